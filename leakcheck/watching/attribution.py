"""Attributes what appears to stages and owners: births, what is counted, and the levels of the process."""

from __future__ import annotations

from lowtide.leakcheck.judging.device_memory import DeviceMemory
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.judging.storages import is_tensor, storage_keys
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.resources.first_use import FirstUse
from lowtide.leakcheck.watching.deep_reading import devices_of
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.probes.originals import time

_FORGETTING = 1.0
_FORGETTING_SHARE = 0.1
"""Seconds, and of what a test takes the share, that finding the dead among what was born may cost."""


class Attribution:
    """To which stage, and to which owner, belongs what appears now.

    Args:
        counters: reads the counters.
        births: what was born.
        ownership: who owns what.
        caches: the filled caches.
        device_memory: what is on the cards besides tensors.
        first_use: which libraries were used for the first time.
        others: the other processes.

    Attributes:
        turns: how often each stage has run since the test began.
    """

    def __init__(
        self,
        counters: CounterReader,
        births: Births,
        ownership: Ownership,
        caches: FilledCaches,
        device_memory: DeviceMemory,
        first_use: FirstUse,
        others: OtherProcesses,
    ) -> None:
        self._counters = counters
        self._births = births
        self._ownership = ownership
        self._caches = caches
        self._device_memory = device_memory
        self._first_use = first_use
        self._others = others
        self._labels: list[str] = []
        self._begun = self._forgetting = 0.0
        self.turns: dict[str, int] = {}

    def begin(self, stage: str) -> None:
        """A test begins, in this stage."""
        self._births.mark(stage)
        self._begun, self._forgetting = time.perf_counter(), 0.0
        self.turns = {stage: 1}

    @property
    def stage_now(self) -> str:
        """The stage to which what appears is attributed."""
        return self._births.label

    def stage(self, label: str, *, again: bool = False) -> None:
        """Tensors that appear from here on, appeared in stage `label`.

        Args:
            label: the stage.
            again: whether this is a new turn of it, not the return from a stage inside it.
        """
        self._others.look()
        self._attribute_births(label, again=again)

    def _attribute_births(self, label: str, *, again: bool = False) -> None:
        if again:
            self.turns[label] = self.turns.get(label, 0) + 1
            if self.turns[label] > 1:
                self._forget_dead()
        self._births.begin(label, self.turns.setdefault(label, 1))

    def _forget_dead(self) -> None:
        """So that no new object passes for a dead one of an earlier turn; not for ever in a loop over a frozen heap,
        where it takes half a second each time.
        """
        now = time.perf_counter()
        if self._forgetting > _FORGETTING + _FORGETTING_SHARE * (now - self._begun):
            return
        self._births.forget_dead()
        self._forgetting += time.perf_counter() - now

    def phase(self, label: str, *, again: bool = False, settings_later: bool = False) -> None:
        """As `stage`, and for all that is counted but the cards' levels.

        Args:
            label: the stage that begins.
            again: see `stage`.
            settings_later: whether the process-wide settings are left to the next reading, since nothing can change
                them before; what has changed then is of the stage that ends here.
        """
        ending = self._births.label
        last = self._ownership.last
        now = self._counters.read_in_part(last, settings="none") if settings_later else self._counters.read(last)
        self._others.look(always=True, now=now)
        self._attribute_births(label, again=again)
        self._caches.note(ending)
        self._ownership.attribute(ending, now, settings_later=settings_later)

    def full_phase(self, label: str) -> Counters:
        """As `phase`, and for the cards' levels too; returns what was read."""
        ending = self._births.label
        self.stage(label)
        self._caches.note(ending)
        now = self._counters.read()
        self._ownership.attribute(ending, now)
        return now

    def enter(self, owner: Owner) -> None:
        """What appears from here to `leave` belongs to `owner`; nests."""
        self._labels.append(self._births.label)
        if owner.only_adds:
            now = self._counters.read()
            self._others.look(now=now)
            self._caches.note(self._births.label)
            self._ownership.attribute(self._births.label, now)
            # Modules are imported by the thousand, so that this must not look at all young objects each time.
            self._births.begin_aside(owner.label)
        else:
            now = self.full_phase(owner.label)
        self._caches.enter()
        self._ownership.enter(owner, now)

    def leave(self) -> None:
        """The setup of the owner entered last is over, whether it succeeded or not."""
        before = self._labels.pop()
        born = self._births.end_aside() if self._ownership.innermost.only_adds else None
        if born is None:
            self.stage(before)
        now = self._counters.read()
        owner = self._ownership.leave(now)
        if not owner.only_adds:
            self._others.follow()
            owner.note_made(self._births.born() or ())
        self._ownership.attribute(owner.stage, now)
        for device in devices_of(now):
            # Listing takes some tenths of a second.
            if owner.growth.get(f"driver {device}", 0) > 0 and self._device_memory.knows(device):
                self._take_allocations(owner, device, now)
        survivors = self._births.survivors(owner.label) if born is None else born
        self._caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        self._caches.leave()
        own = [born.item for born in survivors if is_tensor(born.item)]
        owner.storages = dict.fromkeys(storage_keys(own), owner.stage) if own else {}

    def _take_allocations(self, owner: Owner, device: str, now: Counters) -> None:
        """The driver's allocations that an owner's setup made are its own, unless a library was first used there."""
        names = self._device_memory.adopt_allocations(now, device)
        if names and not self._first_use.libraries():
            owner.items[f"allocations {device}"] = set(names)
