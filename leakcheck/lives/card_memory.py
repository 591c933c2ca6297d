"""Takes a card's memory through the driver's library alone, CUDA's or HIP's: the program of `tenant`'s processes.

    python -m lowtide.leakcheck.lives.card_memory KIND INDEX BYTES

allocates, writes and frees, and prints one line of JSON: `free` (bytes that the driver says are free), `wanted` (of
those, as much as was asked for), `whole` (bytes that it got in one piece) and `pieces` (bytes that it got in pieces of
2 MiB); or `error`. Without BYTES it makes a context, prints a line, and ends with its standard input.

torch would bring caches of its own, and seconds of imports.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Protocol

LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
"""The library of each kind of card."""

PIECE = 2 << 20
"""Bytes of a small piece: the driver's own granularity."""

_TRIES = 12


class DeviceMemoryError(RuntimeError):
    """The driver refused a call that is no allocation; the message names the call and its code."""


class TenantCard(Protocol):
    """The memory of one card."""

    def free_bytes(self) -> int:
        """Return the bytes that the driver says are free on the card.

        Raises:
            DeviceMemoryError: it does not say.
        """

    def allocate(self, size: int) -> int | None:
        """Return the address of so many new bytes, each of them written; None if there is no such memory."""

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
    """Open the memory of a card.

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
    """Return the kind of cards that this process's torch is built for: `hip`, or else `cuda`."""
    torch: Any = sys.modules.get("torch")
    return "hip" if getattr(getattr(torch, "version", None), "hip", None) is not None else "cuda"


def _check(code: int, call: str) -> None:
    if code:
        raise DeviceMemoryError(f"{call} failed with code {code}")


def occupy(card: TenantCard, asked: int) -> dict[str, int]:
    """Take up to `asked` bytes in one piece, then in small ones; nothing is left allocated.

    Raises:
        DeviceMemoryError: the driver refused a call that is no allocation.
    """
    free = card.free_bytes()
    wanted = min(asked, free) // PIECE * PIECE
    return {"free": free, "wanted": wanted, "whole": _largest(card, wanted), "pieces": _in_pieces(card, wanted)}


def _largest(card: TenantCard, wanted: int) -> int:
    """Return the largest piece of up to `wanted` bytes that there is, to within a part in thousands."""
    got, size, step = 0, wanted, wanted // 2
    for _ in range(_TRIES):
        if size <= 0:
            break
        address = card.allocate(size)
        if address is not None:
            card.free(address)
            got = max(got, size)
            if size == wanted:
                break
        size = min(wanted, (size + step if address is not None else size - step) // PIECE * PIECE)
        step //= 2
    return got


def _in_pieces(card: TenantCard, wanted: int) -> int:
    taken: list[int] = []
    try:
        while len(taken) * PIECE < wanted:
            address = card.allocate(PIECE)
            if address is None:
                break
            taken.append(address)
        return len(taken) * PIECE
    finally:
        for address in taken:
            card.free(address)


def main(arguments: list[str]) -> int:
    """Print the line; the exit code is 1 where there is only an error.

    Raises:
        DeviceMemoryError: a context alone was asked for, and the card cannot be used.
    """
    kind, index, *asked = arguments
    if not asked:
        card = open_card(kind, int(index))
        print("ready", flush=True)  # noqa: T201 - who measures reads it
        sys.stdin.read()
        del card
        return 0
    try:
        said: dict[str, Any] = occupy(open_card(kind, int(index)), int(asked[0]))
    except DeviceMemoryError as error:
        said = {"error": str(error)}
    print(json.dumps(said))  # noqa: T201 - the tenant reads it
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
