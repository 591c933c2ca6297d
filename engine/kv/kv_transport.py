"""Staging memory for sending KV blocks to a peer: native memory that is registered, and deregistered at shutdown."""

from __future__ import annotations

import ctypes
import mmap

from lowtide.engine.device_allocator.arena import round_up
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import PageBackend
from lowtide.probes import stages

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
