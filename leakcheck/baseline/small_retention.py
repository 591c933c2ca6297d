"""What tests leave of host memory, each of them less than would be a leak: judged by the sum over the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.leakcheck.baseline.owner_levels import ANYTHING
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.growth import FEWEST_TURNS, adding_turns, kept_steps, rate, repeated
from lowtide.leakcheck.resources.rule import MIB
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_bytes

LEAST_KEPT = 8 * MIB
"""Bytes that a test must keep to count: below are tables that libraries build, and how full the heap happens to be."""

_SHOWN_TESTS = 3


@dataclass(frozen=True)
class _Turn:
    """One test: its name, and whether what it keeps counts."""

    name: str
    counts: bool


class SmallRetention:
    """The level of host memory that nothing explains, from test to test.

    What libraries take once is of many sizes and ends. So only tests that keep at least 8 MiB count, three of them at
    least, and each with no more than the usual amount.
    """

    def __init__(self) -> None:
        self._levels = [0]
        self._turns: list[_Turn] = []

    def fell(self, size: int) -> None:
        """What earlier tests had kept was given back between two tests, in bytes."""
        self._levels[-1] -= size

    def add(self, name: str, share: int, *, counts: bool = True) -> None:
        """A test is over.

        Args:
            name: its name.
            share: by how many bytes it raised what nothing else explains.
            counts: whether it is judged.
        """
        self._levels.append(self._levels[-1] + share)
        self._turns.append(_Turn(name, counts))

    def is_too_much(self, tolerance: int) -> bool:
        """Whether the last test kept something, and all tests together have kept more than the tolerance, in bytes."""
        if not self._turns or self._levels[-1] - self._levels[-2] < LEAST_KEPT:
            return False
        if self._levels[-1] - min(self._levels) <= tolerance:
            return False
        steps, allowed = self._steps()
        return len(adding_turns(steps, allowed)) >= FEWEST_TURNS and repeated(steps, allowed) > tolerance

    def _steps(self) -> tuple[list[int], list[int]]:
        return kept_steps(self._levels), [LEAST_KEPT - 1 if turn.counts else ANYTHING for turn in self._turns]

    def finding(self, stage: str) -> Finding:
        """What tests have kept, the last one included; it is reported once.

        Args:
            stage: to which it is attributed.
        """
        steps, allowed = self._steps()
        turns = adding_turns(steps, allowed)
        total = sum(steps[turn - 1] for turn in turns)
        module = self._turns[-1].name.partition("::")[0]
        names = _last_of([self._turns[turn - 1].name for turn in turns])
        size = rate([steps[turn - 1] for turn in turns], [0] * len(turns), format_bytes)
        self._levels, self._turns = [self._levels[-1]], []
        return Finding(
            resource="host-memory",
            cause="unknown",
            bytes=total,
            count=len(turns),
            device="",
            stage=stage,
            message=f"{format_bytes(total)} of host-memory did not come back over the session, {size}: {names}",
            fingerprint=fingerprint(
                resource="host-memory", device="", stage=stage, suspects=("session",), module=module
            ),
            trend="growth",
        )


def _last_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[-_SHOWN_TESTS:])
    return f"{len(names) - _SHOWN_TESTS} before and {shown}" if len(names) > _SHOWN_TESTS else shown
