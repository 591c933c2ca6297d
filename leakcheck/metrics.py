"""The one table of what is judged after a shutdown: each metric's reading, tolerance and rung.

Readings are disjoint: what one metric has counted is left out of the next, coarser one.  A leaked tensor is one finding
and not four (its storage, the arena that it keeps mapped, the driver's bytes behind that, the process's memory).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.leakcheck.ladder import Rung
from lowtide.probes.ranges import common
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Resource

MIB = 1 << 20


@dataclass(frozen=True)
class Metric:
    """Something that must come back.

    Attributes:
        resource: the word that findings use.
        device: "cpu", "cuda:0", or "" where the reading belongs to the process.
        read: bytes or a count, from a snapshot; None where this machine cannot say.
        tolerance: how far above the baseline still counts as back; unit of `read`.
        rung: where on the ladder it must be back: what comes back later is somebody else's work.
        unit: "bytes" or the plural of what is counted.
        first_use: whether libraries move it when they are first used in a process (kernels that load, threads that
            start), so that the first life says nothing about it.
        settles: whether it comes back in the driver's own time, so that waiting is worth while.
        describe: names what is there in a snapshot, so that a finding can say which are new.
    """

    resource: Resource
    device: str
    read: Callable[[Snapshot], int | None]
    tolerance: int = 0
    rung: Rung = Rung.COLLECT
    unit: str = "bytes"
    first_use: bool = False
    settles: bool = False
    describe: Callable[[Snapshot], tuple[str, ...]] | None = None


def shutdown_metrics(device: str) -> tuple[Metric, ...]:
    """What must be back after an engine's shutdown: everything, at `collect`, because releasing is its own job.

    `device` is where the engine ran.  The tolerances are measured: the heap of a process moves by some MiB with every
    life (32 MiB is the coarsest figure here, and the report says so), a driver's figure for a process by up to 8 MiB.
    """
    metrics = [
        Metric("tensors", "cpu", lambda s: s.tensors.bytes_on("cpu")),
        Metric("arena", device, lambda s: arena_without_tensors(s, device)),
        Metric("pinned", "", lambda s: s.pinned_bytes),
        Metric("gc-frozen", "", lambda s: s.gc.frozen, unit="objects"),
        Metric("threads", "", lambda s: len(s.host.threads), unit="threads", describe=lambda s: s.host.threads),
        Metric("processes", "", lambda s: len(s.host.children), unit="processes", describe=lambda s: s.host.children),
        Metric(
            "file-descriptors",
            "",
            lambda s: len(s.host.descriptors),
            unit="descriptors",
            first_use=True,
            describe=lambda s: s.host.descriptors,
        ),
        Metric(
            "shared-memory",
            "",
            lambda s: sum(entry.bytes for entry in s.host.shared_memory if entry.mapped_here),
            describe=lambda s: tuple(entry.name for entry in s.host.shared_memory if entry.mapped_here),
        ),
        Metric("host-memory", "", lambda s: sum(pool.mapped for pool in s.pools if pool.kind == "host")),
        Metric("host-memory", "cpu", unaccounted_host_memory, tolerance=32 * MIB, first_use=True),
    ]
    if device != "cpu":
        metrics += [
            Metric("tensors", device, lambda s: s.tensors.bytes_on(device)),
            Metric("reserved", device, lambda s: empty_segments(s, device), first_use=True),
            Metric(
                "driver",
                device,
                lambda s: unaccounted_driver_memory(s, device),
                tolerance=8 * MIB,
                first_use=True,
                settles=True,
            ),
        ]
    return tuple(metrics)


def arena_without_tensors(snapshot: Snapshot, device: str) -> int:
    """Bytes mapped by arenas over which no tensor lives: one with a tensor over it is that tensor's leak."""
    tensors = snapshot.tensors.on(device).ranges
    return sum(
        pool.mapped
        for pool in snapshot.pools
        if pool.kind == "arena" and pool.device == device and not common(pool.ranges, tensors)
    )


def empty_segments(snapshot: Snapshot, device: str) -> int | None:
    """Bytes of torch's segments in which nothing is in use: reserved for nothing but the next allocation."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.empty for pool in allocator.pools) if allocator.trusted else None


def unaccounted_driver_memory(snapshot: Snapshot, device: str) -> int | None:
    """The driver's bytes of this process less what arenas and torch's segments hold of them."""
    total, reserved = snapshot.driver_bytes(device), snapshot.reserved(device)
    if total is None or reserved is None:
        return None
    return total - reserved - snapshot.arena_mapped(device=device)


def unaccounted_host_memory(snapshot: Snapshot) -> int:
    """The process's own resident bytes less what announced pools and tensors hold of them."""
    pooled = sum(pool.resident.anonymous for pool in snapshot.pool_residency)
    return snapshot.host.anonymous - pooled - snapshot.tensor_residency.anonymous
