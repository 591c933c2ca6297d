"""Every `functools.lru_cache` that has entries, and which memory of tensors those entries reach."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

import msgspec

from lowtide.probes.heap.reach import module_namespaces, reach
from lowtide.probes.memory.ranges import Range, merge, total
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import module_of_class, type_name
from lowtide.probes.objects.identities import misses_of
from lowtide.probes.objects.listed import Census, all_instances, collector_paused
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, loaded, logging, weakref

LRU_CACHE = type(functools.lru_cache(maxsize=1)(len))

BEYOND_CACHES: tuple[type, ...] = (LRU_CACHE, logging.Handler, logging.Manager)
"""Types that a walk from a cache's entries does not look into.

Another cache holds its own entries; and from any logger a walk comes to all loggers, to their handlers, and through the
records that these keep to whatever was ever logged.
"""

_FEW = 2000
"""Objects behind one cache that are walked for by themselves: most caches hold fewer."""


class CacheReading(msgspec.Struct, frozen=True):
    """One cache and what its entries (arguments and results) keep alive.

    Attributes:
        name: module and qualified name of the cached function.
        entries: entries now.
        maxsize: most entries it keeps; None without bound.
        tensor_bytes: bytes of the storages that its entries reach, each byte once.
        held: address and length of the memory behind `tensor_bytes`, by device.
    """

    name: str
    entries: int
    maxsize: int | None
    tensor_bytes: int
    held: Mapping[str, tuple[Range, ...]] = msgspec.field()


def read_caches(
    objects: Iterable[object] | Census | None = None, *, max_objects: int = 100_000, max_in_all: int | None = None
) -> tuple[CacheReading, ...]:
    """Read every cache with at least one entry; sorted by name.

    Args:
        objects: what to look through; default: everything alive.
        max_objects: how many objects to look at per cache.
        max_in_all: how many objects to look at behind all those caches together that reach more than a few thousand.
            Then what one of these reaches is not walked through for the next: in a real engine's process dozens of
            caches reach the same half of the heap. Default: no limit, and each by itself.

    The walk stops at modules and their namespaces, classes, code, frames, logging's manager and handlers, and other
    caches, and of a function follows its closure and its defaults only: what lies beyond is held by others as well. It
    does not pass to the target of a weak reference, which keeps nothing alive. The cached function itself is no entry.
    """
    with collector_paused():
        census = (
            objects if isinstance(objects, Census) else Census(all_instances(LRU_CACHE) if objects is None else objects)
        )
        wrappers = [wrapper for wrapper in census.exactly(LRU_CACHE) if wrapper.cache_info().currsize]
        namespaces = module_namespaces()
        readings = [_read(*walked) for walked in walk_caches(wrappers, namespaces, max_objects, max_in_all)]
    return tuple(sorted(readings, key=lambda reading: (reading.name, reading.entries, [*reading.held.items()])))


def bytes_held(caches: Iterable[CacheReading]) -> int:
    """Return the bytes of the storages that the entries of all `caches` reach together, each byte once."""
    by_device: dict[str, list[Range]] = {}
    for cache in caches:
        for device, ranges in cache.held.items():
            by_device.setdefault(device, []).extend(ranges)
    return sum(total(merge(ranges)) for ranges in by_device.values())


class CacheActivity:
    """Which caches got new entries since a mark; holds the caches weakly, and finds new ones only when given them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        # By place: the caches, and how often each had been asked at the mark for what it did not have.
        self._caches: list[weakref.ref[Any]] = []
        self._misses: Ints = np.zeros(0, np.int64)

    def add(self, wrappers: Iterable[Any]) -> None:
        """Watch these `lru_cache`s too; one that is known already changes nothing."""
        new: list[weakref.ref[Any]] = []
        for wrapper in wrappers:
            place = self._places.get(id(wrapper))
            if place is None:
                self._places[id(wrapper)] = len(self._caches) + len(new)
                new.append(weakref.ref(wrapper))
            elif place < len(self._caches) and self._caches[place]() is None:
                self._caches[place] = weakref.ref(wrapper)
                self._misses[place] = 0
        self._caches += new
        self._misses = np.concatenate([self._misses, np.zeros(len(new), np.int64)])

    def known(self) -> list[Any]:
        """Return all that are watched and alive."""
        return alive(self._caches)

    def mark(self) -> None:
        """Count what is asked for from here on."""
        self._misses = self._read()

    def take(self, wrappers: Iterable[Any]) -> None:
        """Count what these were asked for until now as before the mark."""
        places = [self._places[id(wrapper)] for wrapper in wrappers]
        self._misses[places] = misses_of([self._caches[place] for place in places])

    def changed(self) -> list[Any]:
        """Return the caches that were asked since the mark for what they did not have."""
        return alive(self._caches[place] for place in (self._read() != self._misses).nonzero()[0].tolist())

    def _read(self) -> Ints:
        """Return how often each was asked for what it did not have, by their places; what is gone has none any more."""
        misses = misses_of(self._caches)
        if misses.min(initial=0) >= 0:
            return misses
        there = misses >= 0
        self._misses = self._misses[there]
        self._caches = list(compress(self._caches, there.tolist()))
        self._places = {id(reference()): place for place, reference in enumerate(self._caches)}
        return misses[there]


def alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    """Return what there is still of what is held weakly."""
    return [item for reference in references if (item := reference()) is not None]


def walk_caches(
    wrappers: Iterable[Any], namespaces: Collection[int], max_objects: int, max_in_all: int | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each cache with what its entries reach.

    Args:
        wrappers: the caches.
        namespaces: `module_namespaces()`.
        max_objects: as of `read_caches`.
        max_in_all: as of `read_caches`.
    """
    if max_in_all is None:
        for wrapper in wrappers:
            yield wrapper, _walk(wrapper, namespaces, max_objects)[0]
        return
    large: list[Any] = []
    for wrapper in wrappers:
        reached, is_more = _walk(wrapper, namespaces, min(_FEW, max_objects))
        if is_more and max_objects > _FEW:
            large.append(wrapper)
        else:
            yield wrapper, reached
    known, left = set(namespaces), max_in_all
    for wrapper in large:
        reached, _ = _walk(wrapper, known, min(max_objects, max(left, 1)))
        left -= len(reached)
        known.update(map(id, reached))
        yield wrapper, reached


def _walk(wrapper: Any, namespaces: Collection[int], max_objects: int) -> tuple[list[Any], bool]:
    return reach(cache_entries(wrapper), boundaries=BEYOND_CACHES, namespaces=namespaces, max_objects=max_objects)


def _read(wrapper: Any, reached: list[Any]) -> CacheReading:
    info = wrapper.cache_info()
    torch: Any = loaded("torch")
    found = Census(reached).instances_of(torch.Tensor) if hasattr(torch, "nn") else []
    held = survey_storages(found).reading.ranges if found else {}
    return CacheReading(_name(wrapper), info.currsize, info.maxsize, sum(map(total, held.values())), held)


def cache_entries(wrapper: Any) -> list[object]:
    """Return the arguments and results that a cache holds, and the dict that holds them.

    A bounded cache shows every key and result to the collector directly, an unbounded one through its dict; what it
    shows besides, its function and its attributes, is left out.
    """
    own = {id(getattr(wrapper, "__wrapped__", None)), id(vars(wrapper))}
    return [item for item in gc.get_referents(wrapper) if id(item) not in own]


def _name(wrapper: Any) -> str:
    module = getattr(wrapper, "__module__", None)
    name = getattr(wrapper, "__qualname__", None)
    if type(name) is not str:  # a cached partial or callable object has no name of its own
        kind = type(getattr(wrapper, "__wrapped__", wrapper))
        name = type_name(kind).removeprefix(f"{module_of_class(kind)}.")
    return f"{module}.{name}" if type(module) is str else name
