"""Libraries beside torch give back what they only keep, if they are in use on a card; nothing else is touched."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowtide.leakcheck.findings.remedies import actions_for
from lowtide.leakcheck.resources import library_caches
from lowtide.leakcheck.resources.library_caches import LIBRARY_CACHES, Emptied, changes_on, empty_library_caches
from lowtide.leakcheck.resources.resource import Rung
from lowtide.leakcheck.watching import judgement
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.reports.schema import NotMeasured

CONTEXTS = (0, 2)


def module(name: str, **values: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(values)
    return made


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch with contexts on two of three cards."""
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 3))
    monkeypatch.setattr(library_caches, "initialized_torch", lambda: torch)
    monkeypatch.setattr(library_caches, "has_context", lambda torch, index: index in CONTEXTS)


class Cupy:
    """Stands for cupy: a pool of blocks on each card, that of the current card at a time, and one of pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = {0: 64, 1: 64, 2: 64, "pinned": 8}
        self.current = 0
        self.used = 0
        pool = SimpleNamespace(
            free_all_blocks=lambda: self.kept.update({self.current: self.used}),
            total_bytes=lambda: self.kept[self.current],
            used_bytes=lambda: self.used,
        )
        pinned = SimpleNamespace(
            free_all_blocks=lambda: self.kept.update({"pinned": 0}), n_free_blocks=lambda: self.kept["pinned"]
        )
        self.pool_class = type("MemoryPool", (SimpleNamespace,), {})
        fake = module(
            "cupy",
            cuda=SimpleNamespace(Device=self.on, MemoryPool=self.pool_class),
            get_default_memory_pool=lambda: pool,
            get_default_pinned_memory_pool=lambda: pinned,
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)

    @contextlib.contextmanager
    def on(self, card: int) -> Iterator[None]:
        before, self.current = self.current, card
        yield
        self.current = before


class Waiting:
    """A list of what is to be freed."""

    def __init__(self, numba: Numba) -> None:
        self._numba = numba

    def __len__(self) -> int:
        return len(self._numba.waiting[0])

    def clear(self) -> None:
        self._numba.clear()


class Numba:
    """Stands for numba: a list of what is to be freed for each context, which takes a current context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = {0: ["array"], 1: []}
        self.streams = ["stream"]
        self.entered: list[int] = []
        self.current: list[int] = []
        # Arrays wait with the memory manager of a context, its streams and events with itself.
        streams = self.streams
        arrays = SimpleNamespace(deallocations=Waiting(self))
        contexts = [SimpleNamespace(deallocations=streams, memory_manager=arrays), None]
        devices = {index: SimpleNamespace(id=index, primary_context=context) for index, context in enumerate(contexts)}
        driver = module("numba.cuda.cudadrv.driver", driver=SimpleNamespace(devices=devices))
        monkeypatch.setitem(sys.modules, driver.__name__, driver)
        monkeypatch.setitem(sys.modules, "numba.cuda", module("numba.cuda", gpus=[self.on(0), self.on(1)]))

    @contextlib.contextmanager
    def on(self, card: int) -> Iterator[None]:
        self.entered.append(card)
        self.current.append(card)
        yield
        self.current.pop()

    def clear(self) -> None:
        self.waiting[self.current[-1]].clear()


def test_cupy_gives_back_the_blocks_of_each_card_that_is_used(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    cupy = Cupy(monkeypatch)
    said = empty_library_caches().notes
    assert cupy.kept == {0: 0, 1: 64, 2: 0, "pinned": 0}
    assert cupy.current == 0
    assert [line.what for line in said] == [
        "64 B in cupy's pools on cuda:0, of which 0 B are used",
        "8 free blocks in cupy's pool of pinned memory on cuda:0",
        "64 B in cupy's pools on cuda:2, of which 0 B are used",
    ]
    assert said[0].why.endswith(": cupy.get_default_memory_pool().free_all_blocks()")
    assert empty_library_caches().notes == ()


def test_a_pool_of_cupys_that_the_program_has_made_gives_back_its_blocks_too(
    monkeypatch: pytest.MonkeyPatch, card: None
) -> None:
    cupy, emptied = Cupy(monkeypatch), []
    own = cupy.pool_class(total_bytes=lambda: 32, used_bytes=lambda: 0, free_all_blocks=lambda: emptied.append(1))
    assert empty_library_caches().notes[0].what == "96 B in cupy's pools on cuda:0, of which 0 B are used"
    assert emptied == [1, 1]
    assert own.used_bytes() == 0


def test_what_is_used_of_cupys_pool_is_said_with_what_is_not(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    cupy = Cupy(monkeypatch)
    cupy.used = 48
    assert empty_library_caches().notes[0].what == "64 B in cupy's pools on cuda:0, of which 48 B are used"
    # All that is left is used: nothing to say.
    assert [line.what for line in empty_library_caches().notes] == []


def test_rmms_pool_is_said_and_left_as_it_is(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    pools: dict[int, Any] = {0: SimpleNamespace(pool_size=lambda: 1 << 20), 2: object()}
    monkeypatch.setitem(sys.modules, "rmm", module("rmm"))
    monkeypatch.setitem(sys.modules, "rmm.mr", module("rmm.mr", get_per_device_resource=pools.__getitem__))
    (line,) = empty_library_caches().notes
    assert line.what == "1.0 MiB in rmm's pool on cuda:0"
    assert changes_on(0) == []


@pytest.mark.parametrize("any_graph", [False, True])
def test_the_plans_of_cufft_are_cleared_unless_a_graph_may_run_them(
    monkeypatch: pytest.MonkeyPatch, card: None, *, any_graph: bool
) -> None:
    plans = [SimpleNamespace(size=size) for size in (2, 3, 0)]
    for each in plans:
        each.clear = functools.partial(setattr, each, "size", 0)
    torch = module("torch", backends=SimpleNamespace(cuda=SimpleNamespace(cufft_plan_cache=plans)))
    monkeypatch.setattr(library_caches, "loaded", {"torch": torch}.get)
    monkeypatch.setitem(sys.modules, "torch.backends.cuda", module("torch.backends.cuda"))
    monkeypatch.setattr(library_caches, "any_graph_alive", lambda: any_graph)
    said = [line.what for line in empty_library_caches().notes]
    assert said == ([] if any_graph else ["2 plans in torch's cache of cuFFT's plans on cuda:0"])
    assert [each.size for each in plans] == ([2, 3, 0] if any_graph else [0, 3, 0])
    # Once nothing runs any more, it is tried whether they are what is left.
    finding = SimpleNamespace(resource="driver", device="cuda:0")
    leak: Any = SimpleNamespace(key="allocations cuda:0", finding=finding)
    for change in actions_for(leak, 1.0, may_unfreeze=False):
        assert change.code == "torch.backends.cuda.cufft_plan_cache.clear()"
        change.apply()
    assert [each.size for each in plans] == [0, 3, 0]


def test_numba_frees_what_waits_in_the_contexts_that_it_has(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    numba = Numba(monkeypatch)
    empty_library_caches()
    assert (numba.waiting[0], numba.entered, numba.current) == ([], [0], [])


def test_a_library_in_an_odd_state_is_left_alone_and_the_next_gives_back_all_the_same(
    monkeypatch: pytest.MonkeyPatch, card: None
) -> None:
    numba = Numba(monkeypatch)
    for odd in (module("cupy"), None, object(), module("cupy", cuda=SimpleNamespace(Device=threading.Lock))):
        monkeypatch.setitem(sys.modules, "cupy", odd)
        numba.waiting[0].append("array")
        monkeypatch.setitem(sys.modules["numba.cuda"].__dict__, "gpus", [numba.on(0)])
        empty_library_caches()
        assert not numba.waiting[0]


def test_without_a_card_nothing_is_asked_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    cupy = Cupy(monkeypatch)
    monkeypatch.setattr(library_caches, "initialized_torch", lambda: None)
    empty_library_caches()
    assert cupy.kept["pinned"] == 8
    names = {cache.module for cache in LIBRARY_CACHES}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 1))
    monkeypatch.setattr(library_caches, "initialized_torch", lambda: torch)
    empty_library_caches()
    assert not names & sys.modules.keys()


@pytest.mark.nightly
def test_a_test_is_judged_without_what_libraries_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(judgement, "release", lambda rung: asked.append(rung.value) or rung is Rung.EMPTY_CACHE)
    kept = NotMeasured(what="64 B in a pool", why="it keeps it")

    def empty() -> Emptied:
        asked.append("libraries")
        return Emptied((kept,))

    monkeypatch.setattr(judgement, "empty_library_caches", empty)
    held: list[bytes] = []
    watched = Watch(Policy(card=False, settle=0.01, remedies="never"))
    watched.open()
    try:
        watched.begin()
        assert not watched.end().findings
        assert not asked
        watched.begin()
        held.append(b"x" * (96 << 20))
        verdict = watched.end()
        assert verdict.findings
        # And what they kept is said.
        assert kept in verdict.not_measured
    finally:
        watched.close()
    assert asked == ["ipc_collect", "empty_cache", "libraries", "clear_host_cache"]
