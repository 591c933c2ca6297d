"""TurnSeries of a quantity, turn after turn: growth is told with its rate, what fills or falls back is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from lowtide.leakcheck.growth.series import Growth, TurnSeries, chance_of_rise, slope_of

KIB = 1024


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
