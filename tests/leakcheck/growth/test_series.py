"""A level turn after turn: what was added for good, and growth with its rate; what fills or falls back is none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest

from lowtide.leakcheck.growth.series import (
    FEWEST_STEPS,
    Growth,
    KeptSteps,
    TurnSeries,
    chance_of_rise,
    slope_of,
    trend_of,
)
from lowtide.reports.sizes import format_bytes

KIB = 1024


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


def at_end(values: Iterable[float]) -> Growth:
    series = TurnSeries()
    for value in values:
        series.add(value)
    return series.growth()


def noise(turns: int, size: float = 40 * KIB, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(0, size) for _ in range(turns)]


def wandering(turns: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    level, levels = 0.0, []
    for _ in range(turns):
        level += rng.gauss(0, 100 * KIB)
        levels.append(level)
    return levels


def test_growth_is_told_with_its_rate_and_an_interval_around_it() -> None:
    found = at_end(2 * KIB * turn + more for turn, more in enumerate(noise(400, 8 * KIB)))
    assert found.kind == "growth"
    assert found.slope is not None
    assert found.slope.low < 2 * KIB < found.slope.high
    assert found.slope.high - found.slope.low < 0.2 * KIB


def test_a_dozen_turns_of_one_size_are_growth_and_so_few_as_seven_are_not_judged() -> None:
    assert at_end(range(0, 12 << 20, 1 << 20)).kind == "growth"
    assert at_end(range(7)) == Growth("undecided", 7, more=1)


def test_a_small_leak_beneath_much_larger_noise_is_told_within_500_turns() -> None:
    told = [at_end(2 * KIB * turn + more for turn, more in enumerate(noise(500, seed=seed))) for seed in range(20)]
    assert {found.kind for found in told} == {"growth"}


def test_48_bytes_a_call_are_told_within_20_000_calls() -> None:
    assert at_end(48 * turn + more for turn, more in enumerate(noise(20_000, 16 * KIB))).kind == "growth"


def after_first_use(turns: int) -> list[float]:
    return [min(turn, turns // 4) * KIB for turn in range(turns)]


def slowing_down(turns: int) -> list[float]:
    return [1e6 * (1 - 0.5 ** (8 * turn / turns)) for turn in range(turns)]


def jump(turns: int) -> list[float]:
    return [1e8 * (turn > turns * 0.6) + more for turn, more in enumerate(noise(turns))]


def saw(turns: int) -> list[float]:
    return [turn % (turns // 3 + 1) * KIB for turn in range(turns)]


def one_long_tooth(turns: int) -> list[float]:
    period = turns * 5 // 6
    return [(turn + period * 7 // 10) % period * KIB for turn in range(turns)]


@pytest.mark.parametrize("turns", [12, 48, 300, 5000])
@pytest.mark.parametrize("shape", [after_first_use, slowing_down, jump, saw, one_long_tooth, noise])
def test_what_fills_jumps_or_falls_back_is_no_growth(shape: Callable[[int], list[float]], turns: int) -> None:
    assert at_end(shape(turns)).kind != "growth"


def test_a_level_that_wanders_is_no_growth() -> None:
    assert [seed for seed in range(30) if at_end(wandering(3000, seed)).kind == "growth"] == []


def test_what_does_not_grow_is_bounded_or_a_saw() -> None:
    assert at_end([7] * 50).kind == "bounded"
    assert at_end(after_first_use(100)).kind == "bounded"
    assert at_end(saw(100)).kind == "sawtooth"


def test_a_leak_beneath_a_saw_is_growth() -> None:
    assert at_end(4 * KIB * turn + turn % 9 * 16 * KIB for turn in range(300)).kind == "growth"


def test_what_is_not_decided_says_how_many_more_turns_it_may_take() -> None:
    series = [KIB * turn + more for turn, more in enumerate(noise(100, 50 * KIB))]
    found = at_end(series[:24])
    assert found.kind == "undecided"
    assert 0 < found.more <= 24


def test_a_series_of_any_length_is_kept_in_few_figures() -> None:
    series = TurnSeries()
    for turn in range(100_000):
        series.add(turn)
    assert len(series._floors) < 64
    found = series.growth()
    assert found.slope is not None
    assert found.slope.rate == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_the_slope_and_its_interval_are_those_of_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(seed)
    values = [turn + rng.choice([0, 1, 1, 3, rng.gauss(0, 5)]) for turn in range(rng.randint(8, 40))]
    expected = stats.theilslopes(values, alpha=0.95)
    found = slope_of(values)
    assert (found.rate, found.low, found.high) == pytest.approx(
        (expected.slope, expected.low_slope, expected.high_slope)
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_chance_of_a_rise_is_that_of_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(seed)
    steps = [rng.gauss(0.4, 1) for _ in range(11)]
    expected = stats.permutation_test(
        (steps,), sum, permutation_type="samples", alternative="greater", n_resamples=1 << 11
    )
    assert chance_of_rise(steps) == pytest.approx(expected.pvalue if sum(steps) > 0 else 1.0)


def test_the_chance_of_a_rise_hardly_changes_where_it_is_no_longer_counted_out() -> None:
    steps = [b - a for a, b in pairwise([0, 3, 5, 4, 9, 8, 12, 14, 13, 17, 20, 19, 25])]
    assert chance_of_rise([*steps, 0.001]) == pytest.approx(chance_of_rise(steps), abs=0.005)
    assert chance_of_rise([]) == chance_of_rise([0, -1]) == 1.0
