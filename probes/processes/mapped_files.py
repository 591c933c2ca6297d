"""Which files below a folder a process maps or has open; and reads of several processes at once, some of which hang."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import msgspec

from lowtide.probes.mappings import read_mappings
from lowtide.probes.originals import os, threading, time

PATIENCE_S = 5.0
"""Seconds after which a process that the kernel keeps from being read is reported as such."""

_MOST_THREADS = 8

Answer = TypeVar("Answer")


def read_side_by_side(read: Callable[[int], Answer], pids: Iterable[int], patience: float) -> dict[int, Answer]:
    """Return what was read of each process within the time; one that is missing did not let itself be read.

    The kernel lets nobody read the memory maps of a process while it changes them, and a driver may keep it there for
    ever: then its thread stays, as a daemon, and the others' answers count.

    Args:
        read: reads one process by its identifier.
        pids: the processes.
        patience: seconds for all of them.
    """
    waiting = sorted(set(pids), reverse=True)
    found: dict[int, Answer] = {}
    deadline = time.monotonic() + patience

    def work() -> None:
        while waiting and time.monotonic() < deadline:
            try:
                pid = waiting.pop()
            except IndexError:  # another thread has taken the last
                return
            found[pid] = read(pid)

    threads = [
        threading.Thread(target=work, daemon=True, name=f"lowtide-reader-{number}")
        for number in range(min(len(waiting), _MOST_THREADS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


FileId = tuple[int, int]
"""A file's device and inode, by which it is known under any name and in any mount namespace."""

_DELETED = " (deleted)"

_SHARED = ("/dev/shm/", "/memfd:", "/SYSV")
"""How the kernel calls shared memory that other processes may have, too."""


class FilesInUse(msgspec.Struct, frozen=True):
    """Which of some files a process uses.

    Attributes:
        ids: those that it maps or has open.
        is_readable: whether all of its maps and descriptors could be read.
    """

    ids: frozenset[FileId]
    is_readable: bool


def mapped_below(pid: int, folder: str) -> dict[str, int] | None:
    """Return the bytes of address space that a process maps of each file below a folder, by its path there.

    A file without a name any more has the kernel's ` (deleted)` behind the one it had.

    Returns:
        None where that may not be read, or the process has ended.
    """
    found: dict[str, int] = {}
    try:
        for each in read_mappings(pid, f"{folder}/"):
            if each.path.startswith(f"{folder}/"):
                path = each.path[len(folder) + 1 :]
                found[path] = found.get(path, 0) + each.bytes
    except OSError:
        return None
    return found


class SharedMapping(msgspec.Struct, frozen=True):
    """Shared memory that a process maps: a file in `/dev/shm`, one of `memfd_create`, or a segment of System V.

    Attributes:
        file: which, the same in every process that maps it, also where it has no name any more.
        path: as the kernel lists it.
        bytes: of address space.
    """

    file: FileId
    path: str
    bytes: int


def mapped_shared_memory(pid: int) -> tuple[SharedMapping, ...] | None:
    """Return the shared memory that a process maps, which another may have made; None where it may not be read."""
    found: dict[FileId, SharedMapping] = {}
    try:
        for each in read_mappings(pid, "s "):
            if each.access.endswith("s") and each.path.startswith(_SHARED):
                known = found.get(each.file)
                size = each.bytes + (0 if known is None else known.bytes)
                found[each.file] = SharedMapping(each.file, each.path, size)
    except OSError:
        return None
    return tuple(found.values())


def maps_library(pid: int, name: str) -> bool:
    """Return whether a process maps a file with this in its name; False where that may not be read.

    Args:
        pid: its process identifier.
        name: part of the file's name without its folder.
    """
    try:
        return any(name in os.path.basename(each.path) for each in read_mappings(pid, name))
    except OSError:
        return False


def files_in_use(pid: int, wanted: Collection[FileId], names: Collection[str]) -> FilesInUse:
    """Return which of some files a process maps or has open.

    Args:
        pid: its process identifier; one that has ended uses nothing.
        wanted: the files.
        names: their names without folders: only descriptors with these are looked at, since to look at a file of a
            server that does not answer takes for ever.
    """
    try:
        mapped = {each.file for each in read_mappings(pid, "/")}
        return FilesInUse(frozenset((mapped | _open(pid, names)) & set(wanted)), True)
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return FilesInUse(frozenset(), True)
    except OSError:
        return FilesInUse(frozenset(), False)


def _open(pid: int, names: Collection[str]) -> set[FileId]:
    found: set[FileId] = set()
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                target = os.readlink(entry.path)
                if target.removesuffix(_DELETED).rpartition("/")[2] in names:
                    facts = os.stat(entry.path)
                    found.add((facts.st_dev, facts.st_ino))
            except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
                continue
    return found
