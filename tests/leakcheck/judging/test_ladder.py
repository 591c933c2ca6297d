"""The ladder: one rung at a time, no further than needed, and a wait that ends when nothing moves any more."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace

import pytest

from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.judging import ladder as late_release
from lowtide.leakcheck.judging.ladder import (
    LadderStep,
    SettlePolicy,
    climb,
    release,
    wait_for_release,
    wait_until_within,
)
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.objects import listed
from lowtide.probes.objects.listed import frozen_by_program
from tests.loaded_modules import load_instead
from tests.waiting import SleptClock

QUICK = SettlePolicy(stability=0.05, limit=0.5, first_pause=0.001, longest_pause=0.01)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a clock that nobody waits for."""
    clock = SleptClock()
    monkeypatch.setattr(ladder, "time", clock)
    return clock.pauses


class Readings:
    """Gives prepared readings, the last one for ever."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)
        self.taken = 0

    def __call__(self) -> int:
        value = self.values[min(self.taken, len(self.values) - 1)]
        self.taken += 1
        return value


def go(readings: Readings, *, waits: bool = False, rungs: tuple[Rung, ...] = tuple(Rung)) -> list[LadderStep[int]]:
    return climb(
        readings,
        lambda value: value == 0,
        still_waiting=lambda value: waits and value > 0,
        moved=lambda then, now: then != now,
        policy=QUICK,
        rungs=rungs,
    )


def test_what_is_back_at_once_costs_one_reading_and_no_collection() -> None:
    collections: list[str] = []
    heard = lambda phase, info: collections.append(phase)  # noqa: E731
    gc.callbacks.append(heard)
    try:
        steps = go(Readings(0))
    finally:
        gc.callbacks.remove(heard)
    assert [step.rung for step in steps] == [Rung.RAW]
    assert collections == []


def test_what_a_user_waits_for_by_default() -> None:
    policy = SettlePolicy()
    assert (policy.stability, policy.limit, policy.first_pause, policy.longest_pause) == (0.5, 60.0, 0.001, 0.1)


def test_the_first_reading_is_at_once() -> None:
    assert go(Readings(5, 0))[0].seconds == 0


def test_it_stops_at_the_rung_where_everything_is_back() -> None:
    steps = go(Readings(5, 0))
    assert [(step.rung, step.reading) for step in steps] == [(Rung.RAW, 5), (Rung.COLLECT, 0)]


def test_it_climbs_to_the_top_when_nothing_helps_and_passes_over_rungs_without_anything_to_act_on() -> None:
    steps = go(Readings(5), rungs=(Rung.RAW, Rung.COLLECT, Rung.UNFREEZE, Rung.EMPTY_CACHE, Rung.CLEAR_CACHES))
    assert [step.rung for step in steps] == [Rung.RAW, Rung.COLLECT, Rung.CLEAR_CACHES]


def test_only_what_may_come_back_by_itself_is_waited_for() -> None:
    readings = Readings(5, 5)
    go(readings, rungs=(Rung.RAW, Rung.SETTLE))
    assert readings.taken == 1


def test_settling_ends_as_soon_as_it_is_back() -> None:
    readings = Readings(5, 4, 3, 0, 99)
    steps = go(readings, waits=True, rungs=(Rung.RAW, Rung.SETTLE))
    assert [(step.rung, step.reading) for step in steps] == [(Rung.RAW, 5), (Rung.SETTLE, 0)]
    assert readings.taken == 4


def test_while_a_cheap_figure_stands_still_no_reading_is_taken() -> None:
    readings, peeks = Readings(5, 5, 0), Readings(7, 7, 7, 7, 6)
    steps = climb(
        readings,
        lambda value: value == 0,
        still_waiting=lambda value: value > 0,
        moved=lambda then, now: then != now,
        policy=QUICK,
        rungs=(Rung.RAW, Rung.SETTLE),
        peek=peeks,
    )
    assert steps[1].reading == 0
    # At once, after the first look at the figure, and when it had moved.
    assert (readings.taken, peeks.taken) == (3, 5)


def test_where_the_cheap_figure_never_moves_the_last_word_is_a_reading() -> None:
    readings = Readings(5, 5, 3)
    (_, settled) = climb(
        readings,
        lambda value: value == 0,
        still_waiting=lambda value: value > 0,
        moved=lambda then, now: then != now,
        policy=QUICK,
        rungs=(Rung.RAW, Rung.SETTLE),
        peek=lambda: 7,
    )
    assert (settled.reading, readings.taken) == (3, 3)


def test_settling_ends_when_nothing_moves() -> None:
    (_, settled) = go(Readings(5), waits=True, rungs=(Rung.RAW, Rung.SETTLE))
    assert settled.reading == 5
    assert QUICK.stability <= settled.seconds < QUICK.limit


def test_settling_goes_on_while_something_moves_but_not_for_ever() -> None:
    class Counting:
        value = 1_000_000

        def __call__(self) -> int:
            self.value -= 1
            return self.value

    steps = climb(
        Counting(),
        lambda value: value == 0,
        still_waiting=lambda value: True,
        moved=lambda then, now: then != now,
        policy=QUICK,
        rungs=(Rung.RAW, Rung.SETTLE),
    )
    assert steps[1].seconds >= QUICK.limit


def test_rungs_are_in_the_order_of_the_design() -> None:
    assert [rung.value for rung in Rung] == [
        "raw",
        "settle",
        "collect",
        "unfreeze",
        "ipc_collect",
        "empty_cache",
        "clear_caches",
        "reset_compiled",
        "clear_workspaces",
        "clear_host_cache",
    ]
    assert Rung.COLLECT.order < Rung.UNFREEZE.order < Rung.CLEAR_HOST_CACHE.order


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_unfreezing_is_tried_only_where_something_is_frozen() -> None:
    # What Python 3.12 keeps in its permanent generation itself comes back there at every full collection.
    gc.collect()
    assert not release(Rung.UNFREEZE)
    gc.freeze()
    assert release(Rung.UNFREEZE)
    assert frozen_by_program(gc.get_freeze_count()) == 0


def test_clearing_caches_clears_every_functools_cache() -> None:
    @functools.lru_cache(maxsize=8)
    def cached(key: int) -> list[int]:
        return [key]

    cached(1)
    assert release(Rung.CLEAR_CACHES)
    assert cached.cache_info().currsize == 0


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def counting(counters: Mapping[str, Mapping[str, int]]) -> ModuleType:
    """What torch.compile counts in."""
    return module("torch._dynamo.utils", counters=counters)


class Card:
    """Stands for torch with a card: notes what is asked of it, and of the collector."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool = True, compiled: int = 0) -> None:
        self.asked: list[str] = []
        note = lambda name: lambda *_: self.asked.append(name)  # noqa: E731
        cuda = SimpleNamespace(
            is_initialized=lambda: is_initialized, empty_cache=note("empty_cache"), ipc_collect=note("ipc_collect")
        )
        native = SimpleNamespace(
            _cuda_clearCublasWorkspaces=note("clear_workspaces"), _host_emptyCache=note("empty_host_cache")
        )
        load_instead(monkeypatch, "torch", module("torch", cuda=cuda, _C=native))
        load_instead(monkeypatch, "torch._dynamo", module("torch._dynamo", reset=note("reset")))
        load_instead(monkeypatch, "torch._dynamo.utils", counting({"frames": {"total": compiled}}))
        monkeypatch.setattr(ladder, "gc", SimpleNamespace(collect=note("collect"), get_objects=list))


@pytest.mark.parametrize(
    ("rung", "asked"),
    [
        (Rung.COLLECT, ["collect"]),
        (Rung.IPC_COLLECT, ["ipc_collect"]),
        (Rung.EMPTY_CACHE, ["empty_cache"]),
        (Rung.CLEAR_CACHES, ["collect"]),
        (Rung.RESET_COMPILED, ["reset", "collect", "empty_cache"]),
        (Rung.CLEAR_WORKSPACES, ["clear_workspaces", "empty_cache"]),
        (Rung.CLEAR_HOST_CACHE, ["empty_host_cache"]),
    ],
)
def test_each_rung_releases_one_kind_on_a_card(rung: Rung, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, compiled=1)
    monkeypatch.setattr(ladder, "any_exported", lambda: True)
    assert release(rung)
    assert card.asked == asked


@pytest.mark.parametrize(
    ("rung", "asked"),
    [
        (Rung.IPC_COLLECT, []),
        (Rung.EMPTY_CACHE, []),
        (Rung.CLEAR_WORKSPACES, []),
        (Rung.RESET_COMPILED, []),
        (Rung.SETTLE, []),
    ],
)
def test_a_card_that_nobody_uses_is_not_woken(rung: Rung, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, is_initialized=False)
    assert not release(rung)
    assert card.asked == asked


def test_a_process_that_has_exported_nothing_has_nothing_to_collect_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    monkeypatch.setattr(ladder, "any_exported", lambda: False)
    assert not release(Rung.IPC_COLLECT)
    assert card.asked == []


def test_what_was_compiled_is_dropped_without_a_card_too(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, is_initialized=False, compiled=3)
    assert release(Rung.RESET_COMPILED)
    assert card.asked == ["reset", "collect"]


@pytest.mark.parametrize(("is_glibc", "on_card"), [(True, False), (False, True), (False, False)])
def test_the_heap_of_the_host_is_trimmed_where_there_is_glibc(
    is_glibc: bool, on_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, is_initialized=on_card)
    trimmed: list[int] = []
    library = SimpleNamespace(**({"malloc_trim": trimmed.append} if is_glibc else {}))
    monkeypatch.setattr(ladder, "_LIBRARY", library)
    assert release(Rung.CLEAR_HOST_CACHE) is (is_glibc or on_card)
    assert trimmed == [0] * is_glibc
    assert card.asked == ["empty_host_cache"] * on_card


def test_unfreezing_collects_what_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    heap = SimpleNamespace(
        unfreeze=lambda: asked.append("unfreeze"),
        collect=lambda: asked.append("collect"),
    )
    monkeypatch.setattr(ladder, "gc", heap)
    monkeypatch.setattr(listed, "_frozen", lambda most: (2001, 1, 2))
    assert release(Rung.UNFREEZE)
    assert asked == ["unfreeze", "collect"]


def test_what_the_interpreter_itself_keeps_from_the_collector_is_not_unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "gc", SimpleNamespace())
    monkeypatch.setattr(listed, "_frozen", lambda most: (375, 1, 2))
    assert not release(Rung.UNFREEZE)


@pytest.mark.parametrize("counters", [{}, {"frames": {}}, {"frames": {"total": 0}}])
def test_what_has_counted_nothing_has_compiled_nothing(
    counters: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_instead(monkeypatch, "torch._dynamo.utils", counting(counters))
    assert not ladder.compiled_anything()


def wait_in_vain(policy: SettlePolicy, peek: Callable[[], object] | None = None) -> None:
    climb(
        Readings(5),
        lambda value: value == 0,
        still_waiting=lambda value: True,
        moved=lambda then, now: False,
        policy=policy,
        peek=peek,
        rungs=(Rung.RAW, Rung.SETTLE),
    )


@pytest.mark.parametrize(("stability", "limit", "ends"), [(1.0, 10.0, 1.0), (10.0, 1.0, 1.0)])
@pytest.mark.parametrize("peek", [None, lambda: 5])
def test_a_wait_ends_when_all_stands_still_or_at_its_limit(
    stability: float, limit: float, ends: float, peek: Callable[[], object] | None, pauses: list[float]
) -> None:
    policy = SettlePolicy(stability=stability, limit=limit, first_pause=0.1, longest_pause=0.1)
    wait_in_vain(policy, peek)
    assert ends <= sum(pauses) <= ends + 0.3


def test_pauses_grow_up_to_the_longest(pauses: list[float]) -> None:
    policy = SettlePolicy(stability=1.0, limit=10.0, first_pause=0.1, longest_pause=0.5)
    wait_in_vain(policy)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.5])


class Chained:
    """A link of a chain that is held by a registry for as long as the link before it lives, and holds itself."""

    def __init__(self, registry: weakref.WeakKeyDictionary[Chained, Chained], before: Chained | None) -> None:
        self.own = self
        if before is not None:
            registry[before] = self


def test_a_collection_is_repeated_until_it_finds_nothing() -> None:
    registry: weakref.WeakKeyDictionary[Chained, Chained] = weakref.WeakKeyDictionary()
    first = Chained(registry, None)
    last = Chained(registry, Chained(registry, first))
    # So that only a full collection sees them.
    gc.collect()
    end = weakref.ref(last)
    del first, last
    assert release(Rung.COLLECT)
    assert end() is None


def test_collecting_ends_as_soon_as_it_is_enough() -> None:
    asked: list[object] = []
    garbage: list[object] = []
    garbage.append(garbage)
    del garbage
    ladder.collect(lambda: asked.append(1) is None)
    assert asked == [1]


def test_what_asking_leaves_in_cycles_is_no_reason_to_collect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[int] = []

    def collect(generation: int = 2, collect_all: Callable[[int], int] = gc.collect) -> int:
        full.extend([generation] if generation == 2 else [])
        return collect_all(generation)

    def ask() -> bool:
        knot: list[object] = []
        knot.append(knot)
        return False

    ask()
    monkeypatch.setattr(ladder, "gc", SimpleNamespace(collect=collect))
    ladder.collect(ask)
    assert len(full) == 2


MIB = 1 << 20


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleptClock()
    for waiting in (ladder, late_release):
        monkeypatch.setattr(waiting, "time", clock)


class Driver:
    """Counts prepared figures in MiB, the last one for ever."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.asked = 0

    def __call__(self) -> int:
        count = self.counts[min(self.asked, len(self.counts) - 1)]
        self.asked += 1
        return count * MIB


@pytest.mark.parametrize("left", [400, 408])
def test_what_is_back_at_once_is_not_late(left: int) -> None:
    driver = Driver(left)
    assert wait_for_release(driver, 1000 * MIB, 600 * MIB, QUICK) is None
    assert driver.asked == 1


@pytest.mark.parametrize("left", [400, 408])
def test_what_comes_late_is_reported_with_bytes_and_seconds(left: int) -> None:
    late = wait_for_release(Driver(1000, 1000, 700, left), 1000 * MIB, 600 * MIB, QUICK)
    assert late is not None
    assert late.bytes == (1000 - left) * MIB
    # Three pauses, of which each is twice the one before it.
    assert late.seconds == pytest.approx(0.007)


def test_only_what_came_while_it_was_waited_for_is_reported() -> None:
    late = wait_for_release(Driver(700, 400), 1000 * MIB, 600 * MIB, QUICK)
    assert late is not None
    assert late.bytes == 300 * MIB


@pytest.mark.parametrize("counts", [(1000,), (1000, 700, 409)])
def test_what_does_not_come_is_reported_by_others(counts: tuple[int, ...]) -> None:
    driver = Driver(*counts)
    assert wait_for_release(driver, 1000 * MIB, 600 * MIB, QUICK) is None
    assert driver.asked > len(counts)


@pytest.mark.parametrize(("counts", "left"), [((64,), 64), ((65, 65, 64), 64), ((1000, 700, 65), 65), ((10,), 10)])
def test_what_a_driver_counts_is_waited_for_until_it_is_allowed(counts: tuple[int, ...], left: int) -> None:
    driver = Driver(*counts)
    assert wait_until_within(driver, 64 * MIB, QUICK) == left * MIB
    assert (driver.asked > len(counts)) == (left > 64)
