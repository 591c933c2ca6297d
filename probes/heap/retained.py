"""What one reference retains: what no root would lead to if it were gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lowtide.probes.heap.search import Search
from lowtide.probes.objects.address_table import Indices, Ints

Cuts = tuple[Sequence[int], Sequence[tuple[int, Sequence[int]]]]
"""A path's nodes, and its cuts: the place in it that each starts from, and the places of edges that go with it."""


class Sweeper:
    """What cutting references retains: which targets no root leads to without one.

    As long as a reference is not taken, what is not reached is what it retains (the edge dominates it). What is reached
    without any of the references that will be asked for is found out once, by one sweep over the heap; each question
    sweeps over the rest only, which is little.

    Args:
        search: the search, whose roots are known.
        cuts: by target, its path, and, from the root on, for each cut the place in the path of the node that the
            reference to be cut starts from, and the places of edges that go with it.
    """

    def __init__(self, search: Search, cuts: Mapping[int, Cuts]) -> None:
        self._search = search
        self._cuts = cuts
        self._offsets, self._original = search.offsets, search.edges
        self._edges = self._original.copy()
        self._places = {
            target: [sorted({search.reference(path[at], path[at + 1]), *others}) for at, others in parts]
            for target, (path, parts) in cuts.items()
        }
        every = {place for parts in self._places.values() for places in parts for place in places}
        self._every = np.array(sorted(every), np.int64)
        self._holders = self._holders_of(self._every)
        # To itself: a reference that leads nowhere new.
        self._edges[self._every] = self._holders
        self._seen = search.reached_by(self._edges)

    def retained(self, target: int) -> list[npt.NDArray[np.bool_]]:
        """For each cut of a target's path, which targets no root leads to then; none, if the path's end is reached."""
        path, parts = self._cuts[target]
        if not parts:
            return []
        own = [np.array(places, np.int64) for places in self._places[target]]
        others = np.isin(self._every, np.concatenate(own), invert=True)
        places, holders = self._every[others], self._holders[others]
        seen = self._seen.copy()
        self._edges[places] = self._original[places]
        frontier = self._freed(seen, places, holders)
        targets = self._search.targets
        found = []
        for (at, _), cut in zip(parts, own, strict=True):
            self._search.flood(seen, self._edges, frontier)
            is_held = bool(seen[path[at + 1 :]].any())
            found.append(np.zeros(len(targets), np.bool_) if is_held else (targets >= 0) & ~seen[targets])
            # The next cut's reach is this one's and what it held back.
            self._edges[cut] = self._original[cut]
            frontier = self._freed(seen, cut, self._holders_of(cut))
        self._edges[self._every] = self._holders
        return found

    def _freed(self, seen: npt.NDArray[np.bool_], places: Ints, holders: Ints) -> Indices:
        """What some references lead to that start from what is reached, now that they count again."""
        held: Indices = np.unique(self._original[places[seen[holders]]])
        held = held[~seen[held]]
        seen[held] = True
        return held

    def _holders_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._offsets, places, side="right") - 1
