"""Libraries beside torch give back what they only keep, if they are in use on a card; nothing else is touched."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowtide.leakcheck.libraries import library_caches
from lowtide.leakcheck.libraries.library_caches import LIBRARY_CACHES, empty_library_caches
from lowtide.leakcheck.resources.rule import Rung
from lowtide.leakcheck.watching import watch
from lowtide.leakcheck.watching.verdict import Policy
from lowtide.leakcheck.watching.watch import Watch

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
        pool = SimpleNamespace(free_all_blocks=lambda: self.kept.update({self.current: 0}))
        pinned = SimpleNamespace(free_all_blocks=lambda: self.kept.update({"pinned": 0}))
        fake = module(
            "cupy",
            cuda=SimpleNamespace(Device=self.on),
            get_default_memory_pool=lambda: pool,
            get_default_pinned_memory_pool=lambda: pinned,
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)

    @contextlib.contextmanager
    def on(self, card: int) -> Iterator[None]:
        before, self.current = self.current, card
        yield
        self.current = before


class Numba:
    """Stands for numba: a list of what is to be freed for each context, which takes a current context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = {0: ["array"], 1: []}
        self.streams = ["stream"]
        self.entered: list[int] = []
        self.current: list[int] = []
        # Arrays wait with the memory manager of a context, its streams and events with itself.
        streams = SimpleNamespace(clear=lambda: self.streams.clear())
        arrays = SimpleNamespace(deallocations=SimpleNamespace(clear=self.clear))
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
    empty_library_caches()
    assert cupy.kept == {0: 0, 1: 64, 2: 0, "pinned": 0}
    assert cupy.current == 0


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
    monkeypatch.setattr(library_caches, "initialized_torch", lambda: SimpleNamespace())
    empty_library_caches()
    assert not names & sys.modules.keys()


def test_a_test_is_judged_without_what_libraries_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(watch, "release", lambda rung: asked.append(rung.value) or rung is Rung.EMPTY_CACHE)
    monkeypatch.setattr(watch, "empty_library_caches", lambda: asked.append("libraries"))
    done = threading.Event()
    watched = Watch(Policy(card=False, settle=0.01, remedies="never"))
    watched.open()
    try:
        watched.begin()
        assert not watched.end().findings
        assert not asked
        watched.begin()
        threading.Thread(target=done.wait, daemon=True).start()
        assert watched.end().findings
    finally:
        watched.close()
        done.set()
    assert asked == ["empty_cache", "libraries", "clear_host_cache"]
