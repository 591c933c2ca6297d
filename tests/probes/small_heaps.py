"""Small heaps, written as lowtide writes paths: one line per path, and `@name` behind an object to give it a name.

    helper .engine .model ['kv'] [1] @leak
    helper .caches lru_cache value @leak

Lines that begin alike share what they begin with; a name that comes again is the same object. What a line says is how
the path to its end must be printed.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_EDGE = re.compile(r"\.\w+|\['[^']*'\]|\[\d+\]|cell '\w+'|lru_cache key \[0\]|lru_cache value|@\w+")


class Node:
    """An object with attributes that others give it."""


class _Spec:
    """An object to be made: what leads from it to where."""

    def __init__(self) -> None:
        self.edges: dict[str, _Spec] = {}


class SmallHeap:
    """Modules that hold what the lines say, for the length of a `with` block.

    Args:
        text: a line per path; the first word is the name of the module.

    Raises:
        ValueError: a line that cannot be read, or an object that would have to be two kinds of thing.
    """

    def __init__(self, text: str) -> None:
        self._roots: dict[str, _Spec] = {}
        self._named: dict[str, _Spec] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            self._read(line)
        self._made: dict[int, Any] = {}

    def __enter__(self) -> SmallHeap:
        for name, spec in self._roots.items():
            module = types.ModuleType(name)
            self._made[id(spec)] = module
            sys.modules[name] = module
        try:
            for name, spec in self._roots.items():
                _fill(sys.modules[name], spec, self._make)
        except ValueError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._roots:
            del sys.modules[name]
        self._made.clear()

    def take(self, *names: str) -> list[Any]:
        """The objects of these names, which from now on only the heap and this list hold."""
        taken = [self._made[id(self._named[name])] for name in names]
        self._made.clear()
        return taken

    def _read(self, line: str) -> None:
        root, _, rest = line.partition(" ")
        words = _EDGE.findall(rest)
        if " ".join(words) != " ".join(rest.split()):
            raise ValueError(f"cannot be read: {line!r}")
        spec = self._roots.setdefault(root, _Spec())
        before, edge = spec, ""
        for word in words:
            if not word.startswith("@"):
                before, edge = spec, word
                spec = spec.edges.setdefault(word, _Spec())
                continue
            spec = before.edges[edge] = self._named.setdefault(word[1:], spec)

    def _make(self, spec: _Spec) -> Any:
        if id(spec) not in self._made:
            kinds = {_kind(edge) for edge in spec.edges}
            if len(kinds) > 1:
                raise ValueError(f"one object cannot have all of {sorted(spec.edges)}")
            kind = kinds.pop() if kinds else "attribute"
            if kind in ("cell", "cache"):
                ((edge, held),) = spec.edges.items()
                self._made[id(spec)] = (
                    _closure(self._make(held), edge) if kind == "cell" else _cache(self._make(held), edge)
                )
            else:
                empty: Any = {"attribute": Node, "key": dict, "place": list}[kind]()
                self._made[id(spec)] = empty
                _fill(empty, spec, self._make)
        return self._made[id(spec)]


def _kind(edge: str) -> str:
    if edge.startswith("."):
        return "attribute"
    if edge.startswith("["):
        return "key" if edge[1] == "'" else "place"
    return "cell" if edge.startswith("cell") else "cache"


def _fill(item: Any, spec: _Spec, make: Callable[[_Spec], Any]) -> None:
    for edge, held in spec.edges.items():
        if isinstance(item, dict):
            item[edge[2:-2]] = make(held)
        elif isinstance(item, list):
            place = int(edge[1:-1])
            item.extend([None] * (place + 1 - len(item)))
            item[place] = make(held)
        else:
            if type(item) is Node:
                _name(edge[1:])
            setattr(item, edge[1:], make(held))


def _name(attribute: str) -> None:
    """Lets the class have code that names the attribute, as a class in a program has."""
    namespace: dict[str, Any] = {}
    exec(f"def put(self, value):\n    self.{attribute} = value", namespace)
    setattr(Node, f"put_{attribute}", namespace["put"])


def _closure(held: Any, edge: str) -> Callable[[], Any]:
    name = edge.split("'")[1]
    namespace: dict[str, Any] = {}
    exec(f"def outer({name}):\n    def inner():\n        return {name}\n    return inner", namespace)
    closure: Callable[[], Any] = namespace["outer"](held)
    return closure


def _cache(held: Any, edge: str) -> Any:
    if edge != "lru_cache value":
        cached = functools.lru_cache(maxsize=4)(id)
        cached(held)
        return cached
    given = functools.lru_cache(maxsize=4)(lambda: held)
    given()
    # The function that it caches holds it too; what is looked for is the entry.
    del given.__wrapped__
    return given
