"""What many objects are, read from the interpreter's memory instead of one by one: identity, type, whether tracked.

`id` and `type` of each of 200,000 objects take 20 and 27 ms, because the interpreter goes to one object after the other
and makes a number of each answer. A list has its objects' addresses side by side, and numpy asks for many words of
memory at the same time: that takes 0.1 and 4 ms. It rests on how CPython lays out a list, a type and the head of an
object, which is looked at once; where it is otherwise, each is asked for after all.

The places of many living objects are looked up by address, in a table as wide as the heap (`ObjectPlaces`).
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from types import ModuleType
from typing import Any, TypeVar, Union

import msgspec

# `np.unique` imports it when it is first called, which in the middle of a reading would pass for the program's import.
import numpy.typing as npt

from lowtide.probes import native
from lowtide.probes.objects.address_table import AddressTable, Indices, Ints, each_once, first_places
from lowtide.probes.objects.foreign import dict_of_module, flags_of, is_a
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, weakref

_SLOT = 4
"""Bits of an address that count within 16 bytes."""

_PART = 1 << 16
"""How many blocks there are, pages in a block, and bytes in a page: a sixteenth of that are a page's slots."""

_SLOTS = _PART >> _SLOT

_NOT_CHOSEN = -1
"""In the slot of an object that was met and is not to be added."""

_Numbers = TypeVar("_Numbers", Ints, Indices)


class ObjectPlaces:
    """Gives each object the number at which it was added, by its identity.

    (The parts of an address are read as they lie in memory, where the lowest comes first: on a little-endian machine.)

    Args:
        ids: the first objects, which the caller keeps alive as all others.

    Raises:
        ValueError: an identity is no address.
    """

    def __init__(self, ids: Ints) -> None:
        # Where a block's pages begin, and where a page's slots do.
        self._blocks = np.zeros(_PART, np.int64)
        self._pages = np.zeros(_PART, np.int64)
        # The first page belongs to no address: whatever is asked for elsewhere is not there.
        self._places = np.zeros(_SLOTS, np.int32)
        self._end_of_blocks, self._end_of_pages = _PART, _SLOTS
        self._count = 0
        self.add(ids)

    def add(self, ids: Ints) -> None:
        """Add objects that are not there yet, each once."""
        first, self._count = self._count, self._count + len(ids)
        slots = self._slots(ids)
        self._places[slots] = np.arange(first + 1, self._count + 1, dtype=np.int32)

    def find(self, ids: Ints) -> Indices:
        """Return the place of each object, shape [len(ids)]; less than 0 for one that was not added."""
        found: Indices = self._places.take(self._slots_of(ids))
        found -= 1
        return found

    def first_places(self, ids: Ints) -> Ints:
        """Return for each object the place in `ids` at which it comes first; none of them may have been added."""
        slots = self._slots(ids)
        turns = np.arange(len(ids), dtype=np.int32)
        # Written backwards, so that the first of several stays.
        self._places[slots[::-1]] = turns[::-1]
        found = self._places.take(slots)
        self._places[slots] = 0
        return found.astype(np.int64)

    def add_new(self, ids: Ints, which: Callable[[Ints], npt.NDArray[np.bool_]]) -> Ints:
        """Add those that are not there yet and are chosen, each once, in one look at where they belong.

        What was not chosen is not asked about again: nine of ten references lead to names and numbers, met many times.
        (If such a one dies and another object takes its place, that is younger than the walk.)

        Args:
            ids: the objects, some of them several times.
            which: says of objects that are not there, each given once, which are to be added.

        Returns:
            Those that were added.
        """
        slots = self._slots(ids)
        places = np.flatnonzero(self._places.take(slots) == 0)
        slots = slots.take(places)
        turns = np.arange(1, len(slots) + 1, dtype=np.int32)
        self._places[slots] = turns
        first = self._places.take(slots) == turns
        slots, new = slots[first], ids.take(places[first])
        chosen = which(new)
        self._places[slots[~chosen]] = _NOT_CHOSEN
        added: Ints = new[chosen]
        self._places[slots[chosen]] = np.arange(self._count + 1, self._count + len(added) + 1, dtype=np.int32)
        self._count += len(added)
        return added

    def _slots_of(self, ids: Ints) -> Ints:
        """Return where the places of some objects are; in the first page for those in whose pages nothing is."""
        parts = _parts(ids)
        slots = self._blocks.take(parts[:, 2])
        slots += parts[:, 1]
        slots = self._pages.take(slots)
        slots += parts[:, 0] >> _SLOT
        return slots

    def _slots(self, ids: Ints) -> Ints:
        """Return the same, with a page for each of them."""
        if _parts(ids)[:, 3].any():
            raise ValueError("an identity is no address")
        slots = self._slots_of(ids)
        missing = ids[slots < _SLOTS]
        if not len(missing):
            return slots
        # Neighbours lie mostly in one page.
        pages = missing >> 16
        pages = np.unique(pages[np.flatnonzero(np.diff(pages, prepend=-1))])
        blocks = np.unique(pages >> 16)
        blocks = blocks[self._blocks[blocks] == 0]
        self._blocks[blocks] = np.arange(len(blocks)) * _PART + self._end_of_blocks
        self._end_of_blocks += len(blocks) * _PART
        self._pages = _with_room(self._pages, self._end_of_blocks)
        self._pages[self._blocks[pages >> 16] + (pages & (_PART - 1))] = (
            np.arange(len(pages)) * _SLOTS + self._end_of_pages
        )
        self._end_of_pages += len(pages) * _SLOTS
        self._places = _with_room(self._places, self._end_of_pages)
        return self._slots_of(ids)


def _parts(ids: Ints) -> npt.NDArray[np.uint16]:
    """Return the four parts of each address, shape [len(ids), 4], the lowest first."""
    return np.ascontiguousarray(ids).view(np.uint16).reshape(-1, 4)


def _with_room(numbers: _Numbers, size: int) -> _Numbers:
    """Return the same with at least so much room, where it is zero."""
    if len(numbers) >= size:
        return numbers
    # What is not written to takes no memory: the kernel gives it when it is.
    larger = np.zeros(4 * size, numbers.dtype)
    larger[: len(numbers)] = numbers
    return larger


Places = Union[AddressTable, ObjectPlaces]  # noqa: UP007 - evaluated

_WORD = 8
_TYPE = 8
"""Where an object has the address of its type, after its reference count."""

_SIZE, _ITEMS = 16, 24
"""Where a list has how many objects it holds, and the address of their addresses."""

_NEXT = -16
"""Where an object that the collector may track has its link to the next one; zero while it is not tracked."""

_LENGTHS: dict[type, int] = {list: 16, tuple: 16, dict: 16, set: 24, frozenset: 24, deque: 16}
"""Where a container has how many things it holds; one of a class that derives from it has so, too."""

_MISSES = 104
"""Where an `lru_cache` has how often it was asked for what it did not have."""

_IS_GC = 328
"""Where a type has the function that says which of its instances the collector may track; zero: all, or none."""

_HAVE_GC = 1 << 14
_ADDRESS_BITS = 48

# One class for all lengths: each length would be a class of its own, which only the collector ends.
_AT_A_TIME = 4096
_OBJECTS = ctypes.py_object * _AT_A_TIME


class Identities(Collection[int]):
    """Identities of objects in eight bytes each: a set of Python's numbers takes ten times as much.

    Args:
        ids: the identities, in any order.
        but: those that are not among them all the same.
    """

    def __init__(self, ids: Ints, but: Collection[int] = ()) -> None:
        ids = each_once(ids)
        self._ids = np.setdiff1d(ids, np.fromiter(but, np.int64, len(but)), assume_unique=True) if but else ids

    def __contains__(self, identity: object) -> bool:
        if type(identity) is not int or not len(self._ids):
            return False
        place = int(self._ids.searchsorted(identity))
        return place < len(self._ids) and int(self._ids[place]) == identity

    def holds(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return which of some identities are among them, shape [len(ids)]."""
        if not len(self._ids):
            return np.zeros(len(ids), np.bool_)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        found: npt.NDArray[np.bool_] = self._ids[places] == ids
        return found

    def and_also(self, others: Collection[int]) -> Identities:
        """Return these and some others."""
        return Identities(np.concatenate([self._ids, np.fromiter(others, np.int64, len(others))]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __len__(self) -> int:
        return len(self._ids)


def identities(objects: list[Any]) -> Ints:
    """Return `id` of each object of a list, shape [len(objects)]; nobody else may change the list meanwhile."""
    if not objects or not _LAID_OUT:
        return np.fromiter(map(id, objects), np.int64, len(objects))
    items = _word(id(objects) + _ITEMS)
    return np.array(_Words(items, len(objects)), np.int64)


def places_of(ids: Ints) -> Places:
    """Return a table of the places of some objects, to which more may be added.

    Args:
        ids: the identities of the first of them, which the caller keeps alive as all others.
    """
    return ObjectPlaces(ids) if _LAID_OUT else AddressTable(ids)


def types_of(ids: Ints) -> Ints:
    """Return `id(type(item))` of each object by its identity, shape [len(ids)].

    Args:
        ids: of objects that the caller keeps alive.
    """
    if not _can_read(ids):
        return np.fromiter((id(type(object_at(each))) for each in ids.tolist()), np.int64, len(ids))
    return _words_at(ids + _TYPE)


def types_in_c() -> tuple[Callable[[Any], Any], ...]:
    """Return callables, all written in C, that one after the other make of identities those of their types.

    From an array of shape [n] and type int64 to another one, as `types_of`, where no Python code may run.
    """
    if not _LAID_OUT:
        each = (functools.partial(map, function) for function in (_ctypes.PyObj_FromPtr, type, id))
        return operator.methodcaller("tolist"), *each, functools.partial(np.fromiter, dtype=np.dtype(np.int64))
    # The word behind an object's first one, counted in words from where the array of all memory begins.
    return operator.methodcaller("__rshift__", 3), np.asarray(_Words(_WORD, (1 << _ADDRESS_BITS) // _WORD - 2)).take


def elements(lists: list[list[Any]]) -> tuple[Ints, Ints]:
    """Return how many objects each list holds, shape [len(lists)], and the identities of all of them, list by list."""
    ids = identities(lists)
    if not _can_read(ids):
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        return counts, np.fromiter(map(id, chain.from_iterable(lists)), np.int64, int(counts.sum()))
    counts = _words_at(ids + _SIZE)
    before = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) + np.repeat(_words_at(ids + _ITEMS) // _WORD - before, counts)
    return counts, _words_at(places * _WORD)


def referents(objects: list[Any]) -> tuple[Ints, Ints, list[Any]]:
    """Return how many objects each object refers to, the identities of all of these, and what keeps them alive.

    One list for all of them, with a mark behind those of each: a list for each takes twice the time.

    Returns:
        The numbers, shape [len(objects)]; the identities, object by object; the objects, with the marks.
    """
    mark = object()
    asked: list[Any] = [[mark]] * (2 * len(objects))
    asked[::2] = objects
    found = gc.get_referents(*asked)
    ids = identities(found)
    is_mark = ids == id(mark)
    ends = np.flatnonzero(is_mark)
    return np.diff(ends, prepend=-1) - 1, ids[~is_mark], found


def are_tracked(ids: Ints) -> npt.NDArray[np.bool_]:
    """Return `gc.is_tracked` of each object by its identity, shape [len(ids)].

    Args:
        ids: of objects that the caller keeps alive.
    """
    if not _can_read(ids):
        return np.fromiter((gc.is_tracked(object_at(each)) for each in ids.tolist()), np.bool_, len(ids))
    kinds = types_of(ids)
    firsts = first_places(kinds)
    # Per type, at the place where it comes first, and from there for all others of it.
    manners = np.zeros(len(ids), np.int8)
    for place in np.flatnonzero(firsts == np.arange(len(ids))).tolist():
        manners[place] = _manner_of(int(kinds[place]))
    return _are_tracked(ids, manners[firsts])


class Tracked:
    """Says which objects the collector tracks, and remembers for each type how to decide it: for one walk.

    (`are_tracked` looks at the types of what it is asked about anew each time.)
    """

    def __init__(self) -> None:
        self._known = places_of(np.zeros(0, np.int64))
        self._manners = np.zeros(0, np.int8)

    def among(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return `gc.is_tracked` of each object by its identity, shape [len(ids)].

        Args:
            ids: of objects that the caller keeps alive, and with them their types until the walk's end.
        """
        if not _can_read(ids):
            return are_tracked(ids)
        kinds = types_of(ids)
        places = self._known.find(kinds)
        new = np.unique(kinds[places < 0])
        if len(new):
            self._known.add(new)
            self._manners = np.append(self._manners, np.array([_manner_of(kind) for kind in new.tolist()], np.int8))
            places = self._known.find(kinds)
        return _are_tracked(ids, self._manners.take(places))


# How to decide whether an instance of a type is tracked: it never is, by its link, or by the collector's answer.
_NEVER, _BY_LINK, _BY_ASKING = range(3)


def _manner_of(kind: int) -> int:
    if not flags_of(object_at(kind)) & _HAVE_GC:
        return _NEVER
    return _BY_ASKING if _word(kind + _IS_GC) else _BY_LINK


def _are_tracked(ids: Ints, manners: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    tracked: npt.NDArray[np.bool_] = manners == _BY_LINK
    # Others have no such link before them.
    tracked[tracked] = _words_at(ids[tracked] + _NEXT) != 0
    for place in np.flatnonzero(manners == _BY_ASKING).tolist():
        tracked[place] = gc.is_tracked(object_at(int(ids[place])))
    return tracked


class NamespaceSizes(msgspec.Struct, frozen=True):
    """How many names each module had at one moment.

    Attributes:
        namespaces: the identities of the modules' namespaces, shape [modules].
        sizes: how many names each one had, shape [modules].
    """

    namespaces: Ints
    sizes: Ints

    def of(self, namespace: Mapping[str, object]) -> int:
        """Return how many names a namespace had; 0 for that of a module that was not there."""
        places = np.flatnonzero(self.namespaces == id(namespace))
        return int(self.sizes[places[0]]) if len(places) else 0


def namespace_sizes() -> NamespaceSizes:
    """Return how many names each module has; in C takes some tens of microseconds, since every test begins with it."""
    modules = list(sys.modules.values())
    if native.namespace_sizes is not None:
        ids, sizes = native.namespace_sizes(modules)
        return NamespaceSizes(np.frombuffer(ids, np.int64), np.frombuffer(sizes, np.int64))
    # One that the collector has cleared, and somebody has kept all the same, has none any more.
    found = [names for item in modules if is_a(item, ModuleType) and (names := dict_of_module(item)) is not None]
    return NamespaceSizes(identities(found), np.fromiter(map(len, found), np.int64, len(found)))


def misses_of(caches: list[weakref.ref[Any]]) -> Ints:
    """Return how often each `lru_cache` was asked for what it did not have, shape [len(caches)]; -1 for a lost one.

    (`cache_info` of each of 800 takes 0.4 ms, this 0.01.)
    """
    if native.numbers_in is not None and _CACHES_LAID_OUT:
        return np.array(np.frombuffer(native.numbers_in(caches, _MISSES), np.int64))
    each = (-1 if (cache := reference()) is None else cache.cache_info()[1] for reference in caches)
    return np.fromiter(each, np.int64, len(caches))


def lengths_of(ids: Ints, kind: type) -> Ints:
    """Return how many things each container holds, by its identity, shape [len(ids)].

    Args:
        ids: of objects that the caller keeps alive.
        kind: what they are or derive from: `list`, `tuple`, `dict`, `set`, `frozenset` or `collections.deque`.
    """
    if not _LENGTHS_LAID_OUT or not _can_read(ids):
        # Not `len`, which a class that derives from it may answer.
        length: Callable[[Any], int] = kind.__dict__["__len__"]
        return np.fromiter((length(object_at(each)) for each in ids.tolist()), np.int64, len(ids))
    return _words_at(ids + _LENGTHS[kind])


def object_at(identity: int) -> Any:
    """Return the object of an identity, which the caller keeps alive in some other way."""
    return ctypes.cast(identity, ctypes.py_object).value


def objects_at(ids: Ints) -> list[Any]:
    """Return the objects of many identities, which the caller keeps alive in some other way."""
    ids = np.ascontiguousarray(ids)
    found: list[Any] = []
    for start in range(0, len(ids), _AT_A_TIME):
        part = ids[start : start + _AT_A_TIME]
        # Never beyond the part: only as many as are asked for are read.
        found += _OBJECTS.from_address(part.ctypes.data)[: len(part)]
    return found


def _can_read(ids: Ints) -> bool:
    return len(ids) > 0 and _LAID_OUT and not int(ids.max()) >> _ADDRESS_BITS


def _words_at(addresses: Ints) -> Ints:
    """Return the word at each address, a multiple of its size."""
    # Its elements are a word apart. It is made for this call only: whoever came across it and printed it would read
    # where nothing is.
    found: Ints = np.asarray(_Words(_WORD, (1 << _ADDRESS_BITS) // _WORD - 2)).take(addresses // _WORD - 1)
    return found


class _Words:
    """Words of memory, for numpy; nobody writes to them.

    (Not an array of `ctypes`: each length would be a class of its own.)
    """

    def __init__(self, address: int, count: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "<i8", "shape": (count,), "data": (address, True)}


def _is_laid_out(type_at: int, size_at: int, items_at: int, next_at: int, is_gc_at: int) -> bool:
    """Return whether this interpreter's lists and objects are as this module takes them to be."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return False
    sample: list[Any] = [object(), 1, "one", (), {}, type, sys]
    # In this order: what is no address is never followed.
    if _word(id(sample) + type_at) != id(list) or _word(id(sample) + size_at) != len(sample):
        return False
    items = _word(id(sample) + items_at)
    if not all(
        _word(items + place * _WORD) == id(item) and _word(id(item) + type_at) == id(type(item))
        for place, item in enumerate(sample)
    ):
        return False
    # Of these only the type of types has such a function, as types in C are not tracked.
    if not _word(id(type) + is_gc_at) or any(_word(id(kind) + is_gc_at) for kind in (list, dict, tuple, object, int)):
        return False
    return all(bool(_word(id(item) + next_at)) == gc.is_tracked(item) for item in (sample, [], {}, {1: sample}, (1, 2)))


def _are_caches_laid_out(misses_at: int) -> bool:
    """Return whether this interpreter's `lru_cache`s, with a bound and without, are as this module takes them to be."""
    for maxsize in (None, 0, 3):
        cache = functools.lru_cache(maxsize)(abs)
        for key in (1, 1, 1, 2, 3, 4, 5, 6, 7):
            cache(key)
        if _word(id(cache) + misses_at) != cache.cache_info().misses:
            return False
        cache.cache_clear()
        if _word(id(cache) + misses_at) != 0:
            return False
    return True


def _are_lengths_laid_out() -> bool:
    """Return whether this interpreter's containers have their lengths where this module takes them to be."""
    for kind, at in _LENGTHS.items():
        sample: Any = kind(dict.fromkeys(range(5)))
        if hasattr(kind, "pop"):
            # Its place among the entries is left empty.
            sample.pop(*(2,) if kind is dict else ())
        if _word(id(sample) + at) != len(sample):
            return False
    return True


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


_LAID_OUT = _is_laid_out(_TYPE, _SIZE, _ITEMS, _NEXT, _IS_GC)
_LENGTHS_LAID_OUT = _LAID_OUT and _are_lengths_laid_out()
_CACHES_LAID_OUT = _LAID_OUT and _are_caches_laid_out(_MISSES)
