"""What is free in Python's and C's heaps between blocks in use is read, and what went back as a whole is not in it."""

from __future__ import annotations

import ctypes
import sys

import pytest

from lowtide.leakcheck.findings import host_memory
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.probes.host.memory_parts import Fragments, fragments
from lowtide.reports.schema import Finding

MIB = 1 << 20
ARENAS, HEAP = "Python's arenas", "malloc's heap"
_LIBRARY = ctypes.CDLL(None)

needs_glibc = pytest.mark.skipif(not hasattr(_LIBRARY, "malloc_info"), reason="malloc_info is glibc's")


def free_in(heap: str) -> int:
    trim_heap()
    return sum(each.bytes for each in fragments() if each.heap == heap)


def numbers(room: int = 0) -> list[float]:
    """A million more than the free bytes have room for."""
    return [float(turn) for turn in range(1_000_000 + room // sys.getsizeof(0.0))]


def test_arenas_that_a_few_objects_keep_are_free_and_stay() -> None:
    before = free_in(ARENAS)
    kept = numbers(before)[::3000]
    (read,) = [each for each in fragments() if each.heap == ARENAS]
    assert read.bytes - before > 16 * MIB
    assert read.blocks > len(kept)
    del kept
    assert free_in(ARENAS) - before < 4 * MIB


def test_arenas_that_are_full_are_not_free() -> None:
    before = free_in(ARENAS)
    kept = numbers()
    assert free_in(ARENAS) - before < 4 * MIB
    del kept


@needs_glibc
def test_the_heap_of_c_is_free_between_blocks_at_most_by_the_pages_that_they_share() -> None:
    _LIBRARY.malloc.restype = ctypes.c_void_p
    before = free_in(HEAP)
    blocks = [_LIBRARY.malloc(4000) for _ in range(4000)]
    for block in blocks[1::2]:
        _LIBRARY.free(ctypes.c_void_p(block))
    try:
        # Some may lie in what was free before.
        assert 7 * MIB < free_in(HEAP) < before + 9 * MIB
    finally:
        for block in blocks[::2]:
            _LIBRARY.free(ctypes.c_void_p(block))
    assert free_in(HEAP) - before < MIB


def left(size: int) -> Finding:
    return Finding(
        resource="host-memory",
        cause="unknown",
        bytes=size,
        count=1,
        device="cpu",
        stage="call",
        message="it did not come back",
        fingerprint="f",
    )


def test_a_finding_says_what_is_a_good_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [Fragments(ARENAS, 60 * MIB, 1234), Fragments(HEAP, 2 * MIB, 7)]
    monkeypatch.setattr(host_memory, "fragments", lambda: read)
    told = host_memory.with_fragments(left(100 * MIB))
    assert told.message == (
        "it did not come back; up to 60.0 MiB of Python's arenas are free between 1,234 blocks in use"
    )
    assert told.advice == "make what is to stay before what is temporary, so that it lies in memory of its own"
    assert host_memory.with_fragments(left(1000 * MIB)) == left(1000 * MIB)
