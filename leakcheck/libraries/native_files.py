"""The files in /dev/shm by which native code keeps its books, and which live as long as the process.

torch counts in one of 80 KiB what it has shared of a card's memory, 10,000 blocks at a time, and the driver has one for
what processes share of it: both come with the first such block, and no later one adds to them.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence

from lowtide.probes.host.readings import mapped_shared_files
from lowtide.probes.memory.ranges import Range, common
from lowtide.probes.objects.listed import Census, all_objects
from lowtide.probes.originals import os

_MOST_BYTES = 1 << 20
"""The size up to which a file may be such books; what holds data is larger, and is reported at once."""

_SEMAPHORE = "sem."
"""How the C library calls the files of named semaphores, which it maps for Python's own."""


def native_files(names: Collection[str], tensors: Sequence[Range]) -> set[str]:
    """Those of some files in /dev/shm that native code of this process maps, and nothing in Python.

    Args:
        names: of the files.
        tensors: where tensors' memory lies: a file with a tensor over it is one that the program shares.
    """
    mapped = mapped_shared_files() if names else {}
    found = {
        name: ranges
        for name, ranges in mapped.items()
        if name in names
        and not name.startswith(_SEMAPHORE)
        and 0 < _size(name) <= _MOST_BYTES
        and not common(ranges, tensors)
    }
    if not found:
        return set()
    # Python reports the length of a map of its own, but not its address.
    lengths = {_pages(_length(item)) for item in Census(all_objects()).instances_of(mmap.mmap)}
    return {name for name, ranges in found.items() if lengths.isdisjoint(_pages(length) for _, length in ranges)}


def _size(name: str) -> int:
    try:
        return os.stat(f"/dev/shm/{name}").st_size
    except OSError:  # it is gone by now
        return 0


def _length(item: mmap.mmap) -> int:
    try:
        return mmap.mmap.__len__(item)
    except ValueError:  # closed
        return 0


def _pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE)
