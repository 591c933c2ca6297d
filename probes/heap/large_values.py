"""How much each object refers to of what may become longer and longer though no container takes anything.

Bytes of text, arrays and their like: the same object grows, as a `bytearray`, or a longer one takes its place. And the
things in tuples, frozensets and the arguments of a `functools.partial`, which always do the latter.
"""

from __future__ import annotations

import array
import functools
import io
from collections.abc import Callable, Collection
from typing import Any

from lowtide.probes import native
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.identities import are_tracked, identities, objects_at, referents, types_of
from lowtide.probes.objects.listed import all_objects, collector_paused, lists_can_be_read
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import loaded

LEAST = 16 << 10
"""Bytes of a value that counts."""

UNIT = 1024
"""Bytes that are one of what is counted."""

OF_VALUES, OF_ITEMS = 1, 2
"""Beside an object's identity, which is a multiple of 8: the KiB of its values, and how many things its tuples have."""

_MANY = 16
"""Things in tuples from which on who refers to them is worth a place in a message."""

_ARGUMENTS: Callable[[Any], tuple[Any, ...]] = functools.partial.__dict__["args"].__get__

_COUNTS: dict[type, Callable[[Any], int]] = {
    tuple: tuple.__len__,
    frozenset: frozenset.__len__,
    functools.partial: lambda partial: len(_ARGUMENTS(partial)),
}
"""How many things there are in what takes nothing, and gives way to a longer one."""

_AT_A_TIME = 1 << 16


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
    return identity & ~(OF_VALUES | OF_ITEMS)


def read_values(wanted: Collection[int] = ()) -> tuple[ContainerLengths, dict[int, list[Any]]]:
    """Read how many KiB of values, and how many things in tuples and their like, each object refers to.

    Of those alone that refer to any, and of values of at least `LEAST` bytes. No foreign code runs, and nothing is kept
    alive but what is wanted.

    Args:
        wanted: those of the identities that are returned of which the values, or tuples, are returned.

    Returns:
        The KiB as the length of `OF_VALUES` beside the object's identity, the things as that of `OF_ITEMS`; for each
        wanted identity that is there what counts there, the largest first.
    """
    with collector_paused():
        found = _Found(wanted)
        if native.values_of_all is not None and lists_can_be_read():
            held, values, count = native.values_of_all((*_sizes(), *_COUNTS), LEAST)
            found.note(np.frombuffer(held, np.int64), values)
            values.clear()
        else:
            count = _find_among(all_objects(), found)
        ids, lengths = found.lengths
        return ContainerLengths(ids, types_of(owner_of(ids)), lengths, count), found.wanted


def _find_among(objects: list[Any], found: _Found) -> int:
    """Find what some objects refer to, of which the list lets go, and return how many they are."""
    count = len(objects)
    for start in range(0, count, _AT_A_TIME):
        part = objects[start : start + _AT_A_TIME]
        found.add(part)
        part.clear()
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
        self._measures = ((OF_VALUES, _sizes(), LEAST), (OF_ITEMS, _COUNTS, 1))
        self._parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        self._seen = np.zeros(0, np.int64)

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Return the identities that `read_values` returns, in their order, and the KiB, or things."""
        names, sizes = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        ids, places = np.unique(names, return_inverse=True)
        lengths = np.bincount(places, sizes, minlength=len(ids)).astype(np.int64)
        return ids, np.where(ids & OF_VALUES, lengths // UNIT, lengths)

    def note(self, owners: Ints, values: list[Any]) -> None:
        """Note what counts of some objects, by the identities of their owners."""
        kinds = types_of(identities(values))
        for of, measures, least in self._measures:
            places = np.flatnonzero(np.isin(kinds, [*map(id, measures)]))
            own = [values[place] for place in places.tolist()]
            sizes = np.fromiter((measures[type(each)](each) for each in own), np.int64, len(own))
            names, large = owners[places] + of, sizes >= least
            self._parts.append((names[large], sizes[large]))
            if self._wants:
                self._keep(names.tolist(), np.flatnonzero(large).tolist(), own, measures)
            own.clear()

    def _keep(
        self, names: list[int], places: list[int], values: list[Any], measures: dict[type, Callable[[Any], int]]
    ) -> None:
        met = {names[place] for place in places if names[place] in self._wants}
        for place in places:
            if names[place] in met:
                self.wanted.setdefault(names[place], []).append(values[place])
        for name in met:
            self.wanted[name].sort(key=lambda value: -measures[type(value)](value))

    def add(self, objects: list[Any]) -> None:
        """Look at what some objects refer to, and dicts that they have to themselves, which are not tracked."""
        counts, held, alive = referents(objects)
        kinds = types_of(held)
        is_value = np.isin(kinds, [id(kind) for _, measures, _ in self._measures for kind in measures])
        values = objects_at(held[is_value])
        self.note(np.repeat(identities(objects), counts)[is_value], values)
        values.clear()
        dicts = np.unique(held[kinds == id(dict)])
        dicts = np.setdiff1d(dicts[~are_tracked(dicts)], self._seen)
        self._seen = np.union1d(self._seen, dicts)
        within = objects_at(dicts)
        alive.clear()
        if within:
            self.add(within)
            within.clear()


def items_of(fixed: Any) -> Any:
    """Return the tuple or frozenset of which `read_values` has counted the things: of a partial its arguments."""
    return _ARGUMENTS(fixed) if type(fixed) is functools.partial else fixed


def size_of_value(value: Any) -> int:
    """Return the bytes of a value that `read_values` has returned."""
    return _sizes()[type(value)](value)


def _written(text: io.StringIO) -> int:
    """Return how much was written to a text in memory: its own size is that of an empty one."""
    try:
        return io.StringIO.tell(text)
    except ValueError:  # closed
        return 0


def _sizes() -> dict[type, Callable[[Any], int]]:
    sizes: dict[type, Callable[[Any], int]] = {
        str: str.__len__,
        bytes: bytes.__len__,
        bytearray: bytearray.__len__,
        array.array: lambda item: len(item) * item.itemsize,
        io.BytesIO: io.BytesIO.__sizeof__,
        io.StringIO: _written,
    }
    ndarray: Any = getattr(loaded("numpy"), "ndarray", None)
    if ndarray is not None:
        # A view owns nothing: what it is a view of does.
        sizes[ndarray] = lambda item: 0 if item.base is not None else item.nbytes
    return sizes
