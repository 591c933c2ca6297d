"""Address ranges: each byte once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lowtide.probes.memory.ranges import Range, common, merge, total, without

some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)


def covered(ranges: list[Range] | tuple[Range, ...]) -> set[int]:
    return {byte for address, length in ranges for byte in range(address, address + length)}


@given(some_ranges)
def test_merged_ranges_cover_the_same_bytes_each_once(ranges: list[Range]) -> None:
    merged = merge(ranges)
    assert covered(merged) == covered(ranges)
    assert total(merged) == len(covered(ranges))


@given(some_ranges)
def test_merged_ranges_are_sorted_and_apart(ranges: list[Range]) -> None:
    merged = merge(ranges)
    assert all(left[0] + left[1] < right[0] for left, right in pairwise(merged))


@given(some_ranges, some_ranges)
def test_common_is_the_intersection(some: list[Range], others: list[Range]) -> None:
    found = common(some, others)
    assert covered(found) == covered(some) & covered(others)
    assert total(found) == len(covered(found))


@given(some_ranges, some_ranges)
def test_without_is_the_difference(some: list[Range], gone: list[Range]) -> None:
    left = without(some, gone)
    assert covered(left) == covered(some) - covered(gone)
    assert total(left) == len(covered(left))
