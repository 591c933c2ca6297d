"""What one reference retains: what no root would lead to if it were gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy.typing as npt

from lowtide.probes.heap.search import Search
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.original_numpy import np

Cuts = tuple[Sequence[int], Sequence[tuple[int, Ints]]]
"""A path's nodes, and its cuts: the place in it that each starts from, and the places of edges that go with it."""

_NEVER = np.iinfo(np.int64).max


class Freed(AbstractSet[int]):
    """The targets that no root leads to once one reference of a path is cut.

    The sets of one path share what they are made of: of two references of it, neither of which frees nothing, the one
    nearer to the root frees all that the other one does.

    Args:
        levels: for each target, the first cut of the path without which it is free no more; -1 where no root leads to
            it in any case; shape [targets].
        turn: the place of the cut among the path's; None where it frees nothing.
    """

    __slots__ = ("levels", "turn")

    def __init__(self, levels: Ints, turn: int | None) -> None:
        self.levels = levels
        self.turn = turn

    def __contains__(self, target: object) -> bool:
        return self.turn is not None and type(target) is int and bool(self.levels[target] > self.turn)

    def __iter__(self) -> Iterator[int]:
        return iter(() if self.turn is None else np.flatnonzero(self.levels > self.turn).tolist())

    def __len__(self) -> int:
        return 0 if self.turn is None else int(np.count_nonzero(self.levels > self.turn))

    __hash__ = object.__hash__


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
            target: [(search.reference(path[at], path[at + 1]), others) for at, others in parts]
            for target, (path, parts) in cuts.items()
        }
        # What goes with all entries of a cache is the same for each of them, and is taken once.
        shared = {id(others): others for _, parts in cuts.values() for _, others in parts}
        own = [place for parts in self._places.values() for place, _ in parts]
        every = np.concatenate([np.array(own, np.int64), *shared.values()])
        self._every = np.unique(every)
        self._holders = self._holders_of(self._every)
        # To itself: a reference that leads nowhere new.
        self._edges[self._every] = self._holders
        self._seen = search.reached_by(self._edges)

    def retained(self, target: int, unreached: npt.NDArray[np.bool_]) -> list[Freed]:
        """For each cut of a target's path, which targets no root leads to then; none, if the path's end is reached.

        Args:
            target: whose path.
            unreached: which targets no root leads to in any case, shape [targets].
        """
        path, parts = self._cuts[target]
        if not parts:
            return []
        own = [np.append(others, place) for place, others in self._places[target]]
        others = np.isin(self._every, np.concatenate(own), invert=True)
        places, holders = self._every[others], self._holders[others]
        seen = self._seen.copy()
        self._edges[places] = self._original[places]
        frontier = self._freed(seen, places, holders)
        # At which cut each node was first reached.
        reached = np.where(seen, 0, _NEVER)
        for turn, cut in enumerate(own):
            reached[frontier] = turn
            for met in self._search.flood(seen, self._edges, frontier):
                reached[met] = turn
            # The next cut's reach is this one's and what it held back.
            self._edges[cut] = self._original[cut]
            frontier = self._freed(seen, cut, self._holders_of(cut))
        self._edges[self._every] = self._holders
        levels: Ints = np.where(unreached, -1, reached[self._search.targets])
        # Of each place of the path on, when the first of its nodes was reached.
        first = np.minimum.accumulate(reached[list(path)][::-1])[::-1]
        return [Freed(levels, None if first[at + 1] <= turn else turn) for turn, (at, _) in enumerate(parts)]

    def _freed(self, seen: npt.NDArray[np.bool_], places: Ints, holders: Ints) -> Indices:
        """What some references lead to that start from what is reached, now that they count again."""
        held: Indices = np.unique(self._original[places[seen[holders]]])
        held = held[~seen[held]]
        seen[held] = True
        return held

    def _holders_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._offsets, places, side="right") - 1
