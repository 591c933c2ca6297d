"""What `lowtide run` and `lowtide check` share: whole lives are run, judged against suppressions, and reported.

While they run they are drawn on a terminal, from the readings that their judge takes anyway; who watches the folder of
a report is told the same.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cached_cell_len
from rich.console import Console
from rich.live import Live

from lowtide.leakcheck.cli.console import INTERRUPTED, find_console, refuse
from lowtide.leakcheck.cli.reporting import begin_report, ended_with, make_report, write_report
from lowtide.reports.terminal.running_life import RunningLife

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.lives.script import Event
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.schema import Report


def load_suppressions(path: Path | None) -> Suppressions:
    """Read the user's entries, then the shipped ones."""
    from lowtide.leakcheck.suppressions.entries import Suppressions, load, shipped
    from lowtide.leakcheck.suppressions.toml import SuppressionError

    try:
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        refuse(f"--suppressions {error}")
    return Suppressions((*own, *shipped().entries))


def load_tolerances(calibration: Path | None, device: str) -> dict[str, int]:
    """Read the tolerances of a life on a device from a calibration's report folder; {} without one."""
    from lowtide.leakcheck.gate.calibration import CalibrationError, read_tolerances

    try:
        return {} if calibration is None else read_tolerances(calibration, device)
    except CalibrationError as error:
        refuse(f"--calibration {error}")


def snapshots_in(report: Path | None) -> AllocatorSnapshots | None:
    """Return what keeps torch's snapshots of stages that leave something; None without a report."""
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


@contextmanager
def broadcast_live(folder: Path, make_report: Callable[[], Report]) -> Iterator[Callable[[Event], None]]:
    """Yield a listener for lives, which writes each event into a folder while somebody watches there.

    Args:
        folder: of the report.
        make_report: makes what the report will have, without subjects.
    """
    from lowtide.reports.live.broadcast import Broadcast

    broadcast = Broadcast(folder, make_report)
    try:
        yield lambda event: broadcast.stage_begins(event.text, event.latest_stages)
    finally:
        broadcast.close()


@contextmanager
def shown_live(console: Console) -> Iterator[Callable[[Event], None]]:
    """Yield a listener for lives, which draws each event on a terminal that can be drawn on, else does nothing.

    What it has drawn is gone when the block ends.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda event: None
        return
    # No thread draws: the lives' own threads are counted. What the engine prints goes above the drawing; what goes to
    # a file stays with that.
    live = Live(
        RunningLife("starting"),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    try:
        # In here, since Ctrl-C may come when the cursor is hidden already.
        with suppress(OSError):
            live.start(refresh=True)
        yield DrawnLife(live).show
    finally:
        with suppress(OSError):
            live.stop()


class DrawnLife:
    """Keeps the sizes of the readings so far, as whole numbers alone, and draws them.

    Args:
        live: draws when it is told to.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._sizes: dict[str, list[int]] = {}
        self._readings = 0

    def show(self, event: Event) -> None:
        """Draw what starts now, with the reading before it; a terminal that is gone is no error of the life's."""
        for name in event.sizes:
            self._sizes.setdefault(name, [0] * self._readings)
        for name, sizes in self._sizes.items():
            sizes.append(event.sizes.get(name, 0))
        self._readings += 1
        since = time.strftime("%H:%M:%S")
        drawing = RunningLife(event.text, event.done, event.total, since, self._sizes)
        with suppress(OSError):
            self._live.update(drawing, refresh=True)
        # It would keep each text that was drawn, and be among the objects of which there are more after each life.
        cached_cell_len.cache_clear()
