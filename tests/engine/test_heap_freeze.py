"""The engine's `gc.freeze()`: its pair, other engines beside it, and a heap that somebody else froze."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lowtide.engine import EngineConfig, LLMEngine
from lowtide.engine.worker import HeapFreeze


class Thing:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()  # which, since Python 3.12, freezes what is immortal again


def test_it_freezes_and_thaws() -> None:
    before = gc.get_freeze_count()
    heap = HeapFreeze()
    heap.freeze()
    assert gc.get_freeze_count() > 10_000
    heap.thaw()
    assert gc.get_freeze_count() <= before


def test_garbage_is_collected_before_and_after() -> None:
    heap = HeapFreeze()
    early = weakref.ref(Thing())
    heap.freeze()
    assert early() is None
    thing = Thing()
    late = weakref.ref(thing)
    gc.freeze()
    del thing
    heap.thaw()
    assert late() is None


def test_of_two_engines_the_first_that_ends_leaves_the_other_s_heap_frozen_and_keeps_no_garbage() -> None:
    first, second = HeapFreeze(), HeapFreeze()
    first.freeze()
    thing = Thing()
    late = weakref.ref(thing)
    second.freeze()
    del thing
    second.thaw()
    assert late() is None
    assert gc.get_freeze_count() > 10_000
    first.thaw()
    assert gc.get_freeze_count() < 10_000


def test_one_that_vanished_without_its_pair_does_not_count() -> None:
    forgotten, other = HeapFreeze(), HeapFreeze()
    forgotten.freeze()
    other.freeze()
    del forgotten
    other.thaw()
    assert gc.get_freeze_count() < 10_000


def test_a_heap_that_the_program_froze_stays_as_it_is() -> None:
    gc.freeze()
    thing = Thing()
    assert gc.is_tracked(thing)
    before = gc.get_freeze_count()
    heap = HeapFreeze()
    heap.freeze()
    # Other threads may have let go of some that were frozen.
    assert before - 100 <= gc.get_freeze_count() <= before
    heap.thaw()
    assert before - 100 <= gc.get_freeze_count() <= before


def test_a_second_thaw_does_nothing() -> None:
    heap = HeapFreeze()
    heap.freeze()
    heap.thaw()
    gc.freeze()
    before = gc.get_freeze_count()
    heap.thaw()
    assert before - 100 <= gc.get_freeze_count() <= before


def test_an_engine_freezes_from_create_to_shutdown() -> None:
    before = gc.get_freeze_count()
    engine = LLMEngine(EngineConfig(kv_cache_bytes=1 << 20, freeze_heap=True))
    engine.create()
    assert gc.get_freeze_count() > 10_000
    engine.shutdown()
    assert gc.get_freeze_count() <= before


def test_an_engine_does_not_freeze_unless_it_is_asked_to() -> None:
    before = gc.get_freeze_count()
    with LLMEngine(EngineConfig(kv_cache_bytes=1 << 20)):
        assert gc.get_freeze_count() == before
