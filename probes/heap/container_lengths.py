"""How many things each container holds, read in one go: twice, and it shows which containers grow.

(A container that was frozen is read like any other: `gc.freeze()` hides it from the collector's list alone.)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import flags_of, mro_of
from lowtide.probes.objects.identities import are_tracked, identities, lengths_of, objects_at, referents, types_of
from lowtide.probes.objects.listed import all_objects, collector_paused
from lowtide.probes.original_numpy import np

CONTAINERS: tuple[type, ...] = (list, dict, set, deque)

_HEAP_TYPE = 1 << 9

_CHUNK = 8_000

_LARGEST_NAMESPACE = 10_000
"""Entries of a dict that may be somebody's attributes."""

_LARGEST_RECORD = 16
"""Things in a list that may hold somebody's dicts, as that of a `ChainMap`."""


@dataclass(frozen=True, slots=True, eq=False)
class ContainerLengths:
    """The containers of one moment, in the order of their identities; all of shape [n].

    Attributes:
        ids: their identities.
        kinds: those of their types.
        lengths: how many things each holds.
        objects: how many objects were gone through.
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
    """Read the length of every list, dict, set and deque that the collector, or an object's attribute, knows of.

    Dicts of nothing that the collector tracks, as of names and numbers, it does not track either: they are found where
    an instance, a class, a namespace or a short list refers to them. No foreign code runs, and nothing is kept alive
    but what is wanted.

    Args:
        wanted: identities of containers that are returned themselves.

    Returns:
        The lengths, and the wanted ones that are there, by identity.
    """
    with collector_paused():
        objects = all_objects()
        try:
            return _lengths_among(objects, wanted)
        finally:
            # The list may be among the objects by this frame.
            objects.clear()


def _lengths_among(objects: list[object], wanted: Collection[int]) -> tuple[ContainerLengths, dict[int, Any]]:
    ids = identities(objects)
    kinds = types_of(ids)
    found, holders = [], []
    for kind in CONTAINERS:
        of_kind = np.flatnonzero(_are_among(kinds, np.array(sorted(_derived(kind)), np.int64)))
        own = ids[of_kind]
        lengths = lengths_of(own, kind)
        if kind is list:
            holders = [_with_attributes(kinds), of_kind[lengths <= _LARGEST_RECORD]]
        if kind is dict:
            holders.append(of_kind[lengths <= _LARGEST_NAMESPACE])
            more = _untracked_dicts(objects, np.concatenate(holders))
            own, lengths = np.concatenate([own, more]), np.concatenate([lengths, lengths_of(more, kind)])
        found.append((own, types_of(own), lengths))
    ids, kinds, lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(ids, kind="stable")
    read = ContainerLengths(ids[order], kinds[order], lengths[order], len(objects))
    places = read.places_of(np.fromiter(wanted, np.int64, len(wanted)))
    kept = read.ids[places[places >= 0]]
    return read, dict(zip(kept.tolist(), objects_at(kept), strict=True))


def _with_attributes(kinds: Ints) -> Ints:
    """Return the places of the instances of classes that are written in Python, by the identities of the types."""
    known = np.unique(kinds)
    of_python = [
        bool(flags_of(cls) & _HEAP_TYPE) and not any(base is type for base in mro_of(cls)) for cls in objects_at(known)
    ]
    return np.flatnonzero(_are_among(kinds, known[of_python]))


def _untracked_dicts(objects: list[object], places: Ints) -> Ints:
    """Return the identities of the dicts that some objects hold and that the collector does not track."""
    holders = [objects[place] for place in places.tolist()]
    met = [np.zeros(0, np.int64)]
    for start in range(0, len(holders), _CHUNK):
        _, held, alive = referents(holders[start : start + _CHUNK])
        held = np.unique(held[types_of(held) == id(dict)])
        met.append(held[~are_tracked(held)])
        alive.clear()
    holders.clear()
    return np.unique(np.concatenate(met))


def _are_among(kinds: Ints, wanted: Ints) -> npt.NDArray[np.bool_]:
    """Say which of some types, by their identities, are among those of a sorted list."""
    if not len(wanted):
        return np.zeros(len(kinds), np.bool_)
    places = np.minimum(np.searchsorted(wanted, kinds), len(wanted) - 1)
    found: npt.NDArray[np.bool_] = wanted[places] == kinds
    return found


def _derived(kind: type) -> Iterator[int]:
    """Give the identities of a class and of all that derive from it."""
    seen: set[int] = set()
    waiting = [kind]
    while waiting:
        cls = waiting.pop()
        if id(cls) not in seen:
            seen.add(id(cls))
            yield id(cls)
            waiting.extend(type.__subclasses__(cls))


def last_entries(container: Any, most: int) -> list[tuple[Any, ...]]:
    """Return what a container took last, as far as it has an order, without running foreign code.

    Args:
        container: a list, dict, set or deque.
        most: how many entries.

    Returns:
        Key and value of each entry of a dict; of others the thing alone.
    """
    cls = type(container)
    if issubclass(cls, dict):
        return list(itertools.islice(reversed(dict.items(container)), most))
    if issubclass(cls, set):
        return [(item,) for item in itertools.islice(set.__iter__(container), most)]
    kind = list if issubclass(cls, list) else deque
    return [(item,) for item in itertools.islice(kind.__reversed__(container), most)]
