"""Where the heaps of glibc's malloc lie in a process, the main thread's and others', and what it has given out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from lowtide.probes.mappings import read_mappings
from lowtide.probes.memory.ranges import Range, common, merge, total, without
from lowtide.probes.originals import os

# A thread's heap of glibc's begins at a multiple of this (malloc/arena.c, HEAP_MAX_SIZE).
_HEAP_OF_THREAD = 64 << 20

_MOST_OF_HEAP_INFO = 0x100
"""Bytes between the beginning of a thread's first heap and its arena."""

_PAGE = os.sysconf("SC_PAGE_SIZE")

_HEAD = struct.Struct("3Q")


def in_malloc(ranges: Iterable[Range]) -> int:
    """Return the bytes of some memory of this process that malloc has given out.

    That is what lies in its heaps, and what it has mapped for one block alone: before each such block are words of its
    own, where what is mapped without malloc begins at a page.
    """
    ranges, heaps = merge(ranges), malloc_heaps()
    return total(common(ranges, heaps)) + sum(size for address, size in without(ranges, heaps) if address % _PAGE)


def malloc_heaps(pid: int | None = None) -> list[Range]:
    """Return where the heaps are; none in a process that has ended, or is another user's.

    The main thread's is what the kernel calls the heap: that of another malloc, too, which has it from `brk`.

    A thread's begins at a multiple of 64 MiB with what glibc's malloc/arena.c calls `heap_info`, and the mapping that
    it lies in may have begun before, or go on behind it. What malloc has mapped for one block alone is in none.

    Args:
        pid: the process; None: this one.
    """
    process = f"/proc/{'self' if pid is None else pid}"
    try:
        writable = list(_writable(pid))
        memory = os.open(f"{process}/mem", os.O_RDONLY)
    except OSError:
        return []
    try:
        found: list[Range] = []
        for low, high, is_main in writable:
            if is_main:
                found.append((low, high - low))
                continue
            for start in range(-(-low // _HEAP_OF_THREAD) * _HEAP_OF_THREAD, high, _HEAP_OF_THREAD):
                size = _size_of_heap(memory, start)
                if 0 < size <= high - start:
                    found.append((start, size))
        return found
    finally:
        os.close(memory)


def _writable(pid: int | None) -> Iterator[tuple[int, int, bool]]:
    """Yield where a process's memory of no file begins and ends, and whether the kernel calls it the heap.

    What lies side by side is one: a program that has forked has its heaps in several mappings.
    """
    before: tuple[int, int, bool] | None = None
    for each in read_mappings(pid, " rw-p "):
        if each.path not in ("", "[heap]"):
            continue
        now = (each.start, each.end, bool(each.path))
        if before is not None and before[1:] == (each.start, now[2]):
            now = (before[0], each.end, now[2])
        elif before is not None:
            yield before
        before = now
    if before is not None:
        yield before


def _size_of_heap(memory: int, start: int) -> int:
    """Return the bytes of the heap of a thread that begins at an address; 0 where none does."""
    try:
        arena, previous, size = _HEAD.unpack(os.pread(memory, _HEAD.size, start))
    except (OSError, struct.error):  # it is gone
        return 0
    # The arena follows this in the first of its heaps.
    is_heap = 0 < arena % _HEAP_OF_THREAD < _MOST_OF_HEAP_INFO and previous % _HEAP_OF_THREAD == 0
    return int(size) if is_heap and size <= _HEAP_OF_THREAD else 0
