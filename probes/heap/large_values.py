"""How much each object refers to of what may become longer and longer though no container takes anything.

Bytes of text, arrays and their like: the same object grows, as a `bytearray`, or a longer one takes its place. The
things in tuples, frozensets, arrays of objects and the arguments of a `functools.partial`, which always do the latter.
And what an object of C refers to that is none of Python's containers, as a `MultiDict` or a block of `itertools.tee`.

Who refers to them may give way to another one, too, as a frozen record does, or what a context is made of: so of each
type it is read how much the one value is that any object of it refers to.
"""

from __future__ import annotations

import array
import functools
import io
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from lowtide.probes import native
from lowtide.probes.heap.container_lengths import ContainerLengths, are_containers
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.identities import (
    are_tracked,
    identities,
    lengths_of,
    objects_at,
    places_of,
    referents,
    types_of,
)
from lowtide.probes.objects.listed import all_objects, collector_paused, lists_can_be_read
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, loaded

LEAST = 16 << 10
"""Bytes of a value that counts."""

UNIT = 1024
"""Bytes that are one of what is counted."""

OF_VALUES, OF_ITEMS, OF_TYPE = 1, 2, 4
"""Beside an object's identity, which is a multiple of 8: the KiB of its values, or how many things its tuples have; and
beside a type's, that it is the most that one value, or tuple, of any object of it has."""

_MANY = 16
"""Things from which on who refers to them is worth a place in a message, and no record of a few fields."""

_ARGUMENTS: Callable[[Any], tuple[Any, ...]] = functools.partial.__dict__["args"].__get__

_COUNTS: dict[type, Callable[[Any], int]] = {
    tuple: tuple.__len__,
    frozenset: frozenset.__len__,
    functools.partial: lambda partial: len(_ARGUMENTS(partial)),
}
"""How many things there are in what takes nothing, and gives way to a longer one; see `_counts`."""

_AT_A_TIME = 1 << 16

_POINTER = 8
"""Bytes that a reference takes."""


def with_values(lengths: ContainerLengths) -> ContainerLengths:
    """Return the lengths of containers with what `read_values` reads now, as if they were some more of these."""
    values, _ = read_values()
    told = (values.ids & OF_VALUES > 0) | (values.lengths >= _MANY)
    ids = np.concatenate([lengths.ids, values.ids[told]])
    order = np.argsort(ids, kind="stable")
    kinds = np.concatenate([lengths.kinds, values.kinds[told]])[order]
    return ContainerLengths(
        ids[order], kinds, np.concatenate([lengths.lengths, values.lengths[told]])[order], lengths.objects
    )


def owner_of(identity: Any) -> Any:
    """Return the identity, or identities, of the object of which `read_values` has read something."""
    return identity & ~(OF_VALUES | OF_ITEMS | OF_TYPE)


def read_values(wanted: Collection[int] = ()) -> tuple[ContainerLengths, dict[int, list[Any]]]:
    """Read how many KiB of values, and how many things in tuples and their like, each object refers to.

    Of those alone that refer to any, and of values of at least `LEAST` bytes. An object that is no container refers to
    its things as if they were in a tuple. No foreign code runs, and nothing is kept alive but what is wanted.

    Args:
        wanted: those of the identities that are returned of which the values, or tuples, are returned.

    Returns:
        The KiB as the length of `OF_VALUES` beside the object's identity, the things as that of `OF_ITEMS`; the same of
        each type, of its objects' largest one; for each wanted identity that is there what counts, the largest first.
    """
    with collector_paused():
        found = _Found(wanted)
        if native.values_of_all is not None and lists_can_be_read():
            held, types, values, count = native.values_of_all((*_sizes(), *_counts()), deque, LEAST, _MANY)
            found.note(np.frombuffer(held, np.int64) & ~1, np.frombuffer(types, np.int64), values)
            values.clear()
        else:
            count = _find_among(all_objects(), found)
        return ContainerLengths(*found.lengths, count), found.wanted


def _find_among(objects: list[Any], found: _Found) -> int:
    """Find what some objects refer to, of which the list lets go, and return how many they are."""
    count = len(objects)
    for start in range(0, count, _AT_A_TIME):
        found.add(objects[start : start + _AT_A_TIME])
    objects.clear()
    return count


class _Found:
    """What was found of values, tuples and their like.

    Args:
        wanted: as of `read_values`.

    Attributes:
        wanted: what counts for each wanted identity that was met, the largest first.
    """

    def __init__(self, wanted: Collection[int]) -> None:
        self.wanted: dict[int, list[Any]] = {}
        self._wants = wanted
        self._measures = ((OF_VALUES, _sizes(), LEAST), (OF_ITEMS, _counts(), 1))
        self._parts = [(np.zeros(0, np.int64),) * 3]
        self._met = places_of(np.zeros(0, np.int64))

    @property
    def lengths(self) -> tuple[Ints, Ints, Ints]:
        """Return the identities that `read_values` returns, in their order, the owners' types, the KiB or things."""
        names, kinds, sizes = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        ids, first, places = np.unique(names, return_index=True, return_inverse=True)
        lengths = np.bincount(places, sizes, minlength=len(ids)).astype(np.int64)
        of_types = np.flatnonzero(names & OF_TYPE)
        lengths[ids & OF_TYPE > 0] = 0
        np.maximum.at(lengths, places[of_types], sizes[of_types])
        return ids, kinds[first], np.where(ids & OF_VALUES, lengths // UNIT, lengths)

    def note(self, owners: Ints, types: Ints, values: list[Any]) -> None:
        """Note what counts of some objects, or what is in one that is its own owner.

        Args:
            owners: the owner of each, by identity; it may be gone by now.
            types: its type.
            values: what counts.
        """
        ids = identities(values)
        kinds, is_own = types_of(ids), owners == ids
        for of, measures, least in self._measures:
            places = np.flatnonzero(np.isin(kinds, [*map(id, measures)]) | (is_own & (of == OF_ITEMS)))
            sizes = _measured(values, ids, kinds, places, measures)
            own = [values[place] for place in places.tolist()] if self._wants else []
            large, of_owners = sizes >= least, types[places]
            # A `BytesIO` shows its bytes (Python 3.12 and later), and is measured itself.
            large &= ~((of == OF_VALUES) & np.isin(of_owners, [*map(id, measures)]))
            self._add(owners[places] + of, of_owners, large, sizes, own)
            self._add(of_owners + of + OF_TYPE, of_owners, large, sizes, own)
            own.clear()

    def _add(self, names: Ints, types: Ints, chosen: Any, sizes: Ints, values: list[Any]) -> None:
        self._parts.append((names[chosen], types[chosen], sizes[chosen]))
        if not self._wants:
            return
        wanted = np.flatnonzero(np.isin(names, [*self._wants]) & chosen)
        for place in wanted[np.argsort(-sizes[wanted], kind="stable")].tolist():
            self.wanted.setdefault(int(names[place]), []).append(values[place])

    def add(self, objects: list[Any]) -> None:
        """Look at what some objects refer to, and dicts and tuples of theirs that are not tracked, however deep."""
        while objects:
            within = self._add_level(objects)
            objects.clear()
            objects = within

    def _add_level(self, objects: list[Any]) -> list[Any]:
        """Look at what some objects refer to; return the dicts and tuples among it that are not tracked and are new."""
        counts, held, alive = referents(objects)
        kinds, ids = types_of(held), identities(objects)
        own = types_of(ids)
        is_value = np.isin(kinds, [id(kind) for _, measures, _ in self._measures for kind in measures])
        have_many = np.flatnonzero((counts >= _MANY) & ~are_containers(own) & ~np.isin(own, [id(tuple), id(frozenset)]))
        places = np.concatenate([np.repeat(np.arange(len(ids)), counts)[is_value], have_many])
        values = objects_at(np.concatenate([held[is_value], ids[have_many]]))
        self.note(ids[places], own[places], values)
        values.clear()
        either = held[np.isin(kinds, [id(dict), id(tuple)])]
        within = objects_at(self._met.add_new(either, lambda new: ~are_tracked(new)))
        alive.clear()
        return within


def _measured(
    values: list[Any], ids: Ints, kinds: Ints, places: Ints, measures: dict[type, Callable[[Any], int]]
) -> Ints:
    """Return the sizes of the values at some places; most are tuples, whose lengths are read without a call each."""
    sizes, own = np.zeros(len(places), np.int64), kinds[places]
    read = [kind for kind in (tuple, frozenset) if kind in measures]
    for kind in read:
        at = np.flatnonzero(own == id(kind))
        sizes[at] = lengths_of(ids[places[at]], kind)
    left = np.flatnonzero(~np.isin(own, [*map(id, read)]))
    asked = (values[place] for place in places[left].tolist())
    sizes[left] = np.fromiter((measures.get(type(each), _referents)(each) for each in asked), np.int64, len(left))
    return sizes


def items_of(fixed: Any) -> Any:
    """Return that of which `read_values` has counted the things: of a partial its arguments."""
    return _ARGUMENTS(fixed) if type(fixed) is functools.partial else fixed


def count_of(item: Any) -> int:
    """Return how many things `read_values` has counted in a tuple, a frozenset, or what else there may be some in."""
    return _counts().get(type(item), _referents)(item)


def _referents(item: object) -> int:
    """Return how many things an object refers to; 0 where it has room for all in itself, as for slots: no more come."""
    count = len(gc.get_referents(item))
    return count if count * _POINTER > object.__sizeof__(item) else 0


def size_of_value(value: Any) -> int:
    """Return the bytes of a value that `read_values` has returned."""
    return _sizes()[type(value)](value)


def _written(file: io.StringIO | io.BytesIO) -> int:
    """Return how much was written to a file in memory: its own size is that of an empty one.

    Of a `BytesIO` only while somebody else refers to its bytes, as who measures them does.
    """
    try:
        return type(file).tell(file)
    except ValueError:  # closed
        return 0


def _counts() -> dict[type, Callable[[Any], int]]:
    ndarray: Any = getattr(loaded("numpy"), "ndarray", None)
    return _COUNTS if ndarray is None else {**_COUNTS, ndarray: lambda item: item.size if item.dtype.hasobject else 0}


def _sizes() -> dict[type, Callable[[Any], int]]:
    sizes: dict[type, Callable[[Any], int]] = {
        str: str.__len__,
        bytes: bytes.__len__,
        bytearray: bytearray.__len__,
        array.array: lambda item: len(item) * item.itemsize,
        io.BytesIO: lambda item: max(io.BytesIO.__sizeof__(item), _written(item)),
        io.StringIO: _written,
    }
    ndarray: Any = getattr(loaded("numpy"), "ndarray", None)
    if ndarray is not None:
        # A view owns nothing: what it is a view of does.
        sizes[ndarray] = lambda item: 0 if item.base is not None else item.nbytes
    return sizes
