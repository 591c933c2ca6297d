"""Address ranges as (address, length) pairs: merged so that overlapping memory is counted once."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Join ranges that overlap or touch; sorted by address, empty ones dropped. Lengths in bytes."""
    merged: list[Range] = []
    for address, length in sorted(ranges):
        if length <= 0:
            continue
        if merged:
            last, held = merged[-1]
            if address <= last + held:
                merged[-1] = (last, max(held, address + length - last))
                continue
        merged.append((address, length))
    return tuple(merged)


def total(ranges: Iterable[Range]) -> int:
    """Return the bytes in `ranges`; merge them first if they may overlap."""
    return sum(length for _, length in ranges)


def common(some: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """Return the ranges that lie in both; merged."""
    left, right = merge(some), merge(others)
    found: list[Range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        left_end, right_end = sum(left[i]), sum(right[j])
        end = min(left_end, right_end)
        if start < end:
            found.append((start, end - start))
        if left_end <= right_end:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(some: Iterable[Range], gone: Iterable[Range]) -> tuple[Range, ...]:
    """Return the parts of `some` that do not lie in `gone`; merged."""
    left: list[Range] = []
    holes = iter(common(some, gone))
    hole = next(holes, None)
    for address, length in merge(some):
        start, end = address, address + length
        while hole is not None and hole[0] < end:
            if hole[0] > start:
                left.append((start, hole[0] - start))
            start = sum(hole)
            hole = next(holes, None)
        if start < end:
            left.append((start, end - start))
    return tuple(left)
