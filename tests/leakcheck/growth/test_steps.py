"""Levels read turn after turn: what was added for good, and whether that goes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from lowtide.leakcheck.growth.steps import FEWEST_STEPS, KeptSteps, trend_of
from lowtide.reports.sizes import format_bytes


def steps(*levels: int) -> Sequence[int]:
    return KeptSteps.between(levels).sizes


def added(*sizes: int) -> list[int]:
    """The levels after turns that added so much and gave nothing back."""
    return list(itertools.accumulate(sizes, initial=0))


def is_growth(levels: Sequence[int], allowed: int = 0) -> bool:
    return KeptSteps.between(levels, allowed).grows


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
    assert KeptSteps([100]).repeated == 0
    assert KeptSteps([4, 4, 4]).repeated == 12
    assert KeptSteps([100, 4, 4]).repeated == 12
    assert KeptSteps([100, 4, 4], [0, 4, 4]).repeated == 0


def test_the_rate_in_words() -> None:
    assert KeptSteps([4 << 20] * 10).said(format_bytes) == "+4.0 MiB in each of 10 tests"
    some = KeptSteps([0, 4, 0, 4, 0, 5])
    assert some.said(format_bytes) == "+4 B to +5 B in each of 3 of 6 tests"
    assert some.turns == [2, 4, 6]


# In which turns what is left was made, and what that says.
OVER_TWO: dict[tuple[int, ...], str | None] = {
    (): None,
    (1,): "residue",
    (2,): "bounded",
    # Each of two turns: a leak, or a cache of two that is full now.
    (1, 2): None,
}
OVER_THREE: dict[tuple[int, ...], str | None] = {
    (): None,
    (1,): "residue",
    (2,): "bounded",
    (3,): "bounded",
    (1, 2): "bounded",
    (1, 3): "bounded",
    (2, 3): "bounded",
    (1, 2, 3): "growth",
}
OVER_FOUR: dict[tuple[int, ...], str | None] = {
    (): None,
    (1,): "residue",
    (2,): "bounded",
    (4,): "bounded",
    (1, 4): "bounded",
    (2, 3): "bounded",
    (3, 4): "bounded",
    (1, 2, 3): "bounded",
    (1, 2, 4): "bounded",
    (2, 3, 4): "bounded",
    (1, 2, 3, 4): "growth",
}


@pytest.mark.parametrize("left", OVER_TWO)
def test_two_turns(left: tuple[int, ...]) -> None:
    assert trend_of(left, 2) == OVER_TWO[left]


@pytest.mark.parametrize("left", OVER_THREE)
def test_three_turns(left: tuple[int, ...]) -> None:
    assert trend_of(left, 3) == OVER_THREE[left]


@pytest.mark.parametrize("left", OVER_FOUR)
def test_four_turns(left: tuple[int, ...]) -> None:
    assert trend_of(left, 4) == OVER_FOUR[left]


@pytest.mark.parametrize("left", [(), (1,), (1, 1)])
def test_one_turn_tells_nothing(left: tuple[int, ...]) -> None:
    assert trend_of(left, 1) is None
    assert trend_of(left, 0) is None


def test_how_much_each_turn_left_does_not_matter() -> None:
    assert trend_of([1, 1, 1, 2, 3, 3], 3) == "growth"
    assert trend_of([1, 1, 1], 3) == "residue"
    assert trend_of([3, 3, 2], 3) == "bounded"


def test_the_order_does_not_matter() -> None:
    assert trend_of([3, 1, 2], 3) == "growth"
    assert trend_of(iter([2, 1]), 3) == "bounded"


def test_as_many_turns_as_are_needed_are_enough() -> None:
    assert trend_of(range(1, FEWEST_STEPS + 1), FEWEST_STEPS) == "growth"
    assert trend_of(range(1, FEWEST_STEPS), FEWEST_STEPS - 1) is None


def test_one_turn_of_a_hundred_that_left_nothing_is_no_growth() -> None:
    assert trend_of(range(1, 101), 100) == "growth"
    assert trend_of(range(2, 101), 100) == "bounded"
    assert trend_of(range(1, 100), 100) == "bounded"


def test_more_turns_than_were_counted_do_no_harm() -> None:
    assert trend_of([1, 2, 3, 4], 3) == "growth"
