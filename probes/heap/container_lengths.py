"""How many things each container holds, read in one go: twice, and it shows which containers grow.

A type is read as if it held its objects: what is in no container, as the nodes of a chain, shows by that. And `atexit`
is read as the list that it has of what is to be called at exit, `contextvars` as the context of the thread that reads.

(A container that was frozen is read like any other: `gc.freeze()` hides it from the collector's list alone.)
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy.typing as npt

from lowtide.probes import native
from lowtide.probes.objects.address_table import Ints, each_once
from lowtide.probes.objects.foreign import mro_of
from lowtide.probes.objects.identities import (
    are_tracked,
    identities,
    lengths_of,
    object_at,
    objects_at,
    referents,
    types_of,
)
from lowtide.probes.objects.listed import (
    all_objects,
    collector_paused,
    lists_can_be_read,
    running_locals,
)
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, loaded
from lowtide.probes.references.interpreter_holders import exit_entries

CONTAINERS: tuple[type, ...] = (list, dict, set, deque)

MANY = 100
"""Entries of a long container."""

_CHUNK = 8_000

_GOLDEN = 0.618034
"""Multiples of this, without what is before the point, are spread evenly, however many."""

_LARGEST_HOLDER = 100_000
"""Things in a container that may hold somebody's dicts: one of attributes, or a record."""


class ContainerLengths(msgspec.Struct, frozen=True, eq=False):
    """The containers of one moment and the types of all objects, in the order of their identities; all of shape [n].

    Attributes:
        ids: their identities.
        kinds: those of their types.
        lengths: how many things each holds; of a type how many objects the collector has.
        objects: how many objects were gone through, with the dicts that the collector does not track.
    """

    ids: Ints
    kinds: Ints
    lengths: Ints
    objects: int = 0

    def places_of(self, ids: Ints) -> Ints:
        """Return the place of each identity among them; -1 where it is none of them."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, places, -1)


def read_lengths(wanted: Collection[int] = ()) -> tuple[ContainerLengths, dict[int, Any]]:
    """Read the length of every list, dict, set and deque that the collector, or something that it has, knows of.

    Dicts of nothing that the collector tracks, as of names and numbers, it does not track either: they are found where
    an object that it does track, or a running function's variable, refers to them. No foreign code runs, and
    nothing is kept alive but what is wanted; in C no other thread runs meanwhile, which would find what it lets go of
    alive.

    Args:
        wanted: identities of containers and types that are returned themselves.

    Returns:
        The lengths, and the wanted ones that are there, by identity.
    """
    read, found = _lengths(wanted)
    in_c = {atexit: atexit._ncallbacks(), contextvars: len(contextvars.copy_context())}
    found |= {id(module): module for module in in_c if id(module) in wanted}
    names, lengths = identities([*in_c]), np.array([*in_c.values()])
    order = np.argsort(names)
    places = np.searchsorted(read.ids, names[order])
    more = zip((read.ids, read.kinds, read.lengths), (names, types_of(names), lengths), strict=True)
    ids, kinds, lengths = (np.insert(those, places, these[order]) for those, these in more)
    return ContainerLengths(ids, kinds, lengths, read.objects), found


def long_containers() -> dict[int, int]:
    """Return how long each container of many entries is, by its identity."""
    # Types are in cycles: none goes meanwhile.
    with collector_paused():
        read, _ = read_lengths()
        places = np.flatnonzero(read.lengths >= MANY)
        ids, kinds, lengths = (each[places].tolist() for each in (read.ids, read.kinds, read.lengths))
        # A type is read as if it held its objects, and is no container itself.
        is_container = {kind: bool(_manner_of(object_at(kind))) for kind in set(kinds)}
    return {item: length for item, kind, length in zip(ids, kinds, lengths, strict=True) if is_container[kind]}


def _lengths(wanted: Collection[int]) -> tuple[ContainerLengths, dict[int, Any]]:
    with collector_paused():
        if native.lengths_of_all is not None and lists_can_be_read():
            read, found = _all_lengths_in_c(wanted)
        else:
            objects = all_objects()
            try:
                read, found = _lengths_among(objects, wanted)
            finally:
                # The list may be among the objects by this frame.
                objects.clear()
        more = _dicts_of_running_functions()
        more = more[read.places_of(more) < 0]
        found |= {id(item): item for item in objects_at(np.intersect1d(more, [*wanted]))}
        places = np.searchsorted(read.ids, more)
        ids, kinds, lengths = (
            np.insert(those, places, these)
            for those, these in ((read.ids, more), (read.kinds, id(dict)), (read.lengths, lengths_of(more, dict)))
        )
        return ContainerLengths(ids, kinds, lengths, read.objects), found


def _dicts_of_running_functions() -> Ints:
    """Return the identities of the dicts that the collector does not track and a running function has."""
    values = running_locals()
    ids = identities(values)
    dicts = ids[types_of(ids) == id(dict)]
    values.clear()
    return each_once(dicts[~are_tracked(dicts)])


def _all_lengths_in_c(wanted: Collection[int]) -> tuple[ContainerLengths, dict[int, Any]]:
    assert native.lengths_of_all is not None
    names = np.fromiter(wanted, np.int64, len(wanted)).tobytes()
    answer = native.lengths_of_all(deque, names, _LARGEST_HOLDER)
    ids, lengths, kinds, count, found = answer
    ids, lengths, kinds = (np.frombuffer(each, np.int64) for each in (ids, lengths, kinds))
    order = np.argsort(ids, kind="stable")
    return ContainerLengths(ids[order], kinds[order], lengths[order], count), {id(each): each for each in found}


def _lengths_among(objects: list[object], wanted: Collection[int]) -> tuple[ContainerLengths, dict[int, Any]]:
    ids, lengths, untracked = _each_length(objects)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    read = ContainerLengths(ids, types_of(ids), lengths[order], len(objects) + untracked)
    places = read.places_of(np.fromiter(wanted, np.int64, len(wanted)))
    kept = read.ids[places[places >= 0]]
    return read, dict(zip(kept.tolist(), objects_at(kept), strict=True))


def _each_length(objects: list[object]) -> tuple[Ints, Ints, int]:
    """Return the containers' identities and lengths, in no order, both of shape [n]; and how many are not tracked."""
    ids = identities(objects)
    kinds, of_objects = np.unique(types_of(ids), return_inverse=True)
    manners = np.fromiter(map(_manner_of, objects_at(kinds)), np.int64, len(kinds))[of_objects]
    found, holders = [], [np.flatnonzero(manners == 0)]
    for number, kind in enumerate(CONTAINERS, 1):
        of_kind = np.flatnonzero(manners == number)
        own = ids[of_kind]
        lengths = lengths_of(own, kind)
        holders.append(of_kind[lengths <= _LARGEST_HOLDER])
        found.append((own, lengths))
    more = _untracked_dicts(objects, np.concatenate(holders))
    found.append((more, lengths_of(more, dict)))
    found.append((kinds, np.bincount(of_objects, minlength=len(kinds))))
    own, lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return own, lengths, len(more)


def _manner_of(cls: type) -> int:
    """Return which container a type is or derives from, from 1; the same in heap.c."""
    bases = set(map(id, mro_of(cls)))
    return next((number for number, kind in enumerate(CONTAINERS, 1) if id(kind) in bases), 0)


def are_containers(kinds: Ints) -> npt.NDArray[np.bool_]:
    """Return of some types, which are alive, by their identities whether their objects are read by `read_lengths`."""
    each, places = np.unique(kinds, return_inverse=True)
    return np.fromiter((_manner_of(kind) > 0 for kind in objects_at(each)), np.bool_, len(each))[places]


def _untracked_dicts(objects: list[object], places: Ints) -> Ints:
    """Return the identities of the dicts that some objects hold and that the collector does not track."""
    holders = [objects[place] for place in places.tolist()]
    met = [np.zeros(0, np.int64)]
    for start in range(0, len(holders), _CHUNK):
        _, held, alive = referents(holders[start : start + _CHUNK])
        held = each_once(held[types_of(held) == id(dict)])
        met.append(held[~are_tracked(held)])
        alive.clear()
    holders.clear()
    return each_once(np.concatenate(met))


def last_entries(container: Any, most: int, step: int = 1, run: int = 1) -> list[tuple[Any, ...]]:
    """Return what a container took last, as far as it has an order, without running foreign code.

    Args:
        container: a list, dict, set, deque, tuple or frozenset, `atexit`, `contextvars`, or an object of C.
        most: how many entries are gone through.
        step: of each so many of them some are returned; a multiple of `run`.
        run: how many, one after the other.

    Returns:
        Key and value of each entry of a dict or a context, function and arguments of one of `atexit`; of others the
        thing alone.
    """
    cls = type(container)
    if container is atexit:
        # A place keeps its number though its function is registered no more.
        return [tuple(entry) for entry in _runs(reversed(exit_entries()), most, step, run) if entry]
    if container is contextvars:
        return [*_runs(iter(contextvars.copy_context().items()), most, step, run)]
    if issubclass(cls, dict):
        return list(_runs(reversed(dict.items(container)), most, step, run))
    for unordered in (set, frozenset):
        if issubclass(cls, unordered):
            return [(item,) for item in _runs(unordered.__iter__(container), most, step, run)]
    if issubclass(cls, tuple):
        backwards = tuple.__getitem__(container, slice(None, None, -1))
        return [(item,) for item in _runs(iter(backwards), most, step, run)]
    for ordered in (list, deque):
        if issubclass(cls, ordered):
            return [(item,) for item in _runs(ordered.__reversed__(container), most, step, run)]
    return [(item,) for item in _runs(reversed(_referents(container)), most, step, run)]


def _referents(item: Any) -> list[Any]:
    """Return what an object of C refers to, which shows its things by that alone."""
    # An array shows nothing to the collector.
    return item.ravel().tolist() if type(item) is getattr(loaded("numpy"), "ndarray", None) else gc.get_referents(item)


def _runs(entries: Iterator[Any], most: int, step: int, run: int) -> Iterator[Any]:
    gone = 0
    for number, stretch in enumerate(range(0, most, step)):
        # Not always the first ones: every so many may be like no others.
        start = stretch + int(number * _GOLDEN % 1 * (step // run)) * run
        stop = min(start + run, most)
        yield from itertools.islice(entries, start - gone, max(start, stop) - gone)
        gone = max(start, stop)
