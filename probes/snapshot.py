"""All probes at one moment: one immutable value that keeps nothing of what it describes alive.

And the breakdown that adds up: one device's used bytes as named lines, and what none of them explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from lowtide.probes.device.driver import Driver, DriverReading
from lowtide.probes.device.torch_allocator import (
    AllocatorReading,
    PinnedReading,
    PoolSegments,
    read_allocators,
    read_pinned,
)
from lowtide.probes.heap.caches import LRU_CACHE, CacheReading, bytes_held, read_caches
from lowtide.probes.host.readings import HostReading, Resident, named_shared_memory, read_host, resident_in
from lowtide.probes.memory.ranges import Range, without
from lowtide.probes.memory.tensors import TensorReading, storage_classes, survey_storages
from lowtide.probes.objects.listed import Census, all_instances, collector_paused
from lowtide.probes.originals import gc
from lowtide.probes.stages import PoolKind, PoolReading, announced_pools


class PoolResidency(msgspec.Struct, frozen=True):
    """How much of an announced pool in host memory is in physical memory.

    Attributes:
        kind: the pool's kind.
        tag: the pool's tag.
        resident: bytes of its mapped ranges that are in physical memory.
    """

    kind: PoolKind
    tag: str
    resident: Resident


class Snapshot(msgspec.Struct, frozen=True):
    """The readings of all probes at one moment.

    Attributes:
        tensors: live tensors by device.
        allocators: torch's allocator per device with a context.
        pinned: torch's cache of page-locked host memory.
        drivers: the driver's figures per device asked for.
        pools: what allocators outside torch announced.
        pool_residency: of those pools that are host memory, per kind and tag, sorted.
        tensor_residency: of the memory under CPU tensors that lies outside the announced pools.
        host: the process on its host.
        frozen: objects in the collector's permanent generation (`gc.freeze()`).
        caches: each `lru_cache` with entries.
        file_residency: of the files of /dev/shm that are mapped here, and are under neither pools nor tensors.
    """

    tensors: TensorReading
    allocators: tuple[AllocatorReading, ...]
    pinned: PinnedReading
    drivers: tuple[DriverReading, ...]
    pools: tuple[PoolReading, ...]
    pool_residency: tuple[PoolResidency, ...]
    tensor_residency: Resident
    host: HostReading
    frozen: int
    caches: tuple[CacheReading, ...]
    file_residency: Resident = msgspec.field(default_factory=lambda: Resident(0, 0))

    def arena_mapped(self, tag: str | None = None, device: str | None = None) -> int:
        """Bytes mapped by announced arenas, of one tag or all, on one device or all."""
        return sum(
            pool.mapped
            for pool in self.pools
            if pool.kind == "arena" and tag in (None, pool.tag) and device in (None, pool.device)
        )

    @property
    def pinned_bytes(self) -> int | None:
        """Bytes of page-locked host memory, torch's cache and announced pools; None where torch does not report it."""
        if self.pinned.torch_reserved is None:
            return None
        return self.pinned.torch_reserved + sum(pool.mapped for pool in self.pools if pool.kind == "pinned")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the storages that the entries of all `lru_cache`s reach, each byte once."""
        return bytes_held(self.caches)

    def driver_bytes(self, device: str) -> int | None:
        """Bytes that the driver says this process holds on `device`; None if it was not asked or does not report it."""
        return next((reading.process_bytes for reading in self.drivers if reading.device == device), None)

    def allocator(self, device: str) -> AllocatorReading | None:
        """Return what torch's allocator holds on `device`; None where the process has no context there."""
        return next((reading for reading in self.allocators if reading.device == device), None)

    def allocated(self, device: str) -> int | None:
        """Bytes that torch's allocator handed out on `device`: 0 without a context, None if it cannot be read."""
        reading = self.allocator(device)
        return 0 if reading is None else reading.allocated

    def reserved(self, device: str) -> int | None:
        """Bytes that torch's allocator took from the driver: 0 without a context, None if it cannot be read."""
        reading = self.allocator(device)
        return 0 if reading is None else reading.reserved


_MOST_BEHIND_CACHES = 300_000
"""Objects behind all large caches together that one snapshot looks at: a third of a second."""


def take_snapshot(*, driver: Driver, devices: Sequence[int] = ()) -> Snapshot:
    """Read everything once.

    Args:
        driver: whom to ask about the cards (`find_driver()`).
        devices: torch's indices of the cards to ask about.

    Raises:
        HostReadError: /proc cannot be read.
        PoolSourceError: an announced source raised.
    """
    with collector_paused():
        # Memory first: the walk over the heap below needs some itself.
        host = read_host()
        pools = announced_pools()
        swapped = host.swapped > 0
        pool_residency = _pool_residency(pools, swapped=swapped)
        drivers = tuple(driver.read(index) for index in devices)
        pinned = read_pinned()
        # One list of the heap for both.
        found = Census(all_instances(*storage_classes(), LRU_CACHE))
        survey = survey_storages(found)
        caches = read_caches(found, max_in_all=_MOST_BEHIND_CACHES)
        tensors = survey.reading
        pooled = [part for pool in pools if _in_host_memory(pool) for part in pool.ranges]
        outside = without(tensors.on("cpu"), pooled)
        tensor_residency = resident_in(outside, swapped=swapped)
        file_residency = resident_in(without(named_shared_memory(), [*pooled, *outside]))
        allocators = read_allocators({storage.address for storage in survey.storages})
    return Snapshot(
        tensors=tensors,
        allocators=allocators,
        pinned=pinned,
        drivers=drivers,
        pools=pools,
        pool_residency=pool_residency,
        tensor_residency=tensor_residency,
        file_residency=file_residency,
        host=host,
        frozen=gc.get_freeze_count(),
        caches=caches,
    )


def _in_host_memory(pool: PoolReading) -> bool:
    return pool.kind != "arena" or pool.device == "cpu"


def _pool_residency(pools: Sequence[PoolReading], *, swapped: bool) -> tuple[PoolResidency, ...]:
    """Per kind and tag; memory that two pools announce is the first one's."""
    ranges: dict[tuple[PoolKind, str], list[Range]] = {}
    for pool in pools:
        if _in_host_memory(pool):
            ranges.setdefault((pool.kind, pool.tag), []).extend(pool.ranges)
    readings = []
    counted: list[Range] = []
    for (kind, tag), parts in sorted(ranges.items()):
        readings.append(PoolResidency(kind, tag, resident_in(without(parts, counted), swapped=swapped)))
        counted.extend(parts)
    return tuple(readings)


class LedgerError(ValueError):
    """A ledger that cannot be drawn up from this snapshot; the message says what to do."""


class DeviceLedgerLine(msgspec.Struct, frozen=True):
    """One named part of the total.

    Attributes:
        name: what holds the bytes.
        bytes: how many.
        note: what the name does not say; may be empty.
    """

    name: str
    bytes: int
    note: str = ""


class LedgerBase(msgspec.Struct, frozen=True):
    """What a device costs before anything is kept on it: constants of the run, measured by the caller.

    Attributes:
        device: `cuda:0`, `cpu`.
        context: bytes; on a card the driver's context, right after initialisation, on `cpu` the interpreter with
            what it imported.
        libraries: bytes; kernels and libraries, which load lazily, after one warm-up.
    """

    device: str
    context: int
    libraries: int = 0


class DeviceLedger(msgspec.Struct, frozen=True):
    """One device's bytes; `sum(line.bytes for line in lines) + unexplained == total`.

    Attributes:
        device: `cuda:0`, `cpu`.
        total: bytes that the source says this process holds; None if it does not report it.
        source: who says so: `nvml`, `amdsmi`, `none`; for `cpu` the kernel's `rss`.
        lines: the parts that are known.
        unexplained: the rest; negative where lines overlap; None without a total.
    """

    device: str
    total: int | None
    source: str
    lines: tuple[DeviceLedgerLine, ...]
    unexplained: int | None


def base_from(snapshot: Snapshot, device: str) -> int:
    """Bytes on `device` that no line explains at this moment.

    Taken right after initialisation it is `LedgerBase.context`; taken again after a warm-up, less the first, it is
    `LedgerBase.libraries`.

    Raises:
        LedgerError: the driver does not report what this process holds on `device`.
    """
    left = read_ledger(snapshot, device, LedgerBase(device, context=0)).unexplained
    if left is None:
        raise LedgerError(
            f"nothing in this snapshot says how much this process holds on {device} in all; take it with a driver that "
            "knows and with the device's index in `devices`, or use LedgerBase(device, context=0)"
        )
    return left


def read_ledger(snapshot: Snapshot, device: str, base: LedgerBase) -> DeviceLedger:
    """Draw up the ledger of one device from one snapshot; read nothing else.

    Raises:
        LedgerError: `base` was measured on another device.
    """
    if base.device != device:
        raise LedgerError(f"the base was measured on {base.device} and cannot serve {device}; measure one there")
    if device == "cpu":
        total: int | None = snapshot.host.rss
        source = "rss"
        lines = _host_lines(snapshot, base)
    else:
        driver = next((reading for reading in snapshot.drivers if reading.device == device), None)
        total = None if driver is None else driver.process_bytes
        source = "none" if driver is None else driver.source
        lines = _device_lines(snapshot, device, base)
    explained = sum(line.bytes for line in lines)
    return DeviceLedger(device, total, source, lines, None if total is None else total - explained)


def _host_lines(snapshot: Snapshot, base: LedgerBase) -> tuple[DeviceLedgerLine, ...]:
    names = {"arena": "arena {}", "pinned": "pinned pool {}", "host": "host pool {}"}
    pools = tuple(
        DeviceLedgerLine(names[pool.kind].format(pool.tag), pool.resident.total, "resident")
        for pool in snapshot.pool_residency
    )
    # The kernel counts shared memory with mapped files, so a pool in shared memory is taken out of their line again.
    # Tensors over mapped files (weights read in place) stay in it.
    shared = sum(pool.resident.file_backed for pool in snapshot.pool_residency)
    mapped_tensors = snapshot.tensor_residency.file_backed
    return (
        DeviceLedgerLine("interpreter", base.context, "at baseline"),
        DeviceLedgerLine(
            "code, libraries and mapped files",
            snapshot.host.file_backed - shared,
            f"{mapped_tensors} bytes of it under tensors" if mapped_tensors else "",
        ),
        *((DeviceLedgerLine("libraries, loaded lazily", base.libraries, "at warm-up"),) if base.libraries else ()),
        *pools,
        DeviceLedgerLine("tensors outside pools", snapshot.tensor_residency.anonymous, "resident"),
    )


def _device_lines(snapshot: Snapshot, device: str, base: LedgerBase) -> tuple[DeviceLedgerLine, ...]:
    arenas: dict[str, int] = defaultdict(int)
    for pool in snapshot.pools:
        if pool.kind == "arena" and pool.device == device:
            arenas[pool.tag] += pool.mapped
    return (
        DeviceLedgerLine("context", base.context, "at baseline"),
        DeviceLedgerLine("kernels and libraries", base.libraries, "at warm-up"),
        *(DeviceLedgerLine(f"arena {tag}", mapped, "mapped") for tag, mapped in sorted(arenas.items())),
        *_torch_lines(snapshot, device),
    )


def _torch_lines(snapshot: Snapshot, device: str) -> tuple[DeviceLedgerLine, ...]:
    allocator = snapshot.allocator(device)
    if allocator is None:
        return ()
    if allocator.library_workspaces is None:  # no snapshot, so no pools
        if allocator.reserved is None:
            return ()
        return (DeviceLedgerLine("torch allocator", allocator.reserved, allocator.note),)
    default = [pool for pool in allocator.pools if not pool.private]
    private = [pool for pool in allocator.pools if pool.private]
    return (
        *_pool_lines("torch default pool", default),
        *_pool_lines("torch private pools", private),
        DeviceLedgerLine("library workspaces", allocator.library_workspaces, "kept by BLAS libraries between calls"),
    )


def _pool_lines(name: str, pools: list[PoolSegments]) -> tuple[DeviceLedgerLine, ...]:
    used = sum(pool.allocated - pool.workspaces for pool in pools)
    free = sum(pool.reserved - pool.allocated for pool in pools)
    ids = " ".join(f"{first}.{second}" for first, second in (pool.pool_id for pool in pools if pool.private))
    return (DeviceLedgerLine(f"{name}, in use", used, ids), DeviceLedgerLine(f"{name}, cached", free, ids))
