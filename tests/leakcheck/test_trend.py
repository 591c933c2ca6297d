"""Residue, bounded or growth: the whole table of which turns of a stage left something, for one to four turns."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.judging.growth import FEWEST_TURNS, trend_of

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
    assert trend_of(range(1, FEWEST_TURNS + 1), FEWEST_TURNS) == "growth"
    assert trend_of(range(1, FEWEST_TURNS), FEWEST_TURNS - 1) is None


def test_one_turn_of_a_hundred_that_left_nothing_is_no_growth() -> None:
    assert trend_of(range(1, 101), 100) == "growth"
    assert trend_of(range(2, 101), 100) == "bounded"
    assert trend_of(range(1, 100), 100) == "bounded"


def test_more_turns_than_were_counted_do_no_harm() -> None:
    assert trend_of([1, 2, 3, 4], 3) == "growth"
