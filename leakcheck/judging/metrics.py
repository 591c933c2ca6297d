"""What is judged, and the one table of it for an engine's shutdown: each metric's reading, tolerance and rung.

Readings are disjoint: what one metric has counted is left out of the next, coarser one.  A leaked tensor is one finding
and not four (its storage, the arena that it keeps mapped, the driver's bytes behind that, the process's memory).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.ladder import Rung
from lowtide.probes.memory.ranges import common
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import PoolKind
from lowtide.reports.schema import Cause, Resource, Verdict

MIB = 1 << 20

R = TypeVar("R")


AWAITING_A_STREAM = "memory that waits for a stream"

NOT_OF_PYTHON: tuple[Verdict, ...] = ("native-held", "in-flight")
"""The verdicts on tensors' memory that has no tensor object any more, or never had one."""


@dataclass(frozen=True)
class Metric(Generic[R]):
    """Something that must come back.

    Attributes:
        resource: the word that findings use.
        device: "cpu", "cuda:0", or "" where the reading belongs to the process.
        read: bytes or a count, from a reading (`R`: a snapshot, or a plain test's); None where this machine cannot say.
        tolerance: how far above the baseline still counts as back; unit of `read`.
        rung: where on the ladder it must be back: what comes back later is somebody else's work.
        unit: "bytes" or the plural of what is counted.
        first_use: whether libraries move it when they are first used in a process (kernels that load, threads that
            start), so that the first life says nothing about it.
        settles: whether it comes back in the driver's own time, so that waiting is worth while.
        items: what is there by name, with bytes or 1 each. Where given, what counts is what is new by name: one thing
            that went away must not hide another that stayed.
        what: how a finding calls it, if not by the resource.
        cause: what a finding says when no rung brings it back.
        verdict: likewise.
        key: under which a plain test's reading has it; of an engine's life only that of private pools has one.
    """

    resource: Resource
    device: str
    read: Callable[[R], int | None]
    tolerance: int = 0
    rung: Rung = Rung.COLLECT
    unit: str = "bytes"
    first_use: bool = False
    settles: bool = False
    items: Callable[[R], Mapping[str, int]] | None = None
    what: str = ""
    cause: Cause = "unknown"
    verdict: Verdict | None = None
    key: str = ""

    def above(self, baseline: R, now: R) -> int | None:
        """How far `now` is above `baseline`; None where one of them cannot say."""
        if self.items is not None:
            return sum(self.new_items(baseline, now).values())
        before, after = self.read(baseline), self.read(now)
        return None if before is None or after is None else after - before

    def new_items(self, baseline: R, now: R) -> dict[str, int]:
        """What is there now, by name, and was not at the baseline."""
        if self.items is None:
            return {}
        known = self.items(baseline)
        return {name: amount for name, amount in self.items(now).items() if name not in known}


def shutdown_metrics(device: str) -> tuple[Metric[Snapshot], ...]:
    """What must be back after an engine's shutdown: everything, at `collect`, because releasing is its own job.

    `device` is where the engine ran.  The tolerances are measured: the heap of a process moves by some MiB with every
    life, by up to 34 MiB in one of 36 runs with a card that a dozen processes share (it is the coarsest figure here,
    and the report says so); a driver's figure for a process by up to 8 MiB.
    """
    of_host = 32 * MIB if device == "cpu" else 64 * MIB
    metrics: list[Metric[Snapshot]] = [
        Metric("tensors", "cpu", lambda s: s.tensors.bytes_on("cpu")),
        Metric("arena", device, lambda s: arena_without_tensors(s, device)),
        Metric("pinned", "", lambda s: s.pinned.torch_reserved),
        Metric("pinned", "", lambda s: sum(pinned_pools(s).values()), items=pinned_pools, cause="native"),
        Metric("gc-frozen", "", lambda s: frozen_by_program(s.gc.frozen), unit="frozen objects", cause="not-restored"),
        Metric(
            "tensors",
            "",
            lambda s: s.tensors.unreadable,
            unit="tensors of a kind whose memory cannot be read",
            what="tensors of a kind whose memory cannot be read",
        ),
        _counted("threads", lambda s: s.host.threads, settles=True),
        _counted("processes", lambda s: s.host.children, settles=True),
        _counted("file-descriptors", lambda s: s.host.descriptors, first_use=True),
        Metric("shared-memory", "", lambda s: sum(own_shared_memory(s).values()), items=own_shared_memory),
        _counted("temporary-files", lambda s: s.host.temporary_files, settles=True, unit="temporary files"),
        Metric("host-memory", "", lambda s: sum(host_pools(s).values()), items=host_pools, cause="native"),
        Metric("host-memory", "cpu", unaccounted_host_memory, tolerance=of_host, first_use=True),
    ]
    if device != "cpu":
        metrics += _card_metrics(device)
    return tuple(metrics)


def _card_metrics(device: str) -> list[Metric[Snapshot]]:
    """What must be back on a card."""
    return [
        Metric("tensors", device, lambda s: s.tensors.bytes_on(device)),
        Metric(
            "tensors",
            device,
            lambda s: native_held(s, device),
            first_use=True,
            what="memory that native code holds",
            cause="native",
            verdict="native-held",
        ),
        Metric(
            "tensors",
            device,
            lambda s: awaiting_a_stream(s, device),
            rung=Rung.EMPTY_CACHE,
            what=AWAITING_A_STREAM,
            cause="pending-transfer",
            verdict="in-flight",
        ),
        Metric("reserved", device, lambda s: empty_segments(s, device), first_use=True),
        Metric(
            "reserved",
            device,
            lambda s: sum(empty_private_pools(s, device).values()),
            items=lambda s: empty_private_pools(s, device),
            what="private pools",
            key=f"reserved {device}",
        ),
        Metric(
            "driver",
            device,
            lambda s: unaccounted_driver_memory(s, device),
            tolerance=8 * MIB,
            first_use=True,
            settles=True,
            cause="driver",
            verdict="unexplained",
        ),
    ]


def _counted(
    resource: Resource,
    names: Callable[[Snapshot], Sequence[str]],
    *,
    first_use: bool = False,
    settles: bool = False,
    unit: str = "",
) -> Metric[Snapshot]:
    """A metric of things that are counted and have names, without what is there to stay."""

    def left(snapshot: Snapshot) -> dict[str, int]:
        by_item = {as_counted(resource, name): name for name in names(snapshot)}
        stays = exempt(resource, by_item, as_read=True)
        return {name: 1 for item, name in by_item.items() if item not in stays}

    return Metric(
        resource,
        "",
        lambda s: len(left(s)),
        unit=unit or resource,
        first_use=first_use,
        settles=settles,
        items=left,
    )


def as_counted(resource: str, name: str) -> str:
    """What the counters call an item of a snapshot: a child process by its number alone."""
    return name.partition(" ")[0] if resource == "processes" else name


def own_shared_memory(snapshot: Snapshot) -> dict[str, int]:
    """Bytes of what this process has in /dev/shm, by name: what it maps, what processes of its left there, and what
    carries its process id in its name.

    (An entry that is neither may be another process's: nobody can be blamed for it from here.)
    """
    pid = str(os.getpid())
    return {
        entry.name: entry.bytes
        for entry in snapshot.host.shared_memory
        if entry.mapped_here or entry.left_here or pid in re.findall(r"\d+", entry.name)
    }


def host_pools(snapshot: Snapshot) -> dict[str, int]:
    """Bytes of announced host memory that is not page-locked, by name."""
    return _pools(snapshot, "host")


def pinned_pools(snapshot: Snapshot) -> dict[str, int]:
    """Bytes of announced host memory that is page-locked, by name."""
    return _pools(snapshot, "pinned")


def _pools(snapshot: Snapshot, kind: PoolKind) -> dict[str, int]:
    return {
        f"{pool.tag} at {address:#x}": length
        for pool in snapshot.pools
        if pool.kind == kind
        for address, length in pool.ranges
    }


def native_held(snapshot: Snapshot, device: str) -> int | None:
    """Bytes of torch's blocks in use that no tensor visible to Python explains, and no library workspace."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.unclaimed for pool in allocator.pools) if allocator.trusted else None


def awaiting_a_stream(snapshot: Snapshot, device: str) -> int | None:
    """Bytes of torch's blocks that were freed while a stream still worked on them."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.pending for pool in allocator.pools) if allocator.trusted else None


def arena_without_tensors(snapshot: Snapshot, device: str) -> int:
    """Bytes mapped by arenas over which no tensor lives: one with a tensor over it is that tensor's leak."""
    tensors = snapshot.tensors.on(device).ranges
    return sum(
        pool.mapped
        for pool in snapshot.pools
        if pool.kind == "arena" and pool.device == device and not common(pool.ranges, tensors)
    )


def empty_segments(snapshot: Snapshot, device: str) -> int | None:
    """Bytes of the default pool's segments in which nothing is in use: reserved for nothing but the next allocation."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.empty for pool in allocator.pools if not pool.private) if allocator.trusted else None


def empty_private_pools(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Bytes of private pools' segments in which nothing is in use, by name: no library's first use makes these.

    They go back only when the pool's owner is gone.
    """
    allocator = snapshot.allocator(device)
    if allocator is None or not allocator.trusted:
        return {}
    return {
        f"pool {pool.pool_id}, segment at {address:#x}": size
        for pool in allocator.pools
        if pool.private
        for address, size in pool.empty_at
    }


ALLOCATOR_HOLDER = "torch's caching allocator"

DRIVER_HOLDER = "the driver or native code"
"""Who holds a card's memory that is neither in arenas nor in torch's segments."""

DRIVER_ADVICE = "give it back where native code took it; what the driver keeps by itself ends with the process"


def unaccounted_driver_memory(snapshot: Snapshot, device: str) -> int | None:
    """The driver's bytes of this process less what arenas and torch's segments hold of them."""
    total, reserved = snapshot.driver_bytes(device), snapshot.reserved(device)
    if total is None or reserved is None:
        return None
    return total - reserved - snapshot.arena_mapped(device=device)


def unaccounted_host_memory(snapshot: Snapshot) -> int:
    """The process's own bytes (`lowtide.probes.host.counters.own_bytes`) less what announced pools, tensors, files of
    /dev/shm and torch's page-locked cache hold of them: each of these is judged by itself.
    """
    pools = [pool.resident for pool in snapshot.pool_residency]
    tensors = snapshot.tensor_residency
    private = snapshot.host.own - snapshot.host.shared
    private -= sum(part.anonymous + part.swapped for part in (*pools, tensors))
    # A page that only other processes have touched is resident, and not this one's.
    named = sum(part.shared for part in (*pools, snapshot.file_residency))
    named += max(tensors.shared, snapshot.pinned.torch_reserved or 0)
    return private + max(0, snapshot.host.shared - named)
