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
from typing import Any

LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
"""The library of each kind of card."""

_CALLS = {
    "cuda": ("cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemsetD8_v2", "cuCtxSynchronize", "cuMemFree_v2"),
    "hip": ("hipMemGetInfo", "hipMalloc", "hipMemset", "hipDeviceSynchronize", "hipFree"),
}
"""What says how much is free, allocates, fills, waits and frees; HIP's are in hip_runtime_api.h."""

PIECE = 2 << 20
"""Bytes of a small piece: the driver's own granularity."""

_TRIES = 12


class DeviceMemoryError(RuntimeError):
    """The driver refused a call that is no allocation; the message names the call and its code."""


class TenantCard:
    """The memory of one card, by the CUDA driver API or the HIP runtime API, whose calls have the same arguments.

    To open it makes a context on the card, which takes memory itself.

    Args:
        kind: `cuda` or `hip`.
        library: that of `LIBRARIES`, loaded.
        index: the card.

    Raises:
        DeviceMemoryError: there is no such card, or no context on it.
    """

    def __init__(self, kind: str, library: Any, index: int) -> None:
        self._library = library
        self._info, self._allocate, self._fill, self._wait, self._free = _CALLS[kind]
        if kind == "hip":
            self._call("hipInit", ctypes.c_uint(0))
            self._call("hipSetDevice", ctypes.c_int(index))
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        # The primary one, whose memory is known from torch's processes.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        """Return the bytes that the driver says are free on the card.

        Raises:
            DeviceMemoryError: it does not say.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call(self._info, ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size: int) -> int | None:
        """Return the address of so many new bytes, each of them written; None if there is no such memory."""
        address = ctypes.c_void_p()
        if getattr(self._library, self._allocate)(ctypes.byref(address), ctypes.c_size_t(size)):
            return None
        self._call(self._fill, address, ctypes.c_int(0xA5), ctypes.c_size_t(size))
        self._call(self._wait)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free what was allocated at an address."""
        self._call(self._free, ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceMemoryError(f"{name.removesuffix('_v2')} failed with code {code}")


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
    return TenantCard(kind, library, index)


def kind_of_cards() -> str:
    """Return the kind of cards that this process's torch is built for: `hip`, or else `cuda`."""
    torch: Any = sys.modules.get("torch")
    return "hip" if getattr(getattr(torch, "version", None), "hip", None) is not None else "cuda"


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
