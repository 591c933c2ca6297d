"""How long the checker itself has worked in a session: a user must see what the check costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lowtide.probes.originals import time


class Spent:
    """Seconds spent with judging and with trying remedies; what runs inside of a block of either counts once.

    Attributes:
        judging: seconds with readings, verdicts and explanations.
        remedies: seconds with trying, at the end, what gives the leaks back.
    """

    def __init__(self, judging: float = 0.0, remedies: float = 0.0) -> None:
        self.judging = judging
        self.remedies = remedies
        self._is_running = False

    @contextlib.contextmanager
    def on_judging(self) -> Iterator[None]:
        """The block judges."""
        if self._is_running:
            yield
            return
        started = self._start()
        try:
            yield
        finally:
            self.judging += self._stop(started)

    @contextlib.contextmanager
    def on_remedies(self) -> Iterator[None]:
        """The block tries remedies."""
        started = self._start()
        try:
            yield
        finally:
            self.remedies += self._stop(started)

    def add(self, others: Sequence[float]) -> None:
        """What another process of the same session has spent: judging, remedies."""
        judging, remedies = others
        self.judging += judging
        self.remedies += remedies

    def both(self) -> tuple[float, float]:
        """Judging and remedies, for `add`."""
        return self.judging, self.remedies

    def __str__(self) -> str:
        return f"judging {self.judging:.1f} s, remedies {self.remedies:.1f} s"

    def _start(self) -> float:
        self._is_running = True
        return time.perf_counter()

    def _stop(self, started: float) -> float:
        self._is_running = False
        return time.perf_counter() - started
