"""Arena pages on a CPU: one anonymous mapping per range, populated on map and given back with `MADV_DONTNEED`."""

from __future__ import annotations

import ctypes
import mmap

import psutil
import torch

from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import Lease, Part

# Linux 5.14; Python's mmap module does not name it (linux/mman.h: MADV_POPULATE_WRITE).
MADV_POPULATE_WRITE = 23


class _Mapping(mmap.mmap):
    """An anonymous mapping that knows its address; it unmaps itself when the last tensor over it is gone."""

    address: int
    nbytes: int


class CpuPages:
    """Pages of anonymous memory.

    Mapping touches every page at once, as a card's driver does: a page that is counted as mapped is really there, and
    memory that does not exist is missed here and not in the middle of a forward pass.

    What a CPU has no use for does nothing here: its memory is the host's, and nothing of it is ever queued or cached.
    """

    pins_host_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.granularity = mmap.PAGESIZE

    def reserve(self, size: int) -> Lease:
        """Reserve a range without any page; `OutOfMemoryError`: there is no address range of this size."""
        try:
            mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"no address range of {size} bytes on the host: {error}") from error
        mapping.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        mapping.nbytes = size
        return mapping

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        """Put physical pages behind one part of the range, with undefined contents, if there is room for all of it."""
        # Asked first, because the kernel kills instead of refusing.
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
        """Give the pages of one part back."""
        assert isinstance(lease, _Mapping)
        lease.madvise(mmap.MADV_DONTNEED, part.offset, part.size)

    def dispose(self, address: int, size: int, parts: list[Part]) -> None:
        """Do nothing: the mapping went with its lease, after whose death this is called."""
        parts.clear()

    def tensor(self, lease: Lease, offset: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor of shape [size] over mapped pages, with a storage of its own that holds the lease."""
        assert isinstance(lease, _Mapping)
        return torch.frombuffer(lease, dtype=torch.uint8, count=size, offset=offset)

    def pin(self, address: int, size: int) -> None:
        """Lock host pages for direct copies; an `OutOfMemoryError` where the system does not let so much be locked."""

    def unpin(self, address: int) -> None:
        """Undo `pin` for the range that starts at `address`."""

    def record(self) -> torch.cuda.Event | None:
        """Mark this point on the device's current stream; None where copies are synchronous."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    def empty_cache(self) -> None:
        """Make torch give cached, unused device memory back to the driver."""
