"""The HIP runtime's virtual memory calls, through ctypes: AMD ships no Python binding of them on the registry.

Struct layouts and constants follow hip_runtime_api.h (ROCm 6 and 7).
"""

from __future__ import annotations

import ctypes
from typing import Any

from lowtide.engine.errors import ConfigError, DriverError, OutOfMemoryError

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
    """The HIP runtime that torch has loaded already, else the system's.

    Raises:
        ConfigError: there is none.
    """
    problems = []
    # By soname first: the loader then answers with the copy that torch brought and never loads a second runtime.
    for name in ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise ConfigError(f"the HIP runtime cannot be loaded; install ROCm or use device 'cpu' ({problems[0]})")


class HipDriver:
    """`VmmDriver` for one AMD card; `library` is the loaded HIP runtime."""

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
        """Undo `host_register`; where it is undone already, that is what was wanted.

        (A Ctrl-C can come after the runtime has done it, and before that is written down.)
        """
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
