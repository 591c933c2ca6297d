"""What the memory of this process is made of: Python's heap, malloc's, maps, files, what is shared; it adds up.

The figures come from who gave the memory out, and cost a tenth of a millisecond together; the kernel's own count says
how much of it there is, and what nobody has a name for is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from lowtide.probes.host.counters import bytes_in_status, read_status
from lowtide.probes.host.fragments import said_by, tell_arenas
from lowtide.probes.originals import contents, os, resource

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
    """Bytes that malloc has given out, 0 where that is not glibc's; asks each arena, which takes up to 0.1 ms."""
    info = info or _mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


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


def _reader() -> Callable[[], _Mallinfo]:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        # Before glibc 2.33, and with another C library.
        return _Mallinfo
    read.restype = _Mallinfo
    return read


_mallinfo = _reader()
