"""Stops a process in the middle of what it does, for one that kills it there."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress

from lowtide.leakcheck.baseline.shared_memory import OwnSegments
from lowtide.leakcheck.targets.faults import Injection, Kind

STANDING = "lowtide-standing "
"""What a line begins with in which a process says that it stands, and where."""


class Pause(Injection):
    """Stops where another injection would make something fail.

    Args:
        kind: of the points that are counted.
        at: which one is not passed, from 0 on.
        made: the shared memory that the process has made.
        points: how many of them the stage has.
    """

    def __init__(self, kind: Kind, at: int, made: OwnSegments, points: int) -> None:
        super().__init__(kind, at)
        self.points = points
        self._made = made

    def reach(self, kind: Kind, what: str, error: Callable[[str], BaseException]) -> None:
        """A fault point: returns, or never does."""
        before = len(self.passed)
        # The one that would be raised is where to stand.
        with suppress(KeyboardInterrupt):
            super().reach(kind, what, error)
        if self.raised is not None and len(self.passed) > before:
            self.stand()

    def stand(self) -> None:
        """Say where this is, and wait for the end."""
        message = {"at": len(self.passed), "points": self.points, "segments": sorted(self._made.names)}
        print(STANDING + json.dumps(message), flush=True)  # noqa: T201 - the witness reads it
        while True:
            signal.pause()
