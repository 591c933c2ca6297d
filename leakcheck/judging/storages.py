"""Which storages somebody's tensors hold that were not there at the baseline, and whose they are."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.judging.ladder import collect
from lowtide.leakcheck.judging.owners import Claims, Owner, gradients_of
from lowtide.leakcheck.resources.unreadable_tensors import name_of
from lowtide.probes.heap.births import Births, Newborn
from lowtide.probes.heap.holders import SharedWalk, instances_in
from lowtide.probes.memory.ranges import Range, merge, total
from lowtide.probes.memory.tensors import StorageReading, keys_of_each, plain_tensors, survey_storages
from lowtide.probes.objects.foreign import is_a, mro_of
from lowtide.probes.objects.listed import Census, all_objects, any_frozen, collector_paused
from lowtide.probes.originals import gc, loaded
from lowtide.probes.stages import PoolReading

Key = tuple[str, int]
"""A storage: its device and its address."""


class HeldStorage(msgspec.Struct, frozen=True):
    """A storage that is held and was not there at the baseline, or belongs to an owner that has ended.

    Attributes:
        key: device and address.
        bytes: its length, without what lies under another one of these.
        text: data type and shape of the largest tensor over it.
        stage: in which stage it appeared.
        owner: who owns it; None: the test.
        turn: in which turn of that stage, from 1.
    """

    key: Key
    bytes: int
    text: str
    stage: str
    owner: Owner | None
    turn: int = 1

    @classmethod
    def of(cls, storage: StorageReading, stage: str, owner: Owner | None = None, turn: int = 1) -> HeldStorage:
        """Return what was read of a storage, as held since a stage."""
        return cls(storage.key, storage.bytes, text_of(storage), stage, owner, turn)

    @property
    def name(self) -> str:
        """As a finding lists it."""
        return f"{self.text} at {self.key[1]:#x}"


class HeapReading(msgspec.Struct, frozen=True):
    """The storages at one moment.

    Attributes:
        held: those to be judged.
        claimed: those that grew under an owner that is alive, to be added to what it owns.
        alive: all of them.
        unreadable: new tensors of a kind whose memory cannot be read, as text, with the stage of each.
        new_on_cpu: bytes under new tensors in the process's own memory, whoever owns them.
    """

    held: tuple[HeldStorage, ...]
    claimed: Mapping[Key, Owner]
    alive: frozenset[Key]
    unreadable: Mapping[str, str]
    new_on_cpu: int


def read_heap(
    births: Births,
    claims: Claims,
    ended: Sequence[Owner],
    seen: Collection[Key],
    survey: tuple[Census, Sequence[Newborn]] | None = None,
) -> HeapReading:
    """Go through the heap once; return its storages.

    Args:
        births: what was born since the baseline.
        claims: what the owners that are alive hold.
        ended: those whose scope has just ended.
        seen: the storages at the last full reading, for what the program froze since the baseline, and for tensors on a
            card that lived before and have new memory now.
        survey: all objects of the kinds that are watched, and those that were born since the baseline, where they are
            known.
    """
    torch: Any = loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return HeapReading((), {}, frozenset(), {}, 0)
    with collector_paused():
        census, survivors = survey or survey_births(births)
        everything = [*census.instances_of(torch.Tensor), *census.instances_of(torch.UntypedStorage)]
        del census
        newborn = {id(born.item): born for born in survivors if is_tensor(born.item)}
        newborn |= _hidden_gradients(torch, births, newborn, everything)
        old = [item for item in everything if id(item) not in newborn]
        known = {*seen, *(key for owner in (*claims.owners, *ended) for key in owner.storages)}
        if births.froze:
            # First: of a storage that a frozen and a young tensor view, the frozen one is the older.
            newborn = {**_newborn_and_frozen(births, old, known), **newborn}
            old = [item for item in old if id(item) not in newborn]
        older = {storage.key: storage for storage in survey_storages(old).storages}
        readings, unreadable = new_storages(newborn.values(), older)
        # An older tensor may have got memory since, over which a new one lies, too.
        given = frozenset[Key]().union(*keys_of_each(born.item for born in newborn.values())) & older.keys() - known
        claimed = _claimed(claims, {*readings, *given})
        claimed |= _claimed_with_parts(readings, claimed)
        held = _held_anew(readings, claimed, {owner.label: owner for owner in (*claims.owners, *ended)}, ended)
        moved = {key for key in older if key[0] != "cpu" and key not in known}
        if moved:
            claimed |= _claimed(claims, moved)
            held += [
                replace(made, text=f"{made.text}, made before")
                for key in sorted(moved - claimed.keys())
                for made in [HeldStorage.of(older[key], births.label)]
            ]
        for owner in claims.owners:
            # Memory that is free may be anybody's next.
            owner.storages = {key: text for key, text in owner.storages.items() if key in older or key in readings}
        held += [
            HeldStorage.of(older[key], stage, owner)
            for owner in ended
            for key, stage in owner.storages.items()
            if key in older
        ]
        return HeapReading(
            held=without_overlaps(held),
            claimed=claimed,
            alive=frozenset({*older, *readings}),
            unreadable={name: born.label for name, born in unreadable.items() if claims.owner_of(born.item) is None},
            new_on_cpu=_bytes_on_cpu(readings),
        )


def _newborn_and_frozen(births: Births, old: Sequence[Any], known: set[Key]) -> dict[int, Newborn]:
    """Return what was frozen before it was ever seen young, by identity.

    New is what lies where nothing lay before, and nothing that an earlier import or fixture has made, of which a clean
    test took no full reading.
    """
    hidden = [item for item, keys in zip(old, keys_of_each(old), strict=True) if not keys <= known]
    return {id(item): Newborn(item, births.froze_in or births.label) for item in hidden}


def _bytes_on_cpu(readings: Mapping[Key, tuple[StorageReading, str, int]]) -> int:
    """Return the bytes of host memory under some storages, each byte once."""
    of_host = ((storage.address, storage.bytes) for key, (storage, *_) in readings.items() if key[0] == "cpu")
    return total(merge(of_host))


def _held_anew(
    readings: Mapping[Key, tuple[StorageReading, str, int]],
    claimed: Mapping[Key, Owner],
    by_label: Mapping[str, Owner],
    ended: Sequence[Owner],
) -> list[HeldStorage]:
    """Return the new storages that nobody who is alive may keep."""
    held = []
    for key, (storage, stage, turn) in readings.items():
        # By its label alone a tensor may have got, with its address, the name of one that died.
        owner = by_label.get(stage)
        if owner is not None and owner.has_settled and key not in owner.storages:
            owner = None
        owner = owner or claimed.get(key)
        if owner is None or any(owner is gone for gone in ended):
            text = stage if owner is None or stage not in by_label else owner.stage
            held.append(HeldStorage.of(storage, text, owner, turn))
    return held


def survey_births(births: Births) -> tuple[Census, Sequence[Newborn]]:
    """Return all objects of the kinds that are watched, and those that were born since the baseline; drop both soon."""
    with collector_paused():
        census = births.all_watched()
        return census, births.survivors(census=census)


def thaw(stage: str, held: Collection[HeldStorage], seen: Collection[Key]) -> tuple[HeldStorage, ...]:
    """Unfreeze the heap, and only then collect; the storages of tensors that were frozen garbage.

    Args:
        stage: in which they were frozen.
        held: what is known to be held, which may include them.
        seen: the storages at the last full reading: those are nobody's now.
    """
    torch: Any = loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        gc.unfreeze()
        collect()
        return ()
    reached = storage_keys(all_objects())
    with collector_paused():
        gc.unfreeze()
        visible = survey_storages(gc.get_objects()).storages
    collect()
    known = reached.union(seen, (each.key for each in held))
    hidden = [storage for storage in visible if storage.key not in known]
    return without_overlaps(HeldStorage.of(storage, stage) for storage in hidden)


def tensors_over(keys: Collection[Key], walk: SharedWalk | None = None) -> list[Any]:
    """Return the tensors and storage objects over some storages; drop them soon."""
    torch: Any = loaded("torch")
    with collector_paused():
        everything = instances_in(walk, torch.Tensor, torch.UntypedStorage)
        wanted = set(keys)
        return [item for item, found in zip(everything, keys_of_each(everything), strict=True) if found & wanted]


def tensors_in(keys: Collection[Key], walk: SharedWalk | None = None) -> list[tuple[Any, frozenset[Key]]]:
    """Return the tensors and storages whose memory lies in some storages, each with those of them; drop them soon.

    A loader cuts a file's memory into storages of their own: who holds one of these holds all of the memory, and the
    storage that covers it is held from C++ alone.
    """
    torch: Any = loaded("torch")
    with collector_paused():
        everything = instances_in(walk, torch.Tensor, torch.UntypedStorage)
        wanted = set(keys)
        of_each = keys_of_each(everything)
        over = [item for item, found in zip(everything, of_each, strict=True) if found & wanted]
        covering = _Covering(storage for storage in survey_storages(over).storages if storage.key in wanted)
        # One answer for all that view one storage.
        around = {key: covering.around(key) | ({key} & wanted) for key in frozenset().union(*of_each)}
        found_in = [frozenset().union(*(around[key] for key in found)) for found in of_each]
        return [(item, found) for item, found in zip(everything, found_in, strict=True) if found]


class _Covering:
    """Some storages, by the memory that they cover."""

    def __init__(self, storages: Iterable[StorageReading]) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for storage in sorted(storages, key=lambda storage: (storage.address, -storage.bytes)):
            ranges = self._ranges.setdefault(storage.device, [])
            # What lies within one that begins before it is found by that one.
            if not ranges or storage.address + storage.bytes > ranges[-1][1]:
                ranges.append((storage.address, storage.address + storage.bytes))

    def around(self, key: Key) -> frozenset[Key]:
        """Return the one that begins last of those that a storage lies in; none, or itself, if it lies in no other."""
        device, address = key
        ranges = self._ranges.get(device, [])
        place = bisect.bisect_right(ranges, (address, sys.maxsize)) - 1
        return frozenset([(device, ranges[place][0])]) if place >= 0 and address < ranges[place][1] else frozenset()


def live_keys() -> set[Key]:
    """Return all storages that Python's tensors hold now."""
    # Frozen garbage is nobody's: see `thaw`.
    return storage_keys(all_objects() if any_frozen() else None)


def is_tensor(item: object) -> bool:
    """Return whether an object is a tensor or a storage, by its real type."""
    torch: Any = loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return False
    return any(base is torch.Tensor or base is torch.UntypedStorage for base in mro_of(type(item)))


def is_module(item: object) -> bool:
    """Tell whether an object is a `torch.nn.Module`, by its real type."""
    torch: Any = loaded("torch")
    return torch is not None and hasattr(torch, "nn") and is_a(item, torch.nn.Module)


def is_storage(item: object) -> bool:
    """Tell whether an object is a storage, by its real type."""
    torch: Any = loaded("torch")
    return torch is not None and is_a(item, getattr(torch, "UntypedStorage", type(None)))


def storage_keys(items: Iterable[Any] | None) -> set[Key]:
    """Return the storages under the tensors among some objects; None: under all that are alive."""
    return {storage.key for storage in survey_storages(items).storages}


def text_of(storage: StorageReading) -> str:
    """Return data type and shape of the largest tensor over a storage."""
    return f"{storage.dtype} [{storage.shape}]" if storage.dtype else "storage"


def new_storages(
    newborn: Iterable[Newborn], older: Mapping[Key, StorageReading]
) -> tuple[dict[Key, tuple[StorageReading, str, int]], dict[str, Newborn]]:
    """Return the storages that only newborn tensors view, with stage and turn of the first; and what cannot be read."""
    by_label: dict[tuple[str, int], list[Any]] = {}
    for born in newborn:
        by_label.setdefault((born.label, born.turn), []).append(born.item)
    readings: dict[Key, tuple[StorageReading, str, int]] = {}
    unreadable: dict[str, Newborn] = {}
    for (label, turn), items in sorted(by_label.items(), key=lambda entry: entry[0][1]):
        survey = survey_storages(items)
        for storage in survey.storages:
            if storage.key not in older:
                readings.setdefault(storage.key, (storage, label, turn))
        if survey.unreadable:
            for item in items:
                if survey_storages([item]).unreadable:
                    unreadable[name_of(item)] = Newborn(item, label)
    return readings, unreadable


def _hidden_gradients(
    torch: Any, births: Births, newborn: Mapping[int, Newborn], everything: Iterable[object]
) -> dict[int, Newborn]:
    """Return the gradients of new tensors that Python has never read, and that are no objects until then."""
    visible = set(map(id, everything))
    found: dict[int, Newborn] = {}
    with plain_tensors(torch):
        for born in newborn.values():
            if not any(base is torch.Tensor for base in mro_of(type(born.item))):
                continue
            for gradient in gradients_of([born.item]):
                if gradient is not None and id(gradient) not in visible:
                    found[id(gradient)] = births.add(gradient, born)
    return found


def _claimed(claims: Claims, storages: Collection[Key]) -> dict[Key, Owner]:
    """Return those of some storages that an owner holds, which is asked where there are any."""
    return {key: claims.by_storage[key] for key in storages if key in claims.by_storage}


def _claimed_with_parts(
    readings: Mapping[Key, tuple[StorageReading, str, int]], claimed: Mapping[Key, Owner]
) -> dict[Key, Owner]:
    """Return the storages without a tensor that lie under an owner's, as those of a file that a loader has mapped."""
    bare = _Covering(storage for key, (storage, *_) in readings.items() if not storage.tensors and key not in claimed)
    return {around: owner for key, owner in claimed.items() for around in bare.around(key)}


def without_overlaps(held: Iterable[HeldStorage]) -> tuple[HeldStorage, ...]:
    """Return the same storages, each byte counted once: with the first that holds it."""
    ends: dict[str, int] = {}
    result = []
    for item in sorted(held, key=lambda item: (item.key, -item.bytes)):
        device, address = item.key
        start = max(address, ends.get(device, 0))
        left = address + item.bytes - start
        if left > 0:
            ends[device] = address + item.bytes
            result.append(replace(item, bytes=left))
    return tuple(result)


def within(pools: Sequence[PoolReading]) -> Callable[[int], bool]:
    """Return a function that says whether an address lies in one of some pools, whose pages may be gone."""
    return inside(part for pool in pools for part in pool.addresses)


def inside(ranges: Iterable[Range]) -> Callable[[int], bool]:
    """Return a function that says whether an address lies in one of some ranges."""
    merged = merge(ranges)
    starts = [start for start, _ in merged]

    def is_inside(address: int) -> bool:
        place = bisect.bisect_right(starts, address) - 1
        return place >= 0 and address < sum(merged[place])

    return is_inside
