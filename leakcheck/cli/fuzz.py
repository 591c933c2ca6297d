"""`lowtide fuzz`: its options, and the order in which what was found is written and shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.leakcheck.cli.console import INTERRUPTED, find_console, refuse, say
from lowtide.leakcheck.cli.reporting import begin_report, check_writable, ended_with, make_report, write_report
from lowtide.leakcheck.targets.target import Device, device_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lowtide.reports.schema import Subject


@dataclass(frozen=True)
class EngineShape:
    """In how many processes lowtide's own engine is.

    Attributes:
        tensor_parallel_size: ranks, each in a process of its own.
        engine_process: whether the core has one.
    """

    tensor_parallel_size: int = 1
    engine_process: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """As settings of the engine, without those that are its defaults."""
        ranks = {"tensor_parallel_size": self.tensor_parallel_size} if self.tensor_parallel_size != 1 else {}
        return {**ranks, **({"engine_process": True} if self.engine_process else {})}


def fuzz(
    target: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="What makes your engine's target [default: lowtide's].")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where lowtide's own engine runs.")] = Device.AUTO,
    examples: Annotated[int, typer.Option(help="Lives to try.")] = 100,
    steps: Annotated[int, typer.Option(help="Calls of one life at most.")] = 10,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed tries the same lives; without one, the life that failed last comes first."),
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
    for name, value in (("--examples", examples), ("--steps", steps), ("--jobs", jobs)):
        if value < 1:
            refuse(f"{name} {value} is not possible: use 1 or more")
    if jobs > 1 and not faults:
        refuse(f"--jobs {jobs} shares out the points of --faults: add --faults, or leave --jobs out")
    if target is not None and defect is not None:
        refuse("--target and --defect exclude each other: the bugs are in lowtide's own engine")
    if tensor_parallel_size != 1 and (target is not None or faults):
        refuse("--tensor-parallel-size is for random lives of lowtide's own engine: leave --target and --faults out")
    if engine_process and target is not None:
        refuse("--engine-process is for lowtide's own engine: leave --target out")
    if report is not None:
        check_writable(report)
    shape = EngineShape(tensor_parallel_size, engine_process)
    try:
        code = _fuzz(target, device, examples, steps, seed, shape, defect, faults, jobs, report)
    except KeyboardInterrupt:
        say("lowtide: interrupted", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


def _fuzz(
    target: str | None,
    device: Device,
    examples: int,
    steps: int,
    seed: int | None,
    shape: EngineShape,
    defect: str | None,
    faults: bool,
    jobs: int,
    report: Path | None,
) -> int:
    from lowtide.leakcheck.cli.fuzz_command import verdict, write_program
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports import schema
    from lowtide.reports.hanging_text import HangingText

    console = find_console()
    driver = find_driver()
    try:
        with begin_report(report, driver):
            subject, program, attempts = _search(
                target, device, examples, steps, seed, shape, defect, faults, jobs, console
            )
        written = make_report(subject, driver)
    finally:
        driver.close()
    # Written before it is shown: a pipe that breaks must not cost the report.
    where, unwritten = write_report(written, report)
    if report is not None and not unwritten:
        try:
            write_program(report, program)
        except schema.ReportError as error:
            unwritten = str(error)
    for line in verdict(subject, attempts):
        console.print(line)
    if program:
        say("", "The life that fails, as a program:", "", *program.split("\n"))
    if where is not None:
        console.print(HangingText(f"report: {where}"))
    return ended_with(schema.exit_code(written), unwritten)


def _search(
    target: str | None,
    device: Device,
    examples: int,
    steps: int,
    seed: int | None,
    shape: EngineShape,
    defect: str | None,
    faults: bool,
    jobs: int,
    console: Console,
) -> tuple[Subject, str, str | Table]:
    """What was found, the life that fails as a program, and how much was tried."""
    from lowtide.engine import EngineError
    from lowtide.engine.defects import find_defect
    from lowtide.leakcheck.cli.fuzz_command import checkpoint_target, fail_all, named_target, reference_target, search
    from lowtide.leakcheck.targets.target import TargetError

    try:
        if target is not None:
            subjected = named_target(target)
        elif faults and defect is None:
            subjected = checkpoint_target(device_name(device), shape.settings)
        else:
            bug = find_defect(defect) if defect is not None else None
            subjected = reference_target(device_name(device), bug, shape.settings)
        if faults:
            return fail_all(subjected, jobs=jobs, console=console)
        return search(subjected, examples=examples, seed=seed, steps=steps, console=console)
    except (EngineError, TargetError) as error:
        refuse(str(error))
