"""What the driver may count for an engine that sleeps: what libraries hold for it at work, and no more."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.contract import after_deep_sleep
from lowtide.probes.device.driver import DriverReading
from lowtide.probes.device.driver.none import NoDriver
from lowtide.probes.snapshot import Snapshot, take_snapshot

MIB = 1 << 20


def snapshot(driver: int | None) -> Snapshot:
    found = take_snapshot(driver=NoDriver("a test"))
    reading = DriverReading("cuda:0", "nvml", driver, 20_000 * MIB, 30_000 * MIB, "")
    return Snapshot(**{name: getattr(found, name) for name in Snapshot.__slots__} | {"drivers": (reading,)})


@pytest.mark.parametrize(
    ("before", "at_work", "after"),
    [
        (500, 500, 500),
        (500, 500, 564),
        # A communicator stays while the engine sleeps.
        (500, 890, 890),
        (500, 890, 954),
        # What came back from the libraries is nothing that may be taken instead.
        (500, 400, 564),
    ],
)
def test_what_libraries_hold_at_work_may_stay(before: int, at_work: int, after: int) -> None:
    assert after_deep_sleep("sleep(2)", "cuda:0", *(snapshot(n * MIB) for n in (before, at_work, after))) == []


@pytest.mark.parametrize(
    ("before", "at_work", "after", "told"), [(500, 500, 565, 65), (500, 890, 955, 455), (500, 400, 565, 65)]
)
def test_more_is_a_finding(before: int, at_work: int, after: int, told: int) -> None:
    (found,) = after_deep_sleep("sleep(2)", "cuda:0", *(snapshot(n * MIB) for n in (before, at_work, after)))
    assert (found.resource, found.cause, found.bytes) == ("driver", "driver", told * MIB)


def test_a_driver_that_does_not_tell_is_not_judged_here() -> None:
    assert after_deep_sleep("sleep(2)", "cuda:0", snapshot(None), snapshot(None), snapshot(None)) == []
