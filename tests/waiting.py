"""Waits of tests: for the thing itself, on a machine of any speed, with an end that only a hang reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600.0
"""Seconds after which a wait has failed; no machine is so slow, and pytest's own limit is longer."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true; fail if it never is."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class SleptClock:
    """Stands for the module `time` where something waits: time passes only in its own sleeps.

    Attributes:
        pauses: seconds of each sleep so far.
    """

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def perf_counter(self) -> float:
        """Return the seconds slept."""
        return sum(self.pauses)

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.pauses.append(seconds)
