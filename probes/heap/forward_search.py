"""The breadth-first search over references as arrays, a level at a time: what it needs is no object, but numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy.typing as npt

from lowtide.probes.heap.roots import FIRST, LAST, LATER
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.original_numpy import np

UNSEEN, ROOT, BLOCKED = -1, -2, -3

_NARROW = 4
"""Nodes of a level that numpy takes longer for than Python does."""

_LEVELS = 1000
"""Narrow levels that are searched before the search looks whether it is over."""


class ForwardSearch:
    """Goes forward over references in compressed sparse rows.

    Args:
        offsets: where each node's edges begin, and where the last one's end.
        edges: the nodes that each node refers to.
        turns: in which of the search's queues each node waits.
        scratch: room for a number for each node.
    """

    def __init__(self, offsets: Ints, edges: Indices, turns: npt.NDArray[np.uint8], scratch: Indices) -> None:
        self._offsets, self._edges, self._turns, self._scratch = offsets, edges, turns, scratch

    def search(self, parents: Indices, frontier: Indices, wanted: Indices) -> None:
        """Note in `parents` the node before each node on a shortest path; what comes last waits for all else.

        Ends as soon as every wanted node is reached.

        Args:
            parents: by node `ROOT`, `BLOCKED` where no path may pass, and else `UNSEEN`.
            frontier: the nodes to begin at, in their order.
            wanted: the nodes that are looked for.
        """
        waiting: list[Indices] = []
        for turn in (FIRST, LATER, LAST):
            # What the program's own modules led to, before what libraries hold themselves.
            frontier = np.concatenate([*waiting[1:], *waiting[:1], frontier])
            waiting = []
            while len(frontier) and (parents[wanted] == UNSEEN).any():
                later = self._turns[frontier] > turn
                waiting.append(frontier[later])
                frontier = self.next_level(parents, frontier[~later])
                if len(frontier) <= _NARROW:
                    frontier, later_ones = self._next_levels(parents, frontier, turn)
                    waiting.append(later_ones)

    def _next_levels(self, parents: Indices, frontier: Indices, turn: int) -> tuple[Indices, Indices]:
        """Do the same for some narrow levels, none blocked: a list of a million links is a million levels.

        Returns:
            The nodes of the next level, and those on the way that wait for a later turn.
        """
        nodes: list[int] = frontier.tolist()
        waiting: list[int] = []
        for _ in range(_LEVELS):
            if not 0 < len(nodes) <= _NARROW:
                break
            reached: list[int] = []
            for node in nodes:
                if self._turns[node] > turn:
                    waiting.append(node)
                    continue
                for held in self._edges[self._offsets[node] : self._offsets[node + 1]].tolist():
                    if parents[held] == UNSEEN:
                        parents[held] = node
                        reached.append(held)
            nodes = reached
        return np.array(nodes, np.int32), np.array(waiting, np.int32)

    def next_level(self, parents: Indices, frontier: Indices) -> Indices:
        """Mark what the frontier's nodes lead to and return what was not reached before."""
        frontier = frontier[parents[frontier] != BLOCKED]
        counts, places = self._places(frontier)
        reached = self._edges[places]
        fresh = parents[reached] == UNSEEN
        reached = reached[fresh]
        # Written backwards, so that of several holders at the same distance the first one stays: of the module that was
        # imported first, of the attribute that was set first. (Not by the places in the heap: when a collection runs
        # changes those, and of two paths of one length another one would be given, with another fingerprint.)
        parents[reached[::-1]] = np.repeat(frontier, counts)[fresh][::-1]
        return self._each_once(reached)

    def flood(self, seen: npt.NDArray[np.bool_], edges: Indices, frontier: Indices) -> Iterator[Indices]:
        """Mark everything that the frontier reaches as seen, and yield it, a level or some narrow ones at a time.

        Args:
            seen: by node, whether it was reached.
            edges: in place of the search's own.
            frontier: the nodes to begin at.
        """
        while len(frontier):
            if len(frontier) <= _NARROW:
                met, frontier = self._narrow_flood(seen, edges, frontier)
            else:
                _, places = self._places(frontier)
                reached = edges[places]
                met = frontier = self._each_once(reached[~seen[reached]])
                seen[frontier] = True
            yield met

    def _narrow_flood(self, seen: npt.NDArray[np.bool_], edges: Indices, frontier: Indices) -> tuple[Indices, Indices]:
        """Do the same for some narrow levels; return what they have, and the last of them."""
        nodes: list[int] = frontier.tolist()
        met: list[int] = []
        while 0 < len(nodes) <= _NARROW and len(met) < _LEVELS:
            reached: list[int] = []
            for node in nodes:
                for held in edges[self._offsets[node] : self._offsets[node + 1]].tolist():
                    if not seen[held]:
                        seen[held] = True
                        reached.append(held)
            met += reached
            nodes = reached
        return np.array(met, np.int32), np.array(nodes, np.int32)

    def _each_once(self, nodes: Indices) -> Indices:
        """Return the nodes once each, in their order; without a sort, whose cost grows faster than the heap."""
        places = np.arange(len(nodes), dtype=np.int32)
        # Written backwards, so that the first place of several stays.
        scratch = self._scratch
        scratch[nodes[::-1]] = places[::-1]
        once: Indices = nodes[scratch[nodes] == places]
        return once

    def _places(self, nodes: Indices) -> tuple[Ints, Ints]:
        """Return how many edges each node has, and the places of all of them in the list of edges, node by node."""
        starts = self._offsets[nodes]
        counts = self._offsets[nodes + 1] - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return counts, np.arange(total) + np.repeat(starts - (ends - counts), counts)
