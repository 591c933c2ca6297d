"""What a process has exported and opened by CUDA IPC: read from torch's files and records, in another process too."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from lowtide.probes.device.cuda_ipc import (
    HEADER,
    SLOTS,
    Counter,
    Export,
    Import,
    counters_in,
    importers_of,
    read_exports,
    read_imports,
)
from tests.probes.ipc_records import BLOCK, MAPPING, Records, exporter_of, importer_of


@pytest.fixture
def records() -> Iterator[Records]:
    made = Records()
    yield made
    made.close()


@pytest.fixture
def importer() -> Iterator[subprocess.Popen[str]]:
    with importer_of(os.getpid()) as child:
        yield child


def test_a_file_says_which_counters_are_not_0(records: Records) -> None:
    records.export(0, 1), records.export(1, 0), records.export(9_999, -1)
    assert counters_in(str(records.path)) == {0: 1, 9_999: -1}


@pytest.mark.parametrize("size", [0, 64, HEADER + 8 * SLOTS - 1, HEADER + 8 * SLOTS + 1])
def test_a_file_of_another_size_has_no_counters(size: int, records: Records) -> None:
    records.path.write_bytes(b"\1" * size)
    assert counters_in(str(records.path)) == {}
    assert counters_in("/dev/shm/torch_0_0_0") == {}


def test_an_export_is_found_with_its_storage_and_its_counter(records: Records) -> None:
    records.export(5, -1)
    counter = Counter(records.file, 5)
    assert read_exports() == (Export(counter, BLOCK),)
    assert (counter.exporter, counter.value()) == (os.getpid(), -1)


def test_each_export_of_one_storage_is_found(records: Records) -> None:
    records.export(6, 0), records.export(5, 1), records.export(7, 1, BLOCK + 512)
    assert [(each.counter.slot, each.address) for each in read_exports()] == [(5, BLOCK), (6, BLOCK), (7, BLOCK + 512)]


HEAP_OF_THREAD = 64 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextmanager
def joined(start: int) -> Iterator[bool]:
    """Map a page right before a heap, so that the kernel has one mapping of both; yield whether it has."""
    no_reserve, fixed_noreplace, page = 0x4000, 0x100000, mmap.PAGESIZE
    # As the C library has it for a heap: else the kernel keeps the two apart.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve | fixed_noreplace
    at = LIBC.mmap(start - page, page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    try:
        yield not any(low == start for low, _ in mapped())
    finally:
        if at == start - page:
            LIBC.munmap(at, page)


@contextmanager
def split(start: int) -> Iterator[bool]:
    """Have the kernel make a mapping of its own of a heap's first page, as a fork may; yield whether it has."""
    LIBC.madvise(start, mmap.PAGESIZE, mmap.MADV_DONTFORK)
    try:
        yield (start, start + mmap.PAGESIZE) in mapped()
    finally:
        LIBC.madvise(start, mmap.PAGESIZE, mmap.MADV_DOFORK)


def mapped() -> list[tuple[int, ...]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [tuple(int(end, 16) for end in line.split(None, 1)[0].split("-")) for line in lines]


@pytest.mark.parametrize("changed", [joined, split, lambda start: nullcontext(True)], ids=["joined", "split", "whole"])
def test_an_export_of_another_thread_is_found_in_whatever_mappings_its_heap_lies(
    records: Records, changed: Callable[[int], AbstractContextManager[bool]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        record = pool.submit(records.export, 5, 1).result()
        start = record - record % HEAP_OF_THREAD
        with changed(start) as is_changed:
            if not is_changed:
                pytest.skip("the kernel has these mappings otherwise")
            assert read_exports() == (Export(Counter(records.file, 5), BLOCK),)


def test_a_record_that_was_freed_is_no_export(records: Records) -> None:
    records.free(records.export(5, 0))
    assert read_exports() == ()


@pytest.mark.parametrize("first", [0, 0x7F00_1234_5678_9ABC], ids=["the last of its list", "another one"])
def test_a_record_that_lies_in_a_list_of_what_is_free_is_no_export(records: Records, first: int) -> None:
    record = records.export(5, 0)
    assert len(read_exports()) == 1
    # Of some sizes the C library takes no more than the first word.
    ctypes.memmove(record, struct.pack("Q", first), 8)
    assert read_exports() == ()


# A few blocks that were freed lie in one list of the C library, which takes two words of each, and more in another one,
# which takes one.
@pytest.mark.parametrize("freed", [0, 5, 20, 200])
def test_the_exports_of_another_process_are_read_from_outside(freed: int) -> None:
    with exporter_of(living=3, freed=freed) as exporter:
        found = read_exports(exporter.pid)
        assert [(each.counter.exporter, each.counter.slot) for each in found] == [(exporter.pid, at) for at in range(3)]


def test_a_process_that_has_exported_nothing_has_no_exports() -> None:
    assert read_exports() == ()
    assert read_exports(2**22 + 1) == ()


def test_the_counter_of_a_file_that_is_gone_says_nothing(records: Records) -> None:
    assert Counter(records.file, 5).value() == 0
    records.path.unlink()
    assert Counter(records.file, 5).value() is None


@pytest.mark.usefixtures("importer")
def test_what_this_process_has_exported_is_no_import_of_its_own(records: Records) -> None:
    records.export(4, 1)
    assert read_imports() == ()


def test_another_process_is_read_from_outside(records: Records, importer: subprocess.Popen[str]) -> None:
    assert read_exports(importer.pid) == ()
    assert set(read_imports(importer.pid)) == {
        Import(Counter("/torch_1_4000000007_0", 3), MAPPING, 0),
        Import(Counter(records.file, 4), MAPPING, 0),
        Import(Counter(records.file, 9), MAPPING, 1),
    }


def test_an_export_is_told_with_who_has_it_open(records: Records, importer: subprocess.Popen[str]) -> None:
    counters = {Counter(records.file, slot) for slot in (4, 5, 9)}
    assert importers_of(counters, [importer.pid, os.getpid()]) == {importer.pid: 2}
    assert importers_of({Counter(records.file, 5)}, [importer.pid]) == {}
