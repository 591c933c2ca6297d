"""What the memory of this process is made of: Python's heap, malloc's, maps, files, what is shared; it adds up.

The figures come from who gave the memory out, and cost a tenth of a millisecond together; the kernel's own count says
how much of it there is, and what nobody has a name for is left. And how much is free and yet cannot go back: between
the blocks of the heaps that are in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from lowtide.probes.host.counters import anonymous_bytes, bytes_in_status, read_status
from lowtide.probes.originals import contents, os, resource, sys

_ARENAS = re.compile(rb"^# arenas allocated current .*\n(\d+) arenas \* (\d+) bytes/arena", re.MULTILINE)
_IN_BLOCKS = re.compile(rb"^# bytes in allocated blocks *= *([\d,]+)$", re.MULTILINE)


class _Mallinfo(ctypes.Structure):
    """Glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class MemoryParts(msgspec.Struct, frozen=True):
    """Bytes of the process's memory, each once: together what the kernel counts, swapped out parts included.

    Attributes:
        python: blocks of Python's heap that are in use: its objects of up to 512 bytes.
        python_free: what that heap has beside them.
        malloc: what was given out by C's malloc, and not freed: larger objects, and what C and C++ take.
        malloc_free: what malloc keeps for later.
        other: anonymous memory that neither has made: maps, stacks, what another allocator takes.
        files: of mapped files: code, and data that is read from them.
        shared: shared memory, and what drivers pin.
        untouched: of what malloc has given out, what nobody has written to, so that the kernel has not given it; this
            is no part of the others, and no memory.
    """

    python: int
    python_free: int
    malloc: int
    malloc_free: int
    other: int
    files: int
    shared: int
    untouched: int

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(getattr(self, name) for name in NAMES)

    def since(self, before: MemoryParts) -> dict[str, int]:
        """Return by how many bytes each part has grown, by its name in words.

        What malloc has given out and nobody has touched hides as much of what else is there: it is taken into account.
        """
        grown = {said: getattr(self, name) - getattr(before, name) for name, said in NAMES.items()}
        hidden = self.untouched - before.untouched
        grown[NAMES["malloc"]] += hidden
        grown[NAMES["other"]] -= hidden
        return grown


NAMES = {
    "python": "Python's heap in use",
    "python_free": "Python's heap, free",
    "malloc": "malloc in use",
    "malloc_free": "malloc's heap, free",
    "other": "anonymous maps and stacks",
    "files": "mapped files",
    "shared": "shared memory",
}
"""What each part is called."""


GIVEN_OUT = NAMES["malloc"]
"""What is called what malloc has given out."""


class Heaps(msgspec.Struct, frozen=True):
    """What the heaps of a process hold; bytes.

    Attributes:
        python: blocks of Python's heap that are in use.
        python_free: what that heap has beside them.
        malloc: what malloc has given out, touched or not.
        malloc_free: of malloc's heaps, pages that are in memory and in no block in use; those too that were given back,
            and read since (`CudaIpc` reads heaps): the kernel shows them as present, and has one page for all.
    """

    python: int
    python_free: int
    malloc: int
    malloc_free: int

    def beside(self, known: int, resident: int) -> dict[str, int]:
        """Return what they hold besides what is known, by the names of `NAMES`: together at most what is resident.

        Args:
            known: bytes that malloc has given out for what is known, as tensors.
            resident: bytes of the process's anonymous memory without what is known.
        """
        found = {}
        for name, size in msgspec.structs.asdict(msgspec.structs.replace(self, malloc=self.malloc - known)).items():
            found[NAMES[name]] = max(0, min(size, resident))
            resident -= found[NAMES[name]]
        return found


def read_parts() -> MemoryParts:
    """Read what the memory of this process is made of now.

    Where malloc is another one than glibc's, its memory is among `other`.
    """
    status = read_status()
    anonymous = bytes_in_status(status, b"RssAnon:") + bytes_in_status(status, b"VmSwap:")
    said = said_by(tell_arenas)
    arenas, blocks = _ARENAS.search(said), _IN_BLOCKS.search(said)
    python = int(blocks[1].replace(b",", b"")) if blocks else 0
    arena_bytes = int(arenas[1]) * int(arenas[2]) if arenas else 0
    info = _mallinfo()
    left, given_out = anonymous, malloc_in_use(info)
    parts = {}
    # Those that are in use are there for certain; of what is free the kernel may have taken back some.
    for name, size in (
        ("python", python),
        ("malloc", given_out),
        ("python_free", arena_bytes - python),
        ("malloc_free", info.fordblks),
    ):
        parts[name] = max(min(size, left), 0)
        left -= parts[name]
    return MemoryParts(
        **parts,
        other=left,
        files=bytes_in_status(status, b"RssFile:"),
        shared=bytes_in_status(status, b"RssShmem:"),
        untouched=given_out - parts["malloc"],
    )


def malloc_in_use(info: _Mallinfo | None = None) -> int:
    """Return the bytes that malloc has given out, 0 where it is not glibc's; asks each arena, up to 0.1 ms."""
    info = info or _mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


def free_in_heaps(resident: int) -> int:
    """Return how much of malloc's heaps is in memory and in no block in use.

    Where malloc is another one than glibc's, which may have the heap, that is nothing.

    Args:
        resident: bytes of the heaps that are in memory.
    """
    info = _mallinfo()
    return max(0, min(int(info.fordblks), resident - int(info.uordblks)))


def free_at_tops() -> int:
    """Return the bytes that are free at the tops of glibc's arenas of threads, which `malloc_trim` does not give back.

    Up to 64 MiB of each arena stay so, where the program has freed a block of half as much (`M_TRIM_THRESHOLD` in
    mallopt(3)). Takes some 0.1 ms, up to as much as malloc has free blocks.
    """
    arenas = said_by(_tell_heaps).split(b"<heap nr=")[2:]
    # What is after the last arena are the sums of all.
    return sum(_top_of(arena.partition(b"</heap>")[0]) for arena in arenas)


def held_bytes() -> int:
    """Return the process's own memory as `anonymous_bytes` does, without what is free at the tops of threads' arenas.

    After the heap has been trimmed it is what somebody holds, as near as can be told.
    """
    return anonymous_bytes() - free_at_tops()


class HighWater(NamedTuple):
    """Resident memory of the process, pages of mapped files included; bytes.

    Attributes:
        now: how much it is.
        most: how much it has been at most since the kernel began to count.
    """

    now: int
    most: int


def read_high_water() -> HighWater:
    """Read the process's resident memory and its peak, which the kernel keeps without being asked."""
    status = read_status()
    return HighWater(bytes_in_status(status, b"VmRSS:"), bytes_in_status(status, b"VmHWM:"))


def forget_high_water() -> bool:
    """Have the kernel count the peak from now on, for `getrusage` too; False where it does not."""
    try:
        file = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        # 5: the peak alone (proc(5)).
        return os.write(file, b"5") == 1
    except OSError:
        return False
    finally:
        os.close(file)


class Limit(NamedTuple):
    """What limits this process's memory; bytes.

    Attributes:
        most: how much it may be.
        used: how much it is.
    """

    most: int
    used: int


def memory_of_group() -> Limit | None:
    """Return the narrowest limit of the control groups that this process is in; None where none limits its memory."""
    found: list[Limit] = []
    lines = b""
    with contextlib.suppress(OSError):
        lines = contents("/proc/self/cgroup")
    for line in lines.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            folder = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
            most, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else _UNIFIED
            # In a container the path may be that of the host, where the group is at the top.
            for group in (folder + path, folder):
                with contextlib.suppress(OSError, ValueError):
                    found.append(Limit(*(int(contents(f"{group}/{name}")) for name in (most, used))))
    return min((each for each in found if each.most < _NO_LIMIT), default=None)


def address_space() -> Limit | None:
    """Return the limit of this process's addresses (`ulimit -v`); None where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return Limit(soft, bytes_in_status(read_status(), b"VmSize:"))


_UNIFIED = ("memory.max", "memory.current")
"""The files of the second version of control groups; `max` in the first says that there is no limit."""

_NO_LIMIT = 1 << 60
"""What the first version has where there is none is beyond."""


_LIBRARY = ctypes.CDLL(None)
"""The C library, opened once: each opening leaves a cycle."""


def _reader() -> Callable[[], _Mallinfo]:
    try:
        read = _LIBRARY.mallinfo2
    except AttributeError:
        # Before glibc 2.33, and with another C library.
        return _Mallinfo
    read.restype = _Mallinfo
    return read


_mallinfo = _reader()


_FREE = re.compile(rb"^(?:# bytes in available blocks|\d+ unused pools \* \d+ bytes) *= *([\d,]+)$", re.MULTILINE)
"""Of what Python says of its arenas, the lines about what is free in those that are not free as a whole."""

_CHUNKS = re.compile(rb'<(?:size|unsorted) from="\d+" to="\d+" total="(\d+)" count="(\d+)"/>')
"""Of what glibc says of its heaps, the free chunks of about one size."""

_FREE_IN_ALL = re.compile(rb'<total type="(?:fast|rest)" count="\d+" size="(\d+)"/>')
"""Likewise, all that is free in one arena: its chunks and its top."""

_PAGES_AROUND = 2 * 4096
"""Bytes of a free chunk that stay when the heap is trimmed, at most: the pages that it shares with its neighbours."""


class Fragments(NamedTuple):
    """Free memory of one heap that blocks in use keep there.

    Attributes:
        heap: whose.
        bytes: of it, at most.
        blocks: how many keep it.
    """

    heap: str
    bytes: int
    blocks: int


def fragments() -> list[Fragments]:
    """Read the heaps of Python and of C, after what can go back has gone; those that cannot be read are left out."""
    arenas = sum(int(size.replace(b",", b"")) for size in _FREE.findall(said_by(tell_arenas)))
    chunks = [(int(total), int(count)) for total, count in _CHUNKS.findall(said_by(_tell_heaps))]
    free = sum(min(total, count * _PAGES_AROUND) for total, count in chunks)
    found = [
        Fragments("Python's arenas", arenas, sys.getallocatedblocks()),
        # Between two free chunks there is one in use, or they would be one.
        Fragments("malloc's heap", free, sum(count for _, count in chunks)),
    ]
    return [each for each in found if each.bytes]


def _top_of(arena: bytes) -> int:
    in_chunks = sum(int(total) for total, _ in _CHUNKS.findall(arena))
    return max(0, sum(map(int, _FREE_IN_ALL.findall(arena))) - in_chunks)


def tell_arenas(stream: ctypes.c_void_p) -> None:
    """Write what `sys._debugmallocstats` prints to stderr, which is the program's."""
    ctypes.pythonapi._PyObject_DebugMallocStats(stream)


def _tell_heaps(stream: ctypes.c_void_p) -> None:
    _LIBRARY.malloc_info(0, stream)


def said_by(tell: Callable[[ctypes.c_void_p], None]) -> bytes:
    """Return what a function of C's writes to a stream; empty where it is not there."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    try:
        begin = _LIBRARY.open_memstream
    except AttributeError:
        return b""
    begin.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(begin(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return b""
    with contextlib.suppress(AttributeError):
        tell(stream)
    _LIBRARY.fclose(stream)
    said = text.value or b""
    _LIBRARY.free(text)
    return said
