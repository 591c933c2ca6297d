"""The walk forward over the heap: from some objects to all that they lead to, with the references as arrays.

It takes everything in, what the collector does not track, too, which most searches pass over. It is there twice: in C
(`native/heap.c`), and in numpy for where that could not be built, which takes up to twice as long.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import FrameType
from typing import ClassVar

import numpy.typing as npt

from lowtide.probes import native
from lowtide.probes.heap.roots import Root
from lowtide.probes.memory.capsules import keeps_exported
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.objects.foreign import flags_of, mro_of
from lowtide.probes.objects.identities import (
    Identities,
    are_tracked,
    elements,
    identities,
    object_at,
    objects_at,
    places_of,
    referents,
    types_of,
)
from lowtide.probes.objects.listed import is_checkers
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc
from lowtide.probes.references.unseen_references import Reader, first_reader, readers, untracked_kinds

# More at once takes more memory for what is in flight, which then is fetched anew from the kernel each time.
_CHUNK = 8_000
_MAY_BE_TRACKED = 1 << 14

# How instances of a type are gone through; the same in heap.c.
HAS_READER, HAS_STAND_IN, LEADS_ON_UNTRACKED, IS_PASSED_OVER, HIDES_DICT = (1 << bit for bit in range(5))

_DICTS_SHARE = sys.version_info >= (3, 13)
"""Whether a dict that shares an instance's values shows none of them; it takes them over when the instance dies."""

_INLINE_VALUES = 1 << 2
"""`Py_TPFLAGS_INLINE_VALUES`: instances of a type have their values in themselves."""

_DICT_BEFORE = 3 * 8
"""Bytes before an instance where the address of its dict is; the same in heap.c."""


def _hides_dict() -> bool:
    """Return whether an instance that has its values in itself shows these alone, and not a dict that shares them."""
    sample = _Sample()
    shared = vars(sample)
    return (
        _DICTS_SHARE
        and bool(flags_of(_Sample) & _INLINE_VALUES)
        and not any(each is shared for each in gc.get_referents(sample))
        and _dict_of(sample) == id(shared)
    )


def _dict_of(item: object) -> int:
    """Return the identity of the dict of an instance that has its values in itself; 0 where none was made."""
    return ctypes.c_int64.from_address(id(item) - _DICT_BEFORE).value


class _Sample:
    def __init__(self) -> None:
        self.value = 0


_INSTANCES_HIDE = _hides_dict()


class Walk(ABC):
    """Goes from some objects to all that they lead to; node `i` is `objects[i]`.

    It keeps every object alive until it is closed.

    Args:
        roots: the first nodes, in their order.

    Attributes:
        objects: the object of each node.
        types: the types of the nodes, and of what was met, by their identities.
        kinds: the identity of each node's type.
        kind_places: the place of each node's type among `types`.
        offsets: where each node's edges begin, and where the last one's end.
        edges: the nodes that each node refers to.
        passed_over: the nodes that only a search goes through which asks for what is not tracked.
    """

    def __init__(self, roots: list[Root]) -> None:
        self.objects: list[object] = [root.held for root in roots]
        self.types: dict[int, type] = {}
        self.kinds: Ints = np.zeros(0, np.int64)
        self.kind_places: Indices = np.zeros(0, np.int32)
        self.offsets: Ints = np.zeros(1, np.int64)
        self.edges: Indices = np.zeros(0, np.int32)
        self.passed_over: Indices = np.zeros(0, np.int32)
        self._also = [root.also for root in roots]
        self._untracked_kinds = set(map(id, untracked_kinds()))
        self._readers_of = readers()
        self._readers: dict[int, Reader] = {}

    @abstractmethod
    def add(self, items: list[object]) -> None:
        """Make nodes of those objects that are none."""

    @abstractmethod
    def read(self) -> None:
        """Read the references of all nodes that were not read yet, making nodes of what it meets."""

    @abstractmethod
    def find(self, ids: Ints) -> Indices:
        """Return the node of each object, by its identity, shape [len(ids)]; -1 for one that has none."""

    def pass_over(self, nodes: Indices) -> None:
        """Has most searches pass over some nodes."""
        self.passed_over = np.concatenate([self.passed_over, nodes])

    def _manner_of(self, cls: type) -> int:
        """Return how instances of a type are gone through; asked once for each type."""
        self.types[id(cls)] = cls
        bases = [id(base) for base in mro_of(cls)]
        reader = first_reader(self._readers_of, bases)
        if reader is not None:
            self._readers[id(cls)] = reader
        manner = HAS_READER if reader is not None else 0
        if cls is FrameType:
            manner |= HAS_STAND_IN
        # What is not tracked refers to nothing that is. But dicts and tuples of nothing that is tracked are not tracked
        # either, nor is, once it is made, what C calls a struct sequence (such as what `torch.max` returns).
        if id(cls) in self._untracked_kinds:
            manner |= LEADS_ON_UNTRACKED
        if flags_of(cls) & _MAY_BE_TRACKED or keeps_exported(cls):
            manner |= IS_PASSED_OVER
        if _INSTANCES_HIDE and flags_of(cls) & _INLINE_VALUES:
            manner |= HIDES_DICT
        return manner

    def _more(self, item: object) -> list[object]:
        """Return what an object with a reader refers to beyond what the collector shows."""
        return [*self._readers[id(type(item))](item)]

    def _grow(self, kind_places: Indices, ends: Ints, edges: Indices, passed_over: Indices) -> None:
        """Add what was read."""
        self.kind_places = np.concatenate([self.kind_places, kind_places])
        self.kinds = np.fromiter(self.types, np.int64, len(self.types)).take(self.kind_places)
        self.offsets = np.concatenate([self.offsets, ends])
        self.edges = np.concatenate([self.edges, edges])
        self.passed_over = np.concatenate([self.passed_over, passed_over])


class NativeWalk(Walk):
    """The walk in C."""

    _kind: ClassVar = native.Walk

    def __init__(self, roots: list[Root]) -> None:
        super().__init__(roots)
        assert self._kind is not None
        self._walk = self._kind()
        self._walk.add_roots(self.objects)

    def add(self, items: list[object]) -> None:
        """See `Walk`."""
        self._walk.add(self.objects, items)

    def read(self) -> None:
        """See `Walk`."""
        self._walk.read(self.objects, self._also, self._manner_of, _stand_in, self._more, _DICTS_SHARE)
        kind_places, ends, edges, passed_over = self._walk.take()
        self._grow(
            np.frombuffer(kind_places, np.int32),
            np.frombuffer(ends, np.int64),
            np.frombuffer(edges, np.int32),
            np.frombuffer(passed_over, np.int32),
        )

    def find(self, ids: Ints) -> Indices:
        """See `Walk`."""
        return np.frombuffer(self._walk.find(ids.astype(np.int64, copy=False).tobytes()), np.int32)


class NumpyWalk(Walk):
    """The walk in numpy."""

    def __init__(self, roots: list[Root]) -> None:
        super().__init__(roots)
        self._table = places_of(identities(self.objects))
        self._done = 0
        self._known_kinds = places_of(np.zeros(0, np.int64))
        self._manners = np.zeros(0, np.int64)

    def add(self, items: list[object]) -> None:
        """See `Walk`."""
        ids = identities(items)
        unwanted = np.flatnonzero(self._table.find(ids) >= 0).tolist()
        begin, first = 0, len(self.objects)
        # So few that whole parts of the list lie between them.
        for place in (*unwanted, len(items)):
            self.objects += items[begin:place]
            begin = place + 1
        self._table.add(identities(self.objects)[first:])

    def read(self) -> None:
        """See `Walk`."""
        kind_places, counts, edges, passed_over = [], [], [], []
        while self._done < len(self.objects):
            done = self._done
            chunk = self.objects[done : done + _CHUNK]
            kinds = self._places_of_kinds(types_of(identities(chunk)))
            kind_places.append(kinds)
            asked = list(chunk)
            for place in np.flatnonzero(self._manners[kinds] & HAS_STAND_IN).tolist():
                asked[place] = _stand_in(chunk[place])
            sizes, ids, held = referents(asked)
            asked.clear()
            more = self._read_more(done, chunk, kinds, sizes)
            if more:
                sizes, ids = _with_more(sizes, ids, more)
            nodes = self._table.find(ids)
            unknown = np.flatnonzero(nodes < 0)
            met = ids[unknown]
            firsts = self._table.first_places(met)
            first = np.flatnonzero(firsts == np.arange(len(met)))
            leads_on, is_passed_over = self._which_lead_on(met[first])
            added = first[leads_on]
            if len(added):
                places = np.full(len(met), -1, np.int32)
                places[added] = np.arange(len(self.objects), len(self.objects) + len(added), dtype=np.int32)
                nodes[unknown] = places[firsts]
                passed_over.append(places[first[is_passed_over]])
                self._table.add(met[added])
                self.objects += objects_at(met[added])
            held.clear()
            more.clear()
            known = nodes >= 0
            counts.append(_sums(known, sizes))
            edges.append(nodes[known])
            self._done += len(chunk)
        none = np.zeros(0, np.int32)
        self._grow(
            np.concatenate([none, *kind_places]),
            len(self.edges) + np.cumsum(np.concatenate([none.astype(np.int64), *counts])),
            np.concatenate([none, *edges]),
            np.concatenate([none, *passed_over]),
        )

    def find(self, ids: Ints) -> Indices:
        """See `Walk`."""
        return self._table.find(ids)

    def _places_of_kinds(self, kinds: Ints) -> Indices:
        """Return the place of each type among those known, which those become that were not met before."""
        places = self._known_kinds.find(kinds)
        new = np.unique(kinds[places < 0])
        if not len(new):
            return places
        manners = [self._manner_of(object_at(kind)) for kind in new.tolist()]
        self._known_kinds.add(new)
        self._manners = np.append(self._manners, np.array(manners, np.int64))
        return self._known_kinds.find(kinds)

    def _read_more(self, first: int, chunk: list[object], kinds: Indices, sizes: Ints) -> dict[int, list[object]]:
        """Return what objects refer to beyond what the collector shows, by their places in a chunk.

        Args:
            first: the node of the chunk's first object.
            chunk: the objects.
            kinds: the places of their types among those known.
            sizes: how many referents of each are known.
        """
        more: dict[int, list[object]] = {}
        for place in np.flatnonzero(self._manners[kinds] & HAS_READER).tolist():
            if items := self._more(chunk[place]):
                more[place] = items
        if _DICTS_SHARE:
            for place in np.flatnonzero(sizes == 0).tolist():
                item = chunk[place]
                if type(item) is dict and (values := [*dict.values(item)]):
                    more.setdefault(place, []).extend(values)
        for place in np.flatnonzero(self._manners[kinds] & HIDES_DICT).tolist():
            held = _dict_of(chunk[place])
            if held and all(id(each) != held for each in gc.get_referents(chunk[place])):
                more.setdefault(place, []).append(object_at(held))
        for place, also in enumerate(self._also[first : first + len(chunk)]):
            if also:
                more.setdefault(place, []).extend(also)
        return more

    def _which_lead_on(self, ids: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which objects, met by the walk, can lead further, and which of these most searches pass over."""
        kinds = self._places_of_kinds(types_of(ids))
        manners = self._manners[kinds]
        leads_on = are_tracked(ids) | (manners & LEADS_ON_UNTRACKED != 0)
        passed_over = ~leads_on & (manners & IS_PASSED_OVER != 0)
        return leads_on | passed_over, passed_over


class NarrowWalk(NumpyWalk):
    """The walk through some objects alone: what else they refer to is not looked at.

    Args:
        roots: the first nodes, in their order.
        only: the identities of those that it may come to, beside what the collector does not track.
    """

    def __init__(self, roots: list[Root], only: Identities) -> None:
        super().__init__(roots)
        self._only = only

    def _which_lead_on(self, ids: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        leads_on, is_passed_over = super()._which_lead_on(ids)
        # What is not tracked is nobody's but of those who refer to it: an array, say, over a tensor's memory.
        is_wanted = self._only.holds(ids) | ~are_tracked(ids)
        return leads_on & is_wanted, is_passed_over & is_wanted


def walk_from(roots: list[Root]) -> Walk:
    """Return the fastest walk that there is here, before its first step."""
    return NumpyWalk(roots) if native.Walk is None else NativeWalk(roots)


def _stand_in(frame: FrameType) -> object:
    """Return what to ask the collector in place of a frame: of the checker's only who called it.

    Its variables hold what it looks at, but an exception or a frame of the program's may be kept by which it was
    called, and with that the program's own frames behind it.
    """
    return (frame.f_back,) if is_checkers(frame) else frame


def _with_more(sizes: Ints, ids: Ints, more: Mapping[int, list[object]]) -> tuple[Ints, Ints]:
    """Return how many referents each object has, and the identities of all, with more for some of the objects."""
    places = sorted(more)
    counts, added = elements([more[place] for place in places])
    behind = np.cumsum(sizes)[places]
    sizes = sizes.copy()
    sizes[places] += counts
    return sizes, np.insert(ids, np.repeat(behind, counts), added)


def _sums(is_counted: npt.NDArray[np.bool_], sizes: Ints) -> Ints:
    """Return how many are counted in each of some runs that lie one behind the other, by the runs' sizes."""
    before = np.zeros(len(is_counted) + 1, np.int32)
    np.cumsum(is_counted, out=before[1:])
    return np.diff(before[np.cumsum(sizes)], prepend=0).astype(np.int64)
