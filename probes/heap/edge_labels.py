"""What all references of a heap are called, in bulk: for a file that is asked for paths when the heap is gone.

A path's own edges are named one by one, as exactly as can be (`references/edges.py`), at some ten microseconds each. A
heap has millions. Here each kind of holder says at once which of its objects it has under which name; what a reference
is called is then looked up by both its ends. A label names one reference alone: an attribute past the instance's dict
is `.__dict__` and then `['name']`, and whoever prints it folds them.

No value is read but to know which object it is, and no code of the program's runs. Keys are written as in paths.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, islice
from types import CellType, FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from lowtide.probes.heap.graph import Graph
from lowtide.probes.objects.address_table import Indices, Ints, each_once
from lowtide.probes.objects.attribute_names import has_values_inside
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    MISSING,
    cells_of,
    code_of,
    dict_of_module,
    flags_of,
    is_a,
    mro_of,
    namespace_of,
    namespace_of_class,
)
from lowtide.probes.objects.identities import elements, identities
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, threading
from lowtide.probes.references.definitions import is_dict_of_cache
from lowtide.probes.references.edges import UNNAMED, EdgeNamer
from lowtide.probes.references.entries import attribute_text, definition_text, key_text

ENTRIES = ".<entries>"
"""What leads from an `lru_cache` to the dict of its entries."""

THREADS = ".<threads>"
"""What leads from a `threading.local` to the dict of its threads."""

HIDDEN = ".<hidden>"
"""What leads to the dict of an instance's attributes where its class has their names for properties or the like."""

UNKNOWN = -1
FIRST_ITEM = -2
"""The label of item 0; those of the items behind it follow downward."""

_LOOKED_AT = 4
"""Entries by which a dict is known as that of an object's attributes."""

_NAMED_SINGLY = 200
"""References from objects of one type that are named one by one, where nothing else is known of such a type."""

_HEAP_TYPE = 1 << 9


def item_label(place: int) -> int:
    """Return the label of an item of a sequence."""
    return FIRST_ITEM - place


class EdgeLabels:
    """Labels of all references of a graph.

    Args:
        graph: the heap; nothing of it may change meanwhile.

    Attributes:
        texts: what labels from 0 on mean.
        labels: the label of each edge; `UNKNOWN`, and items by their places, are negative; shape [edges].
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._places: dict[str, int] = {}
        # A key as it is hashed plainly: no code of the program's runs for a string's or a number's.
        self._keys: dict[str, int] = {}
        self._said: list[Ints] = []
        self._single: list[tuple[int, int, int]] = []
        counts = np.diff(graph.offsets)
        self._sources = np.repeat(np.arange(len(counts)), counts)
        self.labels: Indices = np.full(len(graph.edges), UNKNOWN, np.int32)
        groups = graph.by_type()
        # What is most telling comes first: of two names of one reference the earlier one stays.
        self._roots()
        for special in (self._definitions, self._containers, self._members):
            for cls, nodes in groups:
                special(cls, nodes)
        self._resolve()
        namer = EdgeNamer({})
        for cls, nodes in groups:
            self._attributes_inside(cls, nodes, namer)
        for cls, nodes in groups:
            self._dicts_of_instances(cls, nodes)
        self._say(np.arange(len(graph.kinds)), graph.kinds, np.full(len(graph.kinds), self._text(".__class__")))
        self._resolve()
        for cls, nodes in groups:
            self._others(cls, nodes, namer)
        namer.undo()
        self.texts: Sequence[str] = [*self._places]

    def _objects(self, nodes: Ints) -> list[Any]:
        objects = self._graph.objects
        return [objects[node] for node in nodes.tolist()]

    def _text(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))

    def _key(self, key: object) -> int:
        if type(key) is str:
            known = self._keys.get(key)
            if known is None:
                known = self._keys[key] = self._text(f"[{key_text(key)}]")
            return known
        if type(key) is int and 0 <= key < 1 << 30:
            return item_label(key)
        return self._text(f"[{key_text(key)}]")

    def _say(self, holders: Ints, held: Ints, labels: Ints) -> None:
        """Note what leads from each holder to an object, by its identity."""
        self._take_single()
        self._said.append(np.stack([holders, held, labels]))

    def _say_one(self, holder: int, held: object, text: str) -> None:
        self._single.append((holder, id(held), self._text(text)))

    def _take_single(self) -> None:
        if self._single:
            self._said.append(np.array(self._single, np.int64).T)
            self._single = []

    def _resolve(self, nodes: Ints | None = None) -> None:
        """Give each edge without a label, of some nodes or of all, the first that was said of it."""
        self._take_single()
        holders, ids, said = np.concatenate([np.zeros((3, 0), np.int64), *self._said], axis=1)
        self._said = []
        held = self._graph.nodes_of(ids)
        known = held >= 0
        count = len(self._graph.objects)
        pairs = holders[known] * count + held[known]
        order = np.argsort(pairs, kind="stable")
        pairs, said = pairs[order], said[known][order]
        wanted = np.flatnonzero(self.labels == UNKNOWN) if nodes is None else self._unnamed(nodes)[1]
        asked = self._sources[wanted] * count + self._graph.edges[wanted]
        if len(pairs):
            places = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
            found = pairs[places] == asked
            self.labels[wanted[found]] = said[places[found]]

    def _roots(self) -> None:
        """Variables of running frames, and values of context variables."""
        for node, root in enumerate(self._graph.roots):
            for name, value in root.variables:
                self._say_one(node, value, f"f_locals[{name!r}]")
            if type(root.held) is FrameType:
                self._say_one(node, root.held.f_globals, "f_globals")
            elif root.kind == "context":
                for value in root.also:
                    self._say_one(node, value, ".get()")

    def _definitions(self, cls: type, nodes: Ints) -> None:
        """Functions, modules, classes and caches."""
        if cls is FunctionType:
            for node, function in zip(nodes.tolist(), self._objects(nodes), strict=True):
                self._of_function(node, function)
        elif cls is LRU_CACHE:
            for node, cache in zip(nodes.tolist(), self._objects(nodes), strict=True):
                self._of_cache(node, cache)
        elif any(base is ModuleType for base in mro_of(cls)):
            for node, module in zip(nodes.tolist(), self._objects(nodes), strict=True):
                self._say_one(node, dict_of_module(module), ".__dict__")
        elif any(base is type for base in mro_of(cls)):
            for node, made in zip(nodes.tolist(), self._objects(nodes), strict=True):
                self._say_one(node, namespace_of_class(made), ".__dict__")
                for name in ("__mro__", "__bases__", "__base__"):
                    self._say_one(node, type.__dict__[name].__get__(made), f".{name}")

    def _of_function(self, node: int, function: Any) -> None:
        parts = [(function.__globals__, "__globals__"), (function.__builtins__, ".__builtins__")]
        cells = cells_of(function)
        if cells:
            parts.append((cells, ".__closure__"))
            of_cells = int(self._graph.nodes_of(np.array([id(cells)]))[0])
            if of_cells >= 0:
                for name, cell in zip(code_of(function).co_freevars, cells, strict=True):
                    self._say_one(of_cells, cell, f"cell {name!r}")
        parts += [(getattr(function, name), f".{name}") for name in ("__defaults__", "__kwdefaults__")]
        for held, text in parts:
            if held is not None:
                self._say_one(node, held, text)

    def _of_cache(self, node: int, cache: Any) -> None:
        own = vars(cache)
        self._say_one(node, own.get("__wrapped__"), ".__wrapped__")
        self._say_one(node, own, ".__dict__")
        held = gc.get_referents(cache)
        entries: Any = next((item for item in held if is_dict_of_cache(cache, item)), None)
        if entries is None:
            return
        inside = int(self._graph.nodes_of(np.array([id(entries)]))[0])
        self._say_one(node, entries, ENTRIES)
        keys, values = list(dict.keys(entries)), list(dict.values(entries))
        for place in (inside, node):
            if place >= 0:
                self._say_each(place, keys, "lru_cache key")
                # A bounded one has links there, and shows the results itself.
                self._say_each(place, values if place == inside else held, "lru_cache value")

    def _say_each(self, holder: int, held: list[object], text: str) -> None:
        count = len(held)
        self._say(np.full(count, holder), identities(held), np.full(count, self._text(text)))

    def _containers(self, cls: type, nodes: Ints) -> None:
        """Entries of dicts and sets, items of sequences, also of classes that derive from them."""
        base = next((base for base in mro_of(cls) if any(base is kind for kind in _CONTAINERS)), None)
        if base is None:
            if cls is CellType:
                self._all(nodes, ".cell_contents")
            return
        items = self._objects(nodes)
        if base is dict:
            self._of_dicts(nodes, items)
            return
        # (A list as it is; all else as a list of what it iterates over itself.)
        lists = items if cls is list else [list(base.__iter__(item)) for item in items]
        counts, held = elements(lists)
        holders = np.repeat(nodes, counts)
        if base is set or base is frozenset:
            self._say(holders, held, np.full(len(held), self._text("{…}")))
            return
        before = np.repeat(np.cumsum(counts) - counts, counts)
        self._say(holders, held, FIRST_ITEM - (np.arange(len(held)) - before))

    def _of_dicts(self, nodes: Ints, dicts: list[Any]) -> None:
        keys = [list(dict.keys(each)) for each in dicts]
        counts, values = elements([list(dict.values(each)) for each in dicts])
        if list(map(len, keys)) != counts.tolist():
            return  # one of them was changed by another thread
        holders = np.repeat(nodes, counts)
        known = self._graph.nodes_of(values) >= 0
        label = self._key
        flat = [key for each in keys for key in each]
        labels = np.fromiter(map(label, compress(flat, known.tolist())), np.int64, int(known.sum()))
        self._say(holders[known], values[known], labels)
        others = [place for place, key in enumerate(flat) if type(key) is not str and gc.is_tracked(key)]
        if others:
            found = [flat[place] for place in others]
            texts = [f"<key {definition_text(key)}>" if is_a(key, type) else "<key>" for key in found]
            self._say(holders[others], identities(found), np.fromiter(map(self._text, texts), np.int64, len(texts)))

    def _members(self, cls: type, nodes: Ints) -> None:
        """Slots, and attributes of types written in C that are nothing but a pointer in the object."""
        getters = [
            (f".{name}", member)
            for base in mro_of(cls)
            for name, member in namespace_of(base).items()
            if type(member) is MemberDescriptorType
        ]
        if not getters or cls is FunctionType:
            return
        items = self._objects(nodes)
        for text, getter in getters:
            values = list(map(_reading(getter.__get__, (AttributeError, ValueError, TypeError)), items))
            self._say(nodes, identities(values), np.full(len(values), self._text(text)))
        if cls is MethodType:
            self._say(
                nodes, identities([item.__self__ for item in items]), np.full(len(items), self._text(".__self__"))
            )

    def _dicts_of_instances(self, cls: type, nodes: Ints) -> None:
        """Name the dict of an instance's attributes: it is that if an attribute leads where an entry of it does."""
        if not _has_dict(cls) or any(base is type or base is ModuleType for base in mro_of(cls)):
            return
        is_local = any(base is threading.local for base in mro_of(cls))
        graph = self._graph
        holders, places = self._unnamed(nodes)
        dicts = graph.kinds[graph.edges[places]] == id(dict)
        is_plain = functools.cache(functools.partial(_is_plain, cls))
        for holder, place in zip(holders[dicts].tolist(), places[dicts].tolist(), strict=True):
            entries = graph.objects[int(graph.edges[place])]
            if is_local:
                self._say_one(holder, entries, THREADS)
            elif _are_attributes(graph.objects[holder], entries, is_plain):
                self._say_one(holder, entries, ".__dict__")
            elif any(type(key) is str and not is_plain(key) for key in _first(entries)):
                self._say_one(holder, entries, HIDDEN)

    def _attributes_inside(self, cls: type, nodes: Ints, namer: EdgeNamer) -> None:
        """Attributes whose values lie in the instances (Python 3.11 and later)."""
        each = each_once(self._unnamed(nodes)[0]) if has_values_inside(cls) else _NONE
        if not len(each):
            return
        items = self._objects(each)
        for name in namer.names_inside(cls):
            if _is_plain(cls, name):
                values = [_attribute_inside(item, name) for item in items]
                self._say(each, identities(values), np.full(len(values), self._text(attribute_text(name))))
        self._say(each, np.full(len(each), id(cls)), np.full(len(each), self._text(".__class__")))
        self._resolve(each)

    def _others(self, cls: type, nodes: Ints, namer: EdgeNamer) -> None:
        """Name what is left one by one, as far as that is worth it, and else say of what type the holder is."""
        holders, places = self._unnamed(nodes)
        if not len(places):
            return
        objects, edges = self._graph.objects, self._graph.edges
        # Not by all names that any code has, which takes milliseconds for each.
        is_plain = (
            cls is FunctionType or (bool(flags_of(cls) & _HEAP_TYPE) and _has_dict(cls)) or has_values_inside(cls)
        )
        for holder, place in islice(
            zip(holders.tolist(), places.tolist(), strict=True), 0 if is_plain else _NAMED_SINGLY
        ):
            edge = namer.edge([objects[holder], objects[int(edges[place])]])
            self.labels[place] = self._text(edge.text)
        if is_plain:
            rest = places[self.labels[places] == UNKNOWN]
            # (To ask a function for its annotations would make them.)
            self.labels[rest] = self._text(".__annotations__" if cls is FunctionType else UNNAMED)

    def _all(self, nodes: Ints, text: str) -> None:
        _, places = self._edges_of(nodes)
        self.labels[places] = self._text(text)

    def _edges_of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return the holder and the place of each edge of some nodes."""
        starts = self._graph.offsets[nodes]
        counts = self._graph.offsets[nodes + 1] - starts
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        return np.repeat(nodes, counts), places

    def _unnamed(self, nodes: Ints) -> tuple[Ints, Ints]:
        holders, places = self._edges_of(nodes)
        unnamed = self.labels[places] == UNKNOWN
        return holders[unnamed], places[unnamed]


_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_NONE: Ints = np.zeros(0, np.int64)


def _attribute_inside(item: object, name: str) -> object:
    try:
        return object.__getattribute__(item, name)
    except AttributeError:
        return MISSING


def _reading(get: Callable[[Any], Any], errors: Any) -> Callable[[Any], Any]:
    def read(item: Any) -> Any:
        try:
            return get(item)
        except errors:
            return MISSING

    return read


def _has_dict(cls: type) -> bool:
    return any(type(namespace_of(base).get("__dict__")) is GetSetDescriptorType for base in mro_of(cls))


def _is_plain(cls: type, name: str) -> bool:
    """Return whether an instance's attribute of that name is found without running anything of its class."""
    for base in mro_of(cls):
        value = namespace_of(base).get(name, MISSING)
        if value is not MISSING:
            return not any("__get__" in namespace_of(kind) for kind in mro_of(type(value)))
    return True


def _are_attributes(item: object, entries: Any, is_plain: Callable[[str], bool]) -> bool:
    """Return whether one of the first keys of a dict is the name of an attribute that is what the dict has under it."""
    return any(
        _attribute_inside(item, key) is value
        for key, value in _first(entries).items()
        if type(key) is str and key.isidentifier() and is_plain(key)
    )


def _first(entries: Any) -> dict[Any, object]:
    return dict(islice(dict.items(entries), _LOOKED_AT))
