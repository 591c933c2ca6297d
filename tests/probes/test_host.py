"""The host's facts about this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from lowtide.probes.host.process_files import numbers_in
from lowtide.probes.host.readings import (
    UnmappedRangeError,
    mapped_shared_memory,
    read_host,
    resident_bytes,
    resident_in,
    unnamed_shared_memory,
)

PAGE = mmap.PAGESIZE


def test_resident_memory_is_the_sum_of_its_kinds() -> None:
    host = read_host()
    assert host.rss == host.anonymous + host.file_backed > 1 << 20


def test_resident_memory_is_what_psutil_says() -> None:
    assert abs(read_host().rss - psutil.Process().memory_info().rss) < 4 << 20


def test_memory_of_its_own_is_anonymous() -> None:
    before = read_host()
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * (64 << 20))
        after = read_host()
    assert 60 << 20 < after.anonymous - before.anonymous < 140 << 20
    assert after.file_backed - before.file_backed < 8 << 20


def test_shared_memory_counts_with_files() -> None:
    before = read_host()
    with mmap.mmap(-1, 64 << 20) as pages:
        pages.write(b"x" * (64 << 20))
        after = read_host()
    assert 60 << 20 < after.file_backed - before.file_backed < 70 << 20


def test_a_mapped_file_has_the_name_that_its_folder_lists() -> None:
    # No text in UTF-8: Python writes such a byte otherwise. And mapped as C does it, which keeps no descriptor.
    name = os.fsdecode(b"lowtide \xff of a test")
    path = Path("/dev/shm", name)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    try:
        with path.open("w+b") as file:
            file.truncate(PAGE)
            address = libc.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert path in path.parent.iterdir()
        assert name in mapped_shared_memory([os.getpid()])
        assert libc.munmap(address, PAGE) == 0
        assert name not in mapped_shared_memory([os.getpid()])
    finally:
        path.unlink()


def test_the_digits_of_a_uuid_and_a_number_that_begins_with_0_are_no_process() -> None:
    assert numbers_in("torch_4711_2718281828_0") == {4711, 2718281828}
    assert numbers_in("psm-0123-8f14e45f-ceea-467f-9a3e-0123456789ab") == set()
    assert numbers_in("8f14e45fceea467f9a3e0123456789ab.815") == {815}


def test_threads_count_as_pythons_and_as_the_kernels() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(10,))
    before = read_host()
    thread.start()
    try:
        after = read_host()
    finally:
        done.set()
        thread.join()
    assert (after.threads, after.native_threads) == (before.threads + 1, before.native_threads + 1)


def test_children_have_numbers_and_names() -> None:
    before = read_host().children
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        after = read_host().children
    finally:
        child.communicate()
    (new,) = set(after) - set(before)
    assert new.split()[0] == str(child.pid)
    assert new.split()[1].startswith("python")


def test_the_reading_itself_has_no_descriptor() -> None:
    before = read_host().descriptors
    with open(os.devnull):  # noqa: PTH123 - the descriptor is the point
        assert read_host().descriptors == before + 1
    assert read_host().descriptors == before == len(list(Path("/proc/self/fd").iterdir())) - 1


@pytest.fixture
def block() -> Iterator[shared_memory.SharedMemory]:
    made = shared_memory.SharedMemory(create=True, size=5 * PAGE)
    yield made
    made.close()
    made.unlink()


def test_shared_memory_counts_while_it_is_mapped_here(block: shared_memory.SharedMemory) -> None:
    mapped = read_host().shared_memory
    block.close()
    assert mapped - read_host().shared_memory == 5 * PAGE


@pytest.fixture
def pages() -> Iterator[mmap.mmap]:
    """16 pages of this process's own, none of them touched."""
    made = mmap.mmap(-1, 16 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_NOHUGEPAGE)
    yield made
    made.close()


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def test_untouched_pages_are_not_resident(pages: mmap.mmap) -> None:
    assert resident_bytes(address_of(pages), 16 * PAGE) == 0


def test_touched_pages_are_resident(pages: mmap.mmap) -> None:
    pages[3 * PAGE] = 1
    pages[5 * PAGE] = 1
    assert resident_bytes(address_of(pages), 16 * PAGE) == 2 * PAGE


def test_looking_at_pages_makes_no_class(pages: mmap.mmap) -> None:
    """`ctypes` makes one for each length of an array; in Python 3.13 it is garbage when the array is gone."""
    before = set(map(id, ctypes.Array.__subclasses__()))
    resident_bytes(address_of(pages), 13 * PAGE)
    assert {id(kind) for kind in ctypes.Array.__subclasses__()} <= before


def test_given_up_pages_are_not_resident_any_more(pages: mmap.mmap) -> None:
    pages[0 : 16 * PAGE] = b"x" * (16 * PAGE)
    pages.madvise(mmap.MADV_DONTNEED, 0, 12 * PAGE)
    assert resident_bytes(address_of(pages), 16 * PAGE) == 4 * PAGE


def test_only_bytes_inside_the_range_count(pages: mmap.mmap) -> None:
    pages[0 : 3 * PAGE] = b"x" * (3 * PAGE)
    assert resident_bytes(address_of(pages) + 10, 2 * PAGE) == 2 * PAGE
    assert resident_bytes(address_of(pages) + 2 * PAGE + 7, 2 * PAGE) == PAGE - 7
    assert resident_bytes(address_of(pages) + 5, 1) == 1


def test_a_range_is_read_in_parts(pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.probes.host.readings._MINCORE_BYTES", 3 * PAGE)
    pages[2 * PAGE : 10 * PAGE] = b"x" * (8 * PAGE)
    assert resident_bytes(address_of(pages) + 1, 15 * PAGE) == 8 * PAGE


def test_an_empty_range_holds_nothing(pages: mmap.mmap) -> None:
    assert resident_bytes(address_of(pages), 0) == 0


def test_a_negative_length_is_refused(pages: mmap.mmap) -> None:
    with pytest.raises(ValueError, match="not an address range"):
        resident_bytes(address_of(pages), -1)


def test_a_range_that_is_not_mapped_is_refused() -> None:
    with pytest.raises(UnmappedRangeError, match="not all mapped here"):
        resident_bytes(PAGE, PAGE)


def test_a_part_that_goes_while_it_is_read_holds_nothing(pages: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(address: int, length: int) -> int:
        raise UnmappedRangeError("unmapped since the maps were read")

    monkeypatch.setattr("lowtide.probes.host.readings.resident_bytes", gone)
    assert resident_in([(address_of(pages), PAGE)]).total == 0


def test_kinds_of_mapping_are_distinguished_and_gaps_count_nothing(pages: mmap.mmap) -> None:
    pages[0:PAGE] = b"x" * PAGE
    with mmap.mmap(-1, 4 * PAGE) as shared:
        shared[0 : 2 * PAGE] = b"x" * (2 * PAGE)
        ranges = [(address_of(pages), 16 * PAGE), (address_of(shared), 4 * PAGE), (PAGE, PAGE)]
        found = resident_in(ranges)
    assert (found.anonymous, found.file_backed, found.total) == (PAGE, 2 * PAGE, 3 * PAGE)


def test_shared_memory_without_a_name_is_where_it_is_mapped() -> None:
    with mmap.mmap(-1, 1 << 20) as shared, mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        places = unnamed_shared_memory()
        assert address_of(shared) in {start for start, _ in places}
        assert not any(start <= address_of(own) < start + length for start, length in places)
