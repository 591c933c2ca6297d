"""All memory of one engine: its arenas, and the host memory through which their contents go and come back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from lowtide.engine.device_allocator.arena import Arena, Workspace, round_up
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import PageBackend
from lowtide.engine.teardown import Teardown, WhenDropped, undone_by
from lowtide.probes import stages

# One page-table entry of the host's huge pages.
HUGE_PAGE = 2 << 20


class HostBuffer:
    """An anonymous mapping in blocks of `block` bytes, each of which can be pinned on its own.

    Pinning is slow (1.8 GB/s on an H200's host) only because the driver faults the memory in, 4 KiB at a time.  Pages
    that were written to before, and are huge, are registered at 27 GB/s per thread.  So the first user of a block
    fills it, and only then it is pinned.
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
        """Return a uint8 tensor of shape [size] over the buffer."""
        self._touched.update(range(offset // self.block, -(-(offset + size) // self.block)))
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=self._skip + offset)

    def pinned(self, offset: int) -> bool:
        """Return whether the block at `offset` is pinned."""
        return offset // self.block in self._pinned

    def pin(self, offset: int) -> None:
        """Pin the block at `offset`, but on a CPU; `OutOfMemoryError`: no more memory can be locked."""
        if not self._backend.pins_host_memory:
            return
        index = offset // self.block
        start = index * self.block
        self._backend.pin(self.address + start, min(self.block, self.size - start))
        self._pinned.add(index)

    def close(self) -> None:
        """Unpin all blocks and give back those that could be; calling it again does what is left to do, or nothing."""
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
        """Return what the probes see: pinned and ordinary bytes of the buffer apart."""
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
        """Return a host buffer that fits `size` bytes of an arena, in blocks as large as the ring's slots."""
        return HostBuffer("sleeping weights", size, self.slot_bytes, self._backend)

    def save(self, arena: Arena, image: HostBuffer) -> None:
        """Copy the arena's used bytes into `image`; on an error nothing of the arena has changed."""
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
        """Map `size` bytes of the arena and fill them from `image`; mapping a part overlaps the copy before it."""
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
        """Unpin and give back the ring; `DriverError`: a slot could not be unpinned."""
        self._views = []
        self._slots.close()

    @staticmethod
    def _drain(slot: torch.Tensor, arrived: torch.cuda.Event | None, image: HostBuffer, offset: int) -> None:
        if arrived is not None:
            arrived.synchronize()
        _copy_on_host(image.tensor(offset, slot.numel()), slot)
        # Beyond a limit on locked memory this block stays pageable, and the way back goes through the ring.
        with contextlib.suppress(OutOfMemoryError):
            image.pin(offset)

    def _fill(self, index: int, before: torch.cuda.Event | None, image: HostBuffer, offset: int, size: int) -> None:
        if before is not None:
            before.synchronize()
        _copy_on_host(self._views[index][:size], image.tensor(offset, size))


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not torch's copy_: it would start a pool of native threads below every worker.  memmove lets go of the
    # interpreter lock, so the workers run side by side.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


_LIBC = ctypes.CDLL(None, use_errno=True)


class KVTransport:
    """A native buffer of `size` bytes that is registered for transfer: with the card's driver, or on a CPU locked.

    It is C's memory, as that of UCX or NIXL is: no Python object owns it, no torch counter shows it, and it goes only
    by `close` (vllm#38503 is a shutdown that forgot to).  Peer and wire are no part of this engine: what it has is the
    registration and its end.
    """

    def __init__(self, backend: PageBackend, size: int) -> None:
        self.backend = backend
        self.size = round_up(size, mmap.PAGESIZE)
        self.address = _allocate(self.size)
        self.locked = False
        try:
            # Present before it is registered: the driver faults pages in at a tenth of the rate.
            ctypes.memset(self.address, 0, self.size)
            if backend.pins_host_memory:
                backend.pin(self.address, self.size)
                self.locked = True
            else:
                # Beyond the limit on locked memory (`ulimit -l`) it stays pageable, which is slower and nothing else.
                refused = _LIBC.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size))
                self.locked = not refused
        except BaseException:
            _LIBC.free(ctypes.c_void_p(self.address))
            raise
        _REGISTERED.add(self)
        stages.announce(self)

    def read_pools(self) -> tuple[stages.PoolReading, ...]:
        """Return what the probes see."""
        kind: stages.PoolKind = "pinned" if self.backend.pins_host_memory else "host"
        ranges = ((self.address, self.size),)
        return (stages.PoolReading(kind, "kv transport", "cpu", self.size, self.size, ranges),)

    def close(self) -> None:
        """Deregisters the memory and gives it back; called again, it tries again what the driver has refused."""
        if self not in _REGISTERED:
            return
        # What the driver does not let go must not be freed under it.
        if self.locked and self.backend.pins_host_memory:
            self.backend.unpin(self.address)
        elif self.locked:
            _LIBC.munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size))
        self.locked = False
        _REGISTERED.discard(self)
        stages.withdraw(self)
        _LIBC.free(ctypes.c_void_p(self.address))


# A transport's native side keeps such a table; addresses and sizes only, the memory is C's.
_REGISTERED: set[KVTransport] = set()


def _allocate(size: int) -> int:
    address = ctypes.c_void_p()
    code = _LIBC.posix_memalign(ctypes.byref(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_size_t(size))
    if code or address.value is None:
        raise OutOfMemoryError(f"no {size} bytes of host memory for the KV transport (error {code})")
    return address.value


# Not zero, which is what fresh pages mostly hold and what many tables may hold too; as an index it is out of range.
POISON = 0xA5

# Addresses cost nothing; what the runtime arena really holds is mapped as it is asked for.
RUNTIME_ADDRESSES = 1 << 30
# Behind the KV cache itself, for what belongs to it and may go with it: small tables, scales.
KV_CACHE_SPARE_ADDRESSES = 1 << 20


class EngineMemory:
    """Owns the arenas `weights`, `kv_cache`, `runtime` and `workspace` (one per micro-batch), and the transfer ring.

    Sizes are bytes.  With `poison`, what `restore` maps is filled with `POISON` before anything else.
    """

    def __init__(
        self,
        backend: PageBackend,
        *,
        weights: int,
        kv_cache: int,
        workspace: int,
        num_micro_batches: int,
        poison: bool = False,
    ) -> None:
        self._backend = backend
        self._poison = poison
        self._image: HostBuffer | None = None
        self._ring: TransferRing | None = None
        self._arenas: dict[str, Arena] = {}
        self.workspaces: list[Workspace] = []
        with undone_by(self.close):
            self._arenas["weights"] = Arena("weights", weights, backend)
            self._arenas["kv_cache"] = Arena("kv_cache", kv_cache + KV_CACHE_SPARE_ADDRESSES, backend)
            self._arenas["runtime"] = Arena("runtime", RUNTIME_ADDRESSES, backend)
            for _ in range(num_micro_batches):
                self.workspaces.append(Workspace(Arena("workspace", workspace, backend)))
            self._ring = TransferRing(backend, weights)

    def arena(self, tag: str) -> Arena:
        """Return the arena of one tag: `weights`, `kv_cache` or `runtime`."""
        return self._arenas[tag]

    def mapped(self) -> dict[str, int]:
        """Return the bytes with pages behind them, by tag."""
        sizes = {tag: arena.mapped for tag, arena in self._arenas.items()}
        sizes["workspace"] = sum(workspace.mapped for workspace in self.workspaces)
        return sizes

    def save_weights(self) -> None:
        """Copy the weights to host memory; on an error everything is as it was."""
        assert self._ring is not None
        weights = self._arenas["weights"]
        fresh = self._image is None
        image = self._image or self._ring.new_image(weights.used)
        try:
            self._ring.save(weights, image)
        except BaseException:
            if fresh:
                image.close()
            raise
        self._image = image

    def forget_weights(self) -> None:
        """Give up the host copy of the weights; interrupted before it has begun, it keeps the copy."""
        image = self._image
        if image is None:
            return
        try:
            image.close()
        finally:
            if image.closed:
                self._image = None

    def drop(self, tags: Sequence[str]) -> None:
        """Give the pages of these arenas and of all workspaces back; contents are gone, addresses stay."""
        for tag in tags:
            self._arenas[tag].unmap_to(0)
        for workspace in self.workspaces:
            workspace.drop_pages()
        self._backend.empty_cache()

    def restore(self, tag: str, refill: Callable[[], None] | None = None) -> None:
        """Map an arena's pages again and fill them; without room it may be mapped in part, and the caller drops it."""
        arena = self._arenas[tag]
        if tag == "weights" and self._image is not None:
            assert self._ring is not None
            self._ring.restore(self._image, arena, arena.used)
            return
        arena.map_to(arena.used)
        if self._poison and arena.used:
            arena.bytes_at(0, arena.used).fill_(POISON)
        if refill is not None:
            refill()

    def close_host_buffers(self, teardown: Teardown) -> None:
        """Give up the transfer ring and the host copy of the weights."""
        if self._image is not None and teardown.run("the host copy of the weights", self._image.close):
            self._image = None
        if self._ring is not None and teardown.run("the transfer ring", self._ring.close):
            self._ring = None

    def close(self, teardown: Teardown, *, drop_pages: bool = False) -> None:
        """Give everything up, step by step; memory that a tensor still holds goes with that tensor.

        What could not be given up is kept, for another call to try again.  With `drop_pages` even that is given back:
        for an engine that never came to life, whose tensors nobody but a traceback can hold.
        """
        self.close_host_buffers(teardown)
        if drop_pages:
            for tag, arena in self._arenas.items():
                teardown.run(f"pages of arena {tag!r}", partial(arena.unmap_to, 0))
            for workspace in self.workspaces:
                teardown.run("pages of a workspace", workspace.drop_pages)
        self.workspaces = [
            workspace for workspace in self.workspaces if not teardown.run("a workspace", workspace.close)
        ]
        self._arenas = {
            tag: arena for tag, arena in self._arenas.items() if not teardown.run(f"arena {tag!r}", arena.close)
        }
        self.empty_cache(teardown)

    def empty_cache(self, teardown: Teardown) -> None:
        """Make torch give back what it caches of the memory that the steps used."""
        teardown.run("torch's cached memory", self._backend.empty_cache)
