"""The full reading of a suspect test: everything that is its own and still there, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.leakcheck.judging.device_memory import IDLE_POOL, MEMORY_POOL, DeviceMemory
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.metrics import Reading
from lowtide.leakcheck.judging.owners import Claims, Owner, Ownership, Subject
from lowtide.leakcheck.judging.storages import HeapReading, HeldStorage, Key, read_heap, survey_births
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.first_use import Sorted
from lowtide.probes.heap.births import Births, Newborn
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.memory.ranges import common
from lowtide.probes.originals import os
from lowtide.probes.stages import announced_pools


@dataclass(frozen=True)
class Deep:
    """A full reading.

    Attributes:
        readings: one per subject.
        heap: the storages behind them.
        explained: bytes of new host memory that are judged by name: under new tensors and in new files of /dev/shm.
    """

    readings: tuple[Reading, ...]
    heap: HeapReading
    explained: int

    @classmethod
    def of_no_heap(cls, subjects: int, alive: frozenset[Key]) -> Deep:
        """Return what a reading takes over where nothing in the heap is to be judged.

        Args:
            subjects: how many there are.
            alive: the storages at the last full reading.
        """
        return cls((Reading({"lru-cache": {}}, {}),) * subjects, HeapReading((), {}, alive, {}, 0), 0)

    def with_hidden(self, hidden: Sequence[HeldStorage]) -> Deep:
        """The same, with storages of the test's that no walk could find."""
        own, *others = self.readings
        more: dict[str, dict[str, int]] = {}
        for held in hidden:
            more.setdefault(f"tensors {held.key[0]}", {})[held.name] = held.bytes
        items = {**own.items, **{key: {**own.items.get(key, {}), **found} for key, found in more.items()}}
        heap = replace(self.heap, held=(*self.heap.held, *hidden))
        return Deep((Reading(items, own.amounts), *others), heap, self.explained)

    def settled(self, distinguished: Sorted, now: Counters) -> Deep:
        """The same without what libraries are excused for, and with what they were excused for and are not any more."""
        readings: list[Reading] = []
        for reading in self.readings:
            items = {
                key: distinguished.applied(key, found, now.items.get(key, {})) for key, found in reading.items.items()
            }
            readings.append(Reading(items, reading.amounts))
        return Deep(tuple(readings), self.heap, self.explained)

    def without(self, storages: Collection[Key]) -> Deep:
        """The same without some storages, whoever's they are."""
        if not storages:
            return self
        names = {(f"tensors {held.key[0]}", held.name) for held in self.heap.held if held.key in storages}
        readings = tuple(
            Reading(
                {
                    key: {name: size for name, size in found.items() if (key, name) not in names}
                    for key, found in reading.items.items()
                },
                reading.amounts,
            )
            for reading in self.readings
        )
        left = tuple(held for held in self.heap.held if held.key not in storages)
        return Deep(readings, replace(self.heap, held=left), self.explained)


@dataclass(frozen=True)
class DeepReader:
    """Takes full readings.

    Attributes:
        read: reads the counters.
        ownership: who owns what.
        births: what was born.
        device_memory: what is on the cards besides tensors.
        caches: the filled caches.
    """

    read: Callable[[], Counters]
    ownership: Ownership
    births: Births
    device_memory: DeviceMemory
    caches: FilledCaches

    def __call__(
        self,
        subjects: Sequence[Subject],
        ended: Sequence[Owner],
        seen: Collection[Key],
        note: Callable[[Claims, HeapReading, Sequence[Newborn], Counters], None] = lambda claims, heap, born, now: None,
        walk: SharedWalk | None = None,
        last: Deep | None = None,
    ) -> Deep:
        """One reading.

        Args:
            subjects: who is judged.
            ended: the owners among them.
            seen: the storages at the last full reading.
            note: is shown what the owners that are alive hold, which costs a walk and is forgotten afterwards.
            walk: the walk over the heap to ask, if it is shared with others.
            last: an earlier reading, if nothing has been done since by which an object could have gone.
        """
        now = self.read()
        claims = Claims(self.ownership.live)
        born: Sequence[Newborn] = ()
        if last is None:
            survey = survey_births(self.births)
            heap = read_heap(self.births, claims, ended, seen, survey)
            born = survey[1]
            del survey
        else:
            heap = last.heap
        explained = heap.new_on_cpu + self._named_shared_memory(now)
        storages = {**dict.fromkeys(heap.alive, 0), **{held.key: held.bytes for held in heap.held}}
        cards = self.device_memory.new_items(now, now.devices, storages, self.ownership.baseline)
        readings: list[Reading] = []
        for subject in subjects:
            items: dict[str, Mapping[str, int]] = {}
            for key in (*now.items, "globals"):
                items[key] = self.ownership.new_items(key, now, subject, ended)
                # No object stands for a setting.
                if subject is None and key != "globals":
                    items[key] = unclaimed(key, items[key], claims)
            items |= self._idle_pools(now, subject, ended)
            for key in [key for key in items if key.startswith("arena ")]:
                items[key] = _without_tensors(key.partition(" ")[2], items[key], heap.alive)
            tensors: dict[str, dict[str, int]] = {}
            for held in heap.held:
                if held.owner is subject:
                    tensors.setdefault(f"tensors {held.key[0]}", {})[held.name] = held.bytes
            items |= tensors
            items |= self._own_allocations(now, subject)
            if subject is None:
                items |= {key: _unowned_on_card(key, found, claims) for key, found in cards.items()}
                items["unreadable"] = dict.fromkeys(heap.unreadable, 1)
                judged = {held.key for held in heap.held}
                known = None if last is None else last.readings[len(readings)].items["lru-cache"]
                items["lru-cache"] = self.caches.held(born, judged, walk) if known is None else known
            readings.append(Reading(items, self._levels(now, subject, ended, explained)))
        note(claims, heap, born, now)
        return Deep(tuple(readings), heap, explained)

    def _named_shared_memory(self, now: Counters) -> int:
        """Bytes of the new files in /dev/shm that are mapped here: they are judged by name, whoever's they are."""
        new = now.items.get("shared-memory", {}).keys() - self.ownership.baseline.items.get("shared-memory", {}).keys()
        mapped = new & mapped_shared_memory([os.getpid()]) if new else set()
        return sum(_size_of(name) for name in mapped)

    def _own_allocations(self, now: Counters, owner: Subject) -> dict[str, dict[str, int]]:
        """The driver's allocations that an owner's setup made and that are still there."""
        found = {}
        for key, names in () if owner is None else owner.items.items():
            if names and key.startswith("allocations "):
                there = self.device_memory.all_items(now, key.partition(" ")[2], {}).get(key, {})
                found[key] = {name: size for name, size in there.items() if name in names}
        return found

    def _idle_pools(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> dict[str, dict[str, int]]:
        """What the driver's memory pools keep of what a subject has freed."""
        found = {}
        for key in now.amounts:
            share = self.ownership.shares(key, now, ended)[id(subject)] if key.startswith(MEMORY_POOL) else None
            if share is not None and share > 0:
                found[key] = {IDLE_POOL: share}
        return found

    def _levels(self, now: Counters, subject: Subject, ended: Sequence[Owner], explained: int) -> dict[str, int | None]:
        """By how much each level is above what it should be, as far as nothing finer explains it."""
        levels: dict[str, int | None] = {}
        for key in now.amounts:
            share = self.ownership.shares(key, now, ended)[id(subject)]
            if key.startswith(("allocated ", "reserved ", MEMORY_POOL)):
                continue  # their parts are judged one by one
            if key.startswith("driver ") and self.device_memory.lists_allocations(key.partition(" ")[2]):
                continue
            if share is not None and subject is None and key == "host-memory":
                share -= explained
            levels[key] = share
        return levels


def _size_of(name: str) -> int:
    try:
        return os.stat(f"/dev/shm/{name}").st_size
    except OSError:  # it is gone by now
        return 0


def _unowned_on_card(key: str, items: Mapping[str, int], claims: Claims) -> Mapping[str, int]:
    """Without what a live owner holds: arrays of other libraries, gradients of its tensors that Python has not seen."""
    if resource_of(key) is not None:
        return unclaimed(key, items, claims)
    if not items or not key.startswith("native "):
        return items
    starts = {name: int(name.rpartition(" ")[2], 16) for name in items}
    held = [address for _, address in claims.by_storage]
    return {
        name: size
        for name, size in items.items()
        if not any(starts[name] <= address < starts[name] + size for address in held)
    }


def unclaimed(key: str, items: Mapping[str, int], claims: Claims) -> dict[str, int]:
    """Without what grew under an owner that is alive; it is the owner's from now on."""
    if not items:
        return {}
    owners = claims.names(key)
    resource = resource_of(key)
    objects = {} if resource is None else resource.objects(items)
    left = {}
    for name, amount in items.items():
        number, _, target = name.partition(" -> ")
        owner = owners.get(name) or owners.get(f"{number} ->") or owners.get(target)
        if owner is None and name in objects:
            owner = claims.owner_of(objects[name])
        if owner is None:
            left[name] = amount
        else:
            owner.items.setdefault(key, set()).add(name)
    return left


def _without_tensors(device: str, items: Mapping[str, int], alive: Iterable[Key]) -> dict[str, int]:
    """Without the parts of arenas under a live tensor: those are the tensor's."""
    if not items:
        return {}
    parts = {
        f"{pool.tag} at {address:#x}": (address, length)
        for pool in announced_pools()
        if pool.kind == "arena" and pool.device == device
        for address, length in pool.ranges
    }
    tensors = [(address, 1) for where, address in alive if where == device]
    return {name: size for name, size in items.items() if name in parts and not common([parts[name]], tensors)}
