"""How many bytes of text, arrays and their like each object refers to: one of them may become longer and longer.

No container takes anything then: it is the same object, as a `bytearray`, or a longer one in its place.
"""

from __future__ import annotations

import array
import io
from collections.abc import Callable, Collection, Sequence
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

OF_VALUES = 1
"""Beside an object's identity among those of containers: the KiB of its values. No identity is odd."""

_AT_A_TIME = 1 << 16


def with_values(lengths: ContainerLengths) -> ContainerLengths:
    """Return the lengths of containers with what `read_values` reads now, as if they were some more of these."""
    values, _ = read_values()
    ids = np.concatenate([lengths.ids, values.ids + OF_VALUES])
    order = np.argsort(ids, kind="stable")
    kinds = np.concatenate([lengths.kinds, values.kinds])[order]
    return ContainerLengths(
        ids[order], kinds, np.concatenate([lengths.lengths, values.lengths])[order], lengths.objects
    )


def read_values(wanted: Collection[int] = ()) -> tuple[ContainerLengths, dict[int, Any]]:
    """Read how many KiB of values each object refers to; of those alone that refer to any.

    Of values of at least `LEAST` bytes. No foreign code runs, and nothing is kept alive but what is wanted.

    Args:
        wanted: identities of objects of which the largest value is returned.

    Returns:
        The KiB by object, as lengths; the largest value of each wanted one that is there, by the object's identity.
    """
    with collector_paused():
        if native.values_of_all is not None and lists_can_be_read():
            sizes, found = _sizes(), _Found(wanted)
            held, values, count = native.values_of_all(tuple(sizes), LEAST)
            owners = np.frombuffer(held, np.int64)
            found.note(owners, np.fromiter((sizes[type(each)](each) for each in values), np.int64, len(values)), values)
            values.clear()
        else:
            found, count = _found_among(all_objects(), wanted)
        owners, bytes_held = (np.concatenate(parts) for parts in zip(*found.parts, strict=True))
        ids, places = np.unique(owners, return_inverse=True)
        lengths = np.bincount(places, bytes_held, minlength=len(ids)).astype(np.int64) // UNIT
        return ContainerLengths(ids, types_of(ids), lengths, count), found.largest


def _found_among(objects: list[Any], wanted: Collection[int]) -> tuple[_Found, int]:
    """Return what is found of some objects, which the list lets go of, and how many they are."""
    found, count = _Found(wanted), len(objects)
    for start in range(0, count, _AT_A_TIME):
        part = objects[start : start + _AT_A_TIME]
        found.add(part)
        part.clear()
    objects.clear()
    return found, count


class _Found:
    """What was found of values.

    Args:
        wanted: as of `read_values`.

    Attributes:
        parts: identities of who refers to values, and their bytes.
        largest: the largest value of each wanted one.
    """

    def __init__(self, wanted: Collection[int]) -> None:
        self.parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        self.largest: dict[int, Any] = {}
        self._wanted = wanted
        self._sizes = _sizes()
        self._kinds = np.array([id(kind) for kind in self._sizes], np.int64)
        self._seen = np.zeros(0, np.int64)

    def note(self, owners: Ints, sizes: Ints, values: Sequence[Any]) -> None:
        """Note the large ones of some values, by the identities of their owners."""
        large = sizes >= LEAST
        self.parts.append((owners[large], sizes[large]))
        if not self._wanted:
            return
        owned = owners.tolist()
        rising = sorted(np.flatnonzero(large).tolist(), key=sizes.tolist().__getitem__)
        self.largest |= {owned[place]: values[place] for place in rising if owned[place] in self._wanted}

    def add(self, objects: list[Any]) -> None:
        """Look at what some objects refer to, and dicts that they have to themselves, which are not tracked."""
        counts, held, alive = referents(objects)
        kinds = types_of(held)
        is_value = np.isin(kinds, self._kinds)
        values, owners = held[is_value], np.repeat(identities(objects), counts)[is_value]
        unique, places = np.unique(values, return_inverse=True)
        sizes = _sizes_of(unique, self._sizes)[places]
        large = sizes >= LEAST
        self.note(owners[large], sizes[large], objects_at(values[large]))
        dicts = np.unique(held[kinds == id(dict)])
        dicts = np.setdiff1d(dicts[~are_tracked(dicts)], self._seen)
        self._seen = np.union1d(self._seen, dicts)
        within = objects_at(dicts)
        alive.clear()
        if within:
            self.add(within)
            within.clear()


def size_of_value(value: Any) -> int:
    """Return the bytes of a value that `read_values` has returned."""
    return _sizes()[type(value)](value)


def _sizes_of(ids: Ints, sizes: dict[type, Callable[[Any], int]]) -> Ints:
    """Return the bytes of some values, by their identities."""
    found = np.zeros(len(ids), np.int64)
    kinds = types_of(ids)
    for kind, size in sizes.items():
        of_kind = np.flatnonzero(kinds == id(kind))
        found[of_kind] = np.fromiter(map(size, objects_at(ids[of_kind])), np.int64, len(of_kind))
    return found


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
