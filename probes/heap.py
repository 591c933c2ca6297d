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
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import compress
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lowtide.probes.address_table import AddressTable, Indices, Ints, first_places
from lowtide.probes.c_modules import is_kind_of_module, without_state
from lowtide.probes.capsules import CAPSULE, ExportedMemory
from lowtide.probes.cxx_holders import held_as
from lowtide.probes.edges import GENERATORS, Edge, EdgeNamer, Kind, is_dict_of_cache, variables_of
from lowtide.probes.foreign import (
    LRU_CACHE,
    attribute,
    described,
    dict_of_module,
    flags_of,
    is_a,
    is_callable,
    is_definition,
    module_of_class,
    mro_of,
    namespace_of_class,
    type_name,
)
from lowtide.probes.identities import are_tracked, elements, identities, object_at, objects_at, types_of
from lowtide.probes.interpreter_holders import InterpretersTables, exit_functions, named_holders
from lowtide.probes.landmarks import landmarks
from lowtide.probes.native_references import held_from_c, outermost, references_of
from lowtide.probes.objects import FROZEN_AT_STARTUP, collector_paused, frame_locals
from lowtide.probes.thread_names import thread_name
from lowtide.probes.unseen_references import Reader, reader_of, untracked_holders

RootKind = Literal["module", "frame", "thread", "class", "context", "object", "interpreter", "native"]
Mark = Literal["innocent", "holding", "pending"]
Inspector = Callable[[RootKind, Sequence[object]], "Sequence[Mark | None]"]
"""Says of each object that a path leads to, from a root of that kind, whether it is meant to live (`innocent`), should
be gone (`holding`), or is work that has not ended (`pending`); None if it cannot tell. It runs no foreign code."""

# More at once takes more memory for the lists in flight, and no less time.
_CHUNK = 50_000
_UNSEEN, _ROOT, _BLOCKED = -1, -2, -3
# The search's queues: most objects, then library internals and thread locals, then running frames.
_FIRST, _LATER, _LAST = range(3)
_HEAP_TYPE = 1 << 9
_MAY_BE_TRACKED = 1 << 14

# The frames of the checker hold what it looks at; they are never part of an answer.
_CHECKER = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.pytest_plugin.")
_PROBES = "lowtide.probes."
# A path through one of these modules comes last: what is theirs is seldom what must be cut.
_LIBRARIES = frozenset({"_pytest", "execnet", "hypothesis", "numpy", "pluggy", "pytest", "torch", "triton", "xdist"})
# A path through an instance of one of these modules' classes comes last.
_REGISTRIES = frozenset(
    {
        "_frozen_importlib",
        "_frozen_importlib_external",
        "_pytest",
        "execnet",
        "hypothesis",
        "logging",
        "pluggy",
        "xdist",
    }
)


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


@contextlib.contextmanager
def trace(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    roots: Sequence[tuple[str, object]] = (),
    not_roots: Collection[int] = (),
    thorough: bool = False,
) -> Iterator[Traces]:
    """Walks the heap once; in the block the shortest paths to the targets can be asked for.

    Args:
        targets: the suspects. The sequence itself is never part of a path.
        ignore: ids of objects that no path may pass (containers in which the caller keeps the suspects).
        roots: further roots, with the name of each: what is held where the walk does not look, and is meant to be.
        not_roots: ids of running threads that are no roots: it is asked who else holds them.
        thorough: whether to look again for targets that nothing holds as far as one walk sees: through containers that
            the collector does not track, and from every object that only C or C++ holds, which then is a root.

    Roots are the modules in `sys.modules`, running threads, the current context, classes written in C, and the running
    frames, those of the checker excepted. Frames, thread locals, and what belongs to the interpreter's, the test
    runner's and torch's own modules are searched only for targets that nothing else holds.

    The walk costs about 0.6 s and 130 MB per million tracked objects, frozen or not. It runs no foreign code and
    materialises no instance's `__dict__`; naming a suspended generator's variable leaves its frame object behind
    (Python 3.11 and later). Frozen objects that no root reaches are not seen, neither are references from C or C++.
    While the block lasts the collector is paused, and every object is kept alive.
    """
    with collector_paused():
        heap = _Heap(targets, {id(targets), *ignore}, roots, not_roots) if targets else None
        found = Traces(heap)
        if thorough and heap is not None and found.misses_any:
            found.close()
            found = Traces(_Heap(targets, {id(targets), *ignore}, roots, not_roots, thorough=True))
        del heap
        try:
            yield found
        finally:
            # On Python 3.10, and at times later, this frame is one of the objects: it and the list would keep each
            # other, and the whole heap, until the next collection.
            found.close()


class Traces:
    """The paths of one walk; targets are named by their place in the sequence that was walked for."""

    def __init__(self, heap: _Heap | None) -> None:
        self._heap = heap
        self._parents = np.zeros(0, np.int32) if heap is None else heap.search()
        known = [] if heap is None else heap.roots
        self._namer = EdgeNamer(
            [] if heap is None else heap.objects, {id(root.held): root.variables for root in known if root.variables}
        )
        self._edges: dict[int, list[tuple[int, Edge]]] = {}

    def close(self) -> None:
        """Drops every object."""
        if self._heap is not None:
            self._heap.clear()
            self._namer.undo()
            self._heap = None

    def reaches(self, place: int) -> bool:
        """Whether any root leads to a target."""
        return bool(self._nodes(place))

    @property
    def misses_any(self) -> bool:
        """Whether there is a target that no root leads to."""
        targets = () if self._heap is None else self._heap.targets
        return any(target >= 0 and self._parents[target] == _UNSEEN for target in targets)

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
                frozen=self._heap.is_frozen(node),
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

    def freed_by_cutting(self, place: int, first: int) -> list[frozenset[int]]:
        """For each step of the path to a target, from `first` on: the targets that nothing holds once it is cut.

        An edge of a cache stands for all of the cache's entries, as clearing it cuts them all. Empty where something
        else holds this target too. By one sweep over the heap: as long as an edge is not taken, what is not reached is
        what it retains (the edge dominates it).
        """
        nodes = self._nodes(place)
        if self._heap is None or not nodes:
            return []
        cuts = []
        for start, edge in self._edges_of(place, nodes)[first:]:
            at = start + edge.references - 1
            whole = edge.kind in ("lru-cache-key", "lru-cache-value")
            cuts.append((at, self._heap.entries_of_cache(nodes[start]) if whole else []))
        targets = self._heap.targets
        reached = (targets >= 0) & (self._parents[targets] != _UNSEEN)
        return [
            frozenset(np.flatnonzero(reached & unreached[targets]).tolist())
            for unreached in self._heap.sweep(nodes, cuts)
        ]

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


@dataclass(frozen=True, slots=True)
class _Root:
    """Where paths start: an object, and what it holds besides what the collector shows (`also`)."""

    kind: RootKind
    name: str
    held: object
    also: list[object]
    turn: int
    thread: str = ""
    variables: list[tuple[str, object]] = field(default_factory=list)


class _Heap:
    """The process's heap as arrays: node `i` is `objects[i]`, its edges `edges[offsets[i]:offsets[i + 1]]`."""

    def __init__(
        self,
        targets: Sequence[object],
        ignore: Collection[int],
        given: Sequence[tuple[str, object]],
        not_roots: Collection[int],
        *,
        thorough: bool = False,
    ) -> None:
        # The first nodes are the roots, in their order.
        own = [_Root("object", name, held, [], _FIRST) for name, held in given]
        known_roots = {id(root.held) for root in own}.union(not_roots)
        self.roots = [*own, *(root for root in _roots() if id(root.held) not in known_roots)]
        self.objects = [root.held for root in self.roots]
        known = set(map(id, self.objects))
        _extend(self.objects, gc.get_objects(), known)
        # The walk passes over untracked objects, unless they are asked for.
        untracked = {id(target): target for target in targets if not gc.is_tracked(target)}
        self.objects.extend(target for key, target in untracked.items() if key not in known)
        self._passes_untracked = bool(untracked) or thorough
        self._is_thorough = thorough
        self.held_from_c: frozenset[int] = frozenset()
        self._native_roots: dict[int, _Root] = {}
        listed = len(self.objects)
        table = self._walk(targets)
        # What is tracked, and was not listed but met by the walk, is frozen, if a program has frozen anything at all.
        # (To ask the collector how many are frozen takes it a walk over all of them.)
        met = np.count_nonzero(are_tracked(identities(self.objects[listed:])))
        self._unfrozen = listed if met > FROZEN_AT_STARTUP else sys.maxsize
        self._scratch = np.zeros(len(self.objects), np.int32)
        self.targets = table.find(identities(list(targets)))
        # Its own list is an object like any other, which leads everywhere.
        ignore = {id(self.objects), *ignore}
        ignored = table.find(np.fromiter(ignore, np.int64, len(ignore)))
        self._blocked = np.concatenate([ignored[ignored >= 0], self._checkers_generators(), self._checkers_probes()])
        self._turns = self._find_turns(table)

    def clear(self) -> None:
        """Drops every object."""
        self.objects.clear()
        self.roots.clear()
        self._native_roots.clear()

    def root_at(self, node: int) -> _Root:
        """The root that a node is."""
        return self.roots[node] if node < len(self.roots) else self._native_roots[node]

    def _root_nodes(self) -> Indices:
        return np.array([*range(len(self.roots)), *self._native_roots], np.int32)

    def is_frozen(self, node: int) -> bool:
        """Whether the node's object is in the permanent generation."""
        return bool(node >= self._unfrozen) and gc.is_tracked(self.objects[node])

    def entries_of_cache(self, cache: int) -> list[int]:
        """The places, in the list of edges, of all by which an `lru_cache` holds its entries."""
        own = self.objects[cache]
        if type(own) is not LRU_CACHE:
            return []
        kept = {id(vars(own)), id(vars(own).get("__wrapped__"))}
        places = [
            place
            for place in range(int(self._offsets[cache]), int(self._offsets[cache + 1]))
            if id(self.objects[self._edges[place]]) not in kept
        ]
        for node in {int(self._edges[place]) for place in places}:
            # Its own dict, not one that is a result.
            if type(self.objects[node]) is dict and is_dict_of_cache(own, self.objects[node]):
                places += range(int(self._offsets[node]), int(self._offsets[node + 1]))
        return places

    def sweep(self, path: Sequence[int], cuts: Sequence[tuple[int, Sequence[int]]]) -> list[npt.NDArray[np.bool_]]:
        """For each cut of a path, which nodes no root reaches without it; none, if the path's end is reached.

        Args:
            path: the nodes of the path.
            cuts: from the root on, the place in the path of the node that the reference to be cut starts from, and the
                places of edges that go with it.

        Each node is visited once for all cuts together: the next cut's reach is this one's and what it held back.
        """
        edges = self._edges.copy()
        held_back: list[list[tuple[int, int]]] = []
        for at, others in cuts:
            places = {self._reference(path[at], path[at + 1]), *others}
            held_back.append([(place, int(edges[place])) for place in places])
            for place in places:
                # To itself: a reference that leads nowhere new.
                edges[place] = np.searchsorted(self._offsets, place, side="right") - 1
        seen = np.zeros(len(self.objects), np.bool_)
        seen[self._blocked] = True
        frontier = np.setdiff1d(self._root_nodes(), self._blocked)
        seen[frontier] = True
        retained = []
        nothing = np.zeros(len(self.objects), np.bool_)
        for turn, (at, _) in enumerate(cuts):
            self._flood(seen, edges, frontier)
            retained.append(nothing if seen[list(path[at + 1 :])].any() else ~seen)
            freed = []
            for place, held in held_back[turn]:
                holder = np.searchsorted(self._offsets, place, side="right") - 1
                edges[place] = held
                if seen[holder] and not seen[held]:
                    seen[held] = True
                    freed.append(held)
            frontier = np.array(freed, np.int32)
        return retained

    def _reference(self, holder: int, held: int) -> int:
        """The place, in the list of edges, of one reference."""
        start = int(self._offsets[holder])
        return start + int(np.flatnonzero(self._edges[start : self._offsets[holder + 1]] == held)[0])

    def _flood(self, seen: npt.NDArray[np.bool_], edges: Indices, frontier: Indices) -> None:
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
        self._scratch[nodes[::-1]] = places[::-1]
        once: Indices = nodes[self._scratch[nodes] == places]
        return once

    def search(self) -> Indices:
        """The node before each node on a shortest path from a root, or why there is none.

        Breadth first, a level at a time; what comes last waits until nothing else is left to search. Ends as soon as
        every target is reached.
        """
        parents = np.full(len(self.objects), _UNSEEN, np.int32)
        roots = np.arange(len(self.roots), dtype=np.int32)
        parents[roots] = _ROOT
        parents[self._blocked] = _BLOCKED
        # A library's namespace is reached from its module, however many functions hold it that others imported.
        parents[self._namespaces] = self._modules
        frontier = np.concatenate([roots, self._namespaces])
        waiting: list[Indices] = []
        wanted = self.targets[self.targets >= 0]
        for turn in (_FIRST, _LATER, _LAST):
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
        places = np.flatnonzero(unseen[self._edges])
        held = self._edges[places]
        order = np.argsort(held, kind="stable")
        held = held[order]
        holders = (np.searchsorted(self._offsets, places[order], side="right") - 1).astype(np.int32)
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
        variables = references_of([frame for frame, _ in _running_frames(of_checker=True)])
        # What is frozen may be held by frozen garbage, which no walk sees.
        nodes = [node for node in nodes if not self.is_frozen(node)]
        known = held_from_c(nodes, self.objects, refer, _all_held_by, variables)
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
            self._native_roots[node] = _Root(kind, name or text, item, [], _LAST)
        frontier = np.array(list(self._native_roots), np.int32)
        parents[frontier] = _ROOT
        return frontier

    def _preference(self, node: int, lost: Indices) -> tuple[bool, str]:
        """Of what holds each other, that is told which is not lost itself, and has the first name."""
        return bool((lost == node).any()), described(self.objects[node])

    def _next_level(self, parents: Indices, frontier: Indices) -> Indices:
        """Marks what the frontier's nodes lead to and returns what was not reached before."""
        frontier = frontier[parents[frontier] != _BLOCKED]
        counts, places = self._places(frontier)
        reached = self._edges[places]
        fresh = parents[reached] == _UNSEEN
        reached = reached[fresh]
        # Written backwards, so that of several holders at the same distance the first one stays: of the module that was
        # imported first, of the attribute that was set first. (Not by the places in the heap: when a collection runs
        # changes those, and of two paths of one length another one would be given, with another fingerprint.)
        parents[reached[::-1]] = np.repeat(frontier, counts)[fresh][::-1]
        return self._each_once(reached)

    def _places(self, nodes: Indices) -> tuple[Ints, Ints]:
        """How many edges each node has, and the places of all of them in the list of edges, node by node."""
        starts = self._offsets[nodes]
        counts = self._offsets[nodes + 1] - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return counts, np.arange(total) + np.repeat(starts - (ends - counts), counts)

    def _walk(self, targets: Sequence[object]) -> AddressTable:
        """Reads the references of all objects, adding those that it meets; returns the table of their addresses."""
        table = AddressTable(identities(self.objects))
        readers: dict[int, Reader] = {}
        self._untracked_holders = [id(kind) for kind in untracked_holders()]
        if self._is_thorough:
            readers[id(CAPSULE)] = ExportedMemory(targets).held_by
            self._untracked_holders.append(id(CAPSULE))
        self._types: dict[int, type] = {}
        known_kinds = AddressTable(np.zeros(0, np.int64))
        module_kinds: list[int] = []
        counts: list[Ints] = []
        edges: list[Indices] = []
        kinds: list[Ints] = []
        done = 0
        while done < len(self.objects):
            chunk = self.objects[done : done + _CHUNK]
            kinds.append(types_of(identities(chunk)))
            met_kinds = np.unique(kinds[-1][known_kinds.find(kinds[-1]) < 0])
            known_kinds.add(met_kinds)
            self._types.update((kind, object_at(kind)) for kind in met_kinds.tolist())
            readers.update(
                (kind, reader)
                for kind in met_kinds.tolist()
                if (reader := reader_of(self._types[kind], thorough=self._is_thorough)) is not None
            )
            asked = list(chunk)
            module_kinds.extend(kind for kind in met_kinds.tolist() if is_kind_of_module(self._types[kind]))
            for kind in module_kinds:
                for place in np.flatnonzero(kinds[-1] == kind).tolist():
                    asked[place] = without_state(chunk[place])
            held = list(map(gc.get_referents, asked))
            asked.clear()
            for kind, reader in readers.items():
                for place in np.flatnonzero(kinds[-1] == kind).tolist():
                    held[place].extend(reader(chunk[place]))
            if sys.version_info >= (3, 13):
                # A dict that shares an instance's values shows none of them, and takes them over when that dies.
                for item, referents in zip(chunk, held, strict=True):
                    if not referents and type(item) is dict and item:
                        referents.extend(item.values())
            for place in range(done, min(done + len(chunk), len(self.roots))):
                held[place - done].extend(self.roots[place].also)
            sizes, ids = elements(held)
            nodes = table.find(ids)
            unknown = np.flatnonzero(nodes < 0)
            met = ids[unknown]
            firsts = first_places(met)
            first = np.flatnonzero(firsts == np.arange(len(met)))
            added = first[self._are_worth(met[first])]
            if len(added):
                places = np.full(len(met), -1, np.int32)
                places[added] = np.arange(len(self.objects), len(self.objects) + len(added), dtype=np.int32)
                nodes[unknown] = places[firsts]
                table.add(met[added])
                self.objects += objects_at(met[added])
            known = nodes >= 0
            holders = np.repeat(np.arange(len(chunk)), sizes)
            counts.append(np.bincount(holders[known], minlength=len(chunk)))
            edges.append(nodes[known])
            done += len(chunk)
        self._kinds = np.concatenate(kinds)
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
        self._edges = np.concatenate(edges)
        return table

    def _are_worth(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which objects, met by the walk, can lead further: what is not tracked refers to nothing that is."""
        worth = are_tracked(ids)
        rest = np.flatnonzero(~worth)
        kinds = types_of(ids[rest])
        for kind in self._untracked_holders:
            worth[rest[kinds == kind]] = True
        if self._passes_untracked and len(rest):
            # Dicts and tuples of nothing that is tracked are not tracked either, nor is, once it is made, what C calls
            # a struct sequence (such as what `torch.max` returns).
            containers = [kind for kind in np.unique(kinds).tolist() if flags_of(object_at(kind)) & _MAY_BE_TRACKED]
            worth[rest[np.isin(kinds, containers)]] = True
        worth[_checkers_frames(ids)] = False
        return worth

    def _checkers_generators(self) -> Indices:
        """The checker's own suspended generators: like its frames, they hold what it looks at."""
        files = _checkers_files()
        places = np.flatnonzero(np.isin(self._kinds, list(GENERATORS))).tolist()
        return np.array([place for place in places if _code_file(self.objects[place]) in files], np.int32)

    def _checkers_probes(self) -> Indices:
        """The objects with which the checker reads the program: they hold what they compare, and keep it for nobody.

        A way to them leads from any function that they stand in for.
        """
        own = [kind for kind, cls in self._types.items() if module_of_class(cls).startswith(_PROBES)]
        nodes = np.flatnonzero(np.isin(self._kinds, own)).astype(np.int32)
        return nodes[nodes >= len(self.roots)]

    def _find_turns(self, table: AddressTable) -> npt.NDArray[np.uint8]:
        """In which of the search's queues each node waits."""
        # (By a table, as `np.isin` would sort the whole heap for so many.)
        later = AddressTable(np.array([kind for kind, cls in self._types.items() if _comes_later(cls)], np.int64))
        turns = np.where(later.find(self._kinds) >= 0, _LATER, _FIRST).astype(np.uint8)
        turns[: len(self.roots)] = [root.turn for root in self.roots]
        # A module's namespace too: every function of the module holds it, without passing the module.
        modules = [
            place for place, root in enumerate(self.roots) if root.turn == _LATER and is_a(root.held, ModuleType)
        ]
        namespaces = table.find(identities([dict_of_module(self.objects[place]) for place in modules]))
        self._namespaces = namespaces[namespaces >= 0]
        self._modules = np.array(modules, np.int32)[namespaces >= 0]
        turns[self._namespaces] = _LATER
        return turns


def _roots() -> Iterator[_Root]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            known_as = _own_name(module, str(name))
            yield _Root("module", known_as, module, [], turn=_LATER if is_library(known_as) else _FIRST)
    running = dict(threading._active)  # type: ignore[attr-defined]
    names = {ident: thread_name(thread) for ident, thread in running.items()}
    for ident, thread in running.items():
        if id(thread) not in seen:
            seen.add(id(thread))
            yield _Root("thread", names[ident], thread, [], _LATER if _runs_for_a_library(thread) else _FIRST)
    for variable, value in copy_context().items():
        yield _Root("context", variable.name, variable, [value], _LATER)
    for name, held in (*named_holders(), *exit_functions()):
        if id(held) not in seen and (gc.is_tracked(held) or type(held) is dict or type(held) is tuple):
            seen.add(id(held))
            yield _Root("interpreter", name, held, [], _LAST)
    for frame, ident in _running_frames():
        running_in = "" if ident == threading.get_ident() else names.get(ident, str(ident))
        variables = variables_of(frame)
        frame_locals(frame)  # undoes what reading them left behind
        also = [*(value for _, value in variables), frame.f_globals]
        if sys.version_info < (3, 11):
            # There the collector shows most of it already, and each reference counts once.
            shown = set(map(id, gc.get_referents(frame)))
            also = [item for item in also if id(item) not in shown]
        yield _Root("frame", _frame_name(frame), frame, also, _LAST, running_in, variables)
    # A class written in C shows the collector nothing, and lives as long as the process.
    waiting: list[type] = [object]
    while waiting:
        cls = waiting.pop()
        if id(cls) not in seen:
            seen.add(id(cls))
            waiting.extend(type.__subclasses__(cls))
            if not flags_of(cls) & _HEAP_TYPE:
                yield _Root("class", type_name(cls), cls, [namespace_of_class(cls), mro_of(cls)], _LATER)


def _own_name(module: object, name: str) -> str:
    """The name that a module has itself, where it is found by that too; else the one that it is found by."""
    own = dict.get(dict_of_module(module), "__name__") if is_a(module, ModuleType) else None
    return own if type(own) is str and sys.modules.get(own) is module else name


def _runs_for_a_library(thread: object) -> bool:
    """Whether a thread runs a library's function, as a pool's does: what it was given has a name elsewhere."""
    target = attribute(thread, "_target")
    if type(target) is not FunctionType:
        return False
    module = dict.get(target.__globals__, "__name__")
    return type(module) is str and is_library(module)


def _all_held_by(item: object) -> list[object]:
    """What an object refers to, as the collector is shown it and as it is not."""
    reader = reader_of(type(item))
    shown = gc.get_referents(without_state(item) if is_a(item, ModuleType) else item)
    return shown if reader is None else [*shown, *reader(item)]


def _running_frames(*, of_checker: bool = False) -> Iterator[tuple[FrameType, int]]:
    """The frames of all threads, the checker's or all others, each with its thread's identifier."""
    waiting: list[tuple[FrameType | None, int]] = [(frame, ident) for ident, frame in sys._current_frames().items()]
    while waiting:
        # Nothing of this is left in a local variable at the end: one of the frames is this function's own.
        frame, ident = waiting.pop()
        if frame is not None:
            waiting.append((frame.f_back, ident))
            if _is_checkers(frame) is of_checker:
                yield frame, ident


def _is_checkers(frame: FrameType) -> bool:
    """Whether the frame is the checker's, which holds what it looks at."""
    name = dict.get(frame.f_globals, "__name__", "")
    return type(name) is str and f"{name}.".startswith(_CHECKER)


def _is_checkers_object(item: object) -> bool:
    """Whether an object is one of the checker's functions, or an instance of one of its classes."""
    if type(item) is FunctionType:
        name = dict.get(item.__globals__, "__name__")
        return type(name) is str and name.startswith(_CHECKER)
    return type_name(type(item)).startswith(_CHECKER)


def _checkers_files() -> set[object]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(_CHECKER)]
    return {getattr(module, "__file__", None) for module in modules}


def _code_file(generator: Any) -> str:
    code: CodeType = getattr(generator, f"{GENERATORS[id(type(generator))]}_code")
    return code.co_filename


def is_library(module: str) -> bool:
    """Whether a module is the interpreter's, torch's, the test runner's or the checker's own."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES or f"{module}.".startswith(_CHECKER)


def _comes_later(cls: type) -> bool:
    name = type_name(cls)
    return name.partition(".")[0] in _REGISTRIES or any(base is threading.local for base in mro_of(cls))


def _checkers_frames(ids: Ints) -> list[int]:
    """The places of the objects that are frames of the checker's."""
    places = np.flatnonzero(types_of(ids) == id(FrameType)).tolist()
    return [place for place in places if _is_checkers(object_at(int(ids[place])))]


def _extend(objects: list[object], more: list[object], known: Collection[int]) -> None:
    """Adds those of `more` whose identity is not known and that are no frames of the checker's; empties `more`."""
    ids = identities(more)
    # A table that is empty finds nothing; `np.isin` would sort the whole heap.
    wanted = AddressTable(np.fromiter(known, np.int64, len(known))).find(ids) < 0
    wanted[_checkers_frames(ids)] = False
    objects.extend(compress(more, wanted.tolist()))
    # The frame of this very call may be among them, and would keep them.
    more.clear()


def _frame_name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} in {code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"
