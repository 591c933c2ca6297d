"""Who holds an object: shortest paths from the roots of the process through its whole heap, frozen or not.

All suspects share one forward walk (`gc.get_referents`), since only a forward walk sees what `gc.freeze()` hid, and
only sharing it makes many suspects as cheap as one. The walk fills numpy arrays (addresses, edges in compressed sparse
rows); breadth-first search over them finds the paths; names are looked up for the few edges on those paths only.

Like LeakCanary's Shark, the search has two queues: a path through a library's registries, thread locals or a running
frame is given only where there is no other, because it is seldom the one that must be cut.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from itertools import chain, compress
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any, Literal, NamedTuple
from weakref import CallableProxyType, ProxyType

import numpy as np
import numpy.typing as npt

from lowtide.probes.objects import FROZEN_AT_STARTUP, collector_paused, frame_locals

Kind = Literal[
    "module-global",
    "class-attribute",
    "instance-attribute",
    "item",
    "closure",
    "default",
    "frame-local",
    "generator-local",
    "thread",
    "context-variable",
    "lru-cache-key",
    "lru-cache-value",
    "bound-self",
    "other",
]
RootKind = Literal["module", "frame", "thread", "class", "context"]

# What an edge is called whose name only foreign code could tell.
UNNAMED = ".<unnamed>"

_Ints = npt.NDArray[np.int64]
_Indices = npt.NDArray[np.int32]

# More at once takes more memory for the lists in flight, and no less time.
_CHUNK = 50_000
_UNSEEN, _ROOT, _BLOCKED = -1, -2, -3
# The search's queues: most objects, then library internals and thread locals, then running frames.
_FIRST, _LATER, _LAST = range(3)
_LONGEST_KEY = 60

# The frames of the checker hold what it looks at; they are never part of an answer.
_CHECKER = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.pytest_plugin.")
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

_LruCache: type = type(functools.lru_cache(maxsize=1)(len))
_HAMT = frozenset({"hamt", "hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"})
_AUTOGRAD_NODE = re.compile(r"(\w+Backward\d*|AccumulateGrad)")
_HEAP_TYPE = 1 << 9
_SCATTER = np.int64(-7046029254386353131)  # 2**64 over the golden ratio: neighbouring addresses land far apart
_MISSING = object()

# Types are looked up by their ids, since a metaclass may define `__hash__` and `__eq__`.
_GENERATORS = {id(GeneratorType): "gi", id(CoroutineType): "cr", id(AsyncGeneratorType): "ag"}
_DEFINITIONS = frozenset(
    map(id, (ModuleType, type, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property, _LruCache))
)
# Attributes of types written in C that give what is there and do nothing else.
_PLAIN_GETTERS: dict[int, tuple[str, ...]] = {
    id(BaseException): ("__traceback__", "__context__", "__cause__", "args"),
    id(TracebackType): ("tb_next",),
    id(CellType): ("cell_contents",),
    id(BuiltinFunctionType): ("__self__",),
}

_mro_of = type.__dict__["__mro__"].__get__
_namespace_of = type.__dict__["__dict__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_module_of = type.__dict__["__module__"].__get__
_dict_of_module: Callable[[object], object] = ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]
_code_of = FunctionType.__dict__["__code__"].__get__


@dataclass(frozen=True, slots=True)
class Step:
    """One edge of a path and the object it leads to.

    Attributes:
        type_name: the object's type, module and qualified name (`dict`, `torch.Tensor`, `helper.Engine`).
        edge: the edge, as code: `.model`, `['kv']`, `[3]`, `cell 'scale'`, `lru_cache key`.
        kind: what sort of edge it is.
        frozen: whether the object lies in the collector's permanent generation, hidden by `gc.freeze()`.
        definition: whether the object is a module, class, function or cache: part of the program, made to stay.
        innocent: whether the caller said that the object is where it belongs.
    """

    type_name: str
    edge: str
    kind: Kind
    frozen: bool = False
    definition: bool = False
    innocent: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    """How a root of the process holds an object; strings only, so that it keeps nothing alive.

    Attributes:
        root_kind: what sort of root.
        root_name: dotted name of the module or class, `function in file.py:line` of a frame, name of a thread or of a
            context variable.
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
        return f"{self.root_kind} '{self.root_name}'"

    def __str__(self) -> str:
        return " ".join([self.root, *(step.edge for step in self.steps)])


def find_paths(
    targets: Sequence[object], *, ignore: Collection[int] = (), innocent: Container[int] = ()
) -> list[Path | None]:
    """A shortest path from a root to each target, in the targets' order; None where Python's graph has none.

    Args:
        targets: the suspects. The sequence itself is never part of a path.
        ignore: ids of objects that no path may pass (containers in which the caller keeps the suspects).
        innocent: ids of objects to mark as such in the steps that lead to them.

    Roots are the modules in `sys.modules`, running threads, the current context, classes written in C, and the running
    frames, those of the checker excepted. Frames, thread locals, and what belongs to the interpreter's, the test
    runner's and torch's own modules are searched only for targets that nothing else holds.

    The walk costs about 1 s and 120 MB per million tracked objects. It runs no foreign code and materialises no
    instance's `__dict__`; naming a suspended generator's variable leaves its frame object behind (Python 3.11 and
    later). Frozen objects that no root reaches are not seen, neither are references from C or C++.
    """
    if not targets:
        return []
    with collector_paused():
        heap = _Heap(targets, {id(targets), *ignore})
        namer = _Namer(heap)
        try:
            parents = heap.search()
            return [namer.path(parents, target, innocent) for target in heap.targets.tolist()]
        finally:
            # On Python 3.10, and at times later, this frame is one of the objects: it and the list would keep each
            # other, and the whole heap, until the next collection.
            heap.clear()
            namer.undo()


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

    def __init__(self, targets: Sequence[object], ignore: Collection[int]) -> None:
        # The first nodes are the roots, in their order.
        self.roots = list(_roots())
        self.objects = [root.held for root in self.roots]
        known = set(map(id, self.objects))
        self.objects.extend(
            item
            for item in gc.get_objects()
            if id(item) not in known and (type(item) is not FrameType or not _is_checkers(item))
        )
        # The walk passes over untracked objects, unless they are asked for.
        untracked = {id(target): target for target in targets if not gc.is_tracked(target)}
        self.objects.extend(target for key, target in untracked.items() if key not in known)
        # What the walk adds to these is frozen, if a program has frozen anything at all.
        self._unfrozen = len(self.objects) if gc.get_freeze_count() > FROZEN_AT_STARTUP else sys.maxsize
        table = self._walk()
        self.targets = table.find(_addresses(targets))
        ignored = table.find(np.fromiter(ignore, np.int64, len(ignore)))
        self._blocked = np.concatenate([ignored[ignored >= 0], self._checkers_generators()])
        self._turns = self._find_turns(table)

    def clear(self) -> None:
        """Drops every object."""
        self.objects.clear()
        self.roots.clear()

    def is_frozen(self, node: int) -> bool:
        """Whether the node's object is in the permanent generation."""
        return bool(node >= self._unfrozen) and gc.is_tracked(self.objects[node])

    def search(self) -> _Indices:
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
        waiting: list[_Indices] = []
        wanted = self.targets[self.targets >= 0]
        for turn in (_FIRST, _LATER, _LAST):
            frontier = np.concatenate([*waiting, frontier])
            waiting = []
            while len(frontier) and (parents[wanted] == _UNSEEN).any():
                later = self._turns[frontier] > turn
                waiting.append(frontier[later])
                frontier = self._next_level(parents, frontier[~later])
        return parents

    def _next_level(self, parents: _Indices, frontier: _Indices) -> _Indices:
        """Marks what the frontier's nodes lead to and returns what was not reached before."""
        frontier = frontier[parents[frontier] != _BLOCKED]
        starts = self._offsets[frontier]
        counts = self._offsets[frontier + 1] - starts
        ends = np.cumsum(counts)
        if not len(ends) or not ends[-1]:
            return frontier[:0]
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        reached = self._edges[places]
        fresh = parents[reached] == _UNSEEN
        reached = reached[fresh]
        # Written backwards, so that of several holders at the same distance the first one stays.
        parents[reached[::-1]] = np.repeat(frontier, counts)[fresh][::-1]
        return np.unique(reached)

    def _walk(self) -> _Table:
        """Reads the references of all objects, adding those that it meets; returns the table of their addresses."""
        table = _Table(_addresses(self.objects))
        self._types: dict[int, type] = {}
        counts: list[_Ints] = []
        edges: list[_Indices] = []
        kinds: list[_Ints] = []
        done = 0
        while done < len(self.objects):
            chunk = self.objects[done : done + _CHUNK]
            types = list(map(type, chunk))
            kinds.append(_addresses(types))
            self._types.update(zip(kinds[-1].tolist(), types, strict=True))
            held = list(map(gc.get_referents, chunk))
            for place in range(done, min(done + len(chunk), len(self.roots))):
                held[place - done].extend(self.roots[place].also)
            flat = list(chain.from_iterable(held))
            ids = _addresses(flat)
            nodes = table.find(ids)
            unknown = np.flatnonzero(nodes < 0)
            _, first = np.unique(ids[unknown], return_index=True)
            met = list(map(flat.__getitem__, unknown[np.sort(first)].tolist()))
            # What is not tracked (numbers, strings, tuples of them) refers to nothing that is.
            new = [
                item
                for item in compress(met, map(gc.is_tracked, met))
                if type(item) is not FrameType or not _is_checkers(item)
            ]
            if new:
                self.objects.extend(new)
                table.add(_addresses(new))
                nodes[unknown] = table.find(ids[unknown])
            known = nodes >= 0
            holders = np.repeat(np.arange(len(chunk)), np.fromiter(map(len, held), np.int64, len(held)))
            counts.append(np.bincount(holders[known], minlength=len(chunk)))
            edges.append(nodes[known])
            done += len(chunk)
        self._kinds = np.concatenate(kinds)
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
        self._edges = np.concatenate(edges)
        return table

    def _checkers_generators(self) -> _Indices:
        """The checker's own suspended generators: like its frames, they hold what it looks at."""
        files = _checkers_files()
        places = np.flatnonzero(np.isin(self._kinds, list(_GENERATORS))).tolist()
        return np.array([place for place in places if _code_file(self.objects[place]) in files], np.int32)

    def _find_turns(self, table: _Table) -> npt.NDArray[np.uint8]:
        """In which of the search's queues each node waits."""
        later = [kind for kind, cls in self._types.items() if _comes_later(cls)]
        turns = np.where(np.isin(self._kinds, later), _LATER, _FIRST).astype(np.uint8)
        turns[: len(self.roots)] = [root.turn for root in self.roots]
        # A module's namespace too: every function of the module holds it, without passing the module.
        modules = [
            place for place, root in enumerate(self.roots) if root.turn == _LATER and _is_a(root.held, ModuleType)
        ]
        namespaces = table.find(_addresses([_dict_of_module(self.objects[place]) for place in modules]))
        self._namespaces = namespaces[namespaces >= 0]
        self._modules = np.array(modules, np.int32)[namespaces >= 0]
        turns[self._namespaces] = _LATER
        return turns


class _Table:
    """Finds an address's place in the order of addition: a hash table with open addressing, many keys at a time.

    Five times as fast as a binary search of sorted addresses, ten times as fast as a dict of Python's numbers.
    """

    def __init__(self, ids: _Ints) -> None:
        self._ids = np.zeros(0, np.int64)
        self._count = 0
        self._bits = 0
        self._slots = np.zeros(0, np.int32)
        self.add(ids)

    def add(self, ids: _Ints) -> None:
        """Adds addresses; of one that is there already, or comes twice, `find` may give either place."""
        first, self._count = self._count, self._count + len(ids)
        if self._count > len(self._ids):
            self._ids = np.concatenate([self._ids[:first], np.zeros(2 * self._count - first, np.int64)])
        self._ids[first : self._count] = ids
        if 2 * self._count > len(self._slots):
            self._bits = (4 * self._count).bit_length()
            self._slots = np.full(1 << self._bits, -1, np.int32)
            first = 0
        places = np.arange(first, self._count, dtype=np.int32)
        slots = self._hash(self._ids[first : self._count])
        while len(places):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = places[free]
            lost = self._slots[slots] != places
            places, slots = places[lost], self._next(slots[lost])

    def find(self, ids: _Ints) -> _Indices:
        """The place of each address, -1 for one that was not added."""
        found = np.full(len(ids), -1, np.int32)
        asked = np.arange(len(ids))
        slots = self._hash(ids)
        while len(asked):
            places = self._slots[slots]
            taken = places >= 0
            same = taken & (self._ids[places] == ids)
            found[asked[same]] = places[same]
            collided = taken & ~same
            asked, ids, slots = asked[collided], ids[collided], self._next(slots[collided])
        return found

    def _hash(self, ids: _Ints) -> _Ints:
        # Addresses are multiples of 16; the upper bits of the product depend on all the others.
        hashed: _Ints = ((ids >> 4) * _SCATTER >> (64 - self._bits)) & (len(self._slots) - 1)
        return hashed

    def _next(self, slots: _Ints) -> _Ints:
        following: _Ints = (slots + 1) & (len(self._slots) - 1)
        return following


def _roots() -> Iterator[_Root]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield _Root("module", str(name), module, [], turn=_LATER if _is_librarys(str(name)) else _FIRST)
    running = dict(threading._active)  # type: ignore[attr-defined]
    names = {ident: _thread_name(thread) for ident, thread in running.items()}
    for ident, thread in running.items():
        if id(thread) not in seen:
            seen.add(id(thread))
            yield _Root("thread", names[ident], thread, [], _FIRST)
    for variable, value in copy_context().items():
        yield _Root("context", variable.name, variable, [value], _LATER)
    for frame, ident in _running_frames():
        thread_name = "" if ident == threading.get_ident() else names.get(ident, str(ident))
        variables = _variables(frame)
        frame_locals(frame)  # undoes what reading them left behind
        also = [*(value for _, value in variables), frame.f_globals]
        yield _Root("frame", _frame_name(frame), frame, also, _LAST, thread_name, variables)
    # A class written in C shows the collector nothing, and lives as long as the process.
    waiting: list[type] = [object]
    while waiting:
        cls = waiting.pop()
        if id(cls) not in seen:
            seen.add(id(cls))
            waiting.extend(type.__subclasses__(cls))
            if not _flags_of(cls) & _HEAP_TYPE:
                yield _Root("class", type_name(cls), cls, [_namespace_of_class(cls), _mro_of(cls)], _LATER)


def _running_frames() -> Iterator[tuple[FrameType, int]]:
    """The frames of all threads, except the checker's, each with its thread's identifier."""
    waiting: list[tuple[FrameType | None, int]] = [(frame, ident) for ident, frame in sys._current_frames().items()]
    while waiting:
        # Nothing of this is left in a local variable at the end: one of the frames is this function's own.
        frame, ident = waiting.pop()
        if frame is not None:
            waiting.append((frame.f_back, ident))
            if not _is_checkers(frame):
                yield frame, ident


def _is_checkers(frame: FrameType) -> bool:
    """Whether the frame is the checker's, which holds what it looks at."""
    name = dict.get(frame.f_globals, "__name__", "")
    return type(name) is str and f"{name}.".startswith(_CHECKER)


def _checkers_files() -> set[object]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(_CHECKER)]
    return {getattr(module, "__file__", None) for module in modules}


def _code_file(generator: Any) -> str:
    code: CodeType = getattr(generator, f"{_GENERATORS[id(type(generator))]}_code")
    return code.co_filename


def _is_librarys(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in _LIBRARIES or f"{module}.".startswith(_CHECKER)


def _comes_later(cls: type) -> bool:
    name = type_name(cls)
    return name.partition(".")[0] in _REGISTRIES or any(base is threading.local for base in _mro_of(cls))


def _addresses(objects: Collection[object]) -> _Ints:
    return np.fromiter(map(id, objects), np.int64, len(objects))


def _is_a(item: object, cls: type) -> bool:
    # Not `isinstance`, which asks the object, nor `issubclass`, which asks the class.
    return any(base is cls for base in _mro_of(type(item)))


def _namespace_of_class(cls: type) -> Any:
    """The dict itself; `__dict__` of a class is a proxy of it."""
    return gc.get_referents(_namespace_of(cls))[0]


def type_name(cls: type) -> str:
    """Module and qualified name of a class, without asking its metaclass; `builtins.` is left out."""
    module = _module_of(cls)
    name: str = _qualname_of(cls)
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def _thread_name(thread: object) -> str:
    name = _attribute(thread, "_name")
    return name if type(name) is str else type_name(type(thread))


def _frame_name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} in {code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"


def _variables(frame: FrameType) -> list[tuple[str, object]]:
    """The function's local variables and their values; none for a module or class body, whose variables are a dict."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return []
    return list(frame.f_locals.items())


class _Edge(NamedTuple):
    text: str
    kind: Kind
    references: int = 1


# Given the objects of a path from a holder on: what leads to the next, if the rule knows such holders.
_Rule = Callable[[Sequence[Any]], _Edge | None]


class _Namer:
    """Writes paths down: what each reference is called, found by identity and without running foreign code."""

    def __init__(self, heap: _Heap) -> None:
        self._heap = heap
        self._read: list[FrameType] = []
        self._known_names: dict[int, set[str]] = {}

    def undo(self) -> None:
        """Empties the dicts that reading variables left in frames; only once nothing else holds those dicts."""
        for frame in self._read:
            frame_locals(frame)

    def path(self, parents: _Indices, target: int, innocent: Container[int]) -> Path | None:
        """The path that `parents` gives for the node `target`; None if it was not reached."""
        if target < 0 or parents[target] in (_UNSEEN, _BLOCKED):
            return None
        nodes = [target]
        while parents[nodes[-1]] != _ROOT:
            nodes.append(int(parents[nodes[-1]]))
        nodes.reverse()
        objects = [self._heap.objects[node] for node in nodes]
        root = self._heap.roots[nodes[0]]
        steps: list[Step] = []
        place = 0
        while place < len(objects) - 1:
            edge = self._edge(objects[place:])
            if root.kind == "thread" and place == 0:
                edge = edge._replace(kind="thread")
            elif root.kind == "context" and place == 0:
                edge = _Edge(".get()", "context-variable")
            held = objects[place + edge.references]
            steps.append(
                Step(
                    type_name=type_name(type(held)),
                    edge=edge.text,
                    kind=edge.kind,
                    frozen=self._heap.is_frozen(nodes[place + edge.references]),
                    definition=_is_definition(held),
                    innocent=id(held) in innocent,
                )
            )
            place += edge.references
        return Path(root.kind, root.name, tuple(steps), len(objects) - 1, root.thread)

    def _edge(self, way: Sequence[Any]) -> _Edge:
        """What leads from the first object on the way to the second, or past it where it only carries the next."""
        edges = (rule(way) for rule in (self._of_frame, self._of_generator, *_RULES))
        return next((edge for edge in edges if edge is not None), None) or self._of_attribute(way)

    def _of_frame(self, way: Sequence[Any]) -> _Edge | None:
        frame = way[0]
        if type(frame) is not FrameType:
            return None
        for name, value in self._variables(frame):
            if value is way[1]:
                return _Edge(f"f_locals[{name!r}]", "frame-local")
        if way[1] is frame.f_globals and len(way) > 2:
            return _Edge(f"f_globals{_item(way[1:])}", "module-global", 2)
        return None

    def _of_generator(self, way: Sequence[Any]) -> _Edge | None:
        """A suspended generator or coroutine: one of its variables, or the one that it waits for."""
        prefix = _GENERATORS.get(id(type(way[0])))
        if prefix is None:
            return None
        awaited = "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await"
        if getattr(way[0], awaited) is way[1]:
            return _Edge(f".{awaited}", "other")
        # On Python 3.10 the generator holds its frame and that the variables, later it holds them itself.
        references = 2 if type(way[1]) is FrameType else 1
        frame = getattr(way[0], f"{prefix}_frame")
        if frame is None or len(way) <= references:
            return None
        for name, value in self._variables(frame):
            if value is way[references]:
                return _Edge(f"f_locals[{name!r}]", "generator-local", references)
        return None

    def _variables(self, frame: FrameType) -> list[tuple[str, object]]:
        for root in self._heap.roots:
            if root.held is frame:
                return root.variables
        self._read.append(frame)
        return _variables(frame)

    def _of_attribute(self, way: Sequence[Any]) -> _Edge:
        """An attribute whose value lies in the instance (Python 3.11 and later), which has no `__dict__` yet.

        Reading `__dict__` would make the dict, which then stays; asking for one attribute by its name does not. So the
        names are tried that the code of the instance's class, and then all code in the heap, mentions.
        """
        holder, held = way[0], way[1]
        # What was found on one instance is tried first on the next: a whole search takes about 10 ms.
        known = self._known_names.setdefault(id(type(holder)), set())
        for names in (known, _names_in_class(type(holder)), self._all_names):
            for name in sorted(names):
                if _attribute(holder, name) is held:
                    known.add(name)
                    return _Edge(f".{name}", "instance-attribute")
        return _Edge(UNNAMED, "other")

    @functools.cached_property
    def _all_names(self) -> set[str]:
        names: set[str] = set()
        for item in self._heap.objects:
            if type(item) is FunctionType:
                _add_names(_code_of(item), names)
            elif type(item) is FrameType:
                _add_names(item.f_code, names)
        return names


def _of_module(way: Sequence[Any]) -> _Edge | None:
    if not _is_a(way[0], ModuleType) or way[1] is not _dict_of_module(way[0]):
        return None
    return _entry(way, "module-global", ".__dict__")


def _of_class(way: Sequence[Any]) -> _Edge | None:
    cls = way[0]
    if not _is_a(cls, type):
        return None
    if way[1] is _namespace_of_class(cls):
        return _entry(way, "class-attribute", ".__dict__")
    for name in ("__mro__", "__bases__", "__base__"):
        if type.__dict__[name].__get__(cls) is way[1]:
            return _Edge(f".{name}", "other")
    return None


def _of_function(way: Sequence[Any]) -> _Edge | None:
    function, held = way[0], way[1]
    if type(function) is not FunctionType:
        return None
    if function.__closure__ is not None and held is function.__closure__ and len(way) > 2:
        names = function.__code__.co_freevars
        name = next(name for name, cell in zip(names, held, strict=True) if cell is way[2])
        return _Edge(f"cell {name!r}", "closure", min(3, len(way) - 1))
    if held is function.__globals__:
        return _Edge(f"__globals__{_item(way[1:])}", "module-global", 2) if len(way) > 2 else None
    for attribute in ("__defaults__", "__kwdefaults__"):
        if held is getattr(function, attribute):
            if len(way) == 2:
                return _Edge(f".{attribute}", "default")
            return _Edge(f".{attribute}{_item(way[1:])}", "default", 2)
    return None


def _of_cache(way: Sequence[Any]) -> _Edge | None:
    """A `functools.lru_cache`: a bounded one shows its keys and results itself, an unbounded one the dict of them."""
    cache: Any = way[0]
    held = way[1]
    if type(way[0]) is not _LruCache or held is vars(cache):
        return None
    if held is vars(cache).get("__wrapped__"):
        return _Edge(".__wrapped__", "other")
    if cache.cache_info().maxsize is None:
        return _cache_entry(held, way[2], 2) if type(held) is dict and len(way) > 2 else None
    for entries in gc.get_referents(cache):
        # Its dict leads from the keys to links of a type of their own, which hold the results.
        if type(entries) is dict and any(map(_is_cache_link, entries.values())):
            return _cache_entry(entries, held, 1)
    return None


def _is_cache_link(item: object) -> bool:
    return type_name(type(item)) == "functools._lru_list_elem"


def _cache_entry(entries: dict[object, object], held: object, references: int) -> _Edge:
    if any(key is held for key in entries):
        return _Edge("lru_cache key", "lru-cache-key", references)
    return _Edge("lru_cache value", "lru-cache-value", references)


def _of_context(way: Sequence[Any]) -> _Edge | None:
    """A copied context: its variables, past the tree in which it keeps them."""
    if type(way[0]) is not Context:
        return None
    references = next((place for place, item in enumerate(way) if place and type_name(type(item)) not in _HAMT), 0)
    for variable, value in way[0].items():
        if references and value is way[references]:
            return _Edge(f"[{variable.name!r}]", "context-variable", references)
    return None


def _of_thread_local(way: Sequence[Any]) -> _Edge | None:
    """A `threading.local`: past its dict of the threads and the thread's own dict."""
    if len(way) < 4 or not _is_a(way[0], threading.local) or type(way[1]) is not dict or type(way[2]) is not dict:
        return None
    return _entry(way[1:], "thread", "")._replace(references=3)


def _of_container(way: Sequence[Any]) -> _Edge | None:
    holder, held = way[0], way[1]
    for base in _mro_of(type(holder)):
        if base is dict:
            for key in _keys_of(holder, held):
                return _Edge(f"[{_key_text(key)}]", "item")
            if any(key is held for key in dict.keys(holder)):
                return _Edge("<key>", "item")
        elif base is list or base is tuple or base is deque:
            for place, item in enumerate(base.__iter__(holder)):
                if item is held:
                    return _Edge(f"[{place}]", "item")
        elif (base is set or base is frozenset) and any(item is held for item in base.__iter__(holder)):
            return _Edge("{…}", "item")
    return None


def _of_proxy(way: Sequence[Any]) -> _Edge | None:
    """A read-only view of a dict, such as a class's `__dict__`: past the dict."""
    if type(way[0]) is not MappingProxyType or len(way) == 2:
        return None
    edge = _of_container(way[1:])
    return None if edge is None else edge._replace(references=2)


def _of_instance_dict(way: Sequence[Any]) -> _Edge | None:
    """An attribute, past the instance's `__dict__`: it is that dict if the attribute leads where the entry leads."""
    if len(way) > 2 and type(way[1]) is dict:
        for key in _keys_of(way[1], way[2]):
            if type(key) is str and (_attribute(way[0], key) is way[2] or _is_cached_property(type(way[0]), key)):
                return _Edge(f".{key}", "instance-attribute", 2)
    return None


def _is_cached_property(cls: type, name: str) -> bool:
    """Whether the class computes the attribute once, and then keeps it in the instance's `__dict__` by that name."""
    for base in _mro_of(cls):
        if name in _namespace_of(base):
            return type(_namespace_of(base)[name]) is functools.cached_property
    return False


def _of_member(way: Sequence[Any]) -> _Edge | None:
    """A slot, or an attribute of a type written in C that is nothing but a pointer in its struct."""
    holder, held = way[0], way[1]
    for base in _mro_of(type(holder)):
        for name, member in _namespace_of(base).items():
            if type(member) is MemberDescriptorType or name in _PLAIN_GETTERS.get(id(base), ()):
                try:
                    value = member.__get__(holder)
                except (AttributeError, ValueError):
                    continue  # unset, as a slot or a cell can be
                if value is held:
                    return _Edge(f".{name}", "bound-self" if name == "__self__" else "instance-attribute")
    if type(holder) is ProxyType or type(holder) is CallableProxyType:
        return _Edge(".__callback__", "other")  # asked for it, a proxy would ask its target
    return None


def _of_tensor(way: Sequence[Any]) -> _Edge | None:
    """A tensor's autograd node, where Python has seen it. By its type: asking a tensor can run a subclass's code."""
    if is_autograd_node(type(way[1])) and any(
        type_name(base) == "torch._C.TensorBase" for base in _mro_of(type(way[0]))
    ):
        return _Edge(".grad_fn", "other")
    return None


def is_autograd_node(cls: type) -> bool:
    """Whether instances of the class are nodes of torch's autograd graph (`MulBackward0`, a `Function`'s context)."""
    names = [type_name(base) for base in _mro_of(cls)]
    return "torch._C._FunctionBase" in names or _AUTOGRAD_NODE.fullmatch(names[0]) is not None


# In this order: the first that knows the reference names it.
_RULES: tuple[_Rule, ...] = (
    _of_module,
    _of_class,
    _of_cache,
    _of_function,
    _of_context,
    _of_thread_local,
    _of_container,
    _of_proxy,
    _of_tensor,
    _of_instance_dict,
    _of_member,
)


def _entry(way: Sequence[Any], kind: Kind, alone: str) -> _Edge:
    """The entry of a namespace, past the dict: `way` is its owner, the dict, and what the dict holds."""
    if len(way) == 2:
        return _Edge(alone, "other")
    for key in _keys_of(way[1], way[2]):
        if type(key) is str and key.isidentifier():
            return _Edge(f".{key}", kind, 2)
    return _Edge(f".__dict__{_item(way[1:])}", kind, 2)


def _item(way: Sequence[Any]) -> str:
    edge = _of_container(way)
    return UNNAMED if edge is None else edge.text


def _keys_of(holder: dict[Any, object], held: object) -> list[object]:
    return [key for key, value in list(dict.items(holder)) if value is held]


def _key_text(key: object) -> str:
    """A key as code; only its type where writing it would run foreign code."""
    if any(type(key) is plain for plain in (str, bytes, int, float, bool, type(None))):
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    return f"<{type_name(type(key))}>"


def _attribute(holder: object, name: str) -> object:
    """The attribute as `object` itself finds it, `_MISSING` where finding it could run foreign code."""
    for base in _mro_of(type(holder)):
        value = _namespace_of(base).get(name, _MISSING)
        if value is not _MISSING:
            # A property or other descriptor would run; that of a function only binds.
            is_descriptor = any("__get__" in _namespace_of(cls) for cls in _mro_of(type(value)))
            if is_descriptor and type(value) is not FunctionType:
                return _MISSING
            break
    try:
        return object.__getattribute__(holder, name)
    except AttributeError:
        return _MISSING


def _names_in_class(cls: type) -> set[str]:
    names: set[str] = set()
    for base in _mro_of(cls):
        for value in _namespace_of(base).values():
            if type(value) is FunctionType:
                _add_names(_code_of(value), names)
    return names


def _add_names(code: CodeType, names: set[str]) -> None:
    """Adds what the code could call an attribute: the names that it uses, and strings it could give to `setattr`."""
    names.update(code.co_names)
    for constant in code.co_consts:
        if type(constant) is CodeType:
            _add_names(constant, names)
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)


def _is_definition(item: object) -> bool:
    return any(id(base) in _DEFINITIONS for base in _mro_of(type(item)))
