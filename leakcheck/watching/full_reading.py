"""Full readings of a suspect test, without what libraries are excused for, rung by rung of the release ladder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from lowtide.leakcheck.findings.cached_values import CachedValues, SortedValues
from lowtide.leakcheck.findings.storage_holders import Context, behind_frozen_holders
from lowtide.leakcheck.judging.device_memory import DeviceMemory, allocation_name
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.ladder import LadderStep, climb
from lowtide.leakcheck.judging.metrics import Metric, Reading
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.records import Ownership, Subject
from lowtide.leakcheck.judging.storages import HeapReading, Key, thaw
from lowtide.leakcheck.resources.first_use import JUDGED, LibraryItems, Sorted
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.resources.warm_up import BlasHandles
from lowtide.leakcheck.watching.deep_reading import Deep, DeepReader
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from lowtide.probes.originals import gc
from lowtide.reports.schema import NotMeasured

_RUNGS = (Rung.EMPTY_CACHE, Rung.CLEAR_HOST_CACHE)
"""What a plain test may have to climb, once everything is collected; what needs more is a leak in any case."""


class FullReadings:
    """Takes the full readings of one watch.

    Args:
        read: reads the counters.
        ownership: who owns what.
        births: what was born.
        device_memory: what is on the cards besides tensors.
        caches: the filled caches.
        makers: knows which code made threads, processes and descriptors.
        handles: the BLAS library's handles.

    Attributes:
        distinguished: what of this judgement's items libraries are excused for; None before its first reading.
        values: the cached values among its storages.
    """

    def __init__(
        self,
        read: Callable[[], Counters],
        ownership: Ownership,
        births: Births,
        device_memory: DeviceMemory,
        caches: FilledCaches,
        makers: Makers,
        handles: BlasHandles,
    ) -> None:
        self._read = read
        self._ownership = ownership
        self._births = births
        self._device_memory = device_memory
        self._caches = caches
        self._handles = handles
        self._reader = DeepReader(read, ownership, births, device_memory, caches)
        self._library_items = LibraryItems(makers)
        self._cached_values = CachedValues()
        self._subject = ""
        self.distinguished: Sorted | None = None
        self.values = SortedValues()

    def mark(self, subject: str) -> None:
        """A test begins."""
        self._subject = subject
        self._cached_values.mark()

    def begin(self) -> None:
        """A judgement begins: its first reading settles what libraries are excused for."""
        self.distinguished = None

    def forget(self) -> None:
        """Let go of the caches that the values were found in."""
        self.values = SortedValues()

    @property
    def listed(self) -> tuple[NotMeasured, ...]:
        """What this judgement excused libraries for, and which cards' allocations it could not list."""
        excused = () if self.distinguished is None else self.distinguished.listed
        return (*excused, *self.values.listed, *self._device_memory.not_measured)

    def read(
        self,
        subjects: Sequence[Subject],
        ended: Sequence[Owner],
        seen: Collection[Key],
        note: Callable[[Claims, HeapReading, Counters], None] = lambda claims, heap, now: None,
        last: Deep | None = None,
        known: SharedWalk | None = None,
    ) -> Deep:
        """A full reading, without what libraries are excused for; that is settled with the first of a judgement."""
        with sharing_walk() as walk:
            deep = self._reader(subjects, ended, seen, note, walk, last)
            if self.distinguished is None:
                self.values = self._cached_values.sort(
                    deep.heap.held, self._caches.known(), self._subject, known or walk
                )
        now = self._read()
        if self.distinguished is None:
            new = {
                key: {name: size for part in deep.readings for name, size in part.items.get(key, {}).items()}
                for key in JUDGED
            }
            tensors = [(address, 1) for device, address in deep.heap.alive if device == "cpu"]
            self.distinguished = self._library_items.sort(new, now, self._subject, tensors, self.values.natively)
        return deep.settled(self.distinguished, now).without(self.values.excused)

    def climb(
        self,
        subjects: Sequence[Subject],
        ended: Sequence[Owner],
        seen: Collection[Key],
        above: Callable[[Deep], Sequence[Metric[Reading]]],
        context: Context,
        note: Callable[[Claims, HeapReading, Counters], None],
        *,
        may_thaw: bool,
        give_back: Callable[[Rung], bool],
        diagnoses: bool,
        known: SharedWalk | None,
    ) -> tuple[list[LadderStep[Deep]], frozenset[Key]]:
        """The readings after each rung that a plain test may have to climb; everything has been collected by now.

        And the storages whose holders the test had frozen.

        Args:
            subjects: who is judged.
            ended: the owners among them.
            seen: the storages at the last full reading.
            above: which metrics of a reading are not back.
            context: what is known around the leaks.
            note: is shown what the owners that are alive hold.
            may_thaw: whether a freeze that was done since the baseline may be undone: not that of an owner that lives.
            give_back: does what a rung does; False where there is nothing to act on.
            diagnoses: whether it is to be known at which rung something comes back that is a leak in any case.
            known: a walk of all that leads to what is left, if one has been made.
        """
        first = self.read(subjects, ended, seen, note, known=known)
        if self._tries_blas_handles(first):
            first = self.read(subjects, ended, seen)
        frozen_before = self._ownership.baseline.amounts.get("gc-frozen") or 0
        steps: list[LadderStep[Deep]] = []
        frozen: frozenset[Key] = frozenset()
        if may_thaw and above(first) and frozen_before <= FROZEN_AT_STARTUP < gc.get_freeze_count():
            # Undoes what this test froze; a freeze that was there before is not to be undone.
            frozen = behind_frozen_holders({held.key for held in first.heap.held}, context)
            hidden = thaw(self._births.froze_in, seen)
            steps = [LadderStep(Rung.RAW, first.with_hidden(hidden), 0.0)]
            steps.append(LadderStep(Rung.UNFREEZE, self.read(subjects, ended, seen), 0.0))

        def is_settled(deep: Deep) -> bool:
            # At which rung it comes back is a diagnosis; whether it is a leak may be known before.
            left = above(deep)
            return not left or not (diagnoses or any(metric.rung.order > Rung.COLLECT.order for metric in left))

        def read_after(rung: Rung, before: Deep) -> Deep:
            # What is free in the process's heap, or pinned, no object holds.
            return self.read(subjects, ended, seen, last=before if rung is Rung.CLEAR_HOST_CACHE else None)

        steps = climb(
            lambda: first,
            is_settled,
            rungs=_RUNGS,
            climbed=steps or [LadderStep(Rung.RAW, first, 0.0)],
            give_back=give_back,
            read_after=read_after,
        )
        return steps, frozen

    def _tries_blas_handles(self, deep: Deep) -> bool:
        """Whether some allocations are known now: handles that torch keeps for the next thread, and a trial's own.

        What a second run of the same call does not take again is a first use.
        """
        found = False
        for key, items in deep.readings[0].items.items():
            if not key.startswith("allocations "):
                continue
            device = key.partition(" ")[2]
            trial = self._handles.tried(int(device.rpartition(":")[2]), items)
            known = {*trial.kept, *(allocation_name(address) for address, _ in trial.taken)}
            if known:
                self._device_memory.forget_allocations(device, known)
                found = True
        return found


def no_note(claims: Claims, heap: HeapReading, now: Counters) -> None:
    """In the middle of a test nothing is known yet of what it will have left."""
