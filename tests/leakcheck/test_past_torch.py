"""A test that uses a card without torch is not called clean; one that does not, and one after torch has begun, are."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from lowtide.leakcheck.resources import warm_up as past_torch
from lowtide.leakcheck.resources.warm_up import CardsWithoutTorch
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.device import contexts
from lowtide.probes.device.contexts import cards_with_contexts
from lowtide.probes.host.counters import Counters
from lowtide.reports.outcomes import judged_as


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
    assert contexts.cards_with_contexts() == []


def reading(*targets: str) -> Counters:
    return Counters({"file-descriptors": {f"{n} -> {target}": 1 for n, target in enumerate(targets)}}, {}, {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process has a context on one card; notes each question."""
    asked: list[int] = []
    monkeypatch.setattr(past_torch, "cards_with_contexts", lambda: asked.append(1) or [0])
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
    monkeypatch.setattr(past_torch, "initialized_torch", lambda: object())
    assert seen.not_measured(reading("/dev/nvidia0")) == ()
    assert not asked


def test_a_driver_that_was_asked_for_its_cards_only_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_torch, "cards_with_contexts", list)
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
