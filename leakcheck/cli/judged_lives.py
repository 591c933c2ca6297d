"""What `lowtide run` and `lowtide check` share: whole lives are run, judged against suppressions, and reported."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.leakcheck.cli.console import INTERRUPTED, find_console, refuse
from lowtide.leakcheck.cli.display.live_life import broadcast_live, shown_live
from lowtide.leakcheck.cli.reporting import begin_report, ended_with, make_report, write_report

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.lives.script import Event
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
    from lowtide.probes.device.driver import Driver


def load_suppressions(path: Path | None) -> Suppressions:
    """The user's entries, then the shipped ones."""
    from lowtide.leakcheck.suppressions.entries import Suppressions, load, shipped
    from lowtide.leakcheck.suppressions.toml import SuppressionError

    try:
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        refuse(f"--suppressions {error}")
    return Suppressions((*own, *shipped().entries))


def load_tolerances(calibration: Path | None, device: str) -> dict[str, int]:
    """What one life on a device may leave, by a calibration's report folder; nothing but the table's without one."""
    from lowtide.leakcheck.gate.calibration import CalibrationError, read_tolerances

    try:
        return {} if calibration is None else read_tolerances(calibration, device)
    except CalibrationError as error:
        refuse(f"--calibration {error}")


def snapshots_in(report: Path | None) -> AllocatorSnapshots | None:
    """Where torch's snapshots of stages that leave something come; nowhere without a report."""
    from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots

    if report is None:
        return None
    snapshots = AllocatorSnapshots(report)
    snapshots.remove_old()
    return snapshots


def live(
    make_run: Callable[[Driver, Callable[[Event], None]], LifecycleRun],
    report: Path | None,
    suppressions: Suppressions,
    *,
    wide: bool,
) -> int:
    """Live all lives, on a terminal in view of its user, and show and write the verdict.

    Args:
        make_run: makes the run, for a driver's figures and with whom hears of its stages.
        report: folder of the report; None for none.
        suppressions: the leaks that may stay.
        wide: whether all columns of the tables are shown.

    Returns:
        The command's exit code.
    """
    from lowtide.leakcheck.suppressions.entries import problems
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports import schema
    from lowtide.reports.hanging_text import HangingText
    from lowtide.reports.terminal import render

    console = find_console()
    # Until the report is there: who watches the folder goes on to that.
    with ExitStack() as watched, ExitStack() as stack:
        driver = find_driver()
        stack.callback(driver.close)
        listeners = [stack.enter_context(shown_live(console))]
        if report is not None:
            listeners.append(watched.enter_context(broadcast_live(report, lambda: make_report(None, driver))))
        life = make_run(driver, partial(_tell, listeners))
        today = datetime.date.today()
        unfinished = stack.enter_context(begin_report(report, driver, "cycle"))
        if unfinished is not None:
            life.keep = lambda so_far: unfinished.add([suppressions.judge(so_far, today)[0]], goes_on=True)
        subject, used = suppressions.judge(life.run(), today)
        written = make_report(subject, driver)
        stack.close()
        # Written before it is shown: a pipe that breaks must not cost the report.
        where, unwritten = write_report(written, report)
    console.print(render(written, *(() if where is None else (f"report: {where}",)), wide=wide))
    # A run that ended early may not have come to what an entry is for.
    wrong = problems(suppressions.entries, used, today, subject.findings, ran_all=not subject.reason)
    for problem in wrong:
        console.print(HangingText(f"SUPPRESSION {problem}", style="red"))
    code = INTERRUPTED if life.interrupted else schema.exit_code(written) or (1 if wrong else 0)
    return ended_with(code, unwritten)


def _tell(listeners: Iterable[Callable[[Event], None]], event: Event) -> None:
    for hear in listeners:
        hear(event)
