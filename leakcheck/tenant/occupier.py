"""Takes memory on a card, writes it, gives it back, and prints what it got: the program of a tenant's process.

    python -m lowtide.leakcheck.tenant.occupier KIND INDEX BYTES

One line of JSON: `free` (bytes that the driver says are free), `wanted` (of those, as much as was asked for), `whole`
(bytes that it got in one piece) and `pieces` (bytes that it got in pieces of 2 MiB); or `error`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lowtide.leakcheck.tenant.device_memory import DeviceMemoryError, TenantCard, open_card

PIECE = 2 << 20
"""Bytes of a small piece: the driver's own granularity."""

_TRIES = 12


def occupy(card: TenantCard, asked: int) -> dict[str, int]:
    """Take up to `asked` bytes in one piece, then in small ones; nothing is left allocated.

    Raises:
        DeviceMemoryError: the driver refused a call that is no allocation.
    """
    free = card.free_bytes()
    wanted = min(asked, free) // PIECE * PIECE
    return {"free": free, "wanted": wanted, "whole": _largest(card, wanted), "pieces": _in_pieces(card, wanted)}


def _largest(card: TenantCard, wanted: int) -> int:
    """The largest piece of up to `wanted` bytes that there is, to within a part in thousands."""
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
    """Print the line; the exit code is 1 where there is only an error."""
    kind, index, asked = arguments
    try:
        said: dict[str, Any] = occupy(open_card(kind, int(index)), int(asked))
    except DeviceMemoryError as error:
        said = {"error": str(error)}
    print(json.dumps(said))  # noqa: T201 - the tenant reads it
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
