"""Sizes, numbers and lists as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: int | None) -> str:
    """Return `1.5 MiB`; an em dash where it is not known."""
    if size is None:
        return "—"
    value = float(size)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_amount(amount: int, unit: str) -> str:
    """Return `1.5 MiB` for bytes, `3 threads` and `1 thread` for anything else; `unit` is the plural."""
    if unit == "bytes":
        return format_bytes(amount)
    return f"{amount} {_singular(unit) if amount == 1 else unit}"


def _singular(unit: str) -> str:
    """Return `thread` of `threads`, `tensor of a kind` of `tensors of a kind`: the first plural is what is counted."""
    return re.sub(r"(?:(?<=ss)es|(?<!s)s)\b", "", unit, count=1)


def parse_bytes(size: object) -> int:
    """Return the bytes in `1MiB`, `1.5 GiB`, `2000`, `10kB` or a number.

    Raises:
        ValueError: it is none of these; the message says what is allowed.
    """
    if type(size) is int and size >= 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)\s*", size) if isinstance(size, str) else None
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{size!r} is no size: use bytes such as 4096, or a unit such as 512KiB, 1.5MiB, 2GiB, 10MB")
    step = 1024 if found[3] else 1000
    power = " KMGT".index(found[2].upper()) if found[2] else 0
    return round(float(found[1]) * float(step**power))


def first_of(names: Sequence[str], most: int | None) -> str:
    """Return `a, b and 3 more`: the first of some names, `most` at the most; all of them for None."""
    more = 0 if most is None else max(0, len(names) - most)
    return ", ".join(names[:most]) + (f" and {more} more" if more else "")
