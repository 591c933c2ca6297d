"""Code that takes out of a container what is too much says how long it becomes; it is read, and not run."""

from __future__ import annotations

import collections
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.leakcheck.growth.bounds import bound_in_code, places_that_fill
from lowtide.reports.schema import Hop

MOST = 300
TABLE: dict[int, str] = {}
SEEN: list[int] = []


class Cache:
    """Has several things, each bounded in another way, or not at all."""

    def __init__(self) -> None:
        self.most = 200
        self.window, self.by_attribute, self.by_function = collections.deque[int](), dict[int, int](), list[int]()
        self.replaced, self.running, self.by_argument = list[int](), list[int](), list[int]()
        self.latest, self.own = list[int](), list[int]()
        self.newest: tuple[int, ...] = (0,)
        self.given, self.copied, self.rest = list[int](), list[int](), list[int]()

    def note(self, item: int, most: int) -> None:
        self.window.append(item)
        while len(self.window) > 100:
            self.window.popleft()
        self.by_attribute[item] = item
        if self.most <= len(self.by_attribute):
            self.by_attribute.clear()
        if len(self.by_argument) > most:
            self.by_argument.pop(0)
        if len(self.replaced) >= 50:
            self.replaced = self.replaced[25:]

    def slice(self, item: int, most: int) -> None:
        self.latest = [*self.latest, item][-70:]
        self.newest = (item, *self.newest)[:80]
        self.own = [*self.own, item][-self.most :]
        self.given = [*self.given, item][-most:]
        self.copied = [*self.copied, item][:]
        self.rest = [*self.rest, item][1:]

    def step(self) -> None:
        """How an engine takes what waits: it runs no more than so many, and is no cache."""
        while len(self.running) < self.most:
            self.running.append(self.by_function.pop())


class OfALibrary(Cache):
    """Has what bounds it from another class."""


def trim(cache: Cache) -> None:
    if len(cache.by_function) > 400:
        del cache.by_function[0]


def note(item: int) -> None:
    TABLE[item] = ""
    if len(TABLE) > MOST:
        TABLE.popitem()
    if len(SEEN) > MOST:
        raise ValueError("too many")


@pytest.mark.parametrize("kind", [Cache, OfALibrary])
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("window", 100),
        ("by_attribute", 200),
        ("by_function", 400),
        ("replaced", 50),
        ("by_argument", math.nan),
        ("running", None),
        ("latest", 70),
        ("newest", 80),
        ("own", 200),
        ("given", math.nan),
        ("copied", None),
        ("rest", None),
    ],
)
def test_an_attribute_is_bounded_by_what_takes_out_of_it(
    kind: Callable[[], Cache], name: str, bound: float | None
) -> None:
    cache = kind()
    container: Any = getattr(cache, name)
    path = [
        Hop(type="module", edge=__name__),
        Hop(type=f"{__name__}.Cache", edge=".CACHE"),
        Hop(type="x", edge=f".{name}"),
    ]
    found = bound_in_code(path, [id(cache), id(sys.modules[__name__])], container)
    assert found == (bound if bound is None else pytest.approx(bound, nan_ok=True))


@pytest.mark.parametrize(("name", "bound"), [("TABLE", MOST), ("SEEN", None)])
def test_a_global_is_bounded_by_its_modules_functions(name: str, bound: float | None) -> None:
    path = [Hop(type="module", edge=__name__), Hop(type="dict", edge=f".{name}")]
    assert bound_in_code(path, [id(sys.modules[__name__])], globals()[name]) == bound


class Filled:
    """Has a container that several methods fill, and others that none does."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.by_key: dict[str, Any] = {}
        self.joined: list[Any] = []
        self.read: dict[str, Any] = {}
        self.key = ["a key"]

    def takes(self, item: Any) -> None:
        self.taken.append(item)

    def sets(self, key: str, item: Any) -> None:
        self.by_key[f"{key} of {len(item)}", self.read[key]] = item

    def looks(self) -> int:
        taken = self.taken
        return len(taken)

    def joins(self, item: Any) -> None:
        self.joined = [*self.joined, item]

    def notes(self, other: Any, item: Any) -> None:
        other.__dict__["noted"] = item

    def reads(self, key: str) -> Any:
        other: dict[Any, Any] = {}
        other[self.key] = self.read.get(key)
        other[key] = self.read
        other[key] = self.read[key]
        return self.read[key]


FILLED = Filled()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("taken", Filled.takes),
        ("by_key", Filled.sets),
        ("joined", Filled.joins),
        ("read", None),
        ("key", None),
        ("__dict__", None),
    ],
)
def test_the_line_that_fills_a_container_is_named_and_none_that_reads_it(
    name: str, method: Callable[..., None] | None
) -> None:
    path = [
        Hop(type="module", edge=__name__),
        Hop(type=f"{__name__}.Filled", edge=".FILLED"),
        Hop(type="x", edge=f".{name}"),
    ]
    through = [id(FILLED), id(sys.modules[__name__])]
    places = places_that_fill(path, through, getattr(FILLED, name))
    line = method and method.__code__.co_firstlineno + 1
    assert places == ([f"{method.__qualname__}, test_bounds.py:{line}"] if method else [])


def test_what_python_s_own_modules_fill_has_no_place() -> None:
    path = [Hop(type="module", edge="logging"), Hop(type="list", edge="._handlerList")]
    assert places_that_fill(path, [id(logging)], logging._handlerList) == []  # type: ignore[attr-defined]


def serves(requests: list[Any]) -> Iterator[int]:
    seen: list[Any] = []
    by_key: dict[int, Any] = {}
    joined: list[Any] = []
    read: list[Any] = [1]
    while True:
        for number, request in enumerate(requests):
            seen.append(request)
            by_key[number] = request
            joined = [*joined, request]
        yield len(read) + len(read[0:1])


@pytest.mark.parametrize(("name", "line"), [("seen", 7), ("by_key", 8), ("joined", 9), ("read", None)])
def test_the_line_is_named_in_which_a_function_that_waits_fills_its_variable(name: str, line: int | None) -> None:
    serving: Any = serves([1, 2])
    next(serving)
    path = [Hop(type="object", edge="serving"), Hop(type="list", edge=f"f_locals['{name}']")]
    places = places_that_fill(path, [id(serving)], serving.gi_frame.f_locals[name])
    first = serves.__code__.co_firstlineno
    assert places == ([f"serves, test_bounds.py:{first + line}"] if line else [])
