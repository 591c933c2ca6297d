"""The `lowtide` command."""

from __future__ import annotations

import datetime
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import lowtide
from lowtide.leakcheck.cli.progress import find_console, progress_line

if TYPE_CHECKING:
    from rich.table import Table

    from lowtide.engine import EngineConfig
    from lowtide.engine.defects import Defect
    from lowtide.leakcheck.lives.lifecycle import Event, LifecycleRun
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.leakcheck.suppressions.writing import Added
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.schema import Report, Subject

app = typer.Typer(
    name="lowtide",
    help="Does an inference engine's memory come back, and if not, who holds it?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""


class Device(str, Enum):
    """Where the engine runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Preset(str, Enum):
    """Random models by size."""

    TINY = "tiny"
    ONE_B = "1b"
    EIGHT_B = "8b"


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's; where typer has it from differs between its versions."""


def main() -> None:
    """Run the command line; what it cannot make sense of is told in one line, with exit code 2."""
    if not sys.argv[1:]:
        app()
    try:
        code = app(standalone_mode=False, prog_name="lowtide")
    except _UsageError as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "lowtide"
        typer.echo(f"lowtide: {said.rstrip('.')}: see `{command} --help`", err=True)
        code = 2
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {lowtide.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    device: Annotated[Device, typer.Option(help="Where the engine runs; auto takes a card if there is one.")] = (
        Device.AUTO
    ),
    preset: Annotated[Preset | None, typer.Option(help="A random model of this size [default: tiny].")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face checkpoint folder instead of a preset.")] = None,
    cycles: Annotated[int, typer.Option(help="Whole lives, one after the other; the first warms libraries up.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of random weights and prompts.")] = 0,
    defect: Annotated[str | None, typer.Option(help="Switch a historical bug on; see `lowtide defects`.")] = None,
    twin: Annotated[
        bool, typer.Option("--twin", help="With --defect: the engine that the bug needs, without the bug.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")] = None,
    suppressions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
    ] = None,
) -> None:
    """Drive the reference engine through its life, account for every byte, and judge.

    Exit codes: 0 clean, 1 a leak was found or a suppression has expired or is not needed, 2 bad input or could not be
    measured, 130 interrupted.
    """
    if cycles < 1:
        _refuse(f"--cycles {cycles} is not possible: use 1 or more")
    if preset is not None and model is not None:
        _refuse("--preset and --model exclude each other: give one of them")
    if twin and defect is None:
        _refuse("--twin needs --defect NAME: it is that engine without the bug")
    known = _load_suppressions(suppressions)
    if report is not None:
        _check_writable(report)

    try:
        name = str(model) if model else (preset or Preset.TINY).value
        code = _run(device, name, cycles, seed, defect, twin, report, known)
    except KeyboardInterrupt:
        typer.echo("lowtide: interrupted before there was anything to report", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


def _load_suppressions(path: Path | None) -> Suppressions:
    """The user's entries, then the shipped ones."""
    from lowtide.leakcheck.suppressions.entries import SuppressionError, Suppressions, load, shipped

    try:
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        _refuse(f"--suppressions {error}")
    return Suppressions((*own, *shipped().entries))


def _run(
    device: Device,
    model: str,
    cycles: int,
    seed: int,
    defect: str | None,
    twin: bool,
    report: Path | None,
    suppressions: Suppressions,
) -> int:
    # Only now: importing torch takes seconds, and refusing bad input should not.
    from lowtide.engine import EngineError
    from lowtide.engine.defects import find_defect
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.targets.reference import ReferenceLife

    try:
        active = find_defect(defect) if defect is not None else None
        config, vocab_size = _configure(device, model, seed, active)
    except EngineError as error:
        _refuse(str(error))

    def make_run(driver: Driver, show: Callable[[Event], None]) -> LifecycleRun:
        return LifecycleRun(
            f"run[{config.model}]",
            lambda: ReferenceLife(config, vocab_size, active.prompt_scale if active is not None else 1),
            device=config.device,
            driver=driver,
            cycles=cycles,
            listener=show,
        )

    with ExitStack() as stack:
        if active is not None:
            stack.enter_context(active.trigger() if twin else active.switched_on())
        return _live(make_run, report, suppressions)


def _live(
    make_run: Callable[[Driver, Callable[[Event], None]], LifecycleRun], report: Path | None, suppressions: Suppressions
) -> int:
    """Lives all lives with a progress line, and shows and writes the verdict; the exit code."""
    from rich.text import Text

    from lowtide.leakcheck.suppressions.entries import problems
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports import schema
    from lowtide.reports.folder import write_folder
    from lowtide.reports.hanging_text import HangingText
    from lowtide.reports.terminal import render

    console = find_console()
    with ExitStack() as stack:
        driver = find_driver()
        stack.callback(driver.close)
        progress = stack.enter_context(progress_line(console))
        task = progress.add_task("starting")

        def show(event: Event) -> None:
            progress.update(
                task,
                description=f"cycle {event.cycle}/{event.cycles}: {event.stage}",
                completed=event.done,
                total=event.total,
            )

        life = make_run(driver, show)
        today = datetime.date.today()
        subject, used = suppressions.judge(life.run(), today)
        written = _report(subject, driver)
    # Written before it is shown: a pipe that breaks must not cost the report.
    where = None
    if report is not None:
        try:
            where = write_folder(written, report)
        except schema.ReportError as error:
            console.print(render(written))
            _refuse(str(error))
    console.print(render(written, *(() if where is None else (f"report: {where}",))))
    # A run that ended early may not have come to what an entry is for.
    wrong = problems(suppressions.entries, used, today, subject.findings, ran_all=not subject.reason)
    for problem in wrong:
        console.print(HangingText(Text(f"SUPPRESSION {problem}", style="red")))
    if life.interrupted:
        return INTERRUPTED
    return schema.exit_code(written) or (1 if wrong else 0)


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="What makes your engine's target.")],
    cycles: Annotated[int, typer.Option(help="Whole lives, one after the other; the first warms libraries up.")] = 2,
    report: Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")] = None,
    suppressions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
    ] = None,
) -> None:
    """Drive your engine through one fixed life (create, infer, every sleep, wake, shutdown) again and again, and judge.

    Exit codes: as those of `run`.
    """
    if cycles < 1:
        _refuse(f"--cycles {cycles} is not possible: use 1 or more")
    known = _load_suppressions(suppressions)
    if report is not None:
        _check_writable(report)
    try:
        code = _check(target, cycles, report, known)
    except KeyboardInterrupt:
        typer.echo("lowtide: interrupted before there was anything to report", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


def _check(target: str, cycles: int, report: Path | None, suppressions: Suppressions) -> int:
    from lowtide.leakcheck.lives.target_life import check_run
    from lowtide.leakcheck.targets.target import TargetError, load_factory

    try:
        factory = load_factory(target)

        def make_run(driver: Driver, show: Callable[[Event], None]) -> LifecycleRun:
            return check_run(f"check[{target}]", factory, driver=driver, cycles=cycles, listener=show)

        return _live(make_run, report, suppressions)
    except TargetError as error:
        _refuse(str(error))


@app.command()
def suppress(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a report.")],
    file: Annotated[Path, typer.Option(help="Where to: a file of suppressions, or a pyproject.toml.")] = (
        Path("lowtide.toml")
    ),
) -> None:
    """Write an entry for each leak of a report into a file of suppressions; why it may stay is left to you to say.

    Exit codes: 0 written, or nothing to write; 2 bad input, and the file is as it was.
    """
    from lowtide.leakcheck.suppressions.toml import SuppressionError
    from lowtide.leakcheck.suppressions.writing import append_entries
    from lowtide.reports import schema

    try:
        subjects = schema.read(folder).subjects
        added = append_entries(file, [finding for subject in subjects for finding in subject.findings])
    except (schema.ReportError, SuppressionError) as error:
        _refuse(str(error))
    for line in _told(added, folder, file):
        typer.echo(line)


def _told(added: Added, folder: Path, file: Path) -> Iterator[str]:
    """What `suppress` says of what it did."""
    from lowtide.reports.finding_lines import one_line

    already = f"{added.known} leak(s) have an entry in {file} already" if added.known else ""
    if not added.entries:
        yield f"nothing to write: {already or f'{folder} has no leak that is not suppressed'}"
        return
    for line, finding in added.entries:
        what = f"{finding.resource}/{finding.cause}: {one_line(finding.message)}"
        yield f"{file}:{line}: {finding.fingerprint} {what}"
    yield f"{len(added.entries)} written to {file}" + (f"; {already}" if already else "")
    yield f"Now say in the reason of each why it may stay: {file} does not load before."


@app.command()
def defects(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run each, and its twin without it; print what was found as Markdown."),
    ] = False,
    device: Annotated[Device, typer.Option(help="With --verify: where; what cannot show there runs on the CPU.")] = (
        Device.AUTO
    ),
    jobs: Annotated[int, typer.Option(help="With --verify: processes at the same time.")] = 2,
) -> None:
    """List the historical bugs that the reference engine can switch on.

    Exit codes of --verify: 0 each was found as it must be and nothing without it, 1 not so, 2 could not be measured.
    """
    from rich.table import Column, Table

    from lowtide.engine.defects import DEFECTS

    if verify:
        if jobs < 1:
            _refuse(f"--jobs {jobs} is not possible: use 1 or more")
        raise typer.Exit(_verify(device, jobs))
    table = Table(
        Column("name", no_wrap=True),
        Column("where it happened", overflow="fold"),
        Column("what went wrong", overflow="fold"),
        box=None,
    )
    for known in DEFECTS.values():
        table.add_row(known.name, known.source, known.summary)
    find_console().print(table)


@app.command()
def fuzz(
    target: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="What makes your engine's target [default: lowtide's].")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where lowtide's own engine runs.")] = Device.AUTO,
    examples: Annotated[int, typer.Option(help="Lives to try.")] = 100,
    steps: Annotated[int, typer.Option(help="Calls of one life at most.")] = 10,
    seed: Annotated[
        int | None, typer.Option(help="The same finds the same; without one, what failed last is tried first.")
    ] = None,
    defect: Annotated[str | None, typer.Option(help="Switch a historical bug on; see `lowtide defects`.")] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="Instead of random lives: fail every fault point of every stage in turn.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="With --faults: processes at the same time.")] = 1,
    report: Annotated[Path | None, typer.Option(help="Folder for the report, and for the life that fails.")] = None,
) -> None:
    """Drive an engine through random lives, check every call, and shrink what fails to the shortest life.

    Exit codes: 0 nothing was found, 1 a life fails, 2 bad input or could not be measured, 130 interrupted.
    """
    for name, value in (("--examples", examples), ("--steps", steps), ("--jobs", jobs)):
        if value < 1:
            _refuse(f"{name} {value} is not possible: use 1 or more")
    if jobs > 1 and not faults:
        _refuse(f"--jobs {jobs} shares out the points of --faults: add --faults, or leave --jobs out")
    if target is not None and defect is not None:
        _refuse("--target and --defect exclude each other: the bugs are in lowtide's own engine")
    if report is not None:
        _check_writable(report)
    try:
        code = _fuzz(target, device, examples, steps, seed, defect, faults, jobs, report)
    except KeyboardInterrupt:
        typer.echo("lowtide: interrupted", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


def _fuzz(
    target: str | None,
    device: Device,
    examples: int,
    steps: int,
    seed: int | None,
    defect: str | None,
    faults: bool,
    jobs: int,
    report: Path | None,
) -> int:
    from lowtide.engine import EngineError
    from lowtide.engine.defects import find_defect
    from lowtide.leakcheck.cli.fuzz_command import (
        checkpoint_target,
        fail_all,
        named_target,
        reference_target,
        search,
        verdict,
        write_program,
    )
    from lowtide.leakcheck.targets.target import TargetError
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports import schema
    from lowtide.reports.folder import write_folder

    console = find_console()
    try:
        if target is not None:
            subjected = named_target(target)
        elif faults and defect is None:
            subjected = checkpoint_target(_device_name(device))
        else:
            subjected = reference_target(_device_name(device), find_defect(defect) if defect is not None else None)
        told: str | Table
        if faults:
            subject, program, told = fail_all(subjected, jobs=jobs, console=console)
        else:
            subject, program, told = search(subjected, examples=examples, seed=seed, steps=steps, console=console)
    except (EngineError, TargetError) as error:
        _refuse(str(error))
    driver = find_driver()
    try:
        written = _report(subject, driver)
    finally:
        driver.close()
    where = unwritten = None
    # Written before it is shown: a pipe that breaks must not cost the report.
    if report is not None:
        try:
            where = write_folder(written, report)
            write_program(report, program)
        except schema.ReportError as error:
            unwritten = str(error)
    for line in verdict(subject, told):
        console.print(line)
    if program:
        typer.echo("\nThe life that fails, as a program:\n")
        typer.echo(program)
    if unwritten is not None:
        _refuse(unwritten)
    if where is not None:
        console.print(f"report: {where}", highlight=False)
    return schema.exit_code(written)


def _verify(device: Device, jobs: int) -> int:
    from lowtide.engine.defects import DEFECTS
    from lowtide.engine.errors import ConfigError
    from lowtide.leakcheck.lives.verify import table, verify

    done = []
    try:
        kind = _device_name(device).partition(":")[0]
    except ConfigError as error:
        _refuse(str(error))
    for verified in verify(DEFECTS.values(), kind, jobs=jobs):
        done.append(verified)
        if sys.stderr.isatty():
            typer.echo(
                f"{len(done)}/{len(DEFECTS)} {verified.defect.name}: {verified.note or 'as it must be'}", err=True
            )
    typer.echo(table(done))
    wrong = [item for item in done if item.note and item.bug is not None]
    skipped = sum(item.bug is None for item in done)
    right = len(done) - len(wrong) - skipped
    typer.echo(f"\n{right} of {len(done)} found as they must be, {len(wrong)} not, {skipped} need a card")
    if any(run is not None and run.subject is None for item in done for run in (item.bug, item.twin)):
        return 2
    return 1 if wrong else 0


def _configure(device: Device, model: str, seed: int, defect: Defect | None) -> tuple[EngineConfig, int]:
    """The engine's settings and its vocabulary, checked as far as that goes without memory.

    Raises:
        EngineError: something cannot work.
    """
    from lowtide.engine import EngineConfig, LLMEngine
    from lowtide.engine.config import load_model_config

    config = EngineConfig(model=model, device=_device_name(device), seed=seed)
    if defect is not None:
        config = defect.configure(config)
    LLMEngine(config).check()
    return config, load_model_config(config).vocab_size


def _device_name(device: Device) -> str:
    import torch

    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda"


def _report(subject: Subject, driver: Driver) -> Report:
    from lowtide.leakcheck.baseline.readings import this_machine
    from lowtide.reports.schema import Report

    return Report(
        schema="lowtide-report/1",
        version=lowtide.__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["lowtide", *sys.argv[1:]]),
        machine=this_machine(driver),
        subjects=(subject,),
    )


def _check_writable(folder: Path) -> None:
    """Make sure that the report can be written before hours are spent on what goes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _refuse(f"--report {folder} cannot be written to ({error.strerror}): choose another folder")


def _refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    typer.echo(f"lowtide: {message}", err=True)
    raise typer.Exit(2)
