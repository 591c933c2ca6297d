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

    def __init__(self, driver: Driver, index: int) -> None:
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


SUCCESS = 0
OUT_OF_MEMORY = 2
HOST_MEMORY_NOT_REGISTERED = 713
HOST_REGISTER_PORTABLE = 1
"""Numbers that CUDA and HIP have in common, as most else."""


class Driver:
    """The driver calls that an address range with pages that come and go is made of, for one card.

    Addresses, handles and sizes are plain integers.  Every call checks the driver's return code, and raises
    `OutOfMemoryError` where there is no room and `DriverError` for anything else.
    """

    _minimum: Any
    """The granularity that is asked for, of those that there are."""
    _host = "MemHost"
    """What the names of the calls on host memory begin with."""
    _call: Callable[..., Any]
    """Makes the call of a name, without `cu` or `hip`; returns what it `gives` besides its code."""
    _properties: Callable[[], Any]
    """Returns those of pinned memory on the device."""
    _access: Callable[[], Any]
    """Returns the right of the device to read and to write."""
    _said: Callable[[Any], str]
    """Returns an error in the driver's own words."""

    def granularity(self) -> int:
        """Smallest unit of a mapping: 2 MiB on today's cards."""
        return int(self._call("MemGetAllocationGranularity", self._properties(), self._minimum, gives=True))

    def address_reserve(self, size: int, alignment: int) -> int:
        """Reserve a range of device addresses."""
        what = f"there is no range of {size} device addresses left"
        return int(self._call("MemAddressReserve", size, alignment, 0, 0, gives=True, refusal=what))

    def address_free(self, address: int, size: int) -> None:
        """Give a range of device addresses back."""
        self._call("MemAddressFree", address, size)

    def create(self, size: int) -> int:
        """Allocate physical device memory; returns its handle."""
        return int(self._call("MemCreate", size, self._properties(), 0, gives=True, asked=size))

    def release(self, handle: int) -> None:
        """Give up a handle; the memory goes with the last mapping of it."""
        self._call("MemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory at an address."""
        self._call("MemMap", address, size, 0, handle, 0, asked=size)

    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write the range."""
        self._call("MemSetAccess", address, size, self._access(), 1, asked=size)

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range."""
        self._call("MemUnmap", address, size)

    def host_register(self, address: int, size: int) -> None:
        """Lock host pages for direct copies, by whichever card."""
        what = f"the host does not let {size} bytes be locked (see `ulimit -l`)"
        self._call(f"{self._host}Register", address, size, HOST_REGISTER_PORTABLE, refusal=what)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; a Ctrl-C may have come after the driver did it, before it was written down."""
        self._call(f"{self._host}Unregister", address, done=HOST_MEMORY_NOT_REGISTERED)

    def _no_room(self, asked: int) -> str:
        return f"the card has no room for {asked} bytes"

    def _check(self, code: Any, *, asked: int = 0, refusal: str = "", done: int = SUCCESS) -> None:
        if int(code) in (SUCCESS, done):
            return
        if int(code) == OUT_OF_MEMORY:
            raise OutOfMemoryError(refusal or self._no_room(asked))
        raise DriverError(self._said(code))


class CudaDriver(Driver):
    """For one CUDA card.

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
        self._minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with torch.cuda.device(index):
            # The first call that waits for the card is also what makes torch create the context.
            torch.cuda.synchronize()
            self._context = self._checked(*driver.cuCtxGetCurrent())

    def _call(self, name: str, *args: Any, gives: bool = False, **expected: Any) -> Any:
        self._checked(*self._cuda.cuCtxPushCurrent(self._context))
        try:
            return self._checked(*getattr(self._cuda, f"cu{name}")(*args), **expected)
        finally:
            self._checked(*self._cuda.cuCtxPopCurrent())

    def _checked(self, code: Any, result: Any = None, **expected: Any) -> Any:
        self._check(code, **expected)
        return result

    def _properties(self) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        return properties

    def _access(self) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._index
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return [access]

    def _no_room(self, asked: int) -> str:
        free, total = torch.cuda.mem_get_info(self._index)
        return f"{super()._no_room(asked)}: {free} of {total} bytes are free"

    def _said(self, code: Any) -> str:
        _, name = self._cuda.cuGetErrorName(code)
        _, text = self._cuda.cuGetErrorString(code)
        return f"the CUDA driver answered {(name or b'?').decode()}: {(text or b'?').decode()}"


# Layouts and constants as in hip_runtime_api.h (ROCm 6 and 7): AMD ships no Python binding of these calls.
ALLOCATION_TYPE_PINNED = 1
LOCATION_TYPE_DEVICE = 1
ACCESS_READ_WRITE = 3


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


class HipDriver(Driver):
    """For one AMD card; `library` is the loaded HIP runtime."""

    _minimum = 0
    _host = "Host"

    def __init__(self, library: Any, index: int) -> None:
        self._hip = library
        self._index = index
        # Without it ctypes would read the returned char pointer as an int and cut it to 32 bits.
        self._hip.hipGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *args: Any, gives: bool = False, **expected: Any) -> Any:
        given = ctypes.c_size_t()
        # Numbers as wide as a register each: ctypes would pass 32 bits.
        passed = (ctypes.byref(arg) if isinstance(arg, ctypes.Structure) else ctypes.c_size_t(arg) for arg in args)
        code = getattr(self._hip, f"hip{name}")(*[ctypes.byref(given)] * gives, *passed)
        self._check(code, **expected)
        return given.value

    def _properties(self) -> Any:
        return MemAllocationProp(type=ALLOCATION_TYPE_PINNED, location=MemLocation(LOCATION_TYPE_DEVICE, self._index))

    def _access(self) -> Any:
        return MemAccessDesc(MemLocation(LOCATION_TYPE_DEVICE, self._index), ACCESS_READ_WRITE)

    def _said(self, code: Any) -> str:
        text = self._hip.hipGetErrorString(ctypes.c_int(code)) or b"?"
        return f"the HIP runtime answered {code}: {text.decode()}"
