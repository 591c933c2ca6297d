"""What a driver gives back seconds late is waited for, and what it keeps is not waited for for ever."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.judging import ladder as late_release
from lowtide.leakcheck.judging.ladder import SettlePolicy, wait_for_release, wait_until_within
from tests.waiting import SleptClock

MIB = 1 << 20
QUICK = SettlePolicy(stability=0.05, limit=0.5, first_pause=0.001, longest_pause=0.01)


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
