"""The breadth-first search through a graph of the heap, from the roots to some targets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import FunctionType

import numpy.typing as npt

from lowtide.probes.heap.forward_search import BLOCKED, ROOT, UNSEEN, ForwardSearch
from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.roots import FIRST, LAST, LATER, Root, RootKind, running_frames
from lowtide.probes.objects.address_table import Indices, each_once
from lowtide.probes.objects.foreign import LRU_CACHE, described, is_callable, type_name
from lowtide.probes.objects.listed import CHECKER
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc
from lowtide.probes.references.cxx_holders import held_as
from lowtide.probes.references.definitions import is_dict_of_cache
from lowtide.probes.references.interpreter_holders import InterpretersTables
from lowtide.probes.references.native_references import held_from_c, outermost, references_of
from lowtide.probes.references.unseen_references import reader_of

_FEW = 1000
"""References of one object that are gone through in less time than it takes to note where they are."""


class Search:
    """One question to a graph: by which way the roots lead to some targets.

    Args:
        graph: the heap.
        targets: the suspects.
        ignore: the identities of objects that no path may pass.
        given: further roots, by name.
        not_roots: the identities of objects that are no roots.
        thorough: whether to go through everything that the graph has.
    """

    def __init__(
        self,
        graph: Graph,
        targets: Sequence[object],
        ignore: Collection[int],
        given: Sequence[tuple[str, object]],
        not_roots: Collection[int],
        *,
        thorough: bool = False,
    ) -> None:
        self.graph = graph
        self._is_thorough = thorough
        self.held_from_c: frozenset[int] = frozenset()
        self.offsets, self.edges = graph.with_hidden_edges(targets) if thorough else (graph.offsets, graph.edges)
        self.objects = graph.objects
        self.targets = graph.find(targets)
        # Its own list is an object like any other, which leads everywhere.
        blocked = [graph.find_ids({id(self.objects), *ignore}), graph.checkers]
        if not thorough and all(map(gc.is_tracked, targets)):
            blocked.append(graph.passed_over)
        self._blocked = np.concatenate(blocked)
        nodes_given = graph.find([held for _, held in given]).tolist()
        self._given: dict[int, Root] = {}
        for (name, held), node in zip(given, nodes_given, strict=True):
            if node >= 0:
                self._given.setdefault(node, Root("object", name, held, [], FIRST))
        self._native_roots: dict[int, Root] = {}
        self._references: dict[int, dict[int, int]] = {}
        self._asked: set[int] = set()
        own = np.arange(len(graph.roots), dtype=np.int32)
        no_roots = graph.find_ids(not_roots)
        first = np.array(list(self._given), np.int32)
        self._roots: Indices = np.concatenate([first, own[~np.isin(own, np.concatenate([first, no_roots]))]])
        self._turns = graph.turns
        if len(first) or len(no_roots):
            self._turns = graph.turns.copy()
            self._turns[no_roots] = [LATER if graph.comes_later(node) else FIRST for node in no_roots.tolist()]
            self._turns[first] = FIRST
        self.forward = ForwardSearch(self.offsets, self.edges, self._turns, graph.scratch)

    @property
    def roots(self) -> list[Root]:
        """Those that paths may start from."""
        return [self.root_at(node) for node in (*self._roots.tolist(), *self._native_roots)]

    def root_at(self, node: int) -> Root:
        """Return the root that a node is."""
        if node in self._native_roots:
            return self._native_roots[node]
        return self._given[node] if node in self._given else self.graph.roots[node]

    def _root_nodes(self) -> Indices:
        return np.concatenate([self._roots, np.array(list(self._native_roots), np.int32)])

    def entries_of_cache(self, cache: int) -> list[int]:
        """Return the places, in the list of edges, of all by which an `lru_cache` holds its entries."""
        own = self.objects[cache]
        if type(own) is not LRU_CACHE:
            return []
        kept = {id(vars(own)), id(vars(own).get("__wrapped__"))}
        places = [
            place
            for place in range(int(self.offsets[cache]), int(self.offsets[cache + 1]))
            if id(self.objects[self.edges[place]]) not in kept
        ]
        for node in {int(self.edges[place]) for place in places}:
            # Its own dict, not one that is a result.
            if type(self.objects[node]) is dict and is_dict_of_cache(own, self.objects[node]):
                places += range(int(self.offsets[node]), int(self.offsets[node + 1]))
        return places

    def reference(self, holder: int, held: int) -> int:
        """Return the place, in the list of edges, of one reference."""
        start, stop = int(self.offsets[holder]), int(self.offsets[holder + 1])
        if stop - start <= _FEW or holder not in self._asked:
            self._asked.add(holder)
            return start + int(np.flatnonzero(self.edges[start:stop] == held)[0])
        if holder not in self._references:
            edges = self.edges[start:stop].tolist()
            # Written backwards, so that the first of several stays.
            self._references[holder] = dict(zip(reversed(edges), range(stop - 1, start - 1, -1), strict=True))
        return self._references[holder][held]

    def reached_by(self, edges: Indices) -> npt.NDArray[np.bool_]:
        """Return which nodes the roots lead to by some edges, those that no path may pass included."""
        seen = np.zeros(len(self.objects), np.bool_)
        seen[self._blocked] = True
        frontier = np.setdiff1d(self._root_nodes(), self._blocked)
        seen[frontier] = True
        for _ in self.forward.flood(seen, edges, frontier):
            pass
        return seen

    def search(self) -> Indices:
        """Return the node before each node on a shortest path from a root, or why there is none.

        Breadth first, a level at a time; what comes last waits until nothing else is left to search. Ends as soon as
        every target is reached.
        """
        parents = np.full(len(self.objects), UNSEEN, np.int32)
        parents[self._roots] = ROOT
        parents[self._blocked] = BLOCKED
        # A library's namespace is reached from its module, however many functions hold it that others imported.
        parents[self.graph.namespaces] = self.graph.modules
        frontier = np.concatenate([self._roots, self.graph.namespaces])
        wanted = self.targets[self.targets >= 0]
        self.forward.search(parents, frontier, wanted)
        lost = each_once(wanted[parents[wanted] == UNSEEN])
        if self._is_thorough and len(lost):
            frontier = self._add_native_roots(parents, lost)
            while len(frontier):
                frontier = self.forward.next_level(parents, frontier)
        return parents

    def _add_native_roots(self, parents: Indices, lost: Indices) -> Indices:
        """Make roots of what C or C++ holds and what leads to the lost nodes, as far out as Python's graph goes."""
        unseen = parents == UNSEEN
        places = np.flatnonzero(unseen[self.edges])
        held = self.edges[places]
        order = np.argsort(held, kind="stable")
        held = held[order]
        holders = (np.searchsorted(self.offsets, places[order], side="right") - 1).astype(np.int32)
        before = np.zeros(len(parents), np.bool_)
        frontier = lost
        while len(frontier):
            before[frontier] = True
            starts, ends = np.searchsorted(held, frontier, "left"), np.searchsorted(held, frontier, "right")
            met = each_once(np.concatenate([holders[start:end] for start, end in zip(starts, ends, strict=True)]))
            met = met[unseen[met] & ~before[met]]
            own = np.fromiter((_is_checkers_object(self.objects[node]) for node in met.tolist()), np.bool_, len(met))
            frontier = met[~own]
        nodes = sorted(np.flatnonzero(before).tolist(), key=lambda node: self._preference(node, lost))
        # All that refer to one of them, those through which no path may lead included; not this heap's own list.
        refer = [node for node in each_once(holders[before[held]]).tolist() if self.objects[node] is not self.objects]
        edges: dict[int, set[int]] = {}
        inside = before[held] & before[holders]
        for holder, node in zip(holders[inside].tolist(), held[inside].tolist(), strict=True):
            edges.setdefault(holder, set()).add(node)
        variables = references_of([frame for frame, _ in running_frames(of_checker=True)])
        # What is frozen may be held by frozen garbage, which no walk sees.
        nodes = [node for node in nodes if not self.graph.is_frozen(node)]
        known = held_from_c(nodes, self.objects, refer, _all_held_by, variables, self.graph.referrers_since(nodes))
        self.held_from_c = frozenset(known)
        tables = InterpretersTables()
        outer = outermost(known, edges)
        names = {node: name for node in outer if (name := tables.of(self.objects[node]))}
        called = [node for node in outer if node not in names and is_callable(self.objects[node])]
        in_cxx = held_as({id(self.objects[node]) for node in called})
        for node in outer:
            item, text = self.objects[node], described(self.objects[node])
            name = names.get(node, "")
            if id(item) in in_cxx:
                name = f"{in_cxx[id(item)]}, {text}"
            kind: RootKind = "interpreter" if name else "native"
            self._native_roots[node] = Root(kind, name or text, item, [], LAST)
        frontier = np.array(list(self._native_roots), np.int32)
        parents[frontier] = ROOT
        return frontier

    def _preference(self, node: int, lost: Indices) -> tuple[bool, str]:
        """Return the one that is reported of what holds each other: it is not lost itself, and has the first name."""
        return bool((lost == node).any()), described(self.objects[node])


def _all_held_by(item: object) -> list[object]:
    """Return what an object refers to, as the collector is shown it and as it is not."""
    reader = reader_of(type(item))
    shown = gc.get_referents(item)
    return shown if reader is None else [*shown, *reader(item)]


def _is_checkers_object(item: object) -> bool:
    """Return whether an object is one of the checker's functions, or an instance of one of its classes."""
    if type(item) is FunctionType:
        name = dict.get(item.__globals__, "__name__")
        return type(name) is str and name.startswith(CHECKER)
    return type_name(type(item)).startswith(CHECKER)
