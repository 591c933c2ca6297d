"""Draws lives on a terminal while they run, from the readings that their judge takes anyway.

Who watches the folder of a report is told the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.cells import cached_cell_len
from rich.console import Console
from rich.live import Live

from lowtide.reports.terminal.running_life import RunningLife

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.script import Event


from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.script import Event
    from lowtide.reports.schema import Report


@contextmanager
def broadcast_live(folder: Path, make_report: Callable[[], Report]) -> Iterator[Callable[[Event], None]]:
    """A listener for lives, which writes each event into a folder while somebody watches there.

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
    """A listener for lives, which draws each event on a terminal that can be drawn on, and elsewhere does nothing.

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
