"""A snapshot: all probes at once, and nothing changed by it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from lowtide.probes.device.driver import Driver, DriverReading, NoDriver, find_driver
from lowtide.probes.device.torch_allocator import AllocatorReading, PinnedReading
from lowtide.probes.host.readings import Resident
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.probes.snapshot import PoolResidency, Snapshot, _in_pinned_memory, take_snapshot
from lowtide.probes.stages import PoolReading, PoolSourceError, announce

MIB = 1 << 20
PAGE = mmap.PAGESIZE
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")


def snapshot(driver: Driver | None = None) -> Snapshot:
    return take_snapshot(driver=driver or NoDriver("a test"))


class Allocator:
    """A pool of pages outside torch, announced."""

    def __init__(self, kind: Any, tag: str, pages: int, device: str = "cpu", *, shared: bool = False) -> None:
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self.memory = mmap.mmap(-1, pages * PAGE, flags=flags | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.range = (ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), pages * PAGE)
        self.kind, self.tag, self.device = kind, tag, device
        announce(self)

    def touch(self, pages: int) -> None:
        self.memory[0 : pages * PAGE] = b"x" * (pages * PAGE)

    def read_pools(self) -> tuple[PoolReading, ...]:
        return (PoolReading(self.kind, self.tag, self.device, 2 * self.range[1], self.range[1], (self.range,)),)


def test_a_snapshot_holds_no_live_object() -> None:
    tensor = torch.ones(10)
    watched = weakref.ref(tensor)
    kept = snapshot()
    del tensor
    assert watched() is None
    assert kept.tensors.bytes_on("cpu") > 0


def test_a_snapshot_counts_a_new_tensor_exactly() -> None:
    before = snapshot()
    tensor = torch.ones(12_345)
    after = snapshot()
    assert after.tensors.bytes_on("cpu") - before.tensors.bytes_on("cpu") == tensor.nbytes


def test_it_counts_what_is_frozen() -> None:
    assert frozen_by_program(snapshot().frozen) == 0
    gc.freeze()
    try:
        assert snapshot().frozen == gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_the_driver_is_asked_for_each_device() -> None:
    class Two:
        name = "nvml"

        def read(self, device_index: int) -> DriverReading:
            return DriverReading(f"cuda:{device_index}", "nvml", device_index * 10, 1, 2, "")

        def close(self) -> None: ...

    taken = take_snapshot(driver=Two(), devices=[0, 3])
    assert [reading.device for reading in taken.drivers] == ["cuda:0", "cuda:3"]
    assert (taken.driver_bytes("cuda:0"), taken.driver_bytes("cuda:3")) == (0, 30)


def test_a_device_that_was_not_asked_for_is_unknown() -> None:
    assert snapshot().driver_bytes("cuda:0") is None


def test_a_source_that_cannot_be_read_is_not_passed_over() -> None:
    class Broken:
        def read_pools(self) -> tuple[PoolReading, ...]:
            raise OSError("gone")

    source = Broken()
    announce(source)
    with pytest.raises(PoolSourceError, match="Broken"):
        snapshot()


def test_after_an_error_the_collector_is_on_again() -> None:
    class Broken:
        def read_pools(self) -> tuple[PoolReading, ...]:
            raise OSError("gone")

    source = Broken()
    announce(source)
    with contextlib.suppress(PoolSourceError):
        snapshot()
    assert gc.isenabled()


def test_pools_in_host_memory_are_read_with_what_is_resident() -> None:
    weights, image = Allocator("arena", "weights", 16), Allocator("host", "weights", 16, "cuda:0", shared=True)
    weights.touch(5)
    image.touch(7)
    assert snapshot().pool_residency == (
        PoolResidency("arena", "weights", Resident(5 * PAGE, 0)),
        PoolResidency("host", "weights", Resident(0, 7 * PAGE, shared=7 * PAGE)),
    )


def test_an_arena_on_a_card_is_not_looked_for_in_host_memory() -> None:
    arena = Allocator("arena", "weights", 16, "cuda:0")
    arena.touch(5)
    taken = snapshot()
    assert taken.pool_residency == ()
    assert len(taken.pools) == 1


def test_memory_that_two_pools_announce_is_resident_once() -> None:
    first = Allocator("arena", "weights", 16)
    second = Allocator("host", "image", 16)
    second.range = first.range
    first.touch(5)
    assert sum(pool.resident.total for pool in snapshot().pool_residency) == 5 * PAGE


def test_tensors_outside_pools_are_distinguished_from_those_inside() -> None:
    arena = Allocator("arena", "weights", 16)
    arena.touch(16)
    before = snapshot()
    inside = torch.frombuffer(arena.memory, dtype=torch.uint8)
    with_inside = snapshot()
    outside = torch.ones(16 * MIB // 4)
    with_both = snapshot()
    assert with_inside.tensors.bytes_on("cpu") - before.tensors.bytes_on("cpu") == inside.nbytes
    assert with_inside.tensor_residency == before.tensor_residency
    grown = with_both.tensor_residency.anonymous - with_inside.tensor_residency.anonymous
    assert grown == outside.nbytes


@pytest.fixture
def taken() -> Snapshot:
    """A snapshot with made-up pools and counters."""
    allocator = AllocatorReading("cuda:0", 10, 20, (), None, False, "a test")
    pools = (
        PoolReading("arena", "kv_cache", "cuda:0", 100, 40, ()),
        PoolReading("arena", "weights", "cuda:0", 100, 60, ()),
        PoolReading("arena", "weights", "cuda:1", 100, 7, ()),
        PoolReading("host", "weights", "cpu", 100, 100, ()),
        PoolReading("pinned", "ring", "cpu", 64, 64, ()),
    )
    return replace(snapshot(), allocators=(allocator,), pools=pools, pinned=PinnedReading(3, 5))


def test_mapped_arena_bytes_by_tag_and_device(taken: Snapshot) -> None:
    assert taken.arena_mapped() == 107
    assert taken.arena_mapped("weights") == 67
    assert taken.arena_mapped(device="cuda:0") == 100
    assert taken.arena_mapped("weights", "cuda:0") == 60


def test_pinned_bytes_are_torchs_cache_and_the_pools(taken: Snapshot) -> None:
    assert taken.pinned_bytes == 69


def test_pinned_bytes_of_which_torch_does_not_tell_are_unknown(taken: Snapshot) -> None:
    assert replace(taken, pinned=PinnedReading(None, None)).pinned_bytes is None


def test_of_what_torch_pins_that_is_its_tensors_which_lies_in_shared_memory_without_a_name() -> None:
    # As a card's driver maps what it pins.
    pinned, heap = torch.frombuffer(mmap.mmap(-1, 3 * MIB), dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    rounded_up = mmap.mmap(-1, MIB)
    tensors = [(each.data_ptr(), each.nbytes) for each in (pinned, heap)]
    assert _in_pinned_memory(tensors, PinnedReading(None, 4 * MIB)) == 3 * MIB
    assert _in_pinned_memory(tensors, PinnedReading(None, 2 * MIB)) == 2 * MIB
    assert _in_pinned_memory(tensors, PinnedReading(None, None)) == 0
    # Of what torch has registered instead nothing is known.
    assert _in_pinned_memory(tensors, PinnedReading(None, 1 << 50)) == 1 << 50
    rounded_up.close()


def test_allocator_figures_by_device(taken: Snapshot) -> None:
    assert (taken.allocated("cuda:0"), taken.reserved("cuda:0")) == (10, 20)
    assert (taken.allocated("cuda:1"), taken.reserved("cuda:1")) == (0, 0)


def test_cache_bytes_count_a_shared_tensor_once() -> None:
    shared = torch.ones(1000)
    before = snapshot().cache_bytes
    caches = [functools.lru_cache(maxsize=4)(lambda key: shared) for _ in range(2)]
    for cache in caches:
        cache(1)
    assert snapshot().cache_bytes - before == shared.nbytes


@pytest.mark.parametrize(
    ("frozen", "readings"),
    [pytest.param(False, 10, id="unfrozen"), pytest.param(True, 5, id="frozen", marks=pytest.mark.nightly)],
)
def test_readings_change_nothing(frozen: bool, readings: int) -> None:
    # In a process of its own: what a test runner does beside it would look like the reading's doing.
    script = Path(__file__).with_name("read_again.py")
    command = [sys.executable, str(script), str(readings), *(["--frozen"] if frozen else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_collector_is_paused_for_the_whole_reading() -> None:
    paused = []

    class Watching:
        def read_pools(self) -> tuple[PoolReading, ...]:
            paused.append(not gc.isenabled())
            return ()

    source = Watching()
    announce(source)
    snapshot()
    assert paused == [True]


def test_a_walk_runs_no_collection() -> None:
    collections: list[str] = []

    def heard(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    thresholds = gc.get_threshold()
    gc.callbacks.append(heard)
    try:
        gc.set_threshold(50_000, 10, 10)  # far more than one snapshot leaves, far less than a walk makes
        gc.collect()
        collections.clear()
        kept = snapshot()
        assert collections == []
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(heard)
    assert kept.tensors.unreadable == 0


def test_the_objects_on_the_heap_are_the_same_after_a_reading() -> None:
    snapshot()
    gc.collect()
    before = len(gc.get_objects())
    snapshot()
    assert len(gc.get_objects()) == before


@pytest.mark.cuda
@needs_card
def test_on_a_card_readings_change_nothing() -> None:
    driver = find_driver()
    try:
        kept = torch.ones(1 << 20, device="cuda")
        product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        torch.cuda.synchronize()
        gc.collect()

        def read() -> Snapshot:
            taken = take_snapshot(driver=driver, devices=[0])
            host = replace(taken.host, rss=0, anonymous=0, file_backed=0, own=0, shared=0, heaps=None)
            return replace(taken, host=host)

        def still(taken: Snapshot) -> Snapshot:
            # The card is shared: what others use is theirs.
            return replace(taken, drivers=tuple(replace(reading, card_used=0) for reading in taken.drivers))

        first, before = still(read()), torch.cuda.memory_stats(0)
        for _ in range(100):
            assert still(read()) == first
        assert torch.cuda.memory_stats(0) == before
        assert kept.numel() + product.numel() > 0
    finally:
        driver.close()
