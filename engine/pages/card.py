"""Arena pages on a card, through the driver's virtual memory calls: the same sequence serves CUDA and HIP."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowtide.engine.errors import ConfigError, DriverError, OutOfMemoryError
from lowtide.engine.pages import Lease, Part
from lowtide.engine.teardown import Teardown


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
    """Pages of a card, by its driver's virtual memory calls; as `CpuPages`."""

    def __init__(self, driver: CudaDriver | HipDriver, index: int) -> None:
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
        """Return a uint8 tensor [size] on the card; the pages must be mapped: torch asks the driver whose they are."""
        return torch.as_tensor(_Window(lease, offset, size), device=self.device)

    def pin(self, address: int, size: int) -> None:
        """Register host memory with the driver."""
        self._driver.host_register(address, size)

    def unpin(self, address: int) -> None:
        """Unregister host memory."""
        self._driver.host_unregister(address)

    def record(self) -> torch.cuda.Event | None:
        """Return an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def synchronize(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give torch's cached segments back to the driver."""
        torch.cuda.empty_cache()


class CudaDriver:
    """The driver calls that an address range with pages that come and go is made of, for one CUDA card.

    Addresses, handles and sizes are plain integers.  Every call checks the driver's return code, and raises
    `OutOfMemoryError` where there is no room and `DriverError` for anything else.

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
        """Allocate physical device memory; returns its handle."""
        return int(self._call(self._cuda.cuMemCreate, size, self._properties(), 0, asked=size))

    def release(self, handle: int) -> None:
        """Give up a handle; the memory goes with the last mapping of it."""
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


# Layouts and constants as in hip_runtime_api.h (ROCm 6 and 7): AMD ships no Python binding of these calls.
HIP_SUCCESS = 0
HIP_ERROR_OUT_OF_MEMORY = 2
HIP_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
ALLOCATION_TYPE_PINNED = 1
LOCATION_TYPE_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_MINIMUM = 0
HOST_REGISTER_PORTABLE = 1


class MemLocation(ctypes.Structure):
    """`hipMemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
    )


class MemAllocationProp(ctypes.Structure):
    """`hipMemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleType", ctypes.c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", _AllocFlags),
    )


class MemAccessDesc(ctypes.Structure):
    """`hipMemAccessDesc`."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


def load_hip() -> ctypes.CDLL:
    """Return the HIP runtime that torch has loaded already, else the system's."""
    problems = []
    # By soname first: the loader then answers with the copy that torch brought and never loads a second runtime.
    for name in ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise ConfigError(f"the HIP runtime cannot be loaded; install ROCm or use device 'cpu' ({problems[0]})")


class HipDriver:
    """Do as `CudaDriver`, for one AMD card; `library` is the loaded HIP runtime."""

    def __init__(self, library: Any, index: int) -> None:
        self._hip = library
        self._index = index
        # Without it ctypes would read the returned char pointer as an int and cut it to 32 bits.
        self._hip.hipGetErrorString.restype = ctypes.c_char_p

    def granularity(self) -> int:
        """Smallest unit of a mapping."""
        size = ctypes.c_size_t()
        properties = self._properties()
        self._check(
            self._hip.hipMemGetAllocationGranularity(
                ctypes.byref(size), ctypes.byref(properties), ctypes.c_int(GRANULARITY_MINIMUM)
            )
        )
        return size.value

    def address_reserve(self, size: int, alignment: int) -> int:
        """Reserve a range of device addresses."""
        address = ctypes.c_void_p()
        code = self._hip.hipMemAddressReserve(
            ctypes.byref(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(alignment),
            ctypes.c_void_p(None),
            ctypes.c_ulonglong(0),
        )
        self._check(code, refusal=f"there is no range of {size} device addresses left")
        return address.value or 0

    def address_free(self, address: int, size: int) -> None:
        """Give a range of device addresses back."""
        self._check(self._hip.hipMemAddressFree(ctypes.c_void_p(address), ctypes.c_size_t(size)))

    def create(self, size: int) -> int:
        """Allocate physical device memory."""
        handle = ctypes.c_void_p()
        properties = self._properties()
        code = self._hip.hipMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)
        )
        self._check(code, asked=size)
        return handle.value or 0

    def release(self, handle: int) -> None:
        """Give up a handle."""
        self._check(self._hip.hipMemRelease(ctypes.c_void_p(handle)))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory at an address."""
        code = self._hip.hipMemMap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            ctypes.c_void_p(handle),
            ctypes.c_ulonglong(0),
        )
        self._check(code, asked=size)

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write the range."""
        access = MemAccessDesc(MemLocation(LOCATION_TYPE_DEVICE, self._index), ACCESS_READ_WRITE)
        code = self._hip.hipMemSetAccess(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)
        )
        self._check(code, asked=size)

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range."""
        self._check(self._hip.hipMemUnmap(ctypes.c_void_p(address), ctypes.c_size_t(size)))

    def host_register(self, address: int, size: int) -> None:
        """Lock host pages for direct copies."""
        code = self._hip.hipHostRegister(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(HOST_REGISTER_PORTABLE)
        )
        self._check(code, refusal=f"the host does not let {size} bytes be locked (see `ulimit -l`)")

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; as `CudaDriver.host_unregister`."""
        code = self._hip.hipHostUnregister(ctypes.c_void_p(address))
        if code != HIP_ERROR_HOST_MEMORY_NOT_REGISTERED:
            self._check(code)

    def _properties(self) -> MemAllocationProp:
        return MemAllocationProp(type=ALLOCATION_TYPE_PINNED, location=MemLocation(LOCATION_TYPE_DEVICE, self._index))

    def _check(self, code: int, *, asked: int = 0, refusal: str = "") -> None:
        if code == HIP_SUCCESS:
            return
        if code == HIP_ERROR_OUT_OF_MEMORY:
            raise OutOfMemoryError(refusal or f"the card has no room for {asked} bytes")
        text = self._hip.hipGetErrorString(ctypes.c_int(code)) or b"?"
        raise DriverError(f"the HIP runtime answered {code}: {text.decode()}")
