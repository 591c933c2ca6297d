"""Copies an arena's bytes to host memory and back through a bounded ring of pinned buffers."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lowtide.engine.device_allocator.arena import Arena, round_up
from lowtide.engine.device_allocator.host_memory import HostBuffer
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import PageBackend

# Measured on an H200 with 16 host cores: slots of 32 MiB are the smallest that reach the full rate of the bus, and
# eight of them keep 16 draining threads busy.
SLOT_BYTES = 32 << 20
MAX_SLOTS = 8
MAX_WORKERS = 16


class TransferRing:
    """A ring of pinned slots, kept from create to shutdown so that no sleep waits for fresh pinned memory.

    Into an image that is not pinned yet, bytes go from the card into a slot, and a thread carries them on from there;
    the image's block is pinned behind it, so the way back and every later sleep are one direct copy.
    `total` bounds how much will ever be copied at once; a small model gets a small ring.

    Raises:
        OutOfMemoryError: no host memory for the ring.
    """

    def __init__(self, backend: PageBackend, total: int) -> None:
        self._backend = backend
        self.slot_bytes = min(SLOT_BYTES, round_up(max(total, 1), mmap.PAGESIZE))
        slots = max(1, min(MAX_SLOTS, -(-total // self.slot_bytes)))
        self._workers = min(MAX_WORKERS, os.cpu_count() or 1)
        self._slots = HostBuffer("transfer ring", slots * self.slot_bytes, self.slot_bytes, backend)
        try:
            self._views = []
            for index in range(slots):
                view = self._slots.tensor(index * self.slot_bytes, self.slot_bytes)
                view.zero_()
                self._slots.pin(index * self.slot_bytes)
                self._views.append(view)
        except BaseException:
            self._views = []
            self._slots.close()
            raise

    def new_image(self, size: int) -> HostBuffer:
        """A host buffer that fits `size` bytes of an arena, in blocks as large as the ring's slots."""
        return HostBuffer("sleeping weights", size, self.slot_bytes, self._backend)

    def save(self, arena: Arena, image: HostBuffer) -> None:
        """Copy the arena's used bytes into `image`; on an error nothing of the arena has changed.

        Raises:
            OutOfMemoryError: no host memory; an error of the copy itself comes out as it is.
        """
        inflight: deque[Future[None]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="lowtide-save") as workers:
            try:
                carried = 0
                for offset in range(0, arena.used, self.slot_bytes):
                    size = min(self.slot_bytes, arena.used - offset)
                    source = arena.bytes_at(offset, size)
                    if image.pinned(offset):
                        image.tensor(offset, size).copy_(source, non_blocking=True)
                        continue
                    if len(inflight) == len(self._views):
                        inflight.popleft().result()
                    # Counted apart from the offsets, of which pinned blocks take some without a slot.
                    slot = self._views[carried % len(self._views)][:size]
                    carried += 1
                    slot.copy_(source, non_blocking=True)
                    arrived = self._backend.record()
                    inflight.append(workers.submit(self._drain, slot, arrived, image, offset))
                while inflight:
                    inflight.popleft().result()
            finally:
                # Nothing may still write into a slot or the image when the caller lets go of them.
                for future in inflight:
                    future.cancel()
                self._backend.synchronize()

    def restore(self, image: HostBuffer, arena: Arena, size: int) -> None:
        """Map `size` bytes of the arena and fill them from `image`; mapping a part overlaps the copy before it.

        Raises:
            OutOfMemoryError: the device has no room; an error of the copy itself comes out as it is.
        """
        offsets = range(0, size, self.slot_bytes)
        ahead = {}
        events: dict[int, torch.cuda.Event | None] = {}
        slots = len(self._views)
        with ThreadPoolExecutor(self._workers, thread_name_prefix="lowtide-restore") as workers:
            try:
                for turn, offset in enumerate(offsets):
                    for next_turn in range(turn, min(turn + slots, len(offsets))):
                        start = offsets[next_turn]
                        if next_turn in ahead or image.pinned(start):
                            continue
                        before = events.get(next_turn - slots)
                        ahead[next_turn] = workers.submit(
                            self._fill, next_turn % slots, before, image, start, min(self.slot_bytes, size - start)
                        )
                    length = min(self.slot_bytes, size - offset)
                    while arena.mapped < offset + length:
                        arena.map_part(size)
                    if turn in ahead:
                        ahead[turn].result()
                        source = self._views[turn % slots][:length]
                    else:
                        source = image.tensor(offset, length)
                    arena.bytes_at(offset, length).copy_(source, non_blocking=True)
                    events[turn] = self._backend.record()
            finally:
                for future in ahead.values():
                    future.cancel()
                self._backend.synchronize()

    def close(self) -> None:
        """Unpin and give back the ring.

        Raises:
            DriverError: a slot could not be unpinned.
        """
        self._views = []
        self._slots.close()

    @staticmethod
    def _drain(slot: torch.Tensor, arrived: torch.cuda.Event | None, image: HostBuffer, offset: int) -> None:
        if arrived is not None:
            arrived.synchronize()
        _copy_on_host(image.tensor(offset, slot.numel()), slot)
        try:
            image.pin(offset)
        except OutOfMemoryError:
            # A limit on locked memory: this block stays pageable, and the way back goes through the ring.
            return

    def _fill(self, index: int, before: torch.cuda.Event | None, image: HostBuffer, offset: int, size: int) -> None:
        if before is not None:
            before.synchronize()
        _copy_on_host(self._views[index][:size], image.tensor(offset, size))


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not torch's copy_: it would start a pool of native threads below every worker.  memmove lets go of the
    # interpreter lock, so the workers run side by side.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
