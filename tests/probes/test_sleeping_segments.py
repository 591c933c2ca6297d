"""Segments of a private pool whose pages are gone, of which torch does not hear, by doubles of both."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.device import allocations
from lowtide.probes.device.allocations import with_sleepers
from lowtide.probes.device.torch_allocator import AllocatorReading, parse_pools
from lowtide.probes.memory.ranges import Range

MIB = 1 << 20
DEFAULT = (0, 0)
POOL = (0, 7)


def segment(address: int, size: int, pool: tuple[int, int] = POOL, device: int = 0) -> dict[str, Any]:
    # Three quarters of it are in use.
    block = {"state": "active_allocated", "size": size * MIB * 3 // 4, "address": address * MIB}
    return {
        "address": address * MIB,
        "total_size": size * MIB,
        "segment_pool_id": pool,
        "device": device,
        "blocks": [block],
    }


class Double:
    """Has segments, and allocations behind some of them, in MiB.

    Attributes:
        asked: the ranges that the driver was asked about.
        contexts: on which cards this thread was given a context.
    """

    def __init__(self, segments: Sequence[dict[str, Any]], present: Sequence[tuple[int, int]] | None) -> None:
        self.cuda = SimpleNamespace(mem_get_info=self._give_context)
        self.segments = segments
        self._present = None if present is None else [(start * MIB, size * MIB) for start, size in present]
        self.asked: list[Range] = []
        self.contexts: list[int] = []

    def _give_context(self, index: int) -> None:
        self.contexts.append(index)

    def read_allocations(self, index: int, among: Sequence[Range]) -> Sequence[Range] | None:
        assert self.contexts == [index]
        self.asked += among
        return self._present


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(double: Double | None) -> None:
        monkeypatch.setattr(allocations, "initialized_torch", lambda: double)
        if double is not None:
            monkeypatch.setattr(allocations, "read_allocations", double.read_allocations)

    return install


def asleep(double: Double) -> tuple[int, int]:
    """Bytes of the first card's segments that sleep, and those of them that are in use."""
    pools = parse_pools(double.segments, 0, (), ())
    reading = with_sleepers(AllocatorReading("cuda:0", 0, 0, pools, 0, trusted=True, note=""))
    return sum(pool.asleep for pool in reading.pools), sum(pool.asleep_in_use for pool in reading.pools)


def test_segments_without_pages_sleep(use: Any) -> None:
    double = Double([segment(100, 20), segment(200, 30), segment(300, 5)], present=[(200, 30)])
    use(double)
    assert asleep(double) == (25 * MIB, 25 * MIB * 3 // 4)
    assert double.asked == [(100 * MIB, 20 * MIB), (200 * MIB, 30 * MIB), (300 * MIB, 5 * MIB)]


def test_an_awake_pool_has_all_its_pages(use: Any) -> None:
    # One allocation of the driver's may hold several segments.
    double = Double([segment(100, 20), segment(120, 20)], present=[(100, 40)])
    use(double)
    assert asleep(double) == (0, 0)


def test_the_default_pool_and_other_cards_are_not_asked_about(use: Any) -> None:
    double = Double([segment(100, 20, DEFAULT), segment(200, 20, device=1)], present=[])
    use(double)
    assert asleep(double) == (0, 0)
    assert double.asked == []


def test_a_driver_that_cannot_be_asked_says_nothing(use: Any) -> None:
    double = Double([segment(100, 20)], present=None)
    use(double)
    assert asleep(double) == (0, 0)
    use(None)
    assert asleep(double) == (0, 0)
