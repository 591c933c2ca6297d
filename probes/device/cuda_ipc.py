"""What torch shares of a card by CUDA IPC: each export, the importers that it waits for, and who has opened it.

torch counts the importers of each export in a file of the exporter's in /dev/shm (torch/csrc/CudaIPCTypes.h). An export
sets its counter to 1, and each process that lets go of what it has opened subtracts 1. What the exporter gives up
before its counter is 0 waits in C++, under no tensor. The counter has no sign: one that two importers have closed is
not -1 to torch but 2**64 - 1, and what waits for that is never freed (vllm#51258, pytorch#149187).

Nothing of torch's lists these, so the exporter's and importer's records are looked for in the C library's heap, where
torch makes them.  It is read by way of the kernel: no code of the program's runs, and the reader needs no part in the
process that it reads.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Collection, Iterator, Mapping

import msgspec

from lowtide.probes.mappings import Mapped, read_mappings
from lowtide.probes.memory.malloc_heaps import malloc_heaps
from lowtide.probes.memory.ranges import Range
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import os

SLOTS = 10_000
"""Counters in a file (CUDA_IPC_REF_COUNTER_FILE_SIZE in torch/csrc/CudaIPCTypes.h)."""

HEADER = 64
"""Bytes in front of them: how many processes have the file open (ATen/MapAllocator.cpp, map_alloc_alignment)."""

_WORD = 8

_FILE = re.compile(rb"/torch_\d+_\d+(?:_\d+)?\0")
"""What a file is called in a record; the first number is the exporter's process."""

_MAPPED = re.compile(r"/dev/shm(/torch_(\d+)_\d+(?:_\d+)?)(?: \(deleted\))?")

_AT_ONCE = 16 << 20
"""Bytes of a heap that are looked through at a time."""

# Of std::string: the address of its characters, their number, and 16 bytes.  Behind it comes the number of the counter.
_LENGTH, _SLOT, _NEXT = 1, 4, 5

_RECORD = (_NEXT + 2) * _WORD
"""Bytes of a record that are looked at."""

# No allocation of a card begins at any other address.
_ALIGNMENT = 512


class Counter(msgspec.Struct, frozen=True, order=True):
    """Where the importers of one export are counted.

    Attributes:
        file: in /dev/shm, as `/torch_812_2331_0`.
        slot: which of its counters.
    """

    file: str
    slot: int

    @property
    def exporter(self) -> int:
        """The process that has exported."""
        return int(self.file.split("_")[1])

    def value(self) -> int | None:
        """Return how many importers have not closed it; below 0 where more have closed it than it was exported to.

        None where the file is gone: with its process, or with the last of its exports.
        """
        return counters_in(f"/dev/shm{self.file}").get(self.slot, 0) if _is_there(self.file) else None


class Export(msgspec.Struct, frozen=True):
    """One time that a process has exported a storage.

    Attributes:
        counter: of its importers.
        address: of the storage, in the exporter.
    """

    counter: Counter
    address: int


class Import(msgspec.Struct, frozen=True):
    """One time that a process has opened an export, and has not closed it.

    Attributes:
        counter: of the exporter.
        address: at which the importer sees the exporter's allocation, of which the storage may be a part.
        device: which card that is, as the importer numbers it.
    """

    counter: Counter
    address: int
    device: int


def counters_in(path: str) -> dict[int, int]:
    """Return what a file's counters say, without those that are 0; empty where it is no such file.

    Args:
        path: as `/dev/shm/torch_812_2331_0`.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        data = os.pread(file, HEADER + SLOTS * _WORD + 1, 0)
    except OSError:
        return {}
    finally:
        os.close(file)
    if len(data) != HEADER + SLOTS * _WORD:
        return {}
    values = np.frombuffer(data, np.int64, SLOTS, HEADER)
    return {int(slot): int(values[slot]) for slot in np.flatnonzero(values)}


def read_exports(pid: int | None = None) -> tuple[Export, ...]:
    """Return all that a process has exported and not freed, by its counter; empty where that may not be read.

    A process that has exported nothing costs a look at its mappings; another one a fifth of a second for each GiB of
    its heap.

    Args:
        pid: the process; None: this one.
    """
    files = _mapped_counters(pid)
    if not files:
        return ()
    found = set()
    with contextlib.closing(_Heap(pid)) as heap:
        for words in heap.records([(at + HEADER, SLOTS * _WORD) for at in files], at=_NEXT):
            pointer, address = words[_NEXT : _NEXT + 2]
            at = max(start for start in files if start <= pointer)
            slot = (pointer - at - HEADER) // _WORD
            name = files[at]
            is_whole = words[_LENGTH : _SLOT + 1 : _SLOT - _LENGTH] == [len(name), slot]
            # One that was freed has lost its beginning, at least the first word, to a list of the heap's own.
            if is_whole and heap.says(words[0], name):
                found.add(Export(Counter(name, slot), address))
    return tuple(sorted(found, key=lambda export: export.counter))


def read_imports(pid: int | None = None) -> tuple[Import, ...]:
    """Return what a process has opened of others and not closed, by its counter; empty where that may not be read.

    Takes twice as long as `read_exports`.

    Args:
        pid: the process; None: this one.
    """
    found = set()
    with contextlib.closing(_Heap(pid)) as heap:
        names = heap.names_of_files()
        span = [(min(names), max(names) - min(names) + 1)] if names else []
        for words in heap.records(span, at=0):
            name = names.get(words[0])
            if name is None or words[_LENGTH] != len(name) or words[_SLOT] >= SLOTS or _is_own(name, pid):
                continue
            # The exporter has the address of its counter there, and the importer the number of a card in one byte.
            device, address = words[_NEXT] & 0xFF, words[_NEXT + 1]
            if device < 0x80 and address and address % _ALIGNMENT == 0:
                found.add(Import(Counter(name, words[_SLOT]), address, device))
    return tuple(sorted(found, key=lambda each: each.counter))


def importers_of(counters: Collection[Counter], pids: Collection[int]) -> dict[int, int]:
    """Return the processes that have opened some exports, each with the number of times.

    Args:
        counters: of the exports.
        pids: those that may have.
    """
    times = {pid: sum(each.counter in counters for each in read_imports(pid)) for pid in pids}
    return {pid: number for pid, number in times.items() if number}


def _is_there(file: str) -> bool:
    try:
        os.stat(f"/dev/shm{file}")
    except OSError:
        return False
    return True


def _is_own(file: str, pid: int | None) -> bool:
    return int(file.split("_")[1]) == (os.getpid() if pid is None else pid)


def _mappings(pid: int | None, having: str) -> Iterator[Mapped]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        yield from read_mappings(pid, having)


def _mapped_counters(pid: int | None) -> dict[int, str]:
    """Return the names of the process's own files of counters, by the addresses at which they are mapped."""
    found = {}
    for each in _mappings(pid, "/dev/shm/"):
        name = _MAPPED.search(each.path)
        is_own = name is not None and _is_own(name[1], pid)
        if name is not None and is_own and 0 <= each.bytes - HEADER - SLOTS * _WORD < os.sysconf("SC_PAGE_SIZE"):
            found[each.start] = name[1]
    return found


class _Heap:
    """The C library's heap of a process; read by nobody else while it lasts.

    Args:
        pid: the process; None: this one.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        # Not in the heap itself, where a copy of a record would be found as one.
        self._buffer = memoryview(mmap.mmap(-1, _AT_ONCE + _RECORD))
        try:
            self._file = os.open(f"/proc/{'self' if pid is None else pid}/mem", os.O_RDONLY)
        except OSError:  # it has ended, or is another user's
            self._file = -1

    def close(self) -> None:
        """End it."""
        if self._file >= 0:
            os.close(self._file)

    def says(self, address: int, name: str) -> bool:
        """Return whether a file's name is at an address."""
        try:
            return os.pread(self._file, len(name) + 1, address) == name.encode() + b"\0"
        except (OSError, OverflowError):  # nothing is there
            return False

    def names_of_files(self) -> Mapping[int, str]:
        """Return the names of files of counters, by their addresses."""
        return {
            start + match.start(): bytes(match[0][:-1]).decode()
            for start, data in self._parts()
            for match in _FILE.finditer(data)
        }

    def records(self, ranges: Collection[Range], at: int) -> Iterator[list[int]]:
        """Yield the words of what may be a record: those around each word that is an address in some ranges.

        Args:
            ranges: of addresses.
            at: which word of a record it is.
        """
        for _, data in self._parts() if ranges else ():
            words = np.frombuffer(data, np.uint64, len(data) // _WORD)
            for low, length in ranges:
                for place in np.flatnonzero((words >= low) & (words < low + length)).tolist():
                    record: list[int] = words[max(0, place - at) :][: _RECORD // _WORD].tolist()
                    if place >= at and len(record) == _RECORD // _WORD:
                        yield record

    def _parts(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the contents by address, each there until the next; a record at the end of one is whole in the next."""
        for low, size in malloc_heaps(self._pid) if self._file >= 0 else ():
            for start in range(low, low + size, _AT_ONCE):
                part = self._buffer[: min(len(self._buffer), low + size - start)]
                try:
                    read = os.preadv(self._file, [part], start)
                except OSError:  # the heap has become smaller
                    break
                yield start, part[:read]
