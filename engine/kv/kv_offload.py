"""KV offload: what copies blocks to the host and back, behind the steps' backs; `OffloadingManager` plans it."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import psutil
import torch

from lowtide.engine.device_allocator.arena import round_up
from lowtide.engine.device_allocator.memory import HUGE_PAGE, HostBuffer
from lowtide.engine.errors import KVTransferError, OutOfMemoryError
from lowtide.engine.kv.kv_cache import KVCache, Transfer
from lowtide.engine.pages import PageBackend
from lowtide.engine.teardown import release_frames

# What the thread does; a transfer's end is reported to the engine.
_Job: TypeAlias = "Callable[[], Transfer | None]"
_End: TypeAlias = "weakref.ref[OffloadingConnector] | None"

TIMEOUT_S = 60.0
"""How long all transfers together may take before they count as stuck: 64 GiB need 2 s on an H200's bus."""


class HostSlots:
    """Host memory in slots of one KV block each, touched and pinned when they are first used."""

    def __init__(self, num_slots: int, slot_bytes: int, backend: PageBackend) -> None:
        self.slot_bytes = slot_bytes
        # Pages are what is pinned, and registering has a price per call: slots are pinned in groups that fill a huge
        # page, if they are smaller than one.
        self._group = min(num_slots, max(1, HUGE_PAGE // slot_bytes))
        group_bytes = round_up(self._group * slot_bytes, mmap.PAGESIZE)
        full, rest = divmod(num_slots, self._group)
        size = full * group_bytes + rest * slot_bytes
        # Asked now, because the kernel kills instead of refusing when the slots are touched.
        available = psutil.virtual_memory().available
        if size > available:
            raise OutOfMemoryError(
                f"the host has {available} bytes available, KV offload needs {size}: lower kv_offload_bytes"
            )
        self._buffer = HostBuffer("offloaded kv cache", size, group_bytes, backend)
        self._prepared: set[int] = set()

    def slot(self, index: int) -> torch.Tensor:
        """Return a uint8 tensor of shape [slot_bytes]."""
        group, position = divmod(index, self._group)
        start = group * self._buffer.block
        if group not in self._prepared:
            self._prepare(start)
            self._prepared.add(group)
        return self._buffer.tensor(start + position * self.slot_bytes, self.slot_bytes)

    def close(self) -> None:
        """Do as `HostBuffer.close`."""
        self._buffer.close()

    def _prepare(self, start: int) -> None:
        """Touches a group before it is pinned, which is 4 to 14 times as fast (see `HostBuffer`)."""
        ctypes.memset(self._buffer.address + start, 0, min(self._buffer.block, self._buffer.size - start))
        # Beyond a limit on locked memory copies of these slots are slower, and still right.
        with suppress(OutOfMemoryError):
            self._buffer.pin(start)


class OffloadingConnector:
    """Copies KV blocks to host memory of this process and back, one transfer after the other, in the order given.

    One thread does all copies in order, so a slot is never written while it is read.  Each transfer waits for what the
    device was asked to compute before it, and has ended on the device too when it is reported complete: whoever
    takes it in needs no event to read or overwrite its blocks.  Every transfer must have ended before pages go.

    The thread keeps nothing of the engine while it idles: an engine that is dropped without a shutdown ends it.
    """

    def __init__(self, kv_cache: KVCache, num_slots: int, backend: PageBackend) -> None:
        # Of each layer keys and values, as uint8 [num_blocks, bytes of a block].
        self._rows = tuple(
            tensor.flatten(1).view(torch.uint8) for keys_values in kv_cache.layers for tensor in keys_values
        )
        self._backend = backend
        on_card = backend.device.type == "cuda"
        self._stream = torch.cuda.Stream(backend.device) if on_card else None  # type: ignore[no-untyped-call]
        self._slots: HostSlots | None = HostSlots(num_slots, sum(rows.shape[1] for rows in self._rows), backend)
        # What no copy uses any more, and the driver has not let go of yet.
        self._leaving: HostSlots | None = None
        self._completed: SimpleQueue[Transfer] = SimpleQueue()
        self._cancelled = threading.Event()
        self._jobs: SimpleQueue[_Job | _End] = SimpleQueue()
        # The thread keeps the reference, whose death is the last thing in the queue: `put` is written in C, where no
        # signal handler raises in vain.
        owner = weakref.ref(self, self._jobs.put)
        # A daemon, so that a copy that is stuck does not keep the process from ending.
        self._thread: threading.Thread | None = threading.Thread(
            target=_run_jobs, args=(self._jobs, self._completed, owner), name="lowtide-kv-offload", daemon=True
        )
        self._thread.start()

    def begin(self, transfer: Transfer) -> None:
        """Begin to copy, after all that the device was asked to compute so far."""
        self._jobs.put(partial(self._transfer, transfer, self._backend.record()))

    def flush(self) -> None:
        """Wait until every transfer that was begun has ended; a `KVTransferError` after `TIMEOUT_S` seconds."""
        if self._thread is None:
            return
        ended = threading.Event()
        self._jobs.put(ended.set)
        if not ended.wait(TIMEOUT_S):
            raise KVTransferError(
                f"copies of KV blocks to or from the host have not ended after {TIMEOUT_S:g} s: the device or the host "
                "is stuck, or far slower than it should be; try again, or shut the engine down"
            )

    def take_completed(self) -> list[Transfer]:
        """Return the transfers that have ended and were not reported before; waits for none."""
        return [self._completed.get() for _ in range(self._completed.qsize())]

    def close(self) -> None:
        """Cancel what has not been copied, end the thread, give the host memory back; called again, do what is left.

        A `KVTransferError` where a copy has not ended after `TIMEOUT_S` seconds; its memory goes when it does.
        """
        thread, slots = self._thread, self._slots
        if thread is not None:
            self._cancelled.set()
            self._jobs.put(None)
        try:
            if thread is not None:
                thread.join(TIMEOUT_S)
        finally:
            if thread is not None:
                # What a copy still reads or writes is that copy's alone from now on.
                self._leaving = None if thread.is_alive() else slots
                self._thread = self._slots = self._stream = None
                self._rows = ()
            if self._leaving is not None:
                thread = None
                self._leaving.close()
                self._leaving = None
        if thread is not None:
            raise KVTransferError(
                f"a copy of KV blocks to or from the host has not ended after {TIMEOUT_S:g} s: the device or the host "
                "is stuck; the memory that it uses stays until it ends"
            )

    def _transfer(self, transfer: Transfer, after: torch.cuda.Event | None) -> Transfer:
        """Run in the thread."""
        try:
            self._copy(transfer, after)
        except BaseException as error:  # noqa: BLE001 - raised where it is taken in
            transfer.error = error
        transfer.cancelled = self._cancelled.is_set()
        return transfer

    def _copy(self, transfer: Transfer, after: torch.cuda.Event | None) -> None:
        all_rows, slots = self._rows, self._slots
        with self._side_stream(after):
            for block, host_block in transfer.copies:
                if self._cancelled.is_set() or slots is None:
                    return
                on_host = slots.slot(host_block.slot)
                start = 0
                for rows in all_rows:
                    on_device, size = rows[block.block_id], rows.shape[1]
                    part = on_host[start : start + size]
                    _copy_bytes(*((on_device, part) if transfer.is_load else (part, on_device)))
                    start += size

    @contextmanager
    def _side_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Queues copies after an event of another stream; at the end they are done, whatever happened."""
        stream = self._stream
        if stream is None or after is None:
            yield
            return
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            try:
                yield
            finally:
                stream.synchronize()


def _run_jobs(jobs: SimpleQueue[_Job | _End], completed: SimpleQueue[Transfer], owner: _End) -> None:
    """Do one job after the other until None comes or the `owner` of the queue, whose reference this keeps, is gone."""
    while (job := jobs.get()) is not None and not isinstance(job, weakref.ref):
        end = job()
        if end is not None:
            if end.error is not None:
                # Only now, when the last frame that it came through has ended, can all of them let go of the engine.
                release_frames(end.error, None)
            completed.put(end)
        # A thread that waits must keep no engine alive.
        del job, end


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.device.type == source.device.type == "cpu":
        # As in `transfer`: lets go of the interpreter lock and starts no threads below this one.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source, non_blocking=True)
