"""Host memory that tests keep, each less than would be a leak: read without what is free, judged by their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.growth import FEWEST_TURNS, adding_turns, kept_steps, rate, repeated
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.metrics import host_memory_tolerance
from lowtide.leakcheck.judging.owners import ANYTHING, Owner
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.resources.rule import MIB
from lowtide.leakcheck.watching.deep_reading import devices_of
from lowtide.probes.host.counters import Counters, anonymous_bytes
from lowtide.probes.originals import gc
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


class KeptHostMemory:
    """What the tests of one watch keep of host memory.

    Args:
        read: reads the counters.
        ownership: who owns what.
        tolerance: bytes that a test may leave.
    """

    def __init__(self, read: Callable[[], Counters], ownership: Ownership, tolerance: int) -> None:
        self._read = read
        self._ownership = ownership
        self._tolerance = tolerance
        self._kept = SmallRetention()
        self._level_at_end: int | None = None
        self._subject = ""
        self._is_judged = True

    def begin(self, subject: str, now: Counters, *, judged: bool) -> None:
        """A test begins.

        Args:
            subject: its name; empty where what it keeps does not add up with what others do.
            now: the counters.
            judged: whether what it leaves counts.
        """
        self._subject = subject
        self._is_judged = judged
        if self._level_at_end is not None:
            self._kept.fell(max(self._level_at_end - (now.amounts["host-memory"] or 0), 0))

    def share(self, now: Counters, ended: Sequence[Owner]) -> int | None:
        """Bytes by which the test itself has raised the level; None where that is not known."""
        return self._ownership.shares("host-memory", now, ended)[id(None)]

    def read_trimmed(self, ended: Sequence[Owner]) -> Counters:
        """The counters; where host memory has moved, without what is free in the heap.

        What a verdict itself leaves free goes back, too. So baselines and verdicts are read alike, and what one test
        left free cannot hide what the next one keeps.
        """
        now = self._read()
        share = self.share(now, ended)
        if share is None or abs(share) < LEAST_KEPT:
            return now
        trim_heap()
        return self._read()

    def kept_in_all(self, now: Counters, ended: Sequence[Owner], *, final: bool) -> tuple[Finding, ...]:
        """What the tests until now have kept of host memory together, if this clean one makes it too much."""
        return self.kept(self.share(now, ended), now, final=final)

    def kept(self, share: int | None, now: Counters, *, final: bool) -> tuple[Finding, ...]:
        """The finding about all tests together, if with this one they have kept too much.

        Args:
            share: bytes that this test kept; None where that is not known.
            now: the counters.
            final: whether the test is over.
        """
        if not final:
            return ()
        self._level_at_end = now.amounts["host-memory"]
        if not self._subject:
            return ()
        self._kept.add(self._subject, share or 0, counts=self._is_judged)
        tolerance = max(self._tolerance, host_memory_tolerance(devices_of(now)))
        if not self._is_judged or not self._kept.is_too_much(tolerance):
            return ()
        # A clean test is not collected for: what it left may be garbage.
        gc.collect()
        trim_heap()
        self._level_at_end = anonymous_bytes()
        self._kept.fell(max((now.amounts["host-memory"] or 0) - self._level_at_end, 0))
        if not self._kept.is_too_much(tolerance):
            return ()
        return (self._kept.finding(self._ownership.since("host-memory", ())),)
