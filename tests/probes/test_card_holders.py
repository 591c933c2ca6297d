"""Cards with their holders: what the driver counts, for whom, and for nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.driver.card_holders import CardHolders, count_cards, read_card_holders
from lowtide.probes.device.driver.nvml import NvmlDriver
from tests.probes.fake_drivers import FakeNvml

MIB = 1 << 20


class WithReserve(FakeNvml):
    """A later NVML, which says what the driver has for itself."""

    nvmlMemory_v2 = 0x2000028  # noqa: N815 - its own name

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        memory = super().nvmlDeviceGetMemoryInfo(handle)
        return SimpleNamespace(**vars(memory), reserved=30 * MIB) if version == self.nvmlMemory_v2 else memory


@pytest.fixture(autouse=True)
def _no_choice_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_card_is_read_with_its_processes() -> None:
    nvml = FakeNvml()
    nvml.compute[1] = [(7, 150 * MIB), (8, 20 * MIB)]
    first, second = read_card_holders(NvmlDriver(nvml))
    assert first == CardHolders("cuda:0", 100 * MIB, 1000 * MIB, 0, {})
    assert second == CardHolders("cuda:1", 200 * MIB, 1000 * MIB, 0, {7: 150 * MIB, 8: 20 * MIB})
    assert (first.unlisted, second.unlisted) == (100 * MIB, 30 * MIB)


def test_the_driver_s_reserve_is_in_use_by_nobody() -> None:
    nvml = WithReserve()
    nvml.compute[0] = [(7, 60 * MIB)]
    card, _ = read_card_holders(NvmlDriver(nvml))
    assert (card.used, card.reserved, card.unlisted) == (70 * MIB, 30 * MIB, 10 * MIB)


def test_a_process_without_its_figure_leaves_the_bytes_unlisted() -> None:
    nvml = FakeNvml()
    nvml.compute[0] = [(7, None)]
    card, _ = read_card_holders(NvmlDriver(nvml))
    assert (card.processes, card.unlisted) == ({7: None}, 100 * MIB)


def test_more_listed_than_counted_is_not_less_than_nothing() -> None:
    assert CardHolders("cuda:0", 10, 100, 0, {7: 20}).unlisted == 0
    assert CardHolders("cuda:0", None, None, 0, {7: 20}, "lost").unlisted is None


def test_only_the_cards_that_this_environment_may_use_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (card,) = read_card_holders(NvmlDriver(FakeNvml()))
    assert (card.device, card.used) == ("cuda:0", 200 * MIB)


def test_without_a_driver_there_are_no_cards() -> None:
    assert read_card_holders(NoDriver("none here")) == ()
    assert count_cards(NoDriver("none here")) == 0
