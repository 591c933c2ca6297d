"""Allocates a card's memory through the driver's library alone: CUDA's, or HIP's with the same calls.

torch would bring caches of its own, and seconds of imports.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
"""The library of each kind of card."""


class DeviceMemoryError(RuntimeError):
    """The driver refused a call that is no allocation; the message names the call and its code."""


class TenantCard(Protocol):
    """The memory of one card."""

    def free_bytes(self) -> int:
        """Bytes that the driver says are free on the card.

        Raises:
            DeviceMemoryError: it does not say.
        """

    def allocate(self, size: int) -> int | None:
        """The address of so many new bytes, each of them written; None if there is no such memory."""

    def free(self, address: int) -> None:
        """Free what was allocated at an address."""


class _CudaMemory:
    """By the CUDA driver API; makes a context on the card, which takes memory itself.

    Args:
        library: `libcuda.so.1`.
        index: the card.

    Raises:
        DeviceMemoryError: there is no such card, or no context on it.
    """

    def __init__(self, library: Any, index: int) -> None:
        self._library = library
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _check(library.cuInit(ctypes.c_uint(0)), "cuInit")
        _check(library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)), "cuDeviceGet")
        # The primary one, whose memory is known from torch's processes.
        _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        _check(library.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check(self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
        return free.value

    def allocate(self, size: int) -> int | None:
        address = ctypes.c_uint64()
        if self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
            return None
        _check(self._library.cuMemsetD8_v2(address, ctypes.c_ubyte(0xA5), ctypes.c_size_t(size)), "cuMemsetD8")
        _check(self._library.cuCtxSynchronize(), "cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        _check(self._library.cuMemFree_v2(ctypes.c_uint64(address)), "cuMemFree")


class _HipMemory:
    """By the HIP runtime API, whose calls have the same arguments (hip_runtime_api.h).

    Args:
        library: `libamdhip64.so`.
        index: the card.

    Raises:
        DeviceMemoryError: there is no such card.
    """

    def __init__(self, library: Any, index: int) -> None:
        self._library = library
        _check(library.hipInit(ctypes.c_uint(0)), "hipInit")
        _check(library.hipSetDevice(ctypes.c_int(index)), "hipSetDevice")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check(self._library.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "hipMemGetInfo")
        return free.value

    def allocate(self, size: int) -> int | None:
        address = ctypes.c_void_p()
        if self._library.hipMalloc(ctypes.byref(address), ctypes.c_size_t(size)):
            return None
        _check(self._library.hipMemset(address, ctypes.c_int(0xA5), ctypes.c_size_t(size)), "hipMemset")
        _check(self._library.hipDeviceSynchronize(), "hipDeviceSynchronize")
        return address.value or 0

    def free(self, address: int) -> None:
        _check(self._library.hipFree(ctypes.c_void_p(address)), "hipFree")


def open_card(kind: str, index: int, library: Any = None) -> TenantCard:
    """The memory of a card.

    Args:
        kind: `cuda` or `hip`.
        index: the card, as the driver numbers those that are visible.
        library: the loaded library; None loads it.

    Raises:
        DeviceMemoryError: the library is not there, or the card cannot be used.
    """
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARIES[kind])
        except OSError as error:
            raise DeviceMemoryError(f"{LIBRARIES[kind]} cannot be loaded: {error}") from error
    return _CudaMemory(library, index) if kind == "cuda" else _HipMemory(library, index)


def kind_of_cards() -> str:
    """Of the cards that this process's torch is built for: `hip`, or else `cuda`."""
    torch: Any = sys.modules.get("torch")
    return "hip" if getattr(getattr(torch, "version", None), "hip", None) is not None else "cuda"


def _check(code: int, call: str) -> None:
    if code:
        raise DeviceMemoryError(f"{call} failed with code {code}")
