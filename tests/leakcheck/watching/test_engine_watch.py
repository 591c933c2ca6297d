"""Block tables that lead to pages a sleep dropped: found when the wake ends, unless they were written again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lowtide
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.watching.check import LeakCheck
from lowtide.leakcheck.watching.engine_watch import SleepWatch
from lowtide.probes.stages import listening
from lowtide.reports.schema import Finding

pytestmark = pytest.mark.no_leakcheck(reason="what dangles here is found by the checker around it, too")

PAGES = 64 << 10


class Listener:
    """Hands stages on."""

    def __init__(self) -> None:
        self.watch = SleepWatch()
        self.stage_entered = self.watch.entered
        self.stage_left = self.watch.left


class Engine:
    """Has its cache in an arena, and a table with an address in it; a wake makes a new arena."""

    def __init__(self) -> None:
        # Its addresses stay taken: the new arena has others.
        self.old: Arena | None = None
        self.cache = Arena("kv_cache", PAGES, CpuPages())
        self.weights = Arena("weights", PAGES, CpuPages())
        for arena in (self.cache, self.weights):
            arena.map_to(PAGES)
        self.table = torch.zeros(4, dtype=torch.int64)
        self.write()

    def write(self) -> None:
        self.table[1] = self.cache.bytes_at(0, 1).data_ptr() + 4096

    def sleep(self) -> None:
        self.cache.unmap_to(0)
        self.weights.unmap_to(0)

    def wake(self, *, writes: bool) -> None:
        self.renew()
        self.weights.map_to(PAGES)
        if writes:
            self.write()

    def renew(self) -> None:
        self.old, self.cache = self.cache, Arena("kv_cache", PAGES, CpuPages())
        self.cache.map_to(PAGES)

    def close(self) -> None:
        for arena in (self.old, self.cache):
            if arena is not None:
                arena.close()
        self.weights.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    with listening(listener):
        yield listener


def live(engine: Engine, *, writes: bool) -> None:
    with lowtide.stage("sleep"):
        engine.sleep()
    with lowtide.stage("wake"):
        engine.wake(writes=writes)


def check(finding: Finding, engine: Engine) -> None:
    assert (finding.resource, finding.cause) == ("pointers", "not-restored")
    assert (finding.stage, finding.device) == ("wake", "cpu")
    assert (finding.bytes, finding.count) == (8, 1)
    where = f"{int(engine.table[1]):#x} at byte 8, which was in arena 'kv_cache' when the sleep began"
    assert finding.message.endswith(where)
    assert finding.advice == "write the addresses again in wake, once the memory that they lead to is mapped"


def test_a_table_that_leads_to_a_dropped_arena_is_found_with_who_holds_it(engine: Engine, listener: Listener) -> None:
    live(engine, writes=False)
    (finding,) = listener.watch.take()
    check(finding, engine)
    assert (finding.holder or "").endswith(".table")
    assert listener.watch.take() == ()


def test_a_table_that_is_written_again_is_right(engine: Engine, listener: Listener) -> None:
    live(engine, writes=True)
    assert listener.watch.take() == ()


def test_pages_that_come_back_at_their_addresses_may_be_pointed_to(engine: Engine, listener: Listener) -> None:
    with lowtide.stage("sleep"):
        engine.cache.unmap_to(0)
    assert listener.watch.take() == ()
    with lowtide.stage("wake_up"):
        engine.cache.map_to(PAGES)
    assert listener.watch.take() == ()


@pytest.mark.nightly
def test_what_sleeps_still_is_looked_at_after_the_next_wake(engine: Engine, listener: Listener) -> None:
    with lowtide.stage("sleep"):
        engine.cache.unmap_to(0)
        engine.weights.unmap_to(0)
    with lowtide.stage("wake"):
        engine.weights.map_to(PAGES)
    assert listener.watch.take() == ()
    with lowtide.stage("wake"):
        engine.renew()
    (finding,) = listener.watch.take()
    check(finding, engine)


def test_an_engine_s_own_marks_within_a_test_s_are_the_same_sleep(engine: Engine, listener: Listener) -> None:
    with lowtide.stage("sleep"), lowtide.stage("sleep"):
        engine.sleep()
    with lowtide.stage("wake"):
        with lowtide.stage("wake"):
            engine.wake(writes=False)
        engine.write()
    assert listener.watch.take() == ()


@pytest.mark.nightly
def test_a_wake_that_raised_may_be_made_again(engine: Engine, listener: Listener) -> None:
    with lowtide.stage("sleep"):
        engine.sleep()

    def wake_half() -> None:
        engine.renew()
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"), lowtide.stage("wake"):
        wake_half()
    assert listener.watch.take() == ()
    with lowtide.stage("wake"):
        pass
    (finding,) = listener.watch.take()
    check(finding, engine)


@pytest.mark.parametrize("writes", [True, False])
def test_a_block_is_judged_by_it(writes: bool) -> None:
    engine = Engine()
    with LeakCheck() as block:
        live(engine, writes=writes)
    pointers = [item.resource for item in block.report.subjects[0].findings if item.resource == "pointers"]
    assert pointers == ([] if writes else ["pointers"])
    engine.close()
