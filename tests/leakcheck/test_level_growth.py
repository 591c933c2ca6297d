"""Levels read turn after turn: what was added for good, and whether that goes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from lowtide.leakcheck.judging.growth import adding_turns, grows, kept_steps, rate, repeated
from lowtide.reports.sizes import format_bytes


def steps(*levels: int) -> list[int]:
    return kept_steps(levels)


def added(*sizes: int) -> list[int]:
    """The levels after turns that added so much and gave nothing back."""
    return list(itertools.accumulate(sizes, initial=0))


def is_growth(levels: Sequence[int], allowed: int = 0) -> bool:
    found = kept_steps(levels)
    return grows(found, [allowed] * len(found))


def test_what_each_turn_added_is_kept() -> None:
    assert steps(10, 14, 18, 22) == [4, 4, 4]


def test_what_was_given_back_later_was_not_added() -> None:
    assert steps(0, 4, 8, 12, 0) == [0, 0, 0, 0]
    assert steps(0, 4, 0, 8, 4) == [0, 0, 4, 0]


@pytest.mark.parametrize(
    "levels",
    [
        added(4, 4, 4),
        added(4, 4, 4, 4, 4, 4, 4, 4, 4, 4),
        added(4, 0, 4, 0, 4, 0, 4, 0),
        added(0, 0, 4, 0, 0, 4, 0, 0, 4, 0),
        added(12, 4, 4, 4),
        added(4, 4, 4, 4, 4, 4, 4, 0, 0, 0),
        added(1, 2, 4, 8, 16),
    ],
    ids=["three", "ten", "every other", "every third", "a cache first", "seven of ten", "ever more"],
)
def test_it_grows(levels: Sequence[int]) -> None:
    assert is_growth(levels)


@pytest.mark.parametrize(
    "levels",
    [
        added(4, 4),
        added(4, 4, 4, 0, 0, 0),
        added(4, 4, 4, 4, 0, 0),
        added(4, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0),
        added(1, 2, 4, 8),
        [0, 4, 0, 4, 0, 4, 0],
        [0, 4, 8, 0, 4, 8, 0, 4],
        [0, 4, 4, 4, 4, 4],
    ],
    ids=[
        "twice",
        "fills in half",
        "fills in two thirds",
        "long ago",
        "four sizes",
        "comes and goes",
        "emptied at times",
        "replaced",
    ],
)
def test_it_does_not_grow(levels: Sequence[int]) -> None:
    assert not is_growth(levels)


def test_what_a_turn_may_add_is_no_growth() -> None:
    assert not is_growth(added(4, 4, 4, 4), allowed=4)
    assert is_growth(added(5, 5, 5, 5), allowed=4)


def test_only_what_repeats_counts_against_a_limit() -> None:
    assert repeated([100], [0]) == 0
    assert repeated([4, 4, 4], [0] * 3) == 12
    assert repeated([100, 4, 4], [0] * 3) == 12
    assert repeated([100, 4, 4], [0, 4, 4]) == 0


def test_the_rate_in_words() -> None:
    assert rate([4 << 20] * 10, [0] * 10, format_bytes) == "+4.0 MiB in each of 10 tests"
    assert rate([0, 4, 0, 4, 0, 5], [0] * 6, format_bytes) == "+4 B to +5 B in each of 3 of 6 tests"
    assert adding_turns([0, 4, 0, 4, 0, 5], [0] * 6) == [2, 4, 6]
