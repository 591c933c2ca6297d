"""Host memory that tests keep, each of them less than would be a leak: read without what is free, summed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.leakcheck.baseline.deep_reading import devices_of
from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.baseline.records import Ownership
from lowtide.leakcheck.baseline.small_retention import LEAST_KEPT, SmallRetention
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.metrics import host_memory_tolerance
from lowtide.probes.host.counters import Counters, anonymous_bytes
from lowtide.probes.originals import gc
from lowtide.reports.schema import Finding


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
