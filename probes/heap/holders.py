"""Who holds an object: shortest paths from the roots of the process through its whole heap, frozen or not.

All suspects share one forward walk (`gc.get_referents`), since only a forward walk sees what `gc.freeze()` hid, and
only sharing it makes many suspects as cheap as one. The walk fills numpy arrays (addresses, edges in compressed sparse
rows); breadth-first search over them finds the paths; names are looked up for the few edges on those paths only.

Like LeakCanary's Shark, the search has two queues: a path through a library's registries, thread locals or a running
frame is given only where there is no other, because it is seldom the one that must be cut. And like Shark it says what
one reference retains: what nothing else would hold if that reference were gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FrameType, ModuleType
from typing import Any

import numpy.typing as npt

from lowtide.probes.heap.forward_search import BLOCKED, ROOT, UNSEEN
from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.paths import Inspector, Link, Mark, Path, PathStep, landmarks
from lowtide.probes.heap.search import Search
from lowtide.probes.memory.buffers import Buffer, large_buffers
from lowtide.probes.objects.address_table import Indices, Ints, each_once
from lowtide.probes.objects.foreign import is_a, is_definition, type_name
from lowtide.probes.objects.listed import Census, all_instances, all_objects, collector_paused, frozen_instances
from lowtide.probes.original_numpy import np
from lowtide.probes.references.edges import EdgeNamer
from lowtide.probes.references.entries import Edge

_NO_PLACES: Ints = np.zeros(0, np.int64)


def find_paths(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    inspect: Inspector | None = None,
    roots: Sequence[tuple[str, object]] = (),
) -> list[Path | None]:
    """Return a shortest path from a root to each target, in the targets' order; None where Python's graph has none.

    Arguments, roots and cost are those of `trace`.
    """
    with trace(targets, ignore=ignore, roots=roots) as found:
        return [found.path(place, inspect) for place in range(len(targets))]


class SharedWalk:
    """One walk over the heap for all who ask who holds what, as long as nothing is changed.

    It is made when it is first asked for. It keeps every object alive: close it before anything is measured.

    Args:
        graph: a part of the heap, which is asked until somebody needs what is not in it.
    """

    def __init__(self, graph: Graph | None = None) -> None:
        self._graph = graph
        self._is_part = graph is not None
        self._lost: set[int] = set()
        self._buffers: list[Buffer] | None = None

    @property
    def is_made(self) -> bool:
        """Whether somebody has asked already, so that asking costs little."""
        return self._graph is not None

    def graph(self, needed: Sequence[object] = ()) -> Graph:
        """Return the heap.

        Args:
            needed: objects that shall be in it; where one is not, as it was made since, the walk is made again.
        """
        if self._graph is not None and not all(id(item) in self._lost for item in self._missing(needed)):
            self.close()
        if self._graph is None:
            with collector_paused():
                buffers = self._buffers or ()
                self._graph = Graph([*needed, *(buffer.item for buffer in buffers)])
                self._graph.own |= {id(needed), id(self._buffers), *map(id, buffers)}
            self._is_part = False
            # What is frozen, and what nothing leads to, no walk meets.
            self._lost = set(map(id, self._missing(needed)))
        return self._graph

    @property
    def is_part(self) -> bool:
        """Whether only a part of the heap is asked so far."""
        return self._is_part

    def census(self) -> Census:
        """Return all objects by their types."""
        return self.graph().census()

    def buffers_besides(self, known: Collection[tuple[int, int]]) -> Sequence[Buffer]:
        """Return the large arrays that there are besides those known by identity and bytes, always the same ones.

        Asked before the walk is made, they are in it from the first on: the collector tracks none of them, so a walk
        that was made without them would be made again for them.
        """
        if self._buffers is None:
            self._buffers = [each for each in large_buffers() if (id(each.item), each.bytes) not in known]
        return self._buffers

    def close(self) -> None:
        """Drop every object; the next who asks has the walk made again."""
        self._buffers = None
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _missing(self, items: Sequence[object]) -> list[object]:
        assert self._graph is not None
        nodes = self._graph.find(items).tolist()
        return [item for item, node in zip(items, nodes, strict=True) if node < 0]


@contextlib.contextmanager
def sharing_walk(walk: SharedWalk | None = None) -> Iterator[SharedWalk]:
    """Give the block a walk that everybody may ask: a given one, or a new one."""
    own = walk or SharedWalk()
    try:
        yield own
    finally:
        if walk is None:
            own.close()


def objects_of(ids: Collection[int], walk: SharedWalk | None) -> list[object]:
    """Return the objects of some identities, from a walk, or where there is none by going through the heap."""
    if walk is None:
        return [item for item in all_objects() if id(item) in ids]
    graph = walk.graph()
    return [graph.objects[node] for node in graph.find_ids(ids).tolist()]


def census_of(walk: SharedWalk | None) -> Census:
    """Return all objects by their types, from a walk, or where there is none by going through the heap."""
    return Census(all_objects()) if walk is None else walk.census()


def instances_in(walk: SharedWalk | None, *classes: type) -> list[Any]:
    """Return the objects of some classes, from a walk where there is one; unless it is a part, frozen garbage too."""
    if walk is None:
        return all_instances(*classes)
    found = walk.census().instances_of(*classes)
    if not walk.is_part:
        known = set(map(id, found))
        found += [item for item in frozen_instances(*classes) if id(item) not in known]
    return found


@contextlib.contextmanager
def trace(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    roots: Sequence[tuple[str, object]] = (),
    not_roots: Collection[int] = (),
    thorough: bool = False,
    walk: SharedWalk | None = None,
) -> Iterator[Traces]:
    """Walk the heap once; in the block the shortest paths to the targets can be asked for.

    Args:
        targets: the suspects. The sequence itself is never part of a path.
        ignore: ids of objects that no path may pass (containers in which the caller keeps the suspects).
        roots: further roots, with the name of each: what is held where the walk does not look, and is meant to be.
        not_roots: ids of running threads that are no roots: it is asked who else holds them.
        thorough: whether to look again for targets that nothing holds as far as one walk sees: through containers that
            the collector does not track, and from every object that only C or C++ holds, which then is a root.
        walk: the walk to ask, if it is shared with others.

    Roots are the modules in `sys.modules`, running threads, the current context, classes written in C, and the running
    frames, those of the checker excepted. Frames, thread locals, and what belongs to the interpreter's, the test
    runner's and torch's own modules are searched only for targets that nothing else holds.

    The walk costs about 0.6 s and 130 MB per million tracked objects, frozen or not. It runs no foreign code and
    materialises no instance's `__dict__`; naming a suspended generator's variable leaves its frame object behind
    (Python 3.11 and later). Frozen objects that no root reaches are not seen, neither are references from C or C++.
    While the block lasts the collector is paused, and every object is kept alive.
    """
    with collector_paused():
        own = walk or SharedWalk()
        needed, ignore = [*targets, *(held for _, held in roots)], {id(targets), *ignore}
        ignore.add(id(needed))
        found = Traces(None)
        try:
            if targets:
                # Of a walk that is shared, who asked first had its targets in a list that is one of the objects.
                ignore |= own.graph(needed).own
                found = Traces(Search(own.graph(needed), targets, ignore, roots, not_roots))
            if thorough and found.misses_any:
                found.close()
                found = Traces(Search(own.graph(needed), targets, ignore, roots, not_roots, thorough=True))
            yield found
        finally:
            # On Python 3.10, and at times later, this frame is one of the objects: it and the list would keep each
            # other, and the whole heap, until the next collection.
            found.close()
            if walk is None:
                own.close()


class Traces:
    """The paths of one walk; targets are named by their place in the sequence that was walked for."""

    def __init__(self, heap: Search | None) -> None:
        self._heap = heap
        self._parents = np.zeros(0, np.int32) if heap is None else heap.search()
        known = [] if heap is None else heap.roots
        self._namer = EdgeNamer({id(root.held): root.variables for root in known if root.variables})
        self._edges: dict[int, list[tuple[int, Edge]]] = {}
        self._paths: dict[int, list[int]] = {}
        self._entries: dict[int, Ints] = {}
        self._roots: dict[int, int] = {}
        self._marked: dict[int, int] = {}
        self._behind: dict[int, tuple[int, frozenset[Hashable]] | None] = {}
        self._firsts: dict[int, int] = {}
        self._sweeper: Sweeper | None = None

    def close(self) -> None:
        """Drop every object."""
        if self._heap is not None:
            self._namer.undo()
            self._heap = self._sweeper = None

    def reaches(self, place: int) -> bool:
        """Return whether any root leads to a target."""
        return bool(self._nodes(place))

    @property
    def misses_any(self) -> bool:
        """Whether there is a target that no root leads to."""
        targets = () if self._heap is None else self._heap.targets
        return any(target >= 0 and self._parents[target] == UNSEEN for target in targets)

    def is_frozen(self, place: int) -> bool:
        """Return whether a target lies in the permanent generation, or nothing lists it."""
        if self._heap is None:
            return False
        node = int(self._heap.targets[place])
        return node < 0 or self._heap.graph.is_frozen(node)

    def types_of_holders(self, places: Sequence[int], ignore: Collection[int]) -> list[set[str]]:
        """Return for each of some targets the types of the objects that refer to it and that the collector lists.

        Args:
            places: of the targets.
            ignore: the identities of holders that do not count; the checker's frames and modules never do.
        """
        if self._heap is None:
            return [set() for _ in places]
        nodes = [int(self._heap.targets[place]) for place in places]
        graph = self._heap.graph
        holders = graph.holders_of({node for node in nodes if node >= 0})
        found = []
        for node in nodes:
            items = [graph.objects[holder] for holder in holders.get(node, ()) if graph.is_listed(holder)]
            found.append(
                {
                    type_name(type(item))
                    for item in items
                    if id(item) not in ignore and type(item) is not FrameType and not is_a(item, ModuleType)
                }
            )
        return found

    def is_held_from_c(self, place: int) -> bool:
        """Return whether C or C++ refers to a target itself, which no root leads to; known of a thorough walk."""
        return self._heap is not None and int(self._heap.targets[place]) in self._heap.held_from_c

    def path(self, place: int, inspect: Inspector | None = None) -> Path | None:
        """Return the path to a target; None if no root reaches it."""
        nodes = self._nodes(place)
        if self._heap is None or not nodes:
            return None
        root = self._heap.root_at(nodes[0])
        if root.kind == "native" and len(nodes) == 1:
            return None
        edges = self._edges_of(place, nodes)
        ends = [nodes[start + edge.references] for start, edge in edges]
        items = [self._heap.objects[node] for node in ends]
        marks: Sequence[Mark | None] = [None] * len(items) if inspect is None else inspect(root.kind, items)
        steps = tuple(
            PathStep(
                type_name=type_name(type(item)),
                edge=edge.text,
                kind=edge.kind,
                frozen=self._heap.graph.is_frozen(node),
                definition=is_definition(item),
                mark=mark,
                landmark=landmark,
            )
            for (_, edge), node, item, mark, landmark in zip(
                edges, ends, items, marks, landmarks(items, [edge.text for _, edge in edges]), strict=True
            )
        )
        return Path(root.kind, root.name, steps, len(nodes) - 1, root.thread)

    def through(self, place: int) -> frozenset[int]:
        """Return the identities of all objects that the path to a target leads through, without the target."""
        heap = self._heap
        return frozenset() if heap is None else frozenset(id(heap.objects[node]) for node in self._nodes(place)[:-1])

    def way(self, place: int) -> list[int]:
        """Return the same in their order, from the root on: however long it is, no edge is looked at."""
        heap = self._heap
        return [] if heap is None else [id(heap.objects[node]) for node in self._nodes(place)[:-1]]

    def link(self, place: int, step: int) -> Link:
        """Return one step of the path to a target, with its objects."""
        nodes = self._nodes(place)
        assert self._heap is not None
        start, edge = self._edges_of(place, nodes)[step]
        owner, carrier, held = (
            self._heap.objects[nodes[at]] for at in (start, start + edge.references - 1, start + edge.references)
        )
        return Link(edge.text, edge.kind, owner, carrier, id(held))

    def will_be_cut(self, firsts: Mapping[int, int]) -> None:
        """Say for which targets `freed_by_cutting` may be asked, and from which step on."""
        self._firsts = dict(firsts)

    def freed_by_cutting(self, place: int, first: int) -> list[Freed]:
        """Return for each step of the path to a target, from `first` on: the targets that nothing holds once it is cut.

        An edge of a cache stands for all of the cache's entries, as clearing it cuts them all. Empty where something
        else holds this target too. By one sweep over the heap for all that `will_be_cut`, and one over what their
        edges retain for each.
        """
        if self._heap is None or not self._nodes(place):
            return []
        if self._sweeper is None or self._firsts.get(place) != first:
            self._firsts[place] = first
            cuts = {target: self._cuts_of(target, step) for target, step in self._firsts.items() if self._nodes(target)}
            self._sweeper = Sweeper(self._heap, cuts)
        targets = self._heap.targets
        unreached = (targets < 0) | (self._parents[targets] == UNSEEN)
        return self._sweeper.retained(place, unreached)

    def _cuts_of(self, place: int, first: int) -> Cuts:
        assert self._heap is not None
        nodes = self._nodes(place)
        cuts = []
        for start, edge in self._edges_of(place, nodes)[first:]:
            at = start + edge.references - 1
            whole = edge.kind in ("lru-cache-key", "lru-cache-value")
            cuts.append((at, self._entries_of_cache(nodes[start]) if whole else _NO_PLACES))
        return nodes, cuts

    def _entries_of_cache(self, cache: int) -> Ints:
        assert self._heap is not None
        if cache not in self._entries:
            self._entries[cache] = np.array(self._heap.entries_of_cache(cache), np.int64)
        return self._entries[cache]

    def root(self, place: int) -> object:
        """Return what the path to a target begins at; None where there is none."""
        if self._heap is None or not self._is_reached(place):
            return None
        trail = [int(self._heap.targets[place])]
        while trail[-1] not in self._roots and self._parents[trail[-1]] != ROOT:
            trail.append(int(self._parents[trail[-1]]))
        root = self._roots.get(trail[-1], trail[-1])
        self._roots.update(dict.fromkeys(trail, root))
        return self._heap.objects[root]

    def mark(self, place: int, step: int, number: int) -> None:
        """Give what a step of the path to a target leads to a number, by which `behind` knows it.

        Args:
            place: the target's.
            step: the step.
            number: what it is to be known by.
        """
        nodes = self._nodes(place)
        start, edge = self._edges_of(place, nodes)[step]
        self._marked[nodes[start + edge.references]] = number
        # What was known of the nodes behind it is no more true.
        for node in nodes[start + edge.references :]:
            self._behind.pop(node, None)

    def behind(self, place: int, kind_of: Callable[[object], Hashable]) -> tuple[int, frozenset[Hashable]] | None:
        """Return the number of the last marked object that the path to a target leads through; None if it passes none.

        Of each object it is found out once, however many paths lead through it.

        Args:
            place: the target's.
            kind_of: what an object says of a path that leads through it, None for nothing.

        Returns:
            The number, and what the objects behind it say.
        """
        if self._heap is None or not self._is_reached(place):
            return None
        node = int(self._heap.targets[place])
        trail: list[int] = []
        while node not in self._behind and node not in self._marked and self._parents[node] != ROOT:
            trail.append(node)
            node = int(self._parents[node])
        found = (self._marked[node], frozenset[Hashable]()) if node in self._marked else self._behind.get(node)
        for node in reversed(trail):
            kind = None if found is None else kind_of(self._heap.objects[node])
            if found is not None and kind is not None and kind not in found[1]:
                found = found[0], found[1] | {kind}
            self._behind[node] = found
        return found

    def _nodes(self, place: int) -> list[int]:
        """Return the nodes from the root to a target; none if it was not reached."""
        if self._heap is None:
            return []
        if place not in self._paths:
            is_reached = self._is_reached(place)
            self._paths[place] = self._way_to(int(self._heap.targets[place])) if is_reached else []
        return self._paths[place]

    def _is_reached(self, place: int) -> bool:
        target = -1 if self._heap is None else int(self._heap.targets[place])
        return target >= 0 and self._parents[target] not in (UNSEEN, BLOCKED)

    def _way_to(self, target: int) -> list[int]:
        nodes = [target]
        while self._parents[nodes[-1]] != ROOT:
            nodes.append(int(self._parents[nodes[-1]]))
        nodes.reverse()
        return nodes

    def _edges_of(self, place: int, nodes: Sequence[int]) -> list[tuple[int, Edge]]:
        """Return the path's edges, each with the place of its first node."""
        assert self._heap is not None
        if place not in self._edges:
            objects = [self._heap.objects[node] for node in nodes]
            root = self._heap.root_at(nodes[0])
            named: list[tuple[int, Edge]] = []
            start = 0
            while start < len(objects) - 1:
                edge = self._namer.edge(objects, start)
                if root.kind == "thread" and start == 0:
                    edge = edge._replace(kind="thread")
                elif root.kind == "context" and start == 0:
                    edge = Edge(".get()", "context-variable")
                named.append((start, edge))
                start += edge.references
            self._edges[place] = named
        return self._edges[place]


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
        self._every = each_once(every)
        self._holders = self._holders_of(self._every)
        # To itself: a reference that leads nowhere new.
        self._edges[self._every] = self._holders
        self._seen = search.reached_by(self._edges)

    def retained(self, target: int, unreached: npt.NDArray[np.bool_]) -> list[Freed]:
        """Return for each cut of a target's path which targets no root leads to then; none if its end is reached.

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
            for met in self._search.forward.flood(seen, self._edges, frontier):
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
        """Return what some references lead to that start from what is reached, now that they count again."""
        held: Indices = each_once(self._original[places[seen[holders]]])
        held = held[~seen[held]]
        seen[held] = True
        return held

    def _holders_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._offsets, places, side="right") - 1
