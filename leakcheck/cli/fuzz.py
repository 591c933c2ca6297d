"""`lowtide fuzz`: searches, shows how far it is, writes and prints what it found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from lowtide.leakcheck.cli.console import (
    begin_report,
    check_positive,
    check_writable,
    ended_with,
    find_console,
    interruptible,
    make_report,
    progress_line,
    refuse,
    say,
    write_report,
)
from lowtide.leakcheck.targets.target import Device, Subjected, TargetError, device_name, make_target, named_target
from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.outcomes import judged_as, largest_of_each
from lowtide.reports.schema import Finding, ReportError, Subject, exit_code
from lowtide.reports.sizes import format_amount
from lowtide.reports.terminal import finding_text, not_judged_text

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.fuzz import Found
    from lowtide.leakcheck.lives.script import Coverage
    from lowtide.leakcheck.lives.sweep import Swept
    from lowtide.leakcheck.lives.witness import Killed


PROGRAM = "life.py"
"""The file of a report's folder that has the life that fails."""


def fuzz(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENT...", help="With --target: what that is called with."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="What makes your engine's target [default: lowtide's].")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where lowtide's own engine runs.")] = Device.AUTO,
    examples: Annotated[int, typer.Option(help="Lives to try.")] = 100,
    steps: Annotated[int, typer.Option(help="Calls of one life at most.")] = 10,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed tries the same lives; without one, a new one is drawn and said, and the life that "
            "failed last comes first."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Ranks of lowtide's own engine, in a process of its own each.")
    ] = 1,
    engine_process: Annotated[
        bool, typer.Option("--engine-process", help="The core of lowtide's own engine has a process of its own.")
    ] = False,
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
    check_positive(examples=examples, steps=steps, jobs=jobs)
    if jobs > 1 and not faults:
        refuse(f"--jobs {jobs} shares out the points of --faults: add --faults, or leave --jobs out")
    if arguments and target is None:
        refuse(f"{arguments[0]!r} is for a target of yours: name what makes it with --target MODULE:FACTORY")
    if target is not None and defect is not None:
        refuse("--target and --defect exclude each other: the bugs are in lowtide's own engine")
    if tensor_parallel_size != 1 and (target is not None or faults):
        refuse("--tensor-parallel-size is for random lives of lowtide's own engine: leave --target and --faults out")
    if engine_process and target is not None:
        refuse("--engine-process is for lowtide's own engine: leave --target out")
    check_writable(report)
    shape: dict[str, Any] = {} if tensor_parallel_size == 1 else {"tensor_parallel_size": tensor_parallel_size}
    if engine_process:
        shape["engine_process"] = True
    with interruptible("interrupted"):
        from lowtide.engine import EngineError
        from lowtide.probes.device.driver import find_driver

        console = find_console()
        try:
            with closing(find_driver()) as driver, begin_report(report, driver):
                subjected = _subjected(target, arguments or (), device, shape, defect, with_shards=faults)
                found: tuple[Subject, str, str | Table]
                if faults:
                    found = fail_all(subjected, jobs=jobs, console=console)
                else:
                    found = search(subjected, examples=examples, seed=seed, steps=steps, console=console)
                subject, program, attempts = found
                written = make_report(subject, driver)
        except (EngineError, TargetError) as error:
            refuse(str(error))
        # Written before it is shown: a pipe that breaks must not cost the report.
        where, unwritten = write_report(written, report)
        if report is not None and not unwritten:
            try:
                write_program(report, program)
            except ReportError as error:
                unwritten = str(error)
        for line in verdict(subject, attempts):
            console.print(line)
        if program:
            say("", "The life that fails, as a program:", "", *program.split("\n"))
        if where is not None:
            console.print(HangingText(f"report: {where}"))
        raise typer.Exit(ended_with(exit_code(written), unwritten))


def _subjected(
    target: str | None,
    arguments: Sequence[str],
    device: Device,
    shape: Mapping[str, Any],
    defect: str | None,
    *,
    with_shards: bool,
) -> Subjected:
    """Return what is fuzzed: the user's target, or lowtide's own engine, with shards that can be damaged or a bug."""
    if target is not None:
        return named_target(target, arguments)
    from lowtide.engine.defects import find_defect
    from lowtide.leakcheck.targets.reference import checkpoint_target, reference_target

    if with_shards and defect is None:
        return checkpoint_target(device_name(device), shape)
    return reference_target(device_name(device), find_defect(defect) if defect is not None else None, shape)


def search(
    subjected: Subjected, *, examples: int, seed: int | None, steps: int, console: Console
) -> tuple[Subject, str, str]:
    """Random lives, with a progress line.

    Returns:
        What was found, for a report; the life that fails as a program, empty where none does; how much was tried.

    Raises:
        TargetError: the target cannot be driven.
    """
    from lowtide.leakcheck.lives import fuzz as random_lives

    with progress_line(console) as progress, subjected.context:
        task = progress.add_task("loading", total=examples)

        def show(coverage: Coverage) -> None:
            what = "shrinking" if coverage.failed else "lives"
            found = "1 finding" if coverage.failed else "no finding"
            said = f"{what}: {len(coverage.states)} states, {len(coverage.edges)} edges, {found}"
            progress.update(task, description=said, completed=min(coverage.lives, examples))

        found = random_lives.fuzz(subjected.factory, examples=examples, seed=seed, steps=steps, listener=show)
    program = random_lives.as_program(found.life, subjected.source) if found.life else ""
    outcome, unseen = judged_as("leak" if found.findings else "clean", found.not_measured)
    subject = Subject(
        id=f"fuzz[{subjected.name}]",
        outcome="error" if found.reason else outcome,
        reason=found.reason or unseen,
        findings=found.findings,
        not_measured=found.not_measured,
    )
    return subject, program, _summary(found)


def fail_all(subjected: Subjected, *, jobs: int = 1, console: Console) -> tuple[Subject, str, Table]:
    """Fail every fault point of every stage, and kill the engine in each, with a progress line.

    Returns:
        What was found, for a report; the first life that fails as a program, empty where none does; the points.

    Raises:
        TargetError: the target cannot be driven.
    """
    from lowtide.leakcheck.lives.fuzz import as_program
    from lowtide.leakcheck.lives.sweep import shared_sweep
    from lowtide.leakcheck.lives.witness import kill_in_each_stage
    from lowtide.probes.device.driver import find_driver

    swept: list[Swept] = []
    table = _points_table()
    with progress_line(console) as progress, subjected.context:
        task = progress.add_task("loading", total=None)

        def show(stage: str, kind: str, at: int, points: int) -> None:
            progress.update(task, description=f"{stage}: {kind}", completed=at, total=points)

        able = make_target(subjected.factory).capabilities
        items = shared_sweep(subjected.source, able, config=subjected.thorough, jobs=jobs, listener=show)
        killed: list[Killed] = []
        unknown = ""
        try:
            for item in items:
                swept.append(item)
                if item.points or item.findings:
                    _add_row(table, item, item.kind, item.points, item.raised, "survived")
            with closing(find_driver()) as driver:
                for dead in kill_in_each_stage(
                    subjected.from_outside or subjected.source,
                    able,
                    config=subjected.thorough,
                    driver=driver,
                    listener=lambda stage: progress.update(task, description=f"{stage}: kill", total=None),
                ):
                    killed.append(dead)
                    _add_row(table, dead, "kill", 1, 1, "nothing stayed")
        except TargetError as error:
            if not swept:
                raise
            # What was found before is not lost for it.
            unknown = str(error)
    table.add_row("all", "", str(sum(item.points for item in swept)), str(sum(item.raised for item in swept)), "")
    life = next((item.life for item in swept if item.findings), ())
    subject = _sweep_subject(subjected, (*swept, *killed), unknown)
    return subject, as_program(life, subjected.source) if life else "", table


def _add_row(table: Table, tried: Swept | Killed, kind: str, points: int, raised: int, otherwise: str) -> None:
    verdict = "; ".join(finding.message for finding in tried.findings) or otherwise
    cells = (tried.stage, kind, str(points), str(raised), verdict)
    # As text, not as a string: what stands in brackets is no markup.
    table.add_row(*(Text(one_line(cell)) for cell in cells))


def _points_table() -> Table:
    return Table(
        Column("stage", overflow="fold"),
        Column("fails", overflow="fold"),
        Column("points", justify="right", no_wrap=True),
        Column("raised", justify="right", no_wrap=True),
        Column("", overflow="fold"),
        box=None,
    )


def _sweep_subject(subjected: Subjected, tried: Sequence[Swept | Killed], unknown: str) -> Subject:
    """Return all findings, each once, as a subject; `unknown` says why not everything was tried."""
    findings: dict[str, Finding] = {}
    for found in [found for item in tried for found in item.findings]:
        # The same in several stages is one.
        findings.setdefault(found.fingerprint, found)
    # The same of each stage.
    unmeasured = [missing for item in tried for missing in item.not_measured]
    not_measured = (*subjected.not_measured, *largest_of_each(unmeasured))
    outcome, unseen = judged_as("leak" if findings else "error" if unknown else "clean", not_measured)
    return Subject(
        id=f"faults[{subjected.name}]",
        outcome=outcome,
        reason=unknown or unseen,
        findings=tuple(findings.values()),
        not_measured=not_measured,
    )


def verdict(subject: Subject, attempts: str | Table) -> Iterator[RenderableType]:
    """Yield what is shown in the end."""
    if isinstance(attempts, Table):
        yield attempts
    for missing in subject.not_measured:
        if missing.process is not None and subject.outcome == "unsupported":
            continue  # its reason says so
        yield not_judged_text(missing)
    for finding in subject.findings:
        yield finding_text(finding)
    if isinstance(attempts, str):
        tried = attempts
    else:
        ended = bool(subject.reason) and subject.outcome != "unsupported"
        tried = "not everything was tried" if ended else "every fault point was failed once"
    if subject.outcome == "clean":
        yield HangingText(f"CLEAN: {tried}", style="bold green")
    if subject.outcome == "unsupported":
        yield HangingText(subject.reason, style="yellow")
        yield HangingText(f"NOT JUDGED: nothing can be concluded; {tried}", style="bold yellow")
    elif subject.reason:
        yield HangingText(f"NOT MEASURED: {subject.reason}; {tried}", style="bold yellow")
    if subject.outcome == "leak":
        yield HangingText(f"LEAK: {format_amount(len(subject.findings), 'findings')}; {tried}", style="bold red")


def write_program(folder: Path, program: str) -> None:
    """Put the life that fails beside the report; where none does, remove that of an earlier report.

    Raises:
        ReportError: the folder cannot be written to.
    """
    path = folder / PROGRAM
    try:
        if program:
            path.write_text(program, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}; choose another report folder") from error


def _summary(found: Found) -> str:
    seen = found.coverage
    rate = seen.lives / found.seconds if found.seconds else 0.0
    return (
        f"{seen.lives} lives, {seen.calls} calls, {len(seen.states)} states, {len(seen.edges)} edges in "
        f"{found.seconds:.1f} s ({rate:.1f} lives/s), --seed {found.seed}"
    )
