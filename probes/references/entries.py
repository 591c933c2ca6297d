"""Edges that are entries: of a namespace, a dict, a list, a set; and how a key is written as code."""

from __future__ import annotations

import keyword
from collections import deque
from collections.abc import Callable, Sequence
from types import (
    MappingProxyType,
)
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType

from lowtide.probes.objects.foreign import (
    is_a,
    mro_of,
    type_name,
)

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
# A subclass's own call is foreign code.
_target_of: Callable[[object], object] = ReferenceType.__call__  # type: ignore[assignment]


class Edge(NamedTuple):
    """One edge: its name as code, its kind, and how many references of the heap it folds together."""

    text: str
    kind: Kind
    references: int = 1


def of_container(way: Sequence[Any]) -> Edge | None:
    """An entry of a dict, list, tuple, deque or set, also of a subclass."""
    holder, held = way[0], way[1]
    for base in mro_of(type(holder)):
        if base is dict:
            for key in keys_of(holder, held):
                return Edge(f"[{key_text(key)}]", "item")
            if any(key is held for key in dict.keys(holder)):
                return Edge(f"<key {definition_text(held)}>" if is_a(held, type) else "<key>", "item")
        elif base is list or base is tuple or base is deque:
            for place, item in enumerate(base.__iter__(holder)):
                if item is held:
                    return Edge(f"[{place}]", "item")
        elif (base is set or base is frozenset) and any(item is held for item in base.__iter__(holder)):
            return Edge("{…}", "item")
    return None


def of_proxy(way: Sequence[Any]) -> Edge | None:
    """A read-only view of a dict, such as a class's `__dict__`: past the dict."""
    if type(way[0]) is not MappingProxyType or len(way) == 2:
        return None
    edge = of_container(way[1:])
    return None if edge is None else edge._replace(references=2)


def attribute_text(name: str) -> str:
    """An attribute as code, also where its name cannot stand behind a dot."""
    return f".{name}" if is_name(name) else f".__dict__[{name!r}]"


def is_name(key: object) -> bool:
    """Whether it can stand behind a dot."""
    return type(key) is str and key.isidentifier() and not keyword.iskeyword(key)


def namespace_entry(way: Sequence[Any], kind: Kind, alone: str) -> Edge:
    """The entry of a namespace, past the dict: `way` is its owner, the dict, and what the dict holds."""
    if len(way) == 2:
        return Edge(alone, "other")
    for key in keys_of(way[1], way[2]):
        if is_name(key):
            return Edge(f".{key}", kind, 2)
    return Edge(f".__dict__{item_text(way[1:])}", kind, 2)


def item_text(way: Sequence[Any]) -> str:
    """An entry of a container as code; `[…]` where it is not found."""
    edge = of_container(way)
    return "[…]" if edge is None else edge.text


def keys_of(holder: dict[Any, object], held: object) -> list[object]:
    """The keys under which a dict has an object."""
    return [key for key, value in list(dict.items(holder)) if value is held]


def key_text(key: object) -> str:
    """A key as code; only its type where writing it would run foreign code."""
    if any(type(key) is plain for plain in (str, bytes, int, float, bool, type(None))):
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
    if type(key) is tuple:
        return f"({', '.join(map(key_text, key))})"
    if is_a(key, type):
        return f"<{definition_text(key)}>"
    if is_a(key, ReferenceType):
        referent: object = _target_of(key)
        return f"<weakref to {type_name(type(referent))}>"
    return f"<{type_name(type(key))}>"


def definition_text(cls: Any) -> str:
    """A class by its name."""
    return f"class {type_name(cls)}"
