"""Where each of many living objects has its place, looked up by its address in a table as wide as the heap.

Two objects are never within 16 bytes of each other, so each 16 bytes of the heap have one number of their own.  Nothing
collides and nothing is compared, and what lies together in the heap lies together here: that takes half the time of a
hash table, whose answers lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy.typing as npt

from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.original_numpy import np

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
        """Adds objects that are not there yet, each once."""
        first, self._count = self._count, self._count + len(ids)
        slots = self._slots(ids)
        self._places[slots] = np.arange(first + 1, self._count + 1, dtype=np.int32)

    def find(self, ids: Ints) -> Indices:
        """The place of each object, shape [len(ids)]; less than 0 for one that was not added."""
        found: Indices = self._places.take(self._slots_of(ids))
        found -= 1
        return found

    def first_places(self, ids: Ints) -> Ints:
        """For each object the place in `ids` at which it comes for the first time; none of them may have been added."""
        slots = self._slots(ids)
        turns = np.arange(len(ids), dtype=np.int32)
        # Written backwards, so that the first of several stays.
        self._places[slots[::-1]] = turns[::-1]
        found = self._places.take(slots)
        self._places[slots] = 0
        return found.astype(np.int64)

    def add_new(self, ids: Ints, which: Callable[[Ints], npt.NDArray[np.bool_]]) -> Ints:
        """Adds those that are not there yet and are chosen, each once, in one look at where they belong.

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
        """Where the places of some objects are; in the first page for those in whose pages nothing is."""
        parts = _parts(ids)
        slots = self._blocks.take(parts[:, 2])
        slots += parts[:, 1]
        slots = self._pages.take(slots)
        slots += parts[:, 0] >> _SLOT
        return slots

    def _slots(self, ids: Ints) -> Ints:
        """The same, with a page for each of them."""
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
    """The four parts of each address, shape [len(ids), 4], the lowest first."""
    return np.ascontiguousarray(ids).view(np.uint16).reshape(-1, 4)


def _with_room(numbers: _Numbers, size: int) -> _Numbers:
    """The same with at least so much room, where it is zero."""
    if len(numbers) >= size:
        return numbers
    # What is not written to takes no memory: the kernel gives it when it is.
    larger = np.zeros(4 * size, numbers.dtype)
    larger[: len(numbers)] = numbers
    return larger
