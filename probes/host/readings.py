"""What the process holds on the host: memory, threads, child processes, descriptors, shared memory, code."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import sys
from collections.abc import Collection, Iterable

import msgspec

from lowtide.probes.host.counters import agents_descriptors, bytes_in_status, own_bytes, read_status
from lowtide.probes.host.memory_parts import Heaps, free_at_tops, free_in_heaps, read_parts
from lowtide.probes.host.process_files import descendants_of, open_files, program_name
from lowtide.probes.mappings import read_mappings
from lowtide.probes.memory.malloc_heaps import malloc_heaps
from lowtide.probes.memory.ranges import Range, common, merge
from lowtide.probes.objects.foreign import living_threads
from lowtide.probes.originals import lines_of, os

_SHARED_MEMORY = "/dev/shm"
_UNNAMED_SHARED_MEMORY = ("/dev/zero (deleted)", "/memfd:", "/SYSV")
"""How the kernel calls shared memory that has no name in a file system: of `mmap(-1)`, of a card's driver, …"""

_PAGEMAP = "/proc/self/pagemap"
_PAGEMAP_ENTRY = 8  # bytes per page
_PAGEMAP_PAGES = 1 << 20  # per read
_MINCORE_BYTES = 1 << 30  # per call: one byte of answer per page
_LOWEST_BIT = bytes(value & 1 for value in range(256))
_SWAPPED_BIT = bytes(value >> 6 & 1 for value in range(256))

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_mincore.restype = ctypes.c_int


class HostReadError(RuntimeError):
    """The host does not report what every Linux reports; the message says what is missing."""


class UnmappedRangeError(ValueError):
    """An address range that is not mapped in this process, wholly or in part."""


class HostReading(msgspec.Struct, frozen=True):
    """The process on its host at one moment. Memory in bytes, as the kernel counts it.

    Attributes:
        rss: resident memory; the sum of the next two kinds.
        anonymous: resident memory of its own (heap, stacks, private maps).
        file_backed: resident memory of mapped files (code, libraries) and of shared memory.
        threads: Python threads.
        native_threads: all threads of the process, Python's included.
        children: child processes and theirs, as `pid name`, sorted by pid.
        descriptors: open descriptors, without those of an agent and of the reading itself.
        shared_memory: bytes of the files in /dev/shm that this process maps.
        own: what is neither code nor a file's, swapped out or not; see `lowtide.probes.host.counters.own_bytes`.
        shared: the part of `own` that is shared memory.
        kept_free: the part of `own` that is in no block, and that malloc does not give back (`free_at_tops`).
        heaps: what Python's heap and C's hold; None where that is not known.
    """

    rss: int
    anonymous: int
    file_backed: int
    threads: int
    native_threads: int
    children: tuple[str, ...]
    descriptors: int
    shared_memory: int
    own: int = 0
    shared: int = 0
    kept_free: int = 0
    heaps: Heaps | None = None

    @property
    def swapped(self) -> int:
        """The part of `own` that is swapped out."""
        return self.own - self.anonymous - self.shared


class Resident(msgspec.Struct, frozen=True):
    """How much of some address ranges is in physical memory, in bytes.

    Attributes:
        anonymous: in memory of the process's own.
        file_backed: in mapped files and shared memory, which the kernel counts with them.
        shared: the part of `file_backed` that is shared memory.
        swapped: what is swapped out, and so is in none of these; 0 where nobody asked.
    """

    anonymous: int
    file_backed: int
    shared: int = 0
    swapped: int = 0

    @property
    def total(self) -> int:
        """What is in physical memory, of both kinds."""
        return self.anonymous + self.file_backed


def read_host() -> HostReading:
    """Read this process's facts.

    Raises:
        HostReadError: /proc cannot be read (this is not Linux, or /proc is not mounted).
    """
    status, own = _status()
    return HostReading(
        rss=status["VmRSS"],
        anonymous=status["RssAnon"],
        file_backed=status["RssFile"] + status["RssShmem"],
        threads=len(living_threads()),
        native_threads=len(os.listdir("/proc/self/task")),
        children=_children(),
        # The listing itself has one.
        descriptors=len({*map(int, os.listdir("/proc/self/fd"))} - agents_descriptors()) - 1,
        shared_memory=sum(map(shared_file_bytes, mapped_shared_files())),
        own=own,
        shared=status["RssShmem"],
        kept_free=free_at_tops(),
        heaps=read_heaps(),
    )


def read_heaps() -> Heaps:
    """Read what the heaps of Python and C hold, in a millisecond or two."""
    parts = read_parts()
    free = free_in_heaps(resident_in(malloc_heaps()).anonymous)
    return Heaps(parts.python, parts.python_free, parts.malloc + parts.untouched, free)


def _status() -> tuple[dict[str, int], int]:
    """Return the memory lines of /proc/self/status and the process's own memory, in bytes: one read, they add up."""
    try:
        status = read_status()
    except OSError as error:
        raise HostReadError(f"/proc/self/status cannot be read ({error}); lowtide needs Linux with /proc") from error
    if b"\nRssShmem:" not in status:
        raise HostReadError("/proc/self/status does not tell RssAnon, RssFile and RssShmem; lowtide needs Linux 4.5")
    names = ("VmRSS", "RssAnon", "RssFile", "RssShmem")
    return {name: bytes_in_status(status, f"{name}:".encode()) for name in names}, own_bytes(status)


def _children() -> tuple[str, ...]:
    """Return those that are there, and theirs; one that ends before it is asked its name is none any more."""
    found = ((pid, program_name(pid)) for pid in sorted(descendants_of(os.getpid())))
    return tuple(f"{pid} {name}" for pid, name in found if name)


def resident_bytes(address: int, length: int) -> int:
    """Return the bytes of `[address, address + length)` that are in physical memory, by `mincore(2)`.

    A page counts whole or not at all, but only with its bytes inside the range. A page of a mapped file counts where it
    is in the page cache, even if only another process reads it.

    Raises:
        UnmappedRangeError: part of the range is not mapped in this process.
    """
    if length < 0 or address < 0:
        raise ValueError(f"not an address range: {length} bytes from {address:#x}")
    page = mmap.PAGESIZE
    resident = 0
    end = address + length
    position = address
    while position < end:
        first = position - position % page
        stop = min(end, first + _MINCORE_BYTES)
        pages = -(-(stop - first) // page)
        # No array of ctypes: for each length that makes a class, which is garbage afterwards in Python 3.13.
        answer = bytearray(pages)
        if _mincore(first, pages * page, ctypes.byref(ctypes.c_char.from_buffer(answer))) != 0:
            code = ctypes.get_errno()
            raise UnmappedRangeError(
                f"{length} bytes from {address:#x} are not all mapped here ({os.strerror(code)}); "
                "read the range while its owner holds it"
            )
        # Only the lowest bit of each answer is defined.
        present = answer.translate(_LOWEST_BIT)
        resident += present.count(1) * page
        if present[0]:
            resident -= position - first
        if present[-1]:
            resident -= first + pages * page - stop
        position = stop
    return resident


def resident_in(ranges: Iterable[Range], *, swapped: bool = False) -> Resident:
    """Return how much of `ranges` is in physical memory, by kind of mapping; what is not mapped is not.

    Args:
        ranges: the addresses.
        swapped: whether to look for what is swapped out, too.
    """
    wanted = merge(ranges)
    if not wanted:
        return Resident(0, 0)
    mapped = list(read_mappings())
    kinds = (
        [each.range for each in mapped if each.inode == "0"],
        [each.range for each in mapped if each.inode != "0"],
        [each.range for each in mapped if each.inode != "0" and _is_shared_memory(each.path)],
    )
    anonymous, file_backed, shared = (sum(map(_resident_or_gone, common(wanted, parts))) for parts in kinds)
    return Resident(anonymous, file_backed, shared, sum(map(_swapped_bytes, wanted)) if swapped else 0)


def _is_shared_memory(name: str) -> bool:
    return name.startswith((f"{_SHARED_MEMORY}/", *_UNNAMED_SHARED_MEMORY))


def named_shared_memory() -> list[Range]:
    """Return where this process maps files of /dev/shm that still have their names there."""
    return [part for parts in mapped_shared_files().values() for part in parts]


def unnamed_shared_memory() -> list[Range]:
    """Return where this process maps shared memory that never had a name, as a card's driver does what it pins."""
    return [each.range for each in read_mappings() if each.path.startswith(_UNNAMED_SHARED_MEMORY)]


def mapped_shared_files() -> dict[str, list[Range]]:
    """Return by their names the files of /dev/shm that this process maps and that still have these, with where."""
    prefix = f"{_SHARED_MEMORY}/"
    found: dict[str, list[Range]] = {}
    for each in read_mappings(having=prefix):
        if each.path.startswith(prefix) and not each.path.endswith(" (deleted)"):
            found.setdefault(each.path.removeprefix(prefix), []).append(each.range)
    return found


def _swapped_bytes(part: Range) -> int:
    """Return the bytes of the pages of a range that are swapped out, by pagemap; 0 where it may not be read."""
    first, stop = part[0] // mmap.PAGESIZE, -(-sum(part) // mmap.PAGESIZE)
    found = 0
    with contextlib.suppress(OSError):
        number = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while first < stop:
                wanted = min(stop - first, _PAGEMAP_PAGES) * _PAGEMAP_ENTRY
                entries = os.pread(number, wanted, first * _PAGEMAP_ENTRY)
                # Less than one, too: the loop would not go on.
                if len(entries) < _PAGEMAP_ENTRY:
                    break
                # Bit 62 of each entry; the kernel writes them in the machine's order.
                top = entries[_PAGEMAP_ENTRY - 1 :: _PAGEMAP_ENTRY] if sys.byteorder == "little" else entries[::8]
                found += top.translate(_SWAPPED_BIT).count(1)
                first += len(entries) // _PAGEMAP_ENTRY
        finally:
            os.close(number)
    return found * mmap.PAGESIZE


def _resident_or_gone(part: Range) -> int:
    try:
        return resident_bytes(*part)
    except UnmappedRangeError:  # another thread unmapped it since the maps were read
        return 0


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the names in /dev/shm that any of these processes maps or has open; what may not be read is none."""
    prefix, gone = f"{_SHARED_MEMORY}/", " (deleted)"
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            mapped = [each for each in read_mappings(pid, prefix) if each.path.startswith(prefix)]
            found |= {path for path in open_files(pid) if path.startswith(prefix)} | {each.path for each in mapped}
            found |= _renamed({each.inode for each in mapped if each.path.endswith(gone)})
    return {path.removeprefix(prefix).removesuffix(gone) for path in found}


def _renamed(inodes: Collection[str]) -> set[str]:
    """Return the names that these files have now: `sem_open(3)` maps a semaphore before it gets its own."""
    if not inodes:
        return set()
    with os.scandir(_SHARED_MEMORY) as entries:
        return {entry.name for entry in entries if str(entry.inode()) in inodes}


def shared_file_bytes(name: str) -> int:
    """Return the length of a file in /dev/shm; 0 if it is gone by now."""
    try:
        return os.stat(f"{_SHARED_MEMORY}/{name}").st_size
    except OSError:
        return 0


_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+\s*(.*)$")


def resident_code(pattern: str) -> dict[str, int]:
    """Return the bytes of code in physical memory of each loaded library whose file name matches, by file name.

    Args:
        pattern: a regular expression that the whole file name must match.

    Raises:
        OSError: /proc/self/smaps cannot be read.
    """
    wanted = re.compile(pattern)
    found: dict[str, int] = {}
    name = ""
    for line in lines_of("/proc/self/smaps"):
        header = _HEADER.match(line)
        if header is not None:
            file = header[2].rpartition("/")[2]
            name = file if "x" in header[1] and wanted.fullmatch(file) else ""
        elif name and line.startswith("Rss:"):
            found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
    return found
