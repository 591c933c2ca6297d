"""What torch counts as its peak on a card, and that whoever has it count anew is heard, on a double of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.device import card_peaks as module
from lowtide.probes.device.card_peaks import CardPeak, ResetsOfPeaks, forget_card_peak, read_card_peaks


class Torch:
    """As much of torch as counts memory, on two cards of which one is in use."""

    def __init__(self, **stats: int) -> None:
        self.heard: list[object] = []
        self.stats = {name.replace("__", "."): size for name, size in stats.items()}
        self._C: Any = SimpleNamespace(
            _cuda_hasPrimaryContext=lambda index: index == 0,
            _cuda_resetPeakMemoryStats=lambda index: self.heard.append(index),
        )
        self.cuda = SimpleNamespace(
            device_count=lambda: 2,
            memory_stats=lambda index: self.stats,
            reset_peak_memory_stats=lambda index: self._C._cuda_resetPeakMemoryStats(index),
        )


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch(allocated_bytes__all__current=5, allocated_bytes__all__peak=7)
    monkeypatch.setattr(module, "initialized_torch", lambda: made)
    monkeypatch.setattr(module, "loaded", lambda name: made)
    return made


def test_a_card_without_a_context_is_not_read(torch: Torch) -> None:
    assert read_card_peaks() == {"cuda:0": CardPeak(5, 7)}


def test_an_allocator_that_does_not_count_has_no_peak(torch: Torch) -> None:
    torch.stats = {}
    assert read_card_peaks() == {}

    def fails(index: int) -> dict[str, int]:
        raise RuntimeError

    torch.cuda.memory_stats = fails
    assert read_card_peaks() == {}


def test_before_cuda_is_in_use_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "initialized_torch", lambda: None)
    assert read_card_peaks() == {}


def test_torch_is_told_to_count_anew(torch: Torch) -> None:
    assert forget_card_peak("cuda:0")
    assert torch.heard == [0]


def test_an_allocator_that_cannot_says_so(torch: Torch) -> None:
    def fails(index: int) -> None:
        raise RuntimeError

    torch.cuda.reset_peak_memory_stats = fails
    assert not forget_card_peak("cuda:0")


def test_the_program_s_reset_is_heard_before_it_is_made(torch: Torch) -> None:
    original = torch._C._cuda_resetPeakMemoryStats
    resets = ResetsOfPeaks(lambda: torch.heard.append("before"))
    resets.start()
    resets.start()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.heard == ["before", 1]
    resets.stop()
    resets.stop()
    assert torch._C._cuda_resetPeakMemoryStats is original
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.heard == ["before", 1, 1]


def test_what_somebody_else_has_put_there_meanwhile_stays(torch: Torch) -> None:
    resets = ResetsOfPeaks(lambda: None)
    resets.start()
    other: Any = lambda index: None  # noqa: E731
    torch._C._cuda_resetPeakMemoryStats = other
    resets.stop()
    assert torch._C._cuda_resetPeakMemoryStats is other


def test_without_torch_nothing_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "loaded", lambda name: None)
    resets = ResetsOfPeaks(lambda: None)
    resets.start()
    resets.stop()
