"""First use of a memo: plain data's values are listed; objects of the program are told, and once what goes on."""

from __future__ import annotations

import enum
import functools
import re
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.cached_values import (
    FEWEST_TURNS,
    MOST_ADDED,
    MOST_OF_LIBRARY,
    CachedValues,
    SortedValues,
)
from lowtide.leakcheck.judging.storages import HeldStorage, storage_keys
from lowtide.probes.heap.caches import cache_entries
from lowtide.probes.heap.reach import reach
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.foreign import LRU_CACHE

pytestmark = pytest.mark.nightly

LIBRARY = """
import functools
import torch
import weakref

REGISTERED = {}

@functools.lru_cache(maxsize=8)
def table(*args, **kwargs):
    return torch.zeros(64)

@functools.lru_cache(maxsize=1)
def only(length):
    return torch.zeros(64)

@functools.lru_cache(maxsize=8, typed=True)
def typed(length, dtype=torch.float32, device="cpu"):
    # The base of a view has no holder but the view.
    return {"cos": torch.zeros(64).view(8, 8).t(), "sin": [torch.zeros(64), (1, 2.0)]}

@functools.lru_cache(maxsize=8)
def sized(length):
    return torch.zeros(length)

@functools.lru_cache(maxsize=1024)
def many(length):
    return torch.zeros(64)

@functools.lru_cache(maxsize=8)
def same(item):
    return item

@functools.cache
def unbounded(length):
    return torch.zeros(64)

@functools.lru_cache(maxsize=8)
def pairs(length):
    # As many as there will be entries.
    return {"cos": torch.zeros(length), "sin": torch.zeros(length)}

@functools.lru_cache(maxsize=8)
def registered(name):
    return REGISTERED[name]

@functools.lru_cache(maxsize=8)
def trained(length):
    return torch.zeros(64, requires_grad=True)

@functools.lru_cache(maxsize=8)
def module(length):
    return torch.nn.Linear(8, 8).requires_grad_(False)

def plain(length):
    return torch.zeros(64)

def decorated(function):
    kept = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args):
        return kept(*args)

    return wrapper

class Model:
    @functools.lru_cache(maxsize=8)
    def method(self, length):
        return torch.zeros(64)

    @staticmethod
    @decorated
    def anchors(length):
        return torch.zeros(64)

_PLANS = {}
_RANKS_CACHE = {}
_REGISTERED = []
_KV_CACHE = {}
_MEMORY = {}

class Mesh:
    def __init__(self, size=64):
        self._ranks = torch.zeros(size)

class Server(Mesh):
    def close(self):
        pass

class Plan:
    def __init__(self, mesh):
        self.mesh = mesh

@functools.cache
def steps(mesh):
    return mesh

def plan(mesh, key):
    steps(mesh)
    _PLANS[weakref.ref(mesh), key] = Plan(mesh)

def clear_plans():
    _PLANS.clear()
"""


class Process:
    """A process with a library, test by test."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._values = CachedValues()
        self._before = self._storages()

    def _caches(self) -> list[Any]:
        places = [vars(self.library), vars(sys.modules[__name__])]
        caches = [value for place in places for value in place.values() if type(value) is LRU_CACHE]
        anchors = vars(self.library.Model)["anchors"].__func__.__closure__
        kept = next(cell.cell_contents for cell in anchors if type(cell.cell_contents) is LRU_CACHE)
        return [*caches, vars(self.library.Model)["method"], kept]

    def _storages(self) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        tables = [vars(self.library)[name] for name in vars(self.library) if re.fullmatch("_[A-Z]+(_[A-Z]+)?", name)]
        for entries in (*map(cache_entries, self._caches()), tables):
            reached, _ = reach(entries)
            tensors = [item for item in reached if isinstance(item, torch.Tensor)]
            found.update({(item.device, item.address): item.bytes for item in survey_storages(tensors).storages})
        return found

    def end(self, name: str = "") -> tuple[int, SortedValues]:
        """How many storages are told of a test, and how they were told apart."""
        now = self._storages()
        held = [
            HeldStorage(key, size, "float32 [64]", "call", None) for key, size in now.items() if key not in self._before
        ]
        found = self._values.sort(held, self._caches(), name)
        self._before = now
        self._values.mark()
        return len({storage.key for storage in held} - found.excused), found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A process with a module as if it were installed."""
    module = ModuleType("installed_tables")
    module.__file__ = f"{sysconfig.get_path('purelib')}/installed_tables.py"
    exec(compile(LIBRARY, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield Process(module)
    own.cache_clear()
    of_kind.cache_clear()


@functools.lru_cache(maxsize=8)
def own(length: Any) -> Any:
    return torch.zeros(int(length))


@functools.cache
def of_kind(kind: Kind, size: int = 1) -> Any:
    return {"first": torch.zeros(size), "second": torch.zeros(size)}


class Kind(enum.Enum):
    """A small key."""

    HALF = 1
    FULL = 2


class Length(int):
    """An object of the program's that is a number."""


def test_what_a_library_computed_from_plain_data_is_listed_once_for_each_cache(process: Process) -> None:
    library = process.library
    library.table(1, 2.0, 3j, True, None)
    library.table("cpu", b"half")
    library.table(torch.float32, torch.device("cpu"), torch.strided, torch.Size([2, 3]))
    library.table(length=3, dtype=torch.float32)
    library.table(((16, 16), (8, 8)), frozenset([1]))
    library.typed(3, dtype=torch.float16)
    library.only(5)
    library.Model.anchors(5)
    reported, found = process.end()
    assert reported == 0
    assert [line.what.partition(" (")[0] for line in found.listed] == [
        "1.2 KiB in 5 tensors",
        "256 B in 1 tensor",
        "512 B in 2 tensors",
        "256 B in 1 tensor",
    ]
    for line in found.listed:
        exec(line.why.rpartition("; ")[2].removesuffix(" empties it"), {library.__name__: library})
    assert process._storages() == {}


def test_what_a_library_has_in_objects_of_its_own_is_listed_with_all_that_empties_it(process: Process) -> None:
    library = process.library
    library.plan(library.Mesh(), (8, torch.float32))
    library._RANKS_CACHE[8, "cpu"] = torch.zeros(64)
    reported, found = process.end()
    assert reported == 0
    lines = {line.what.rpartition(" in ")[2]: line for line in found.listed}
    assert lines.keys() == {"installed_tables._PLANS", "installed_tables._RANKS_CACHE"}
    calls = lines["installed_tables._PLANS"].why.rpartition("leak; ")[2].removesuffix(" empties it")
    assert calls == "installed_tables.clear_plans(); installed_tables.steps.cache_clear()"
    assert lines["installed_tables._RANKS_CACHE"].why.endswith("what installed_tables offers for that empties it")
    library.plan(library.Mesh(), 16)
    assert process.end()[0] == 0


def test_what_each_of_many_tests_adds_to_a_librarys_objects_is_told_once_as_growth(process: Process) -> None:
    told = []
    for turn in range(FEWEST_TURNS + 2):
        process.library.plan(process.library.Mesh(), turn)
        told.append(process.end(f"test_{turn}")[0])
    assert [turn for turn, reported in enumerate(told) if reported] == [FEWEST_TURNS - 1]


KEPT: list[Any] = []


class OwnMesh:
    """What stands between a library's objects and a tensor."""

    def __init__(self) -> None:
        self._ranks = torch.zeros(64)


TOLD = {
    "what a library was given": lambda library: library._REGISTERED.append(torch.zeros(64)),
    "an engine's cache": lambda library: library._KV_CACHE.update({0: torch.zeros(64)}),
    "a memory that is no memo": lambda library: library._MEMORY.update({0: torch.zeros(64)}),
    "an object that can be ended": lambda library: library._PLANS.update({8: library.Server()}),
    "an object of the program's on the way": lambda library: library._PLANS.update({8: library.Plan(OwnMesh())}),
    "a key of the program's": lambda library: library._PLANS.update({OwnMesh: library.Mesh()}),
    "too much in an object": lambda library: library._PLANS.update({8: library.Mesh(MOST_ADDED // 4 + 1)}),
    "a plan of what the program has": lambda library: (
        KEPT.append(library.Mesh()),
        library.plan(KEPT[-1], 8),
    ),
    "a module as argument": lambda library: library.table(torch.nn.ReLU()),
    "a model's method": lambda library: library.Model().method(3),
    "an argument": lambda library: library.same(torch.ones(8)),
    "a tensor in the key": lambda library: library.table((1, torch.ones(8))),
    "an object of the program": lambda library: library.table(Process),
    "a parameter": lambda library: library.trained(3),
    "a module as value": lambda library: library.module(3),
    "more of the program's than constants": lambda library: own(MOST_ADDED // 4 + 1),
    "an object of the program's": lambda library: own(Length(3)),
    "too much": lambda library: library.sized(MOST_OF_LIBRARY // 4 + 1),
    "many that are too much": lambda library: [library.sized(MOST_OF_LIBRARY // 16 + turn) for turn in range(4)],
    "what the program holds too": lambda library: KEPT.append(library.table(7)),
    "a view that the program holds": lambda library: KEPT.append(library.table(7)[:2]),
    "what the program has registered": lambda library: (
        library.REGISTERED.setdefault("kept", torch.ones(8)),
        library.registered("kept"),
    ),
}


@pytest.mark.parametrize("use", TOLD.values(), ids=TOLD.keys())
def test_what_is_the_programs_or_too_much_is_reported(process: Process, use: Any) -> None:
    try:
        use(process.library)
        reported, found = process.end()
        assert reported > 0
        assert not found.listed
    finally:
        KEPT.clear()


def test_the_constants_in_a_cache_of_the_program_are_listed_with_a_bound_and_without_one(process: Process) -> None:
    own(64)
    of_kind(Kind.HALF)
    of_kind(Kind.FULL, size=2)
    process.library.unbounded(3)
    process.library.table(5)
    process.library.pairs(5)
    process.library.pairs(6)
    reported, found = process.end()
    assert reported == 0
    assert {line.what.rpartition(".")[2] for line in found.listed} == {"own", "of_kind", "unbounded", "table", "pairs"}


def test_a_cache_that_the_program_made_of_a_librarys_function_is_the_programs(process: Process) -> None:
    cache = functools.lru_cache(maxsize=8)(process.library.plain)
    tensor = cache(3)
    held = [HeldStorage(key, 256, "float32 [64]", "call", None) for key in storage_keys([tensor])]
    del tensor
    assert not CachedValues().sort(held, [cache], "").excused


def test_what_a_later_test_adds_beyond_constants_is_reported_with_the_first_and_once(process: Process) -> None:
    process.library.sized(MOST_ADDED)
    assert process.end("test_first")[0] == 0
    process.library.sized(64)
    assert process.end("test_small")[0] == 0
    process.library.sized(MOST_ADDED // 4)
    reported, found = process.end("test_large")
    assert reported == 1
    ((advice, cache),) = found.hints
    assert "came with test_first" in advice
    assert cache is process.library.sized
    process.library.sized(65)
    assert process.end("test_after")[0] == 0


def test_what_was_never_listed_is_not_said_to_have_been(process: Process) -> None:
    for extra in (1, 2):
        own(MOST_ADDED // 4 * extra + extra)
        reported, found = process.end()
        assert (reported, found.hints) == (1, ())


def test_what_each_of_many_tests_adds_is_told_once_as_growth(process: Process) -> None:
    told = []
    for length in range(FEWEST_TURNS + 3):
        process.library.many(length)
        reported, found = process.end(f"test_{length}")
        told += [(length, advice) for advice, _ in found.hints]
        assert reported == len(found.hints)
    ((turn, advice),) = told
    assert turn == FEWEST_TURNS - 1
    assert f"+256 B in each of {FEWEST_TURNS} tests" in advice
    assert "came with test_0" in advice


def test_what_comes_again_does_not_grow(process: Process) -> None:
    for turn in range(4 * FEWEST_TURNS + 8):
        # Each value comes four times.
        process.library.many(turn // 4)
        assert process.end()[0] == 0


def test_another_cache_has_a_first_use_and_what_takes_a_values_place_is_no_more(process: Process) -> None:
    process.library.table(1)
    assert process.end()[0] == 0
    process.library.only(1)
    assert process.end()[0] == 0
    process.library.only(2)
    assert process.end()[0] == 0


def test_what_one_test_computes_in_several_stages_is_its_first_use(process: Process) -> None:
    process.library.table(1)
    values = process._values
    storages = [HeldStorage(key, 256, "", "call", None) for key in process._storages()]
    assert len(values.sort(storages, process._caches(), "test").excused) == 1
    process.library.table(2)
    storages = [HeldStorage(key, 256, "", "call", None) for key in process._storages()]
    assert len(values.sort(storages, process._caches(), "test").excused) == 2
