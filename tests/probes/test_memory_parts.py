"""The parts of the process's memory add up to what the kernel counts, and the one that grew is named."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.probes.host import memory_parts
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.memory_parts import MemoryParts, held_bytes, malloc_in_use, read_parts
from lowtide.probes.host.readings import read_heaps
from lowtide.probes.memory.malloc_heaps import in_malloc
from tests.probes.thread_arenas import PIECE, free, take

MIB = 1 << 20
_LIBRARY = ctypes.CDLL(None)

needs_glibc = pytest.mark.skipif(not hasattr(_LIBRARY, "mallinfo2"), reason="mallinfo2 is glibc's")


def counted_by_kernel() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    sizes = {line.partition(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
    return (int(sizes["Rss"]) + int(sizes["Swap"])) * 1024


def grown(before: MemoryParts) -> str:
    """The name of the part that has grown most."""
    parts = read_parts().since(before)
    return max(parts, key=lambda name: parts[name])


def test_the_parts_add_up_to_what_the_kernel_counts() -> None:
    assert read_parts().total == pytest.approx(counted_by_kernel(), rel=0.01)


def test_no_part_is_less_than_nothing() -> None:
    read = read_parts()
    assert min(read.python, read.python_free, read.malloc, read.malloc_free, read.other, read.untouched) >= 0
    assert read.python > MIB
    assert read.files > MIB


@needs_glibc
def test_what_c_has_taken_is_malloc_s() -> None:
    _LIBRARY.malloc.restype = ctypes.c_void_p
    before = read_parts()
    taken = [_LIBRARY.malloc(100_000) for _ in range(80)]
    for address in taken:
        ctypes.memset(address, 1, 100_000)
    assert grown(before) == "malloc in use"
    assert read_parts().since(before)["malloc in use"] == pytest.approx(8_000_000, rel=0.1)
    for address in taken:
        _LIBRARY.free(ctypes.c_void_p(address))
    assert read_parts().since(before)["malloc in use"] < MIB


def test_small_objects_are_in_python_s_heap() -> None:
    before = read_parts()
    made = [object() for _ in range(1_000_000)]
    assert grown(before) == "Python's heap in use"
    assert len(made) == 1_000_000


def test_a_map_is_nobody_s_beside_memory_that_was_never_touched() -> None:
    _LIBRARY.malloc.restype = ctypes.c_void_p
    untouched = _LIBRARY.malloc(1 << 30)
    before = read_parts()
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.write(b"x" * (16 * MIB))
        assert grown(before) == "anonymous maps and stacks"
    _LIBRARY.free(ctypes.c_void_p(untouched))


def test_without_glibc_what_malloc_has_is_among_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_parts, "_mallinfo", memory_parts._Mallinfo)
    read = read_parts()
    assert (malloc_in_use(), read.malloc, read.malloc_free) == (0, 0, 0)
    assert read.total == pytest.approx(counted_by_kernel(), rel=0.01)


@needs_glibc
def test_what_is_free_at_the_tops_of_threads_arenas_is_no_held_memory() -> None:
    trim_heap()
    held, kept = held_bytes(), anonymous_bytes()
    addresses = take(4, 300)
    assert held_bytes() - held == pytest.approx(len(addresses) * PIECE, rel=0.1)
    free(addresses)
    trim_heap()
    assert held_bytes() - held < 8 * MIB
    # Else there is nothing to leave out, and this shows nothing.
    assert anonymous_bytes() - kept > 50 * MIB


@needs_glibc
def test_free_pages_of_a_heap_are_those_that_malloc_has_not_given_back() -> None:
    before = read_heaps().malloc_free
    # Larger than what Python has a heap of its own for, and one that stays on top of them.
    blocks = [bytes(1000) for _ in range(60_000)]
    pin = bytes(1000)
    in_use = read_heaps().malloc_free
    del blocks
    free = read_heaps().malloc_free
    trim_heap()
    given_back = read_heaps().malloc_free
    assert in_use - before < 8 * MIB
    assert free - in_use > 48 * MIB
    assert given_back - in_use < 8 * MIB
    del pin


def test_a_heap_that_another_malloc_has_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_parts, "_mallinfo", memory_parts._Mallinfo)
    assert read_heaps().malloc_free == 0


@needs_glibc
@pytest.mark.parametrize(("size", "aligned"), [(65536, 4096), (65536, 16), (64 * MIB, 16)], ids=["page", "heap", "own"])
def test_what_malloc_has_given_out_is_its_own_wherever_it_begins(size: int, aligned: int) -> None:
    block = ctypes.c_void_p()
    assert _LIBRARY.posix_memalign(ctypes.byref(block), ctypes.c_size_t(aligned), ctypes.c_size_t(size)) == 0
    assert in_malloc([(block.value or 0, size)]) == size
    _LIBRARY.free(block)


def test_what_is_mapped_without_malloc_is_not_its_own() -> None:
    with mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(view)
        del view
        assert in_malloc([(address, MIB)]) == 0
