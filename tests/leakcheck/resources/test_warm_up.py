"""A card is used once before a test uses it, what that takes is known; one used without torch is not called clean."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lowtide.leakcheck.resources import first_use as module
from lowtide.leakcheck.resources.first_use import BlasHandles, CardsWithoutTorch, Trial, WarmUp
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.device import allocations
from lowtide.probes.device.allocations import cards_with_contexts
from lowtide.probes.host.counters import Counters
from lowtide.reports.outcomes import judged_as


class Calls:
    """Counts instead of warming up."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, use: Callable[[], None]) -> None:
        self.count += 1


def queued() -> int:
    return len(torch.cuda._queued_calls)


def test_nothing_is_done_before_torch_initialises_a_card() -> None:
    calls, before = Calls(), queued()
    warm_up = WarmUp(BlasHandles(), calls)
    warm_up.queue()
    warm_up.queue()
    assert (calls.count, queued()) == (0, before + 1)
    torch.cuda._queued_calls[-1][0]()
    assert (calls.count, warm_up.is_done) == (1, True)
    warm_up.close()
    assert queued() == before


def test_it_is_done_once() -> None:
    calls = Calls()
    warm_up = WarmUp(BlasHandles(), calls)
    warm_up.now()
    warm_up.now()
    warm_up.queue()
    assert calls.count == 1


def test_another_thread_that_initialises_a_card_leaves_it_for_later() -> None:
    calls = Calls()
    warm_up = WarmUp(BlasHandles(), calls)
    thread = threading.Thread(target=warm_up.now)
    thread.start()
    thread.join()
    assert (calls.count, warm_up.is_done) == (0, False)


def test_torch_keeps_a_queued_call_but_not_who_queued_it() -> None:
    warm_up = WarmUp(BlasHandles(), Calls())
    warm_up.queue()
    call, alive = torch.cuda._queued_calls[-1][0], weakref.ref(warm_up)
    entry = torch.cuda._queued_calls.pop()
    del warm_up
    gc.collect()
    assert alive() is None
    call()
    del entry


def test_a_further_card_takes_what_the_first_one_took_where_it_was_in_use_before() -> None:
    handles = BlasHandles()
    assert handles.sizes(1) == ()
    handles.learn(0, [], [(0x1000, 64 * MIB), (0x9000000, 1024)])
    handles.learn(1, [(0x1000, 64 * MIB)], [(0x1000, 64 * MIB)])
    assert handles.sizes(1) == handles.sizes(0) == (64 * MIB, 1024)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_a_card_that_cannot_be_used_raises_nothing_in_the_program_and_is_said() -> None:
    warm_up = WarmUp(BlasHandles(), lambda use: use())
    warm_up.now()
    (said,) = warm_up.not_measured()
    assert said.what == "what a card's first use takes"
    assert "NVIDIA" in said.why or "CUDA" in said.why
    assert warm_up.not_measured() == ()


MIB = 1 << 20
HANDLE = (64 * MIB, 131072)
"""What one takes: a large part, and a small one."""


@dataclass
class FakeCard:
    """A card on which each thread that multiplies holds a handle while it runs."""

    listed: dict[int, int] = field(default_factory=dict)
    idle: int = 0
    broken: bool = False

    def take(self, *sizes: int) -> dict[str, int]:
        """Allocations, as the cards' readings name them."""
        found = {}
        for size in sizes:
            address = 0x1000 * (len(self.listed) + 1)
            self.listed[address] = size
            found[f"allocation at {address:#x}"] = size
        return found

    def threads(self, count: int) -> dict[str, int]:
        """What so many threads at once take anew."""
        anew, self.idle = max(0, count - self.idle), max(self.idle, count)
        return self.take(*HANDLE * anew)

    def use_at_once(self, index: int, count: int) -> bool:
        self.threads(count)
        return not self.broken

    def read(self, index: int) -> tuple[tuple[int, int], ...]:
        return tuple(self.listed.items())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    fake = FakeCard()
    monkeypatch.setattr(module, "read_allocations", fake.read)
    monkeypatch.setattr(module, "read_segments", lambda index: [])
    monkeypatch.setattr(module, "_use_at_once", fake.use_at_once)
    return fake


@pytest.fixture
def handles(card: FakeCard) -> BlasHandles:
    """That have seen the main thread's handle taken."""
    handles = BlasHandles()
    before = card.read(0)
    card.take(*HANDLE)
    handles.learn(0, before, card.read(0))
    return handles


def test_the_handles_of_threads_that_ended_are_kept(card: FakeCard, handles: BlasHandles) -> None:
    items = card.threads(3)
    assert handles.tried(0, items).kept == set(items)


def test_an_allocation_of_a_handle_s_size_that_no_thread_can_use_is_none(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    assert handles.tried(0, items).kept == set()


def test_of_a_handle_and_a_leak_of_its_size_one_is_kept(card: FakeCard, handles: BlasHandles) -> None:
    items = {**card.threads(1), **card.take(64 * MIB)}
    kept = handles.tried(0, items).kept
    assert sorted(items[name] for name in kept) == sorted(HANDLE)


def test_idle_handles_of_earlier_tests_excuse_no_later_leak(card: FakeCard, handles: BlasHandles) -> None:
    assert handles.tried(0, card.threads(2)).kept
    assert handles.tried(0, card.take(64 * MIB)).kept == set()


def test_where_no_handle_was_seen_nothing_is_tried(card: FakeCard) -> None:
    assert BlasHandles().tried(0, card.threads(1)) == Trial()


def test_a_trial_that_fails_proves_nothing(card: FakeCard, handles: BlasHandles) -> None:
    items = card.threads(1)
    card.broken = True
    assert handles.tried(0, items).kept == set()


def test_what_a_trial_takes_itself_is_reported(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    there = set(card.read(0))
    trial = handles.tried(0, items)
    assert trial == Trial(taken=tuple(entry for entry in card.read(0) if entry not in there))
    assert sorted(size for _, size in trial.taken) == sorted(HANDLE)


def test_what_a_trial_that_fails_has_taken_is_reported(card: FakeCard, handles: BlasHandles) -> None:
    items = card.take(64 * MIB)
    card.broken = True
    assert sorted(size for _, size in handles.tried(0, items).taken) == sorted(HANDLE)


class Driver:
    """Stands for libcuda."""

    def __init__(self, *, initialised: bool = True, primary: tuple[bool, ...] = (), current: int | None = None) -> None:
        self.initialised, self.primary, self.current = initialised, primary, current
        self.device = 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.primary)
        return 0 if self.initialised else 3

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:
        active._obj.value = self.primary[device.value]
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        if self.current is None:
            return 201
        device._obj.value = self.current
        return 0


@pytest.mark.parametrize(
    ("driver", "cards"),
    [
        (Driver(primary=(False, True)), [1]),
        (Driver(primary=(False, False), current=1), [1]),
        (Driver(primary=(True, True), current=0), [0, 1]),
        (Driver(primary=(False, False)), []),
        (Driver(primary=(True,), initialised=False), []),
    ],
)
def test_a_context_is_seen_whoever_made_it(driver: Driver, cards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: modes.append(mode) or driver)
    assert cards_with_contexts() == cards
    assert [bool(mode & os.RTLD_NOLOAD) for mode in modes] == [True]


def test_where_the_driver_is_not_loaded_there_is_none() -> None:
    assert allocations.cards_with_contexts() == []


def reading(*targets: str) -> Counters:
    return Counters({"file-descriptors": {f"{n} -> {target}": 1 for n, target in enumerate(targets)}}, {}, {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process has a context on one card; notes each question."""
    asked: list[int] = []
    monkeypatch.setattr(module, "cards_with_contexts", lambda: asked.append(1) or [0])
    return asked


def test_what_was_taken_without_torch_makes_no_test_clean(asked: list[int]) -> None:
    reported = CardsWithoutTorch().not_measured(reading("/dev/null", "/dev/nvidia-uvm"))
    outcome, reason = judged_as("clean", reported)
    assert outcome == "unsupported"
    assert reason.startswith("not judged: memory on cuda:0 that was taken without torch; call torch.cuda.init()")


def test_nobody_is_asked_where_no_driver_is_open_or_torch_has_begun(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = CardsWithoutTorch()
    assert seen.not_measured(reading("/dev/null", "pipe:[1]", "/home/dev/nvidia")) == ()
    monkeypatch.setattr(module, "initialized_torch", lambda: object())
    assert seen.not_measured(reading("/dev/nvidia0")) == ()
    assert not asked


def test_a_driver_that_was_asked_for_its_cards_only_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cards_with_contexts", list)
    assert CardsWithoutTorch().not_measured(reading("/dev/nvidiactl")) == ()


@pytest.mark.parametrize(("card", "warm_up"), [(True, "first-use"), (True, "off"), (False, "off")])
def test_a_watch_says_it_and_has_torch_begin_before_the_next_test(
    card: bool, warm_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    cards: list[int] = []
    monkeypatch.setattr(CardsWithoutTorch, "cards", lambda self, now: cards)
    watch = Watch(Policy(card=card, warm_up=warm_up, settle=0.01))
    warmed: list[int] = []
    monkeypatch.setattr(watch._warm_up, "now", lambda: warmed.append(1))
    watch.open()
    try:
        watch.begin()
        assert not watch.end().not_measured
        watch.begin()
        cards.append(0)
        reported = [missing.what for missing in watch.end().not_measured]
        assert reported == (["memory on cuda:0 that was taken without torch"] if card else [])
        assert not warmed
        watch.begin()
        assert bool(warmed) == (warm_up == "first-use")
        watch.end()
    finally:
        watch.close()
