"""How much a context alone takes on a card, by a process that has nothing else there."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch

from lowtide.leakcheck.lives import tenant as bare_context
from lowtide.leakcheck.lives.tenant import BareContexts, context_sizes
from lowtide.probes.device.driver import Driver, DriverError, find_driver
from lowtide.probes.device.driver.card_holders import CardHolders

WAITS = (sys.executable, "-S", "-c", "import sys; print('ready', flush=True); sys.stdin.read()")
FAILS = (sys.executable, "-S", "-c", "raise SystemExit(1)")
MIB = 1 << 20


class Listed(dict[int, int]):
    """Counts 450 MiB for every process that it is asked about."""

    def get(self, pid: int, default: Any = None) -> Any:
        return {"cuda:1": 450 * MIB}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    asked: list[object] = []

    def read(driver: object) -> tuple[CardHolders, ...]:
        asked.append(driver)
        return ()

    monkeypatch.setattr(bare_context, "read_card_holders", read)
    monkeypatch.setattr(bare_context, "by_process", lambda cards: Listed())
    return asked


def make(command: tuple[str, ...]) -> BareContexts:
    return BareContexts(lambda: cast("Driver", "a driver"), command=command)


def test_it_is_measured_once_for_each_card(asked: list[object]) -> None:
    contexts = make(WAITS)
    assert [contexts.size("cuda:1"), contexts.size("cuda:1")] == [450 * MIB] * 2
    assert contexts.size("cuda:0") is None
    assert len(asked) == 2


def test_a_card_without_room_for_a_context_is_not_known(asked: list[object]) -> None:
    assert make(FAILS).size("cuda:1") is None
    assert asked == []


def test_a_driver_that_does_not_answer_is_not_known(monkeypatch: pytest.MonkeyPatch, asked: list[object]) -> None:
    def refuse(driver: object) -> None:
        raise DriverError("no answer")

    monkeypatch.setattr(bare_context, "read_card_holders", refuse)
    assert make(WAITS).size("cuda:1") is None


def test_an_engine_on_the_cpu_has_none() -> None:
    assert context_sizes("cpu", find_driver)("cuda:0") is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_context_on_a_real_card_takes_hundreds_of_mebibytes() -> None:
    driver = find_driver()
    try:
        size = context_sizes("cuda:0", lambda: driver)("cuda:0")
    finally:
        driver.close()
    assert size is not None
    assert 100 * MIB < size < 2048 * MIB
