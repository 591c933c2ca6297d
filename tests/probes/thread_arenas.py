"""What threads have allocated at once, each in an arena of malloc's: freed, or kept."""

from __future__ import annotations

import ctypes
import threading

_LIBRARY = ctypes.CDLL(None)
_LIBRARY.malloc.restype, _LIBRARY.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_LIBRARY.free.argtypes = [ctypes.c_void_p]

PIECE = 100_000
_RAISES_THRESHOLD = 31 << 20


def take(threads: int, pieces: int) -> list[int]:
    """The addresses of so many pieces of memory of each of so many threads, written to."""
    # A large block that is freed has malloc keep twice as much at the top of each arena from then on.
    _LIBRARY.free(_LIBRARY.malloc(_RAISES_THRESHOLD))
    together, taken = threading.Barrier(threads), list[int]()

    def run() -> None:
        together.wait()
        for _ in range(pieces):
            address = _LIBRARY.malloc(PIECE)
            ctypes.memset(address, 1, PIECE)
            taken.append(address)
        # None is over before all have an arena.
        together.wait()

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return taken


def free(addresses: list[int]) -> None:
    """Free them."""
    while addresses:
        _LIBRARY.free(addresses.pop())
