"""How long may be spent on what can be left out: what a holder retains, and trying remedies; never on the verdict."""

from __future__ import annotations

import math

from lowtide.probes.originals import time

REMEDIES_SHARE = 4
"""How many times the budget of a test the remedies of a session may take: with the default of 30 s, 120 s."""

UNTRIED = "not tried: the time for remedies was over (--leakcheck-budget)"
"""How a finding says that nothing was tried to give it back."""


class Budget:
    """Seconds from its making on.

    Args:
        seconds: how many; without a limit by default.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._until = time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is to be begun."""
        return time.monotonic() >= self._until

    def within(self, seconds: float) -> Budget:
        """One of so many seconds that ends with this one at the latest."""
        return Budget(min(seconds, self._until - time.monotonic()))


def untried(advice: str | None) -> str:
    """A finding's advice, with the word that it was not tried."""
    return f"{advice} ({UNTRIED})" if advice else UNTRIED
