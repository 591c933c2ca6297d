"""The ledger: its lines and what is unexplained add up to the total, whatever the snapshot says."""

from __future__ import annotations

import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lowtide.leakcheck.judging.metrics import unaccounted_driver_memory
from lowtide.probes.device.allocations import Outside, OutsideTorch
from lowtide.probes.device.driver import DriverReading, NoDriver, find_driver
from lowtide.probes.device.torch_allocator import AllocatorReading, PinnedReading, PoolSegments
from lowtide.probes.host.memory_parts import Heaps
from lowtide.probes.host.readings import HostReading, Resident
from lowtide.probes.memory.tensors import TensorReading
from lowtide.probes.snapshot import PoolResidency, Snapshot, take_snapshot
from lowtide.probes.stages import PoolReading
from lowtide.reports.from_snapshot import LedgerBase, to_ledger, to_readings
from lowtide.reports.schema import Ledger

MIB = 1 << 20
CARD = LedgerBase("cuda:0", context=500, libraries=60)
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")

EMPTY = Snapshot(
    tensors=TensorReading({}, 0),
    allocators=(),
    pinned=PinnedReading(0, 0),
    drivers=(DriverReading("cuda:0", "nvml", 10_000, 20_000, 30_000, ""),),
    pools=(),
    pool_residency=(),
    tensor_residency=Resident(0, 0),
    host=HostReading(1000, 700, 300, 1, 1, (), 0, 0),
    frozen=0,
    caches=(),
)
ALLOCATOR = AllocatorReading(
    "cuda:0",
    allocated=450,
    reserved=1000,
    pools=(
        PoolSegments((0, 0), reserved=700, allocated=400, workspaces=32, empty=0, unclaimed=0, pending=0),
        PoolSegments((0, 1), reserved=200, allocated=50, workspaces=8, empty=100, unclaimed=0, pending=0),
        PoolSegments((0, 2), reserved=100, allocated=0, workspaces=0, empty=100, unclaimed=0, pending=0),
    ),
    library_workspaces=40,
    trusted=True,
    note="",
)


AWAKE = replace(EMPTY, allocators=(ALLOCATOR,))


def lines_of(ledger: Ledger) -> dict[str, int]:
    names = [line.name for line in ledger.lines]
    assert len(names) == len(set(names))
    return {line.name: line.bytes for line in ledger.lines}


def unexplained(taken: Snapshot, device: str) -> int:
    found = to_ledger(taken, LedgerBase(device, context=0)).unexplained
    assert found is not None
    return found


def adds_up(ledger: Ledger) -> bool:
    return (
        ledger.unexplained is not None and sum(line.bytes for line in ledger.lines) + ledger.unexplained == ledger.total
    )


def test_a_cards_lines() -> None:
    arenas = (
        PoolReading("arena", "weights", "cuda:0", 5000, 3000, ()),
        PoolReading("arena", "kv_cache", "cuda:0", 5000, 1000, ()),
        PoolReading("arena", "kv_cache", "cuda:0", 5000, 200, ()),
    )
    ledger = to_ledger(replace(EMPTY, pools=arenas, allocators=(ALLOCATOR,)), CARD)
    assert lines_of(ledger) == {
        "context": 500,
        "kernels and libraries": 60,
        "arena kv_cache": 1200,
        "arena weights": 3000,
        "torch default pool, in use": 368,
        "torch default pool, cached": 300,
        "torch private pools, in use": 42,
        "torch private pools, cached": 250,
        "library workspaces": 40,
    }
    assert (ledger.total, ledger.source, ledger.unexplained) == (10_000, "nvml", 4240)


def test_what_is_elsewhere_is_on_no_cards_ledger() -> None:
    elsewhere = (
        PoolReading("arena", "weights", "cuda:1", 100, 100, ()),
        PoolReading("arena", "weights", "cpu", 100, 100, ()),
        PoolReading("pinned", "ring", "cuda:0", 100, 100, ()),
        PoolReading("host", "image", "cuda:0", 100, 100, ()),
    )
    taken = replace(EMPTY, pools=elsewhere, allocators=(replace(ALLOCATOR, device="cuda:1"),))
    assert lines_of(to_ledger(taken, CARD)) == {"context": 500, "kernels and libraries": 60}


def test_what_the_driver_lists_nowhere_is_kernels_and_libraries_from_the_first_life_on() -> None:
    # Of 10,000 that the driver counts torch explains 1,000; others have asked for 20 more than at the baseline.
    base = LedgerBase("cuda:0", context=500, libraries=60, outside=Outside(30, {"libcublas.so.13": 10}))
    now = Outside(50, {"libcublas.so.13": 15, "libcufft.so.12": 3})
    ledger = to_ledger(replace(AWAKE, outside={"cuda:0": now}), base)
    lines = lines_of(ledger)
    assert lines["kernels and libraries"] == 10_000 - 1_000 - 500 - 20
    assert (lines["libcublas.so.13"], lines["libcufft.so.12"]) == (5, 3)
    assert ledger.unexplained == 20 - 8
    assert adds_up(ledger)


@pytest.mark.parametrize(("before", "now"), [(None, {"cuda:0": Outside(50)}), (Outside(30), {})])
def test_where_the_driver_lists_nothing_they_are_what_a_warm_up_took(
    before: Outside | None, now: dict[str, Outside]
) -> None:
    ledger = to_ledger(replace(AWAKE, outside=now), LedgerBase("cuda:0", context=500, libraries=60, outside=before))
    assert lines_of(ledger)["kernels and libraries"] == 60
    assert ledger.unexplained == 10_000 - 1_000 - 500 - 60


def test_private_pools_are_named_by_their_ids() -> None:
    ledger = to_ledger(replace(EMPTY, allocators=(ALLOCATOR,)), CARD)
    (line,) = [line for line in ledger.lines if line.name == "torch private pools, cached"]
    assert line.note == "0.1 0.2"


def test_a_pool_that_an_engine_keeps_has_its_name_and_no_memory_while_it_sleeps() -> None:
    default, awake, asleep = ALLOCATOR.pools
    owned = (
        default,
        replace(awake, owner="weights of vLLM's CuMemAllocator", asleep=150, asleep_in_use=40),
        replace(asleep, owner="kv_cache of vLLM's CuMemAllocator"),
    )
    taken = replace(EMPTY, allocators=(replace(ALLOCATOR, pools=owned),))
    lines = lines_of(to_ledger(taken, CARD))
    assert lines["weights of vLLM's CuMemAllocator, in use"] == 50 - 8 - 40
    assert lines["weights of vLLM's CuMemAllocator, cached"] == 200 - 50 - (150 - 40)
    assert lines["kv_cache of vLLM's CuMemAllocator, cached"] == 100
    assert lines["torch private pools, in use"] == lines["torch private pools, cached"] == 0
    assert (unaccounted_driver_memory(taken, "cuda:0") or 0) - (unaccounted_driver_memory(AWAKE, "cuda:0") or 0) == 150


def test_an_allocator_without_a_snapshot_is_one_line_by_its_own_count() -> None:
    blind = replace(ALLOCATOR, pools=(), library_workspaces=None, trusted=False, note="no memory snapshot")
    ledger = to_ledger(replace(EMPTY, allocators=(blind,)), CARD)
    (line,) = [line for line in ledger.lines if line.name == "torch allocator"]
    assert (line.bytes, line.note) == (1000, "no memory snapshot")


def test_an_allocator_that_does_not_tell_is_no_line_of_zero() -> None:
    blind = replace(ALLOCATOR, pools=(), library_workspaces=None, reserved=None)
    ledger = to_ledger(replace(EMPTY, allocators=(blind,)), CARD)
    assert "torch allocator" not in lines_of(ledger)
    assert adds_up(ledger)


def test_without_a_driver_the_lines_stay_and_the_total_is_unknown() -> None:
    taken = replace(EMPTY, drivers=(NoDriver("a test").read(0),), allocators=(ALLOCATOR,))
    ledger = to_ledger(taken, CARD)
    assert (ledger.total, ledger.unexplained, ledger.source) == (None, None, "none")
    assert lines_of(ledger)["library workspaces"] == 40


def test_a_device_that_the_driver_was_not_asked_about_has_no_total() -> None:
    ledger = to_ledger(EMPTY, LedgerBase("cuda:5", context=0))
    assert (ledger.total, ledger.source) == (None, "none")


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_right_after_measuring_the_base_nothing_is_unexplained(device: str) -> None:
    taken = replace(EMPTY, allocators=(ALLOCATOR,))
    assert to_ledger(taken, LedgerBase(device, unexplained(taken, device))).unexplained == 0


def test_the_hosts_lines() -> None:
    taken = replace(
        EMPTY,
        pool_residency=(
            PoolResidency("arena", "weights", Resident(100, 0)),
            PoolResidency("host", "weights", Resident(0, 50)),
            PoolResidency("pinned", "ring", Resident(0, 20)),
        ),
        tensor_residency=Resident(30, 5),
    )
    ledger = to_ledger(taken, LedgerBase("cpu", context=400, libraries=10))
    assert lines_of(ledger) == {
        "stacks and data of libraries": 400,
        "code, libraries and mapped files": 300 - 50 - 20,
        "libraries, loaded lazily": 10,
        "arena weights": 100,
        "host pool weights": 50,
        "pinned pool ring": 20,
        "tensors outside pools": 30,
    }
    assert (ledger.total, ledger.source, ledger.unexplained) == (1000, "rss", 1000 - 840)


# Of 700 anonymous bytes 130 are those of a pool and of tensors, and 400 those of the baseline.
@pytest.mark.parametrize(
    ("heaps", "in_malloc", "told"),
    [
        pytest.param(Heaps(60, 5, 70, 10), 30, (60, 5, 40, 10), id="all of it"),
        pytest.param(Heaps(60, 5, 20, 10), 30, (60, 5, 0, 10), id="tensors elsewhere"),
        pytest.param(Heaps(60, 5, 130, 80), 30, (60, 5, 100, 5), id="more than there is"),
    ],
)
def test_heaps_have_lines_of_their_own(heaps: Heaps, in_malloc: int, told: tuple[int, int, int, int]) -> None:
    taken = replace(
        EMPTY,
        pool_residency=(PoolResidency("arena", "weights", Resident(100, 0)),),
        tensor_residency=Resident(30, 0),
        host=replace(EMPTY.host, heaps=heaps),
        in_malloc=in_malloc,
    )
    ledger = to_ledger(taken, LedgerBase("cpu", context=400))
    lines = lines_of(ledger)
    names = ("Python's heap in use", "Python's heap, free", "malloc in use", "malloc's heap, free")
    assert tuple(lines[name] for name in names) == told
    assert adds_up(ledger)
    assert ledger.unexplained == 700 - 130 - 400 - sum(told)


def _lines_of_what_is_taken() -> list[dict[str, int]]:
    """Return a ledger's lines before, with many small objects, and then with 16 MiB each of three kinds."""

    def lines() -> dict[str, int]:
        ledger = to_ledger(take_snapshot(driver=NoDriver("a test")), LedgerBase("cpu", 0))
        return {**lines_of(ledger), "unexplained": ledger.unexplained or 0}

    read = [lines()]
    objects = [str(number) * 20 for number in range(100_000)]
    read.append(lines())
    # What is mapped is in no heap.
    mapped = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.write(b"x" * (16 * MIB))
    given_out = bytearray(b"x" * (16 * MIB))
    tensor = torch.ones(16 * MIB, dtype=torch.uint8)
    read.append(lines())
    del objects, given_out, tensor
    mapped.close()
    return read


def test_what_objects_and_native_code_take_is_in_the_heaps_lines() -> None:
    # In a process in which no test has read free pages of a heap, which look as if they were in memory from then on.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        before, with_objects, after = fresh.submit(_lines_of_what_is_taken).result(timeout=120)
    grown = {name: (with_objects[name] - size) // MIB for name, size in before.items()}
    assert grown["Python's heap in use"] + grown["malloc in use"] >= 12
    grown = {name: (after[name] - size) // MIB for name, size in with_objects.items()}
    told = {name: grown[name] for name in ("malloc in use", "tensors outside pools", "unexplained")}
    assert all(15 <= size <= 17 for size in told.values()), told


def test_tensors_over_mapped_files_are_reported_where_they_are_counted() -> None:
    ledger = to_ledger(replace(EMPTY, tensor_residency=Resident(30, 5)), LedgerBase("cpu", 0))
    (line,) = [line for line in ledger.lines if line.name == "code, libraries and mapped files"]
    assert (line.bytes, line.note) == (300, "5 bytes of it under tensors")


amounts = st.integers(0, 1 << 40)


@given(amounts, amounts, amounts, amounts, amounts, amounts, amounts)
def test_every_ledger_adds_up(
    total: int, context: int, mapped: int, reserved: int, allocated: int, workspaces: int, resident: int
) -> None:
    allocator = replace(
        ALLOCATOR,
        pools=(PoolSegments((0, 0), reserved, allocated, workspaces, 0, 0, 0),),
        library_workspaces=workspaces,
    )
    taken = replace(
        EMPTY,
        drivers=(DriverReading("cuda:0", "nvml", total, None, None, ""),),
        allocators=(allocator,),
        pools=(PoolReading("arena", "weights", "cuda:0", mapped, mapped, ()),),
        pool_residency=(PoolResidency("arena", "weights", Resident(resident, mapped)),),
        host=replace(EMPTY.host, rss=total, file_backed=reserved),
    )
    assert adds_up(to_ledger(taken, LedgerBase("cuda:0", context)))
    assert adds_up(to_ledger(taken, LedgerBase("cpu", context)))


def test_on_this_host_a_large_tensor_is_explained() -> None:
    driver = NoDriver("a test")
    before = take_snapshot(driver=driver)
    base = LedgerBase("cpu", unexplained(before, "cpu"))
    kept = torch.ones(256 * MIB // 4)
    ledger = to_ledger(take_snapshot(driver=driver), base)
    assert adds_up(ledger)
    assert lines_of(ledger)["tensors outside pools"] - before.tensor_residency.anonymous == kept.nbytes
    assert ledger.unexplained is not None
    assert abs(ledger.unexplained) < 64 * MIB


def test_on_this_host_memory_that_nobody_names_is_unexplained() -> None:
    driver = NoDriver("a test")
    base = LedgerBase("cpu", unexplained(take_snapshot(driver=driver), "cpu"))
    with mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as hidden:
        hidden.write(b"x" * (256 * MIB))
        ledger = to_ledger(take_snapshot(driver=driver), base)
    assert ledger.unexplained is not None
    assert ledger.unexplained > 192 * MIB


@pytest.mark.cuda
@needs_card
def test_on_a_card_the_ledger_explains_what_torch_takes() -> None:
    driver = find_driver()
    try:
        left = torch.ones(1024, 1024, device="cuda")
        warm = left @ left
        torch.cuda.synchronize()
        base = LedgerBase("cuda:0", unexplained(take_snapshot(driver=driver, devices=[0]), "cuda:0"))
        kept = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        ledger = to_ledger(take_snapshot(driver=driver, devices=[0]), base)
    finally:
        driver.close()
    assert adds_up(ledger)
    assert lines_of(ledger)["torch default pool, in use"] >= kept.nbytes + warm.nbytes
    assert lines_of(ledger)["library workspaces"] > 0
    assert ledger.unexplained is not None
    assert abs(ledger.unexplained) <= 4 * MIB


def _ledger_of_first_use() -> Ledger:
    cupy, driver, outside = pytest.importorskip("cupy"), find_driver(), OutsideTorch()

    def taken() -> Snapshot:
        torch.cuda.synchronize()
        return take_snapshot(driver=driver, devices=[0], outside_torch=outside)

    try:
        left = torch.ones(256, 256, device="cuda")
        before = taken()
        base = LedgerBase("cuda:0", unexplained(before, "cuda:0"), outside=before.outside["cuda:0"])
        # Code that is loaded here, and 96 MiB that torch knows nothing of.
        torch.fft.fft(torch.linalg.inv(left + torch.eye(256, device="cuda")))
        kept = cupy.cuda.runtime.malloc(96 * MIB)
        ledger = to_ledger(taken(), base)
        cupy.cuda.runtime.free(kept)
    finally:
        driver.close()
    return ledger


@pytest.mark.cuda
@needs_card
def test_on_a_card_code_is_of_libraries_and_memory_past_torch_is_unexplained() -> None:
    pytest.importorskip("cupy")
    # In a process that has loaded none of it: the tests before this one may have.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        ledger = fresh.submit(_ledger_of_first_use).result(timeout=120)
    assert adds_up(ledger)
    assert lines_of(ledger)["kernels and libraries"] > 2 * MIB
    assert ledger.unexplained is not None
    # Solvers take memory past torch, too.
    assert 96 * MIB <= ledger.unexplained <= 384 * MIB


@pytest.mark.parametrize(("reserved", "beside"), [(64, 28), (None, 0), (0, 0)])
def test_what_torch_pins_beside_its_tensors_is_rounded_up_or_kept(reserved: int | None, beside: int) -> None:
    snapshot = replace(EMPTY, pinned=PinnedReading(None, reserved), pinned_tensors=36 if reserved else 0)
    assert to_readings(snapshot, "cuda:0", ()).pinned_beside_tensors == beside
