"""Sizes as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: int | None) -> str:
    """`1.5 MiB`; an em dash where it is not known."""
    if size is None:
        return "—"
    value = float(size)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_amount(amount: int, unit: str) -> str:
    """`1.5 MiB` for bytes, `3 threads` for anything else."""
    return format_bytes(amount) if unit == "bytes" else f"{amount} {unit}"
