"""Arena pages on a card, through the driver's virtual memory calls; the same sequence serves CUDA and HIP."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from lowtide.engine.pages import Lease, Part
from lowtide.engine.teardown import Teardown


class VmmDriver(Protocol):
    """The driver calls that an address range with pages that come and go is made of, for one card.

    Addresses, handles and sizes are plain integers.  Every call raises `OutOfMemoryError` where there is no room and
    `DriverError` for anything else.
    """

    def granularity(self) -> int:
        """Smallest unit of a mapping, bytes."""

    def address_reserve(self, size: int, alignment: int) -> int:
        """Reserve a range of addresses."""

    def address_free(self, address: int, size: int) -> None:
        """Give a range of addresses back."""

    def create(self, size: int) -> int:
        """Allocate physical memory; returns its handle."""

    def release(self, handle: int) -> None:
        """Give up a handle; the memory goes with the last mapping of it."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory at an address."""

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write the range."""

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range."""

    def host_register(self, address: int, size: int) -> None:
        """Lock host pages for direct copies."""

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""


class _Range:
    """A reserved range of device addresses."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class _Window:
    """What torch imports as a tensor: a part of a range, in the CUDA array interface, version 3.

    torch keeps this object, and with it the lease, for as long as the storage lives.
    """

    def __init__(self, lease: Lease, offset: int, size: int) -> None:
        self.lease = lease
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (lease.address + offset, False),
            "version": 3,
        }


class VmmPages:
    """`PageBackend` over a card's virtual memory calls."""

    def __init__(self, driver: VmmDriver, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._driver = driver
        self.granularity = driver.granularity()
        self.pins_host_memory = True

    def reserve(self, size: int) -> Lease:
        """Reserve `size` bytes of device addresses."""
        return _Range(self._driver.address_reserve(size, self.granularity), size)

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        """Create physical memory and map it; on a failure half-way the half is undone."""
        address = lease.address + offset
        handle = self._driver.create(size)
        try:
            self._driver.map(address, size, handle)
            try:
                self._driver.set_access(address, size)
            except BaseException:
                self._driver.unmap(address, size)
                raise
        except BaseException:
            self._driver.release(handle)
            raise
        return Part(offset, size, handle)

    def unmap(self, lease: Lease, part: Part) -> None:
        """Unmap the part and release its memory, after the kernels that may still use it."""
        self.synchronize()
        self._unmap(lease.address, part)

    def dispose(self, address: int, size: int, parts: list[Part]) -> None:
        """Unmap what is left and give the addresses back, after the kernels that may still use them.

        A part that the driver refuses skips no other; it stays in `parts`, and the addresses stay reserved with it.
        """
        teardown = Teardown("giving an arena back")
        teardown.run("waiting for the card", self.synchronize)
        for part in list(parts):
            teardown.run(f"the part at {part.offset}", partial(self._unmap_one, address, part, parts))
        if not parts:
            teardown.run("its addresses", partial(self._driver.address_free, address, size))
        teardown.finish()

    def _unmap_one(self, address: int, part: Part, parts: list[Part]) -> None:
        self._unmap(address, part)
        parts.remove(part)

    def _unmap(self, address: int, part: Part) -> None:
        self._driver.unmap(address + part.offset, part.size)
        self._driver.release(part.handle)

    def tensor(self, lease: Lease, offset: int, size: int) -> torch.Tensor:
        """A uint8 tensor [size] on the card; the pages must be mapped, because torch asks the driver whose they are."""
        return torch.as_tensor(_Window(lease, offset, size), device=self.device)

    def pin(self, address: int, size: int) -> None:
        """Register host memory with the driver."""
        self._driver.host_register(address, size)

    def unpin(self, address: int) -> None:
        """Unregister host memory."""
        self._driver.host_unregister(address)

    def record(self) -> torch.cuda.Event | None:
        """An event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def synchronize(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give torch's cached segments back to the driver."""
        torch.cuda.empty_cache()
