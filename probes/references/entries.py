"""Edges that are entries: of a namespace, a dict, a list, a set; and how a key is written as code."""

from __future__ import annotations

import keyword
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType

from lowtide.probes.objects.described import constant_text
from lowtide.probes.objects.foreign import is_a, mro_of, type_name

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
    "opaque",
    "other",
]

_LONGEST_KEY = 60
_DEEPEST_KEY = 8

_FEW = 16
"""Items that are gone through in less time than it takes to note where they are."""

# A subclass's own call is foreign code.
_target_of: Callable[[object], object] = ReferenceType.__call__  # type: ignore[assignment]


class Edge(NamedTuple):
    """One edge: its name as code, its kind, and how many references of the heap it folds together."""

    text: str
    kind: Kind
    references: int = 1


class Containers:
    """Knows where containers have their items, as long as none of them changes.

    A container that is asked for a second time is gone through once for all that will be asked: a path may lead to each
    of a million items.
    """

    def __init__(self) -> None:
        self._asked: set[tuple[int, str]] = set()
        # With the container, so that its identity stays its own.
        self._known: dict[tuple[int, str], tuple[object, dict[int, int]]] = {}
        self._keys: dict[int, tuple[object, dict[int, list[object]]]] = {}
        self._found: dict[int, tuple[object, Any]] = {}

    def keys_of(self, holder: dict[Any, object], held: object) -> list[object]:
        """Return the keys under which a dict has an object."""
        if dict.__len__(holder) <= _FEW or self._is_first(holder, "values"):
            return [key for key, value in list(dict.items(holder)) if value is held]
        if id(holder) not in self._keys:
            keys: dict[int, list[object]] = {}
            for key, value in list(dict.items(holder)):
                keys.setdefault(id(value), []).append(key)
            self._keys[id(holder)] = holder, keys
        return self._keys[id(holder)][1].get(id(held), [])

    def has_key(self, holder: dict[Any, object], held: object) -> bool:
        """Return whether an object is a key of a dict."""
        return self.place_of(holder, "keys", dict.__len__(holder), dict.keys(holder), held) is not None

    def place_in(self, base: Any, holder: Any, held: object) -> int | None:
        """Return the place of an object in what a built-in class of a container iterates over; None if it has none."""
        return self.place_of(holder, "items", base.__len__(holder), base.__iter__(holder), held)

    def once(self, holder: Any, find: Callable[[Any], Any]) -> Any:
        """Return what a function finds in a container, which is the same for all of its items; of one function only."""
        if id(holder) not in self._found:
            self._found[id(holder)] = holder, find(holder)
        return self._found[id(holder)][1]

    def place_of(self, holder: object, part: str, size: int, items: Iterable[object], held: object) -> int | None:
        """Return the place of an object among the items of one part of a container; None if it is not among them."""
        if size <= _FEW or self._is_first(holder, part):
            return next((place for place, item in enumerate(items) if item is held), None)
        return self._places(holder, part, items).get(id(held))

    def _is_first(self, holder: object, part: str) -> bool:
        key = id(holder), part
        if key in self._asked:
            return False
        self._asked.add(key)
        return True

    def _places(self, holder: object, part: str, items: Iterable[object]) -> dict[int, int]:
        key = id(holder), part
        if key not in self._known:
            places: dict[int, int] = {}
            for place, item in enumerate(items):
                places.setdefault(id(item), place)
            self._known[key] = holder, places
        return self._known[key][1]


class Rest(Sequence[Any]):
    """The objects of a path from one of them on, without a copy: paths may be long.

    Args:
        objects: those of the whole path.
        start: the place of the first.
        containers: knows where the containers among them have their items.
    """

    __slots__ = ("_objects", "_start", "containers")

    def __init__(self, objects: Sequence[Any], start: int = 0, containers: Containers | None = None) -> None:
        self._objects = objects
        self._start = start
        self.containers = containers or Containers()

    def __len__(self) -> int:
        return len(self._objects) - self._start

    def __getitem__(self, place: Any) -> Any:
        return self._objects[self._start + place]

    def __iter__(self) -> Iterator[Any]:
        return (self._objects[place] for place in range(self._start, len(self._objects)))

    def after(self, count: int) -> Rest:
        """Return what is left behind the first so many objects."""
        return Rest(self._objects, self._start + count, self.containers)

    def keys(self, place: int) -> list[object]:
        """Return the keys under which the dict at a place has the object behind it."""
        return self.containers.keys_of(self[place], self[place + 1])


def of_container(way: Rest) -> Edge | None:
    """Return an entry of a dict, list, tuple, deque or set, also of a subclass."""
    holder, held = way[0], way[1]
    for base in mro_of(type(holder)):
        if base is dict:
            for key in way.keys(0):
                return Edge(f"[{key_text(key)}]", "item")
            if way.containers.has_key(holder, held):
                return Edge(f"<key {definition_text(held)}>" if is_a(held, type) else "<key>", "item")
        elif base is list or base is tuple or base is deque:
            place = way.containers.place_in(base, holder, held)
            if place is not None:
                return Edge(f"[{place}]", "item")
        elif (base is set or base is frozenset) and way.containers.place_in(base, holder, held) is not None:
            return Edge("{…}", "item")
    return None


def of_proxy(way: Rest) -> Edge | None:
    """Return a read-only view of a dict, such as a class's `__dict__`: past the dict."""
    if type(way[0]) is not MappingProxyType or len(way) == 2:
        return None
    edge = of_container(way.after(1))
    return None if edge is None else edge._replace(references=2)


def attribute_text(name: str) -> str:
    """Return an attribute as code, also where its name cannot stand behind a dot."""
    return f".{name}" if is_name(name) else f".__dict__[{name!r}]"


def is_name(key: object) -> bool:
    """Return whether it can stand behind a dot."""
    return type(key) is str and key.isidentifier() and not keyword.iskeyword(key)


def namespace_entry(way: Rest, kind: Kind, alone: str) -> Edge:
    """Return the entry of a namespace, past the dict: `way` is its owner, the dict, and what the dict holds."""
    if len(way) == 2:
        return Edge(alone, "other")
    for key in way.keys(1):
        if is_name(key):
            return Edge(f".{key}", kind, 2)
    return Edge(f".__dict__{item_text(way.after(1))}", kind, 2)


def item_text(way: Rest) -> str:
    """Return an entry of a container as code; `[…]` where it is not found."""
    edge = of_container(way)
    return "[…]" if edge is None else edge.text


def key_text(key: object, deepest: int = _DEEPEST_KEY) -> str:
    """Return a key as code; its type alone where writing it would run foreign code, or is nested too deep."""
    if any(type(key) is plain for plain in (str, bytes, int, float, bool, type(None))):
        text = constant_text(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
    if type(key) is tuple and deepest:
        return f"({', '.join(key_text(part, deepest - 1) for part in key)})"
    if is_a(key, type):
        return f"<{definition_text(key)}>"
    if is_a(key, ReferenceType):
        referent: object = _target_of(key)
        return f"<weakref to {type_name(type(referent))}>"
    return f"<{type_name(type(key))}>"


def definition_text(cls: Any) -> str:
    """Return a class by its name."""
    return f"class {type_name(cls)}"
