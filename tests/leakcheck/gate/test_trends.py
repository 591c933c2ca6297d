"""Where a series changed its level: at the right run, and nowhere where there is only noise."""

from __future__ import annotations

import random

import pytest

from lowtide.leakcheck.gate.history import LevelChange, level_changes

MIB = 1 << 20


def noisy(levels: list[tuple[int, int]], noise: float, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [round(level + draw.gauss(0, noise)) for level, runs in levels for _ in range(runs)]


@pytest.mark.parametrize("place", [2, 7, 150, 293, 298])
def test_a_step_is_found_at_its_run(place: int) -> None:
    values = [0] * place + [48 * MIB] * (300 - place)
    assert level_changes(values, 1024) == [LevelChange(place, 0, 48 * MIB)]


def test_each_of_several_steps_is_found() -> None:
    values = [0] * 40 + [8 * MIB] * 30 + [24 * MIB] * 20 + [0] * 10
    assert [(change.place, change.after) for change in level_changes(values, 1024)] == [
        (40, 8 * MIB),
        (70, 24 * MIB),
        (90, 0),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_three_times_the_noise_is_found_within_two_runs(seed: int) -> None:
    found = level_changes(noisy([(100 * MIB, 60), (130 * MIB, 60)], 10 * MIB, seed), 4 * MIB)
    assert len(found) == 1
    assert abs(found[0].place - 60) <= 2


def test_noise_alone_has_no_level_to_change() -> None:
    alarms = [seed for seed in range(200) if level_changes(noisy([(500 * MIB, 120)], 10 * MIB, seed), 4 * MIB)]
    assert alarms == []


@pytest.mark.parametrize("place", [0, 1, 25, 48, 49])
def test_one_run_is_a_spike_and_no_level(place: int) -> None:
    values = [0] * 50
    values[place] = 900 * MIB
    assert level_changes(values, 1024) == []


def test_a_change_below_the_smallest_one_is_none() -> None:
    values = [0] * 20 + [1000] * 20
    assert level_changes(values, 1024) == []
    assert len(level_changes(values, 1000)) == 1
    # Two in a hundred of the largest value are not worth a look either.
    assert level_changes([10_000 * MIB] * 20 + [10_100 * MIB] * 20, 1024) == []


@pytest.mark.parametrize("values", [[], [1], [0, 9], [0, 9, 9], [5] * 30])
def test_too_few_runs_or_no_change_at_all_have_no_step(values: list[int]) -> None:
    assert level_changes(values, 1) == []


def test_counts_have_levels_too() -> None:
    assert level_changes([2] * 10 + [3] * 10, 1) == [LevelChange(10, 2, 3)]


def test_a_small_step_beside_a_large_one_is_none() -> None:
    assert level_changes([0] * 20 + [600] * 20 + [9000] * 20, 1024) == [LevelChange(40, 300, 9000)]
