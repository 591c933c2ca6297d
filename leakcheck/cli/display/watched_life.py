"""Tells who watches a report's folder what the lives go through whose report it will have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
