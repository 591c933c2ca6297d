"""All probes at one moment: one immutable value that keeps nothing of what it describes alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.probes.device.allocations import Outside, OutsideTorch, with_sleepers
from lowtide.probes.device.driver import Driver, DriverReading
from lowtide.probes.device.torch_allocator import (
    AllocatorReading,
    PinnedReading,
    read_allocators,
    read_pinned,
)
from lowtide.probes.heap.caches import LRU_CACHE, CacheReading, bytes_held, read_caches
from lowtide.probes.host.readings import (
    HostReading,
    Resident,
    named_shared_memory,
    read_host,
    resident_in,
    unnamed_shared_memory,
)
from lowtide.probes.memory.malloc_heaps import in_malloc
from lowtide.probes.memory.ranges import Range, common, total, without
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
        in_malloc: bytes of pools in host memory and of tensors, touched or not, that malloc has given out.
        outside: by device, what others than torch and the arenas have asked the driver for, where it lists that.
        pinned_tensors: bytes of tensors that lie in page-locked memory, as far as torch's cache can have them: it takes
            the next power of two for each, and keeps what was given back.
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
    in_malloc: int = 0
    outside: Mapping[str, Outside] = msgspec.field(default_factory=dict)
    pinned_tensors: int = 0

    def arena_mapped(self, tag: str | None = None, device: str | None = None) -> int:
        """Return the bytes mapped by announced arenas, of one tag or all, on one device or all."""
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
        """Return the bytes that the driver says this process holds on `device`; None if not asked or not reported."""
        return next((reading.process_bytes for reading in self.drivers if reading.device == device), None)

    def allocator(self, device: str) -> AllocatorReading | None:
        """Return what torch's allocator holds on `device`; None where the process has no context there."""
        return next((reading for reading in self.allocators if reading.device == device), None)

    def allocated(self, device: str) -> int | None:
        """Return the bytes that torch's allocator handed out on `device`: 0 without a context, None if unknown."""
        reading = self.allocator(device)
        return 0 if reading is None else reading.allocated

    def reserved(self, device: str) -> int | None:
        """Return the bytes that torch's allocator took from the driver: 0 without a context, None if unknown."""
        reading = self.allocator(device)
        return 0 if reading is None else reading.reserved

    def asleep(self, device: str) -> int:
        """Return the bytes of that which the driver does not have while the pools that they are in sleep."""
        reading = self.allocator(device)
        return 0 if reading is None else sum(pool.asleep for pool in reading.pools)


_MOST_BEHIND_CACHES = 300_000
"""Objects behind all large caches together that one snapshot looks at: a third of a second."""


def take_snapshot(
    *, driver: Driver, devices: Sequence[int] = (), outside_torch: OutsideTorch | None = None
) -> Snapshot:
    """Read everything once.

    Args:
        driver: whom to ask about the cards (`find_driver()`).
        devices: torch's indices of the cards to ask about.
        outside_torch: reads what others have asked the driver for there; None: that is left out.

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
        claimed = {storage.address for storage in survey.storages}
        allocators = tuple(map(with_sleepers, read_allocators(claimed)))
    snapshot = Snapshot(
        tensors=tensors,
        allocators=allocators,
        pinned=pinned,
        drivers=drivers,
        pools=pools,
        pool_residency=pool_residency,
        tensor_residency=tensor_residency,
        file_residency=file_residency,
        in_malloc=in_malloc([*outside, *pooled]),
        pinned_tensors=_in_pinned_memory(outside, pinned),
        host=host,
        frozen=gc.get_freeze_count(),
        caches=caches,
    )
    return snapshot if outside_torch is None else replace(snapshot, outside=_outside(snapshot, outside_torch))


def _in_pinned_memory(tensors: Sequence[Range], pinned: PinnedReading) -> int:
    """Return the bytes of tensors that torch may have pinned: a card's driver does so in shared memory with no name.

    Where less of that is mapped than torch has, it has registered other memory (`pinned_use_cuda_host_register`), and
    all of it may be tensors'.
    """
    cached = pinned.torch_reserved or 0
    mapped = unnamed_shared_memory() if cached else []
    return min(cached, total(common(tensors, mapped))) if total(mapped) >= cached else cached


def _outside(snapshot: Snapshot, outside_torch: OutsideTorch) -> dict[str, Outside]:
    found = {}
    for reading in snapshot.drivers:
        reserved = snapshot.reserved(reading.device)
        if reading.process_bytes and reserved is not None:
            explained = reserved - snapshot.asleep(reading.device) + snapshot.arena_mapped(device=reading.device)
            outside = outside_torch.read(reading.device, reading.process_bytes - explained)
            if outside is not None:
                found[reading.device] = outside
    return found


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
