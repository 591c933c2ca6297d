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
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lowtide.probes.heap.cxx_holders import held_as
from lowtide.probes.heap.edges import Edge, EdgeNamer, Kind, is_dict_of_cache
from lowtide.probes.heap.graph import CHECKER, FIRST, LAST, LATER, Graph, Root, RootKind, running_frames
from lowtide.probes.heap.interpreter_holders import InterpretersTables
from lowtide.probes.heap.landmarks import landmarks
from lowtide.probes.heap.native_references import held_from_c, outermost, references_of
from lowtide.probes.heap.unseen_references import reader_of
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.objects.c_modules import without_state
from lowtide.probes.objects.foreign import LRU_CACHE, described, is_a, is_callable, is_definition, type_name
from lowtide.probes.objects.listed import Census, all_objects, collector_paused

Mark = Literal["innocent", "holding", "pending"]
Inspector = Callable[[RootKind, Sequence[object]], "Sequence[Mark | None]"]
"""Says of each object that a path leads to, from a root of that kind, whether it is meant to live (`innocent`), should
be gone (`holding`), or is work that has not ended (`pending`); None if it cannot tell. It runs no foreign code."""

_UNSEEN, _ROOT, _BLOCKED = -1, -2, -3


@dataclass(frozen=True, slots=True)
class Step:
    """One edge of a path and the object it leads to.

    Attributes:
        type_name: the object's type, module and qualified name (`dict`, `torch.Tensor`, `helper.Engine`).
        edge: the edge, as code: `.model`, `['kv']`, `[3]`, `cell 'scale'`, `lru_cache key`.
        kind: what sort of edge it is.
        frozen: whether the object lies in the collector's permanent generation, hidden by `gc.freeze()`.
        definition: whether the object is a module, class, function or cache: part of the program, made to stay.
        mark: what the caller's inspector says of the object.
        landmark: the name by which the program knows the object wherever it is met, as that of a fixture; empty
            where it has none.
    """

    type_name: str
    edge: str
    kind: Kind
    frozen: bool = False
    definition: bool = False
    mark: Mark | None = None
    landmark: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """How a root of the process holds an object; strings only, so that it keeps nothing alive.

    Attributes:
        root_kind: what sort of root.
        root_name: dotted name of the module or class, `function in file.py:line` of a frame, name of a thread, of a
            context variable, or of an object that the caller gave as a root.
        steps: the edges from the root to the object; none if it is itself a root.
        references: references followed, those that one step folds together counted one by one.
        thread: for a frame, the name of its thread if that is not the calling one, else empty.
    """

    root_kind: RootKind
    root_name: str
    steps: tuple[Step, ...]
    references: int
    thread: str = ""

    @property
    def root(self) -> str:
        """The root in words: `module 'helper'`, `frame of f in test_x.py:12`, `thread 'worker'`."""
        if self.root_kind == "frame":
            return f"frame of {self.root_name}"
        if self.root_kind == "context":
            return f"context variable '{self.root_name}'"
        return self.root_name if self.root_kind == "object" else f"{self.root_kind} '{self.root_name}'"

    def __str__(self) -> str:
        return " ".join([self.root, *(step.edge for step in self.steps)])


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One edge with the live objects that it starts from, so that it can be cut; drop it soon.

    Attributes:
        edge: its name, as code.
        kind: what sort of edge it is.
        owner: the object that has the attribute, the entry, the cell.
        carrier: the object in which the reference lies: the owner, or a part of it, such as the dict of its attributes.
        held: the identity of what it leads to.
    """

    edge: str
    kind: Kind
    owner: Any
    carrier: Any
    held: int


def find_paths(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    inspect: Inspector | None = None,
    roots: Sequence[tuple[str, object]] = (),
) -> list[Path | None]:
    """A shortest path from a root to each target, in the targets' order; None where Python's graph has none.

    Arguments, roots and cost are those of `trace`.
    """
    with trace(targets, ignore=ignore, roots=roots) as found:
        return [found.path(place, inspect) for place in range(len(targets))]


_Cuts = tuple[Sequence[int], Sequence[tuple[int, Sequence[int]]]]
"""A path's nodes, and its cuts: the place in it that each starts from, and the places of edges that go with it."""


class SharedWalk:
    """One walk over the heap for all who ask who holds what, as long as nothing is changed.

    It is made when it is first asked for. It keeps every object alive: close it before anything is measured.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._lost: set[int] = set()

    def graph(self, needed: Sequence[object] = ()) -> Graph:
        """The heap.

        Args:
            needed: objects that shall be in it; where one is not, as it was made since, the walk is made again.
        """
        if self._graph is not None and not all(id(item) in self._lost for item in self._missing(needed)):
            self.close()
        if self._graph is None:
            with collector_paused():
                self._graph = Graph(needed)
            # What is frozen, and what nothing leads to, no walk meets.
            self._lost = set(map(id, self._missing(needed)))
        return self._graph

    def census(self) -> Census:
        """All objects by their types."""
        return self.graph().census()

    def close(self) -> None:
        """Drop every object; the next who asks has the walk made again."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _missing(self, items: Sequence[object]) -> list[object]:
        assert self._graph is not None
        nodes = self._graph.find(items).tolist()
        return [item for item, node in zip(items, nodes, strict=True) if node < 0]


@contextlib.contextmanager
def sharing_walk(walk: SharedWalk | None = None) -> Iterator[SharedWalk]:
    """For the block, a walk that everybody may ask: a given one, or a new one."""
    own = walk or SharedWalk()
    try:
        yield own
    finally:
        if walk is None:
            own.close()


def objects_of(ids: Collection[int], walk: SharedWalk | None) -> list[object]:
    """The objects of some identities, from a walk, or where there is none by going through the heap."""
    if walk is None:
        return [item for item in all_objects() if id(item) in ids]
    graph = walk.graph()
    return [graph.objects[node] for node in graph.find_ids(ids).tolist()]


def census_of(walk: SharedWalk | None) -> Census:
    """All objects by their types, from a walk, or where there is none by going through the heap."""
    return Census(all_objects()) if walk is None else walk.census()


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
    """Walks the heap once; in the block the shortest paths to the targets can be asked for.

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
                found = Traces(_Search(own.graph(needed), targets, ignore, roots, not_roots))
            if thorough and found.misses_any:
                found.close()
                found = Traces(_Search(own.graph(needed), targets, ignore, roots, not_roots, thorough=True))
            yield found
        finally:
            # On Python 3.10, and at times later, this frame is one of the objects: it and the list would keep each
            # other, and the whole heap, until the next collection.
            found.close()
            if walk is None:
                own.close()


class Traces:
    """The paths of one walk; targets are named by their place in the sequence that was walked for."""

    def __init__(self, heap: _Search | None) -> None:
        self._heap = heap
        self._parents = np.zeros(0, np.int32) if heap is None else heap.search()
        known = [] if heap is None else heap.roots
        self._namer = EdgeNamer(
            [] if heap is None else heap.objects, {id(root.held): root.variables for root in known if root.variables}
        )
        self._edges: dict[int, list[tuple[int, Edge]]] = {}
        self._firsts: dict[int, int] = {}
        self._sweeper: _Sweeper | None = None

    def close(self) -> None:
        """Drops every object."""
        if self._heap is not None:
            self._namer.undo()
            self._heap = self._sweeper = None

    def reaches(self, place: int) -> bool:
        """Whether any root leads to a target."""
        return bool(self._nodes(place))

    @property
    def misses_any(self) -> bool:
        """Whether there is a target that no root leads to."""
        targets = () if self._heap is None else self._heap.targets
        return any(target >= 0 and self._parents[target] == _UNSEEN for target in targets)

    def is_frozen(self, place: int) -> bool:
        """Whether a target lies in the permanent generation, or nothing lists it."""
        if self._heap is None:
            return False
        node = int(self._heap.targets[place])
        return node < 0 or self._heap.graph.is_frozen(node)

    def types_of_holders(self, places: Sequence[int], ignore: Collection[int]) -> list[set[str]]:
        """For each of some targets, the types of the objects that refer to it and that the collector lists.

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
        """Whether C or C++ refers to a target itself, which no root leads to; known of a thorough walk."""
        return self._heap is not None and int(self._heap.targets[place]) in self._heap.held_from_c

    def path(self, place: int, inspect: Inspector | None = None) -> Path | None:
        """The path to a target; None if no root reaches it."""
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
            Step(
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

    def link(self, place: int, step: int) -> Link:
        """One step of the path to a target, with its objects."""
        nodes = self._nodes(place)
        assert self._heap is not None
        start, edge = self._edges_of(place, nodes)[step]
        owner, carrier, held = (
            self._heap.objects[nodes[at]] for at in (start, start + edge.references - 1, start + edge.references)
        )
        return Link(edge.text, edge.kind, owner, carrier, id(held))

    def will_be_cut(self, firsts: Mapping[int, int]) -> None:
        """Says for which targets `freed_by_cutting` may be asked, and from which step on."""
        self._firsts = dict(firsts)

    def freed_by_cutting(self, place: int, first: int) -> list[frozenset[int]]:
        """For each step of the path to a target, from `first` on: the targets that nothing holds once it is cut.

        An edge of a cache stands for all of the cache's entries, as clearing it cuts them all. Empty where something
        else holds this target too. By one sweep over the heap for all that `will_be_cut`, and one over what their
        edges retain for each.
        """
        if self._heap is None or not self._nodes(place):
            return []
        if self._sweeper is None or self._firsts.get(place) != first:
            self._firsts[place] = first
            cuts = {target: self._cuts_of(target, step) for target, step in self._firsts.items() if self._nodes(target)}
            self._sweeper = _Sweeper(self._heap, cuts)
        targets = self._heap.targets
        reached = (targets >= 0) & (self._parents[targets] != _UNSEEN)
        return [frozenset(np.flatnonzero(reached & unreached).tolist()) for unreached in self._sweeper.retained(place)]

    def _cuts_of(self, place: int, first: int) -> _Cuts:
        assert self._heap is not None
        nodes = self._nodes(place)
        cuts = []
        for start, edge in self._edges_of(place, nodes)[first:]:
            at = start + edge.references - 1
            whole = edge.kind in ("lru-cache-key", "lru-cache-value")
            cuts.append((at, self._heap.entries_of_cache(nodes[start]) if whole else []))
        return nodes, cuts

    def root(self, place: int) -> object:
        """What the path to a target begins at; None where there is none."""
        nodes = self._nodes(place)
        return self._heap.objects[nodes[0]] if self._heap is not None and nodes else None

    def _nodes(self, place: int) -> list[int]:
        """The nodes from the root to a target; none if it was not reached."""
        if self._heap is None:
            return []
        target = int(self._heap.targets[place])
        if target < 0 or self._parents[target] in (_UNSEEN, _BLOCKED):
            return []
        nodes = [target]
        while self._parents[nodes[-1]] != _ROOT:
            nodes.append(int(self._parents[nodes[-1]]))
        nodes.reverse()
        return nodes

    def _edges_of(self, place: int, nodes: Sequence[int]) -> list[tuple[int, Edge]]:
        """The path's edges, each with the place of its first node."""
        assert self._heap is not None
        if place not in self._edges:
            objects = [self._heap.objects[node] for node in nodes]
            root = self._heap.root_at(nodes[0])
            named: list[tuple[int, Edge]] = []
            start = 0
            while start < len(objects) - 1:
                edge = self._namer.edge(objects[start:])
                if root.kind == "thread" and start == 0:
                    edge = edge._replace(kind="thread")
                elif root.kind == "context" and start == 0:
                    edge = Edge(".get()", "context-variable")
                named.append((start, edge))
                start += edge.references
            self._edges[place] = named
        return self._edges[place]


class _Search:
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
        own = np.arange(len(graph.roots), dtype=np.int32)
        no_roots = graph.find_ids(not_roots)
        first = np.array(list(self._given), np.int32)
        self._roots: Indices = np.concatenate([first, own[~np.isin(own, np.concatenate([first, no_roots]))]])
        self._turns = graph.turns
        if len(first) or len(no_roots):
            self._turns = graph.turns.copy()
            self._turns[no_roots] = [LATER if graph.comes_later(node) else FIRST for node in no_roots.tolist()]
            self._turns[first] = FIRST

    @property
    def roots(self) -> list[Root]:
        """Those that paths may start from."""
        return [self.root_at(node) for node in (*self._roots.tolist(), *self._native_roots)]

    def root_at(self, node: int) -> Root:
        """The root that a node is."""
        if node in self._native_roots:
            return self._native_roots[node]
        return self._given[node] if node in self._given else self.graph.roots[node]

    def _root_nodes(self) -> Indices:
        return np.concatenate([self._roots, np.array(list(self._native_roots), np.int32)])

    def entries_of_cache(self, cache: int) -> list[int]:
        """The places, in the list of edges, of all by which an `lru_cache` holds its entries."""
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
        """The place, in the list of edges, of one reference."""
        start = int(self.offsets[holder])
        return start + int(np.flatnonzero(self.edges[start : self.offsets[holder + 1]] == held)[0])

    def reached_by(self, edges: Indices) -> npt.NDArray[np.bool_]:
        """Which nodes the roots lead to by some edges, those that no path may pass included."""
        seen = np.zeros(len(self.objects), np.bool_)
        seen[self._blocked] = True
        frontier = np.setdiff1d(self._root_nodes(), self._blocked)
        seen[frontier] = True
        self.flood(seen, edges, frontier)
        return seen

    def flood(self, seen: npt.NDArray[np.bool_], edges: Indices, frontier: Indices) -> None:
        """Marks everything that the frontier reaches as seen."""
        while len(frontier):
            _, places = self._places(frontier)
            reached = edges[places]
            frontier = self._each_once(reached[~seen[reached]])
            seen[frontier] = True

    def _each_once(self, nodes: Indices) -> Indices:
        """The same nodes without repetition, in their order; without a sort, whose cost grows faster than the heap."""
        places = np.arange(len(nodes), dtype=np.int32)
        # Written backwards, so that the first place of several stays.
        scratch = self.graph.scratch
        scratch[nodes[::-1]] = places[::-1]
        once: Indices = nodes[scratch[nodes] == places]
        return once

    def search(self) -> Indices:
        """The node before each node on a shortest path from a root, or why there is none.

        Breadth first, a level at a time; what comes last waits until nothing else is left to search. Ends as soon as
        every target is reached.
        """
        parents = np.full(len(self.objects), _UNSEEN, np.int32)
        parents[self._roots] = _ROOT
        parents[self._blocked] = _BLOCKED
        # A library's namespace is reached from its module, however many functions hold it that others imported.
        parents[self.graph.namespaces] = self.graph.modules
        frontier = np.concatenate([self._roots, self.graph.namespaces])
        waiting: list[Indices] = []
        wanted = self.targets[self.targets >= 0]
        for turn in (FIRST, LATER, LAST):
            # What the program's own modules led to, before what libraries hold themselves.
            frontier = np.concatenate([*waiting[1:], *waiting[:1], frontier])
            waiting = []
            while len(frontier) and (parents[wanted] == _UNSEEN).any():
                later = self._turns[frontier] > turn
                waiting.append(frontier[later])
                frontier = self._next_level(parents, frontier[~later])
        lost = np.unique(wanted[parents[wanted] == _UNSEEN])
        if self._is_thorough and len(lost):
            frontier = self._add_native_roots(parents, lost)
            while len(frontier):
                frontier = self._next_level(parents, frontier)
        return parents

    def _add_native_roots(self, parents: Indices, lost: Indices) -> Indices:
        """Makes roots of what C or C++ holds and what leads to the lost nodes, as far out as Python's graph goes."""
        unseen = parents == _UNSEEN
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
            met = np.unique(np.concatenate([holders[start:end] for start, end in zip(starts, ends, strict=True)]))
            met = met[unseen[met] & ~before[met]]
            own = np.fromiter((_is_checkers_object(self.objects[node]) for node in met.tolist()), np.bool_, len(met))
            frontier = met[~own]
        nodes = sorted(np.flatnonzero(before).tolist(), key=lambda node: self._preference(node, lost))
        # All that refer to one of them, those through which no path may lead included; not this heap's own list.
        refer = [node for node in np.unique(holders[before[held]]).tolist() if self.objects[node] is not self.objects]
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
        parents[frontier] = _ROOT
        return frontier

    def _preference(self, node: int, lost: Indices) -> tuple[bool, str]:
        """Of what holds each other, the one that is reported: it is not lost itself, and has the first name."""
        return bool((lost == node).any()), described(self.objects[node])

    def _next_level(self, parents: Indices, frontier: Indices) -> Indices:
        """Marks what the frontier's nodes lead to and returns what was not reached before."""
        frontier = frontier[parents[frontier] != _BLOCKED]
        counts, places = self._places(frontier)
        reached = self.edges[places]
        fresh = parents[reached] == _UNSEEN
        reached = reached[fresh]
        # Written backwards, so that of several holders at the same distance the first one stays: of the module that was
        # imported first, of the attribute that was set first. (Not by the places in the heap: when a collection runs
        # changes those, and of two paths of one length another one would be given, with another fingerprint.)
        parents[reached[::-1]] = np.repeat(frontier, counts)[fresh][::-1]
        return self._each_once(reached)

    def _places(self, nodes: Indices) -> tuple[Ints, Ints]:
        """How many edges each node has, and the places of all of them in the list of edges, node by node."""
        starts = self.offsets[nodes]
        counts = self.offsets[nodes + 1] - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return counts, np.arange(total) + np.repeat(starts - (ends - counts), counts)


class _Sweeper:
    """What cutting references retains: which targets no root leads to without one.

    As long as a reference is not taken, what is not reached is what it retains (the edge dominates it). What is reached
    without any of the references that will be asked for is found out once, by one sweep over the heap; each question
    sweeps over the rest only, which is little.

    Args:
        search: the search, whose roots are known.
        cuts: by target, its path, and, from the root on, for each cut the place in the path of the node that the
            reference to be cut starts from, and the places of edges that go with it.
    """

    def __init__(self, search: _Search, cuts: Mapping[int, _Cuts]) -> None:
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


def _all_held_by(item: object) -> list[object]:
    """What an object refers to, as the collector is shown it and as it is not."""
    reader = reader_of(type(item))
    shown = gc.get_referents(without_state(item) if is_a(item, ModuleType) else item)
    return shown if reader is None else [*shown, *reader(item)]


def _is_checkers_object(item: object) -> bool:
    """Whether an object is one of the checker's functions, or an instance of one of its classes."""
    if type(item) is FunctionType:
        name = dict.get(item.__globals__, "__name__")
        return type(name) is str and name.startswith(CHECKER)
    return type_name(type(item)).startswith(CHECKER)
