"""What is judged, and how each row of the table (`rules`) is read: from a snapshot, and from a test's reading.

Readings are disjoint: what one metric has counted is left out of the next, coarser one.  A leaked tensor is one finding
and not four (its storage, the arena that it keeps mapped, the driver's bytes behind that, the process's memory).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lowtide.leakcheck.judging.exemptions import exempt
from lowtide.leakcheck.judging.rules import RULES, bound_of_test
from lowtide.leakcheck.resources.resource import Bound, Rule, Rung
from lowtide.probes.memory.ranges import common
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.originals import os
from lowtide.probes.snapshot import Snapshot
from lowtide.probes.stages import PoolKind
from lowtide.reports.schema import Cause, Finding, ResourceName, Verdict

R = TypeVar("R")

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
        key: of the row of the table, with the device.
    """

    resource: ResourceName
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
        """Return how far `now` is above `baseline`; None where one of them cannot say."""
        if self.items is not None:
            return sum(self.new_items(baseline, now).values())
        before, after = self.read(baseline), self.read(now)
        return None if before is None or after is None else after - before

    def new_items(self, baseline: R, now: R) -> dict[str, int]:
        """Return what is there now, by name, and was not at the baseline."""
        if self.items is None:
            return {}
        known = self.items(baseline)
        return {name: amount for name, amount in self.items(now).items() if name not in known}


def metric_of(
    rule: Rule,
    bound: Bound,
    device: str,
    read: Callable[[R], int | None],
    items: Callable[[R], Mapping[str, int]] | None,
    tolerance: int,
) -> Metric[R]:
    """Return the metric of one row of the table, with how it is read.

    Args:
        rule: the row.
        bound: its column.
        device: where it is judged; "" for the process.
        read: see `Metric`.
        items: likewise.
        tolerance: likewise.
    """
    return Metric(
        rule.resource,
        device,
        read,
        tolerance=tolerance,
        rung=bound.rung,
        unit=rule.unit,
        first_use=bound.first_use,
        settles=bound.settles,
        items=items,
        what=bound.what,
        cause=bound.cause,
        verdict=rule.verdict,
        key=rule.key_on(device if rule.place != "process" else ""),
    )


def shutdown_metrics(device: str) -> tuple[Metric[Snapshot], ...]:
    """Return what must be back after an engine's shutdown, as far as snapshots contain it; `rules` has the table.

    `process-groups` and `globals` are no part of a snapshot: `lowtide.leakcheck.lives.life_record` compares them.

    Args:
        device: where the engine ran.
    """
    return tuple(
        _of_snapshots(rule, rule.life, where, card=device != "cpu")
        for rule in RULES
        if rule.life is not None and rule.key in _FROM_SNAPSHOT
        for where in _places(rule, device)
    )


def _places(rule: Rule, device: str) -> Sequence[str]:
    """Return where a row is judged in the life of an engine on one device."""
    if rule.key == "host-memory":
        return ("cpu",)
    if rule.place == "process":
        return ("",)
    if device == "cpu":
        return ("cpu",) if rule.place == "device" else ()
    # An engine's arenas are on its device.
    return ("cpu", device) if rule.key == "tensors" else (device,)


def _of_snapshots(rule: Rule, bound: Bound, device: str, *, card: bool) -> Metric[Snapshot]:
    reading = _FROM_SNAPSHOT[rule.key](device)
    return metric_of(rule, bound, device, reading.read, reading.items, bound.allowed(card=card))


@dataclass(frozen=True)
class _FromSnapshot:
    """How a row is read from a snapshot: as one figure, and by name if it has names."""

    read: Callable[[Snapshot], int | None]
    items: Callable[[Snapshot], Mapping[str, int]] | None = None


def _by_name(items: Callable[[Snapshot], Mapping[str, int]]) -> _FromSnapshot:
    return _FromSnapshot(lambda snapshot: sum(items(snapshot).values()), items)


def _counted(resource: ResourceName, names: Callable[[Snapshot], Sequence[str]]) -> _FromSnapshot:
    """Return the reading of things that are counted and have names, without what is there to stay."""

    def left(snapshot: Snapshot) -> dict[str, int]:
        by_item = {as_counted(resource, name): name for name in names(snapshot)}
        stays = exempt(resource, by_item, as_read=True)
        return {name: 1 for item, name in by_item.items() if item not in stays}

    return _by_name(left)


def as_counted(resource: str, name: str) -> str:
    """Return what the counters call an item of a snapshot: a child process by its number alone."""
    return name.partition(" ")[0] if resource == "processes" else name


def own_shared_memory(snapshot: Snapshot) -> dict[str, int]:
    """Return the bytes of what is this process's in /dev/shm, by name.

    That is what it maps, what processes of its left there, and what carries its process id in its name.

    (An entry that is neither may be another process's: nobody can be blamed for it from here.)
    """
    pid = str(os.getpid())
    own = {
        entry.name: entry.bytes
        for entry in snapshot.host.shared_memory
        if entry.mapped_here or entry.left_here or pid in re.findall(r"\d+", entry.name)
    }
    stays = exempt("shared-memory", own, as_read=True)
    return {name: size for name, size in own.items() if name not in stays}


def host_pools(snapshot: Snapshot) -> dict[str, int]:
    """Return the bytes of announced host memory that is not page-locked, by name."""
    return _pools(snapshot, "host")


def pinned_pools(snapshot: Snapshot) -> dict[str, int]:
    """Return the bytes of announced host memory that is page-locked, by name."""
    return _pools(snapshot, "pinned")


def _pools(snapshot: Snapshot, kind: PoolKind) -> dict[str, int]:
    return {
        f"{pool.tag} at {address:#x}": length
        for pool in snapshot.pools
        if pool.kind == kind
        for address, length in pool.ranges
    }


def native_held(snapshot: Snapshot, device: str) -> int | None:
    """Return the bytes of torch's blocks in use that no tensor visible to Python explains, and no library workspace."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.unclaimed for pool in allocator.pools) if allocator.trusted else None


def awaiting_a_stream(snapshot: Snapshot, device: str) -> int | None:
    """Return the bytes of torch's blocks that were freed while a stream still worked on them."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.pending for pool in allocator.pools) if allocator.trusted else None


def exported_memory(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Return the bytes of torch's blocks that wait for who has opened them by CUDA IPC, by name."""
    allocator = snapshot.allocator(device)
    pools = () if allocator is None or not allocator.trusted else allocator.pools
    return {f"block at {address:#x}": size for pool in pools for address, size in pool.exported_at}


def arena_without_tensors(snapshot: Snapshot, device: str) -> int:
    """Return the bytes mapped by arenas over which no tensor lives: one with a tensor over it is that tensor's leak."""
    tensors = snapshot.tensors.on(device).ranges
    return sum(
        pool.mapped
        for pool in snapshot.pools
        if pool.kind == "arena" and pool.device == device and not common(pool.ranges, tensors)
    )


def empty_segments(snapshot: Snapshot, device: str) -> int | None:
    """Return the bytes of the default pool's segments in which nothing is in use."""
    allocator = snapshot.allocator(device)
    if allocator is None:
        return 0
    return sum(pool.empty for pool in allocator.pools if not pool.private) if allocator.trusted else None


def empty_private_pools(snapshot: Snapshot, device: str) -> dict[str, int]:
    """Return the bytes of private pools' segments with nothing in use, by name: no library's first use makes these.

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
    """Return the driver's bytes of this process less what arenas and torch's segments hold of them."""
    total, reserved = snapshot.driver_bytes(device), snapshot.reserved(device)
    if total is None or reserved is None:
        return None
    return total - reserved - snapshot.arena_mapped(device=device)


def unaccounted_host_memory(snapshot: Snapshot) -> int:
    """Return the process's own bytes (`lowtide.probes.host.counters.own_bytes`) that nothing else explains.

    What announced pools, tensors, files of /dev/shm and torch's page-locked cache hold of them is judged by itself.
    """
    pools = [pool.resident for pool in snapshot.pool_residency]
    tensors = snapshot.tensor_residency
    private = snapshot.host.own - snapshot.host.shared
    private -= sum(part.anonymous + part.swapped for part in (*pools, tensors))
    # A page that only other processes have touched is resident, and not this one's.
    named = sum(part.shared for part in (*pools, snapshot.file_residency))
    named += max(tensors.shared, snapshot.pinned.torch_reserved or 0)
    return private + max(0, snapshot.host.shared - named)


_FROM_SNAPSHOT: Mapping[str, Callable[[str], _FromSnapshot]] = {
    "tensors": lambda device: _FromSnapshot(lambda snapshot: snapshot.tensors.bytes_on(device)),
    "unreadable": lambda _: _FromSnapshot(lambda snapshot: snapshot.tensors.unreadable),
    "native": lambda device: _FromSnapshot(lambda snapshot: native_held(snapshot, device)),
    "in-flight": lambda device: _FromSnapshot(lambda snapshot: awaiting_a_stream(snapshot, device)),
    "cuda-ipc": lambda device: _by_name(lambda snapshot: exported_memory(snapshot, device)),
    "arena": lambda device: _FromSnapshot(lambda snapshot: arena_without_tensors(snapshot, device)),
    "empty-segments": lambda device: _FromSnapshot(lambda snapshot: empty_segments(snapshot, device)),
    "reserved": lambda device: _by_name(lambda snapshot: empty_private_pools(snapshot, device)),
    "driver": lambda device: _FromSnapshot(lambda snapshot: unaccounted_driver_memory(snapshot, device)),
    "pinned-cache": lambda _: _FromSnapshot(lambda snapshot: snapshot.pinned.torch_reserved),
    "pinned": lambda _: _by_name(pinned_pools),
    "host-pools": lambda _: _by_name(host_pools),
    "host-memory": lambda _: _FromSnapshot(unaccounted_host_memory),
    "gc-frozen": lambda _: _FromSnapshot(lambda snapshot: frozen_by_program(snapshot.gc.frozen)),
    "threads": lambda _: _counted("threads", lambda snapshot: snapshot.host.threads),
    "processes": lambda _: _counted("processes", lambda snapshot: snapshot.host.children),
    "file-descriptors": lambda _: _counted("file-descriptors", lambda snapshot: snapshot.host.descriptors),
    "shared-memory": lambda _: _by_name(own_shared_memory),
    "temporary-files": lambda _: _counted("temporary-files", lambda snapshot: snapshot.host.temporary_files),
}
"""How each row of the table is read from a snapshot on a device, by the row's key."""


HOST_MEMORY_TOLERANCE = bound_of_test("host-memory").allowed(card=False)
"""Bytes of the process's own memory that may stay."""

HOST_MEMORY_TOLERANCE_WITH_CARD = bound_of_test("host-memory").allowed(card=True)
"""The same where the process uses a card."""

DRIVER_TOLERANCE = bound_of_test("driver").tolerance
"""Bytes that the driver may count more where its allocations cannot be listed."""

UNLISTED_TOLERANCE = bound_of_test("unlisted").tolerance
"""Bytes that the driver may count more beyond what it lists."""

_LEVELS = ("pinned", "gc-frozen", "host-memory", "driver")
"""The keys of what a test's reading has as one figure, without names."""


@dataclass(frozen=True)
class Reading:
    """What one test, or one fixture, is judged by at one moment.

    Attributes:
        items: per metric's key, what is its own and still there, by name, with bytes or 1 each.
        amounts: per metric's key a level of the whole process; None if it cannot be read.
    """

    items: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    amounts: Mapping[str, int | None] = field(default_factory=dict)


def host_memory_tolerance(devices: Collection[str]) -> int:
    """Return the bytes of the process's own memory that may stay, by the devices that it uses."""
    return HOST_MEMORY_TOLERANCE if set(devices) <= {"cpu"} else HOST_MEMORY_TOLERANCE_WITH_CARD


def may_be_of_libraries(finding: Finding, devices: Collection[str]) -> bool:
    """Return whether host memory that no object of Python's explains may be what a card's libraries take."""
    return finding.resource == "host-memory" and finding.bytes <= host_memory_tolerance(devices)


def plain_metrics(devices: Collection[str], tolerance: int = 0) -> tuple[Metric[Reading], ...]:
    """Return what a plain test is judged by; a metric's key is that of its row and its device, as `tensors cuda:0`.

    Args:
        devices: the devices that are judged, `cpu` included.
        tolerance: bytes that may stay of each resource that is counted in bytes; the coarse levels (`driver` without a
            list of allocations, `host-memory`) keep their own tolerance where that is larger.
    """
    card = not set(devices) <= {"cpu"}
    tested = [(rule, rule.test) for rule in RULES if rule.test is not None]
    metrics = [_of_readings(rule, bound, "", tolerance, card=card) for rule, bound in tested if rule.place == "process"]
    for device in devices:
        places = ("device",) if device == "cpu" else ("device", "card")
        metrics += [
            _of_readings(rule, bound, device, tolerance, card=card) for rule, bound in tested if rule.place in places
        ]
    return tuple(metrics)


def _of_readings(rule: Rule, bound: Bound, device: str, tolerance: int, *, card: bool) -> Metric[Reading]:
    key = rule.key_on(device)
    # What arrays explain has no more room in a process that uses a card: see `may_be_of_libraries`.
    allowed = bound.allowed(card=card and rule.key != "host-memory")
    if rule.unit == "bytes":
        allowed = max(allowed, tolerance)
    if rule.key in _LEVELS:
        return metric_of(rule, bound, device, lambda reading: reading.amounts.get(key, 0), None, allowed)
    return metric_of(
        rule,
        bound,
        device,
        lambda reading: sum(reading.items.get(key, {}).values()),
        lambda reading: reading.items.get(key, {}),
        allowed,
    )
