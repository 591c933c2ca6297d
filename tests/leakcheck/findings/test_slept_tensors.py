"""What a sleep gives back and a wake makes: an engine that holds its memory twice, or never let go, and clean twins."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.findings import life_findings
from lowtide.leakcheck.findings.life_findings import ENGINE, SleptTensors, not_judged
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.judging.storages import live_keys
from lowtide.probes.memory.ranges import Range
from lowtide.reports.schema import Finding

pytestmark = pytest.mark.nightly

MIB = 1 << 20


def memory(mib: int = 8) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8)


class Engine:
    """Drops its cache in a sleep and makes it again in the wake."""

    def __init__(self) -> None:
        self.weights, self.kv = memory(2), memory()

    def sleep(self) -> None:
        del self.kv

    def wake(self) -> None:
        self.kv = memory()


class KeepsAView(Engine):
    def sleep(self) -> None:
        self.spare = self.kv[:100]
        super().sleep()


class KeepsInAList(Engine):
    def sleep(self) -> None:
        self.kept = [self.kv]
        super().sleep()


class MakesTwice(Engine):
    def wake(self) -> None:
        super().wake()
        self.kv_of_graphs = memory()


class LeavesItToTheCollector(Engine):
    def sleep(self) -> None:
        cycle: list[object] = [self.kv]
        cycle.append(cycle)
        super().sleep()


class MovesIt(Engine):
    """Its weights go to a new storage in the sleep, and back into another one."""

    def sleep(self) -> None:
        super().sleep()
        self.weights = self.weights.clone()

    def wake(self) -> None:
        super().wake()
        self.weights = self.weights.clone()


class Grows(Engine):
    """Wakes with a cache of another size."""

    def wake(self) -> None:
        self.kv = memory(12)


def after(engine: Engine, slept: SleptTensors, sleeps: int = 1) -> list[Finding]:
    found: list[Finding] = []
    for _ in range(sleeps):
        slept.begin("sleep(1)")
        engine.sleep()
        slept.end()
        between = memory(24)
        slept.begin("wake")
        engine.wake()
        found += slept.more_awake("wake", lambda: Context(roots=[(ENGINE, engine)], living=True))
        del between
    return found


@pytest.mark.parametrize(
    ("make", "holder"),
    [(KeepsAView, "engine.spare"), (KeepsInAList, "engine.kept[0]"), (MakesTwice, "engine.kv")],
)
def test_what_is_held_twice_after_a_wake_is_told_with_its_holder(make: type[Engine], holder: str) -> None:
    (finding,) = after(make(), SleptTensors("cpu"))
    assert (finding.resource, finding.stage, finding.device, finding.bytes) == ("tensors", "wake", "cpu", 8 * MIB)
    assert finding.holder == holder
    assert "there are 8.0 MiB more on cpu after wake than before the sleep" in finding.message


def test_a_cache_that_comes_back_larger_is_told_by_how_much() -> None:
    (finding,) = after(Grows(), SleptTensors("cpu"))
    assert (finding.bytes, finding.holder) == (4 * MIB, "engine.kv")


@pytest.mark.parametrize("make", [Engine, LeavesItToTheCollector, MovesIt])
def test_what_was_there_before_is_there_again_and_what_others_make_meanwhile_is_theirs(make: type[Engine]) -> None:
    assert after(make(), SleptTensors("cpu"), sleeps=2) == []


def test_a_wake_that_failed_leaves_what_it_made_to_the_next_one() -> None:
    engine, slept = Engine(), SleptTensors("cpu")
    slept.begin("sleep")
    engine.sleep()
    slept.begin("wake")
    left = memory()
    slept.begin("wake")
    engine.wake()
    (finding,) = slept.more_awake("wake", lambda: Context(roots=[(ENGINE, [left])], living=True))
    assert finding.bytes == 8 * MIB
    assert left.numel()


@pytest.mark.parametrize(("make", "kept"), [(Engine, None), (KeepsAView, (10 * MIB, 10 * MIB))])
def test_of_a_sleep_that_gives_back_less_than_half_it_is_known_how_much(
    make: type[Engine], kept: tuple[int, int] | None
) -> None:
    # What was there before the engine is none of it.
    there = memory(64)
    slept = SleptTensors("cpu", functools.partial(frozenset, live_keys()))
    engine = make()
    slept.begin("sleep(1)")
    engine.sleep()
    del there
    assert slept.kept_asleep() == kept
    if kept is not None:
        found = slept.explain_kept("sleep(1)", Context(roots=[(ENGINE, engine)], living=True))
        assert sorted(str(finding.holder) for finding in found) == ["engine.spare", "engine.weights"]


def test_where_nobody_says_what_a_sleep_returns_that_is_said_with_the_bytes() -> None:
    missing = not_judged("sleep(1)", (12 * MIB, 12 * MIB), "cpu", "pid 7 (core)")
    assert missing.what == "what sleep(1) gives back on cpu in pid 7 (core): 0 B of 12.0 MiB came back"
    assert missing.why.startswith("nobody says how much it should be")


@pytest.mark.parametrize("beside", [True, False])
def test_an_engine_with_arenas_is_looked_at_where_that_is_asked_for(beside: bool) -> None:
    slept = SleptTensors("cpu", beside_arenas=beside)
    without = after(KeepsAView(), slept)
    arena = Arena("kv_cache", MIB, CpuPages())
    try:
        assert [len(found) for found in (without, after(KeepsAView(), slept))] == [1, beside]
    finally:
        arena.close()


def test_nothing_is_read_of_other_stages_and_of_a_wake_without_a_sleep() -> None:
    slept = SleptTensors("cpu")
    for stage in ("create", "wake", "infer"):
        slept.begin(stage)
        slept.end()
        assert slept.kept_asleep() is None
        assert slept.more_awake(stage, Context) == []


class Request:
    def __init__(self, engine: Engine) -> None:
        self.data = self
        self.kv = engine.kv


class LeavesRequests(Engine):
    def sleep(self) -> None:
        Request(self)
        super().sleep()


def test_what_only_the_collector_gives_back_of_a_sleep_is_told_with_its_cycle() -> None:
    slept, engine = SleptTensors("cpu"), LeavesRequests()
    slept.begin("sleep")
    engine.sleep()
    (finding,) = slept.only_collected("sleep")
    assert (finding.bytes, finding.cause, finding.holder, finding.stage) == (8 * MIB, "cycle", "Request.data", "sleep")
    assert finding.message == (
        "8.0 MiB on cpu came back only when the collector ran, at the end of sleep, in a cycle through Request.data"
    )
    assert finding.advice == "break the cycle in teardown: set Request.data to None"
    assert slept.only_collected("sleep") == []


@pytest.mark.parametrize("kind", [Engine, KeepsInAList])
def test_of_what_a_sleep_gives_back_at_once_or_keeps_nothing_is_said(kind: type[Engine]) -> None:
    slept, engine = SleptTensors("cpu"), kind()
    slept.begin("sleep")
    engine.sleep()
    assert slept.only_collected("sleep") == []


OF_MODULE: list[Engine] = []


def sleep_of_nothing() -> tuple[list[Finding], tuple[int, int] | None, int]:
    """What is said of a sleep that gives nothing back, and how often the collector goes through the heap for that."""
    slept = SleptTensors("cpu")
    slept.begin("sleep")
    before = gc.get_stats()[2]["collections"]
    found, sizes = slept.only_collected("sleep"), slept.kept_asleep()
    return found, sizes, gc.get_stats()[2]["collections"] - before


def test_what_a_running_function_leads_to_is_held_and_nothing_is_collected_to_see_it() -> None:
    gc.collect()
    engine = [{"engine": Engine()}]
    found, sizes, collections = sleep_of_nothing()
    assert (found, collections) == ([], 0)
    assert sizes is not None
    assert min(sizes) >= 10 * MIB
    del engine


def test_what_no_running_function_leads_to_may_be_garbage_and_is_collected_for() -> None:
    OF_MODULE.append(Engine())
    try:
        found, sizes, collections = sleep_of_nothing()
    finally:
        OF_MODULE.clear()
    assert (found, collections > 0) == ([], True)
    assert sizes is not None
    assert min(sizes) >= 10 * MIB


class Unmaps(Engine):
    """Keeps its tensors in a sleep, without memory behind them, as vLLM's and SGLang's do; and wakes with the same."""

    asleep: Sequence[Range] = ()

    def sleep(self) -> None:
        self.asleep = [(each.data_ptr(), each.nbytes) for each in (self.weights, self.kv)]

    def wake(self) -> None:
        self.asleep = ()


class UnmapsLittle(Unmaps):
    def sleep(self) -> None:
        self.asleep = [(self.weights.data_ptr(), self.weights.nbytes)]


@pytest.mark.parametrize(("make", "stays"), [(Unmaps, None), (UnmapsLittle, 8 * MIB)])
def test_tensors_without_memory_were_given_back(
    monkeypatch: pytest.MonkeyPatch, make: type[Unmaps], stays: int | None
) -> None:
    engine = make()
    monkeypatch.setattr(life_findings, "asleep_on", lambda device: engine.asleep)
    slept = SleptTensors("cpu")
    for _ in range(2):
        slept.begin("sleep(1)")
        engine.sleep()
        kept = slept.kept_asleep()
        assert (None if kept is None else kept[1] // MIB * MIB) == stays
        slept.begin("wake")
        engine.wake()
        assert slept.more_awake("wake", lambda: Context(roots=[(ENGINE, engine)], living=True)) == []
