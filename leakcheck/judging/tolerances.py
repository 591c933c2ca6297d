"""The one table of what a plain test must give back: each resource's tolerance and the rung at which it is judged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lowtide.leakcheck.judging.ladder import Rung
from lowtide.leakcheck.judging.metrics import AWAITING_A_STREAM, MIB, Metric
from lowtide.reports.schema import Cause, Resource, Verdict

HOST_MEMORY_TOLERANCE = 64 * MIB
"""Bytes of the process's own memory that may stay: heaps fragment, libraries build tables, threads get stacks."""

HOST_MEMORY_TOLERANCE_WITH_CARD = 768 * MIB
"""The same where the process uses a card: on an H200 a process's first engine, with its libraries, took 516 MiB."""

DRIVER_TOLERANCE = 64 * MIB
"""Bytes that the driver may count more where its allocations cannot be listed: kernels load on first use."""


UNLISTED_TOLERANCE = 16 * MIB
"""Bytes that the driver may count more beyond what it lists: it takes memory for code in steps of 2 MiB."""


@dataclass(frozen=True)
class Reading:
    """What one test, or one fixture, is judged by at one moment.

    Attributes:
        items: per metric's key, what is its own and still there, by name, with bytes or 1 each.
        amounts: per metric's key a level of the whole process; None where it cannot be told.
    """

    items: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    amounts: Mapping[str, int | None] = field(default_factory=dict)


def host_memory_tolerance(devices: Collection[str]) -> int:
    """Bytes of the process's own memory that may stay, by the devices that it uses."""
    return HOST_MEMORY_TOLERANCE if set(devices) <= {"cpu"} else HOST_MEMORY_TOLERANCE_WITH_CARD


def plain_metrics(devices: Collection[str], tolerance: int = 0) -> tuple[Metric[Reading], ...]:
    """What a plain test is judged by; a metric's key is its resource and its device, as `tensors cuda:0`.

    Args:
        devices: the devices that are judged, `cpu` included.
        tolerance: bytes that may stay of each resource that is counted in bytes; the coarse levels (`driver` without a
            list of allocations, `host-memory`) keep their own tolerance where that is larger.
    """
    metrics = [
        _items("lru-cache", unit="modules and objects of bound methods in caches", cause="lru-cache"),
        _items(
            "tensors",
            key="unreadable",
            unit="tensors of a kind whose memory cannot be read",
            what="tensors of a kind whose memory cannot be read",
        ),
        _level("pinned", tolerance=tolerance),
        _level("gc-frozen", unit="frozen objects", cause="not-restored"),
        _items("threads", unit="threads", cause="thread", settles=True),
        _items("processes", unit="processes", settles=True),
        _items("file-descriptors", unit="file descriptors", settles=True),
        _items("shared-memory", unit="bytes", tolerance=tolerance, settles=True),
        _items("temporary-files", unit="temporary files", settles=True),
        _items("process-groups", unit="process groups", cause="not-restored"),
        _items("globals", unit="process-wide settings", cause="not-restored"),
        _level("host-memory", tolerance=max(tolerance, host_memory_tolerance(devices)), rung=Rung.CLEAR_HOST_CACHE),
    ]
    for device in devices:
        metrics.append(_items("tensors", device, tolerance=tolerance))
        metrics.append(_items("arena", device, tolerance=tolerance))
        if device == "cpu":
            continue
        metrics += [*_allocator_metrics(device, tolerance), *_driver_metrics(device, tolerance)]
    return tuple(metrics)


def _allocator_metrics(device: str, tolerance: int) -> list[Metric[Reading]]:
    """What torch's allocator holds on a card beside tensors that Python sees."""
    return [
        _items(
            "tensors",
            device,
            key=f"native {device}",
            tolerance=tolerance,
            cause="native",
            verdict="native-held",
            what="memory that native code holds",
        ),
        _items(
            "tensors",
            device,
            key=f"workspaces {device}",
            tolerance=tolerance,
            cause="library-workspace",
            verdict="native-held",
            what="workspaces of BLAS libraries",
        ),
        _items(
            "tensors",
            device,
            key=f"in-flight {device}",
            tolerance=tolerance,
            rung=Rung.EMPTY_CACHE,
            cause="pending-transfer",
            verdict="in-flight",
            what=AWAITING_A_STREAM,
        ),
        _items("reserved", device, tolerance=tolerance, rung=Rung.EMPTY_CACHE, cause="allocator-cache"),
    ]


def _driver_metrics(device: str, tolerance: int) -> list[Metric[Reading]]:
    """What the card's driver counts, with a list of its allocations and without."""
    return [
        _items(
            "driver",
            device,
            key=f"allocations {device}",
            tolerance=tolerance,
            rung=Rung.EMPTY_CACHE,
            settles=True,
            cause="native",
            verdict="native-held",
            what="driver memory that was allocated outside torch",
        ),
        _items(
            "driver",
            device,
            key=f"memory-pool {device}",
            tolerance=max(tolerance, UNLISTED_TOLERANCE),
            rung=Rung.EMPTY_CACHE,
            settles=True,
            cause="allocator-cache",
            verdict="cached",
            what="freed memory that the driver's memory pool keeps",
        ),
        _items(
            "driver",
            device,
            key=f"unlisted {device}",
            tolerance=max(tolerance, UNLISTED_TOLERANCE),
            rung=Rung.EMPTY_CACHE,
            settles=True,
            cause="driver",
            verdict="unexplained",
            what="memory that the driver counts and does not list",
        ),
        _level(
            "driver",
            device,
            tolerance=max(tolerance, DRIVER_TOLERANCE),
            rung=Rung.EMPTY_CACHE,
            settles=True,
            cause="driver",
            verdict="unexplained",
        ),
    ]


def _key(resource: Resource, device: str) -> str:
    return f"{resource} {device}".strip()


def _items(
    resource: Resource,
    device: str = "",
    *,
    key: str = "",
    unit: str = "bytes",
    tolerance: int = 0,
    rung: Rung = Rung.COLLECT,
    settles: bool = False,
    cause: Cause = "unknown",
    verdict: Verdict | None = None,
    what: str = "",
) -> Metric[Reading]:
    """A metric of things with names."""
    place = key or _key(resource, device)
    return Metric(
        resource,
        device,
        lambda reading: sum(reading.items.get(place, {}).values()),
        tolerance=tolerance,
        rung=rung,
        unit=unit,
        settles=settles,
        items=lambda reading: reading.items.get(place, {}),
        cause=cause,
        verdict=verdict,
        what=what,
        key=place,
    )


def _level(
    resource: Resource,
    device: str = "",
    *,
    unit: str = "bytes",
    tolerance: int = 0,
    rung: Rung = Rung.COLLECT,
    settles: bool = False,
    cause: Cause = "unknown",
    verdict: Verdict | None = None,
) -> Metric[Reading]:
    """A metric of a level that must be reached again; 0 where the reading has none."""
    place = _key(resource, device)
    return Metric(
        resource,
        device,
        lambda reading: reading.amounts.get(place, 0),
        tolerance=tolerance,
        rung=rung,
        unit=unit,
        settles=settles,
        cause=cause,
        verdict=verdict,
        key=place,
    )
