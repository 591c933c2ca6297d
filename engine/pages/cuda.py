"""The CUDA driver's virtual memory calls, through `cuda-bindings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.engine.errors import ConfigError, DriverError, OutOfMemoryError


class CudaDriver:
    """`VmmDriver` for one CUDA card.  Every call checks the driver's return code.

    Calls run in the card's primary context, the one torch uses, and put the caller's back: they come from worker
    threads too, which have none, and the user's choice of device is not ours to change.

    Raises:
        ConfigError: cuda-bindings is not installed.
    """

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigError('the CUDA engine needs cuda-bindings: pip install "lowtide[gpu]"') from error
        self._cuda: Any = driver
        self._index = index
        with torch.cuda.device(index):
            # The first call that waits for the card is also what makes torch create the context.
            torch.cuda.synchronize()
            self._context = self._check(*driver.cuCtxGetCurrent())

    def granularity(self) -> int:
        """Smallest unit of a mapping: 2 MiB on today's cards."""
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._cuda.cuMemGetAllocationGranularity, self._properties(), option))

    def address_reserve(self, size: int, alignment: int) -> int:
        """Reserve a range of device addresses."""
        what = f"there is no range of {size} device addresses left"
        return int(self._call(self._cuda.cuMemAddressReserve, size, alignment, 0, 0, refusal=what))

    def address_free(self, address: int, size: int) -> None:
        """Give a range of device addresses back."""
        self._call(self._cuda.cuMemAddressFree, address, size)

    def create(self, size: int) -> int:
        """Allocate physical device memory."""
        return int(self._call(self._cuda.cuMemCreate, size, self._properties(), 0, asked=size))

    def release(self, handle: int) -> None:
        """Give up a handle."""
        self._call(self._cuda.cuMemRelease, handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory at an address."""
        self._call(self._cuda.cuMemMap, address, size, 0, handle, 0, asked=size)

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write the range."""
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._index
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(self._cuda.cuMemSetAccess, address, size, [access], 1, asked=size)

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range."""
        self._call(self._cuda.cuMemUnmap, address, size)

    def host_register(self, address: int, size: int) -> None:
        """Lock host pages for direct copies, by whichever card."""
        portable = self._cuda.CU_MEMHOSTREGISTER_PORTABLE
        what = f"the host does not let {size} bytes be locked (see `ulimit -l`)"
        self._call(self._cuda.cuMemHostRegister, address, size, portable, refusal=what)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; where it is undone already, that is what was wanted.

        (A Ctrl-C can come after the driver has done it, and before that is written down.)
        """
        done = self._cuda.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        self._call(self._cuda.cuMemHostUnregister, address, done=done)

    def _call(
        self, function: Callable[..., Any], *args: Any, asked: int = 0, refusal: str = "", done: Any = None
    ) -> Any:
        self._check(*self._cuda.cuCtxPushCurrent(self._context))
        try:
            return self._check(*function(*args), asked=asked, refusal=refusal, done=done)
        finally:
            self._check(*self._cuda.cuCtxPopCurrent())

    def _properties(self) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        return properties

    def _check(self, code: Any, result: Any = None, *, asked: int = 0, refusal: str = "", done: Any = None) -> Any:
        if code in (self._cuda.CUresult.CUDA_SUCCESS, done):
            return result
        if code == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            if refusal:
                raise OutOfMemoryError(refusal)
            free, total = torch.cuda.mem_get_info(self._index)
            raise OutOfMemoryError(f"the card has no room for {asked} bytes: {free} of {total} bytes are free")
        _, name = self._cuda.cuGetErrorName(code)
        _, text = self._cuda.cuGetErrorString(code)
        raise DriverError(f"the CUDA driver answered {(name or b'?').decode()}: {(text or b'?').decode()}")
