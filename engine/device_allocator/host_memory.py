"""Host memory that a card can copy to and from at full speed, had without waiting for slow page-locking."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import partial

import torch

from lowtide.engine.device_allocator.arena import round_up
from lowtide.engine.dropped import WhenDropped
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import PageBackend
from lowtide.engine.teardown import Teardown
from lowtide.probes import stages

# One page-table entry of the host's huge pages.
HUGE_PAGE = 2 << 20


class HostBuffer:
    """An anonymous mapping in blocks of `block` bytes, each of which can be pinned on its own.

    Pinning is slow (1.8 GB/s on an H200's host) only because the driver faults the memory in, 4 KiB at a time.  Pages
    that were written to before, and are huge, are registered at 27 GB/s per thread.  So the first user of a block
    fills it, and only then it is pinned.

    Raises:
        OutOfMemoryError: no address range of this size.
    """

    def __init__(self, tag: str, size: int, block: int, backend: PageBackend) -> None:
        self.tag = tag
        # Whole pages, because whole pages are what is pinned.
        self.size = round_up(size, mmap.PAGESIZE)
        self.block = block
        # From when on its contents are not to be relied on.
        self.closed = False
        self._backend = backend
        self._pinned: set[int] = set()
        self._touched: set[int] = set()
        reserved = round_up(self.size, HUGE_PAGE) + HUGE_PAGE
        try:
            self._mapping = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"no address range of {reserved} bytes on the host for {tag}: {error}") from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._skip = round_up(start, HUGE_PAGE) - start
        self.address = start + self._skip
        # A kernel without huge pages refuses; everything still works, the first touch is slower.
        with contextlib.suppress(OSError, AttributeError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        stages.announce(self)
        # For an owner that is dropped without `close`: pages must not go while the driver has them registered.
        self._dropped = WhenDropped(
            self, _unpin_all, backend, self.address, block, self._pinned, self._mapping, at_exit=False
        )

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """A uint8 tensor of shape [size] over the buffer."""
        self._touched.update(range(offset // self.block, -(-(offset + size) // self.block)))
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=self._skip + offset)

    def pinned(self, offset: int) -> bool:
        """Whether the block at `offset` is pinned."""
        return offset // self.block in self._pinned

    def pin(self, offset: int) -> None:
        """Pin the block at `offset`; on a CPU, which copies nothing by itself, it stays ordinary memory.

        Raises:
            OutOfMemoryError: the system does not let that much memory be locked.
        """
        if not self._backend.pins_host_memory:
            return
        index = offset // self.block
        start = index * self.block
        self._backend.pin(self.address + start, min(self.block, self.size - start))
        self._pinned.add(index)

    def close(self) -> None:
        """Unpin all blocks and give the memory back; calling it again does what is left to do, or nothing.

        Raises:
            ExceptionGroup: blocks that could not be unpinned; they are still there, and the others are not.
        """
        self.closed = True
        teardown = Teardown(f"giving host memory ({self.tag}) back")
        for index in sorted(self._pinned):
            if teardown.run(
                f"unpinning block {index}", partial(self._backend.unpin, self.address + index * self.block)
            ):
                self._pinned.discard(index)
        # The mapping itself goes with the last tensor over it; its pages go now, but for those that the driver has.
        for index in sorted(self._touched - self._pinned):
            start = index * self.block
            self._mapping.madvise(mmap.MADV_DONTNEED, self._skip + start, min(self.block, self.size - start))
            self._touched.discard(index)
        if not self._pinned:
            self._dropped.cancel()
            stages.withdraw(self)
        teardown.finish()

    def read_pools(self) -> tuple[stages.PoolReading, ...]:
        """What the probes see: pinned and ordinary bytes of the buffer apart."""
        readings = []
        kinds: tuple[tuple[stages.PoolKind, set[int]], ...] = (
            ("pinned", self._pinned),
            ("host", self._touched - self._pinned),
        )
        for kind, blocks in kinds:
            ranges = tuple(
                (self.address + index * self.block, min(self.block, self.size - index * self.block))
                for index in sorted(blocks)
            )
            if ranges:
                held = sum(length for _, length in ranges)
                readings.append(stages.PoolReading(kind, self.tag, "cpu", self.size, held, ranges))
        return tuple(readings)


def _unpin_all(backend: PageBackend, address: int, block: int, pinned: set[int], mapping: mmap.mmap) -> None:
    while pinned:
        backend.unpin(address + pinned.pop() * block)
