"""Arena pages on a CPU: one anonymous mapping per range, populated on map and given back with `MADV_DONTNEED`."""

from __future__ import annotations

import ctypes
import mmap

import psutil
import torch

from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import Lease, PageBackend, Part

# Linux 5.14; Python's mmap module does not name it (linux/mman.h: MADV_POPULATE_WRITE).
MADV_POPULATE_WRITE = 23


class _Mapping(mmap.mmap):
    """An anonymous mapping that knows its address.

    It unmaps itself when the last tensor over it is gone.
    """

    address: int
    nbytes: int


class CpuPages(PageBackend):
    """`PageBackend` over anonymous memory.

    Mapping touches every page at once, as a card's driver does: a page that is counted as mapped is really there, and
    memory that does not exist is missed here and not in the middle of a forward pass.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.granularity = mmap.PAGESIZE

    def reserve(self, size: int) -> Lease:
        """Reserve `size` bytes of address space; no page is behind it yet."""
        try:
            mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"no address range of {size} bytes on the host: {error}") from error
        mapping.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        mapping.nbytes = size
        return mapping

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        """Populate the part; checked against available memory first, because the kernel kills instead of refusing."""
        available = psutil.virtual_memory().available
        if size > available:
            raise OutOfMemoryError(f"the host has {available} bytes available, {size} more are needed")
        assert isinstance(lease, _Mapping)
        try:
            try:
                lease.madvise(MADV_POPULATE_WRITE, offset, size)
            except OSError:
                # An older kernel, or a sandbox without it: writing to the pages has the same effect.
                ctypes.memset(lease.address + offset, 0, size)
        except BaseException:
            # An interrupt half-way: what is there already is given back.
            lease.madvise(mmap.MADV_DONTNEED, offset, size)
            raise
        return Part(offset, size)

    def unmap(self, lease: Lease, part: Part) -> None:
        """Drop the part's pages."""
        assert isinstance(lease, _Mapping)
        lease.madvise(mmap.MADV_DONTNEED, part.offset, part.size)

    def dispose(self, address: int, size: int, parts: list[Part]) -> None:
        """Nothing to do: the mapping went with its lease."""
        parts.clear()

    def tensor(self, lease: Lease, offset: int, size: int) -> torch.Tensor:
        """A uint8 tensor [size] whose storage holds the mapping."""
        assert isinstance(lease, _Mapping)
        return torch.frombuffer(lease, dtype=torch.uint8, count=size, offset=offset)
