"""What counts as host memory that nobody has, in lives: anonymous, shared without a file, and swapped out."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator, Sequence
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from lowtide.leakcheck.judging.metrics import unaccounted_host_memory
from lowtide.leakcheck.lives import shutdown_judgement
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.torch_allocator import PinnedReading
from lowtide.probes.host import readings as host
from lowtide.probes.host.readings import resident_in
from lowtide.probes.snapshot import Snapshot, take_snapshot
from tests.probes.thread_arenas import free, take

pytestmark = pytest.mark.nightly

MIB = 1 << 20
SIZE = 96 * MIB

KEPT: list[Any] = []
TEXTS: list[str] = []


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    gc.collect()
    yield
    for kept in KEPT:
        if isinstance(kept, list) and kept and isinstance(kept[0], int):
            free(kept)
        if isinstance(kept, shared_memory.SharedMemory):
            kept.close()
            kept.unlink()
    KEPT.clear()


class MapsMemory:
    """Has shared memory that has no file; the clean twin unmaps it."""

    keeps = False

    def create(self) -> None:
        self.map = mmap.mmap(-1, SIZE)
        self.map.write(b"x" * SIZE)

    def infer(self) -> Sequence[Sequence[int]]:
        return [[self.map[0]]]

    def shutdown(self) -> None:
        if self.keeps:
            KEPT.append(self.map)
        else:
            self.map.close()


class KeepsTheMap(MapsMemory):
    keeps = True


class FreesInThreads:
    """Has its requests read in by threads, in each life by more, whose arenas keep what they have freed."""

    keeps = False
    threads = 0

    def create(self) -> None:
        type(self).threads += 4

    def infer(self) -> Sequence[Sequence[int]]:
        addresses = take(self.threads, 300)
        if self.keeps:
            KEPT.append(addresses)
        else:
            free(addresses)
        return [[0]]

    def shutdown(self) -> None:
        pass


class KeepsASharedTensor(MapsMemory):
    """A tensor in shared memory: found as a tensor, and as nothing else."""

    def create(self) -> None:
        self.weights = torch.ones(SIZE // 4).share_memory_()

    def infer(self) -> Sequence[Sequence[int]]:
        return [[int(self.weights[0])]]

    def shutdown(self) -> None:
        KEPT.append(self.weights)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_threads_have_freed_in_a_life_is_no_leak(monkeypatch: pytest.MonkeyPatch, *, keeps: bool) -> None:
    monkeypatch.setattr(FreesInThreads, "keeps", keeps)
    monkeypatch.setattr(FreesInThreads, "threads", 0)
    run = LifecycleRun(
        "threads",
        FreesInThreads,
        device="cpu",
        driver=NoDriver("a test"),
        cycles=2,
        script=("create", "infer", "shutdown"),
    )
    found = [(finding.resource, finding.bytes > 110_000_000) for finding in run.run().findings if finding.bytes]
    assert found == ([("host-memory", True)] if keeps else [])


class KeepsAFile(MapsMemory):
    """A file of /dev/shm: found by its name, and as nothing else."""

    def create(self) -> None:
        self.segment = shared_memory.SharedMemory(create=True, size=SIZE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.segment.buf)), 1, SIZE)

    def infer(self) -> Sequence[Sequence[int]]:
        return [[int(self.segment.buf[0])]]

    def shutdown(self) -> None:
        KEPT.append(self.segment)


class FreesPieces(MapsMemory):
    """What it frees stays free in the heap: no leak, and what hides none."""

    def create(self) -> None:
        self.pieces = [bytes(1000) for _ in range(100_000)]

    def infer(self) -> Sequence[Sequence[int]]:
        return [[len(self.pieces)]]

    def shutdown(self) -> None:
        self.pieces.clear()


class KeepsTexts(FreesPieces):
    def shutdown(self) -> None:
        TEXTS.extend(f"{number:8}" * 20 for number in range(600_000))
        self.pieces.clear()


@pytest.mark.parametrize("life", [FreesPieces, KeepsTexts])
def test_a_life_answers_for_the_texts_that_it_keeps_not_for_what_it_has_freed(life: type[FreesPieces]) -> None:
    run = LifecycleRun(
        "pieces", life, device="cpu", driver=NoDriver("a test"), cycles=3, script=("create", "infer", "shutdown")
    )
    try:
        large = [finding for finding in run.run().findings if finding.bytes]
    finally:
        TEXTS.clear()
    if life is FreesPieces:
        assert large == []
        return
    (finding,) = large
    assert (finding.resource, finding.holder) == ("host-memory", f"{__name__}.TEXTS")
    assert finding.bytes >= 2 * 600_000 * 200
    assert finding.advice == f"del {__name__}.TEXTS[600000:1800000]"


class KeepsPieces(FreesPieces):
    def create(self) -> None:
        self.pieces = []

    def shutdown(self) -> None:
        KEPT.append([bytes(1000) for _ in range(60_000)])


def test_what_is_free_before_a_life_hides_nothing_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def long_containers() -> dict[int, int]:
        """Leave more free than the life keeps, below a piece that is in use, as judging a large heap does."""
        pieces = [bytes(1000) for _ in range(90_000)]
        pinned.append(pieces.pop())
        return {}

    pinned: list[bytes] = []
    monkeypatch.setattr(shutdown_judgement, "long_containers", long_containers)
    run = LifecycleRun(
        "pieces", KeepsPieces, device="cpu", driver=NoDriver("a test"), cycles=2, script=("create", "infer", "shutdown")
    )
    (finding,) = [finding for finding in run.run().findings if finding.bytes]
    assert finding.resource == "host-memory"
    assert finding.bytes >= 55 * MIB


@pytest.mark.parametrize(
    ("life", "resource"),
    [(MapsMemory, ""), (KeepsTheMap, "host-memory"), (KeepsASharedTensor, "tensors"), (KeepsAFile, "shared-memory")],
)
def test_a_life_answers_once_for_shared_memory_that_it_keeps(life: type[MapsMemory], resource: str) -> None:
    run = LifecycleRun(
        "maps", life, device="cpu", driver=NoDriver("a test"), cycles=2, script=("create", "infer", "shutdown")
    )
    large = [finding for finding in run.run().findings if finding.bytes]
    assert {finding.resource for finding in large} == ({resource} if resource else set())
    assert len(large) == 1 or resource != "host-memory"
    assert all(finding.bytes >= SIZE for finding in large)


class KeepsAnArray(FreesPieces):
    """Puts what it keeps in the place of the last life's, so that nothing adds up; the rest may be first use."""

    size = 48 * MIB

    def create(self) -> None:
        self.pieces = [bytes(1000) for _ in range(40_000)]

    def shutdown(self) -> None:
        KEPT[:] = [self.array(), self.pieces]

    def array(self) -> Any:
        return np.ones(self.size // 8)


class KeepsASmallOne(KeepsAnArray):
    size = 16 * MIB


class LetsGoOfIt(KeepsAnArray):
    def array(self) -> Any:
        return len(super().array())


class KeepsATensorOfIt(KeepsAnArray):
    def array(self) -> Any:
        array = super().array()
        return array, torch.from_numpy(array)


@pytest.mark.parametrize("cycles", [1, 3])
@pytest.mark.parametrize(
    ("life", "resource"),
    [(KeepsAnArray, "host-memory"), (KeepsASmallOne, ""), (LetsGoOfIt, ""), (KeepsATensorOfIt, "tensors")],
)
def test_an_array_is_told_though_it_may_have_come_with_a_first_use(
    life: type[KeepsAnArray], resource: str, cycles: int
) -> None:
    old = np.ones(40 * MIB // 8)
    run = LifecycleRun(
        "array", life, device="cpu", driver=NoDriver("a test"), cycles=cycles, script=("create", "infer", "shutdown")
    )
    large = [finding for finding in run.run().findings if finding.bytes]
    assert [finding.resource for finding in large] == ([resource] if resource else [])
    if resource == "host-memory":
        (finding,) = large
        assert finding.bytes == 48 * MIB
        assert finding.holder == f"{__name__}.KEPT[0]"
        assert "48.0 MiB in a numpy.ndarray held by" in finding.message
    assert len(old)


def snapshot() -> Snapshot:
    return take_snapshot(driver=NoDriver("a test"))


def test_what_is_swapped_out_is_the_process_s_own_and_that_of_tensors_theirs() -> None:
    taken = snapshot()
    swapped = replace(taken, host=replace(taken.host, own=taken.host.own + 10))
    assert (taken.host.swapped, swapped.host.swapped) == (0, 10)
    assert unaccounted_host_memory(swapped) - unaccounted_host_memory(taken) == 10
    of_tensors = replace(swapped, tensor_residency=replace(taken.tensor_residency, swapped=10))
    assert unaccounted_host_memory(of_tensors) == unaccounted_host_memory(taken)


def test_the_cache_of_pinned_memory_is_judged_by_itself() -> None:
    taken = snapshot()
    pinned = replace(
        taken,
        host=replace(taken.host, own=taken.host.own + SIZE, shared=taken.host.shared + SIZE),
        pinned=PinnedReading(0, SIZE),
    )
    assert abs(unaccounted_host_memory(pinned) - unaccounted_host_memory(taken)) <= taken.host.shared


def test_swapped_pages_of_a_range_are_counted_by_pagemap(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped, present = (1 << 62).to_bytes(8, "little"), (1 << 63).to_bytes(8, "little")
    file = tmp_path / "pagemap"
    file.write_bytes(present * 4 + swapped * 3 + present)
    monkeypatch.setattr(host, "_PAGEMAP", file)
    monkeypatch.setattr(host, "_PAGEMAP_PAGES", 2)
    ranges = [(3 * mmap.PAGESIZE, 3 * mmap.PAGESIZE), (7 * mmap.PAGESIZE, mmap.PAGESIZE)]
    assert resident_in(ranges, swapped=True).swapped == 2 * mmap.PAGESIZE
    assert resident_in(ranges).swapped == 0
    monkeypatch.setattr(host, "_PAGEMAP", tmp_path / "not there")
    assert resident_in(ranges, swapped=True).swapped == 0


def test_a_pagemap_that_ends_within_an_entry_ends_the_reading(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pagemap"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"half")
    monkeypatch.setattr(host, "_PAGEMAP", file)
    assert resident_in([(0, 4 * mmap.PAGESIZE)], swapped=True).swapped == mmap.PAGESIZE
