"""Which simulated series are told to grow, of shapes that do and that do not, beside a threshold and least squares."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.leakcheck.growth.series import TurnSeries
from lowtide.probes.heap.container_lengths import read_lengths
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.memory_parts import read_parts

KIB = 1 << 10
MIB = 1 << 20
TURNS = (48, 100, 200, 500)
LONG = 20_000

Numbers = Any
Shape = Callable[[np.random.Generator, int], Numbers]


def _noise(rng: np.random.Generator, turns: int, size: float) -> Numbers:
    return rng.normal(0, size, turns)


def _autocorrelated(rng: np.random.Generator, turns: int, size: float, memory: float = 0.9) -> Numbers:
    level, levels = 0.0, np.zeros(turns)
    for turn, step in enumerate(rng.normal(0, size, turns)):
        level = levels[turn] = memory * level + step
    return levels


def with_noise(rng: np.random.Generator, turns: int) -> Numbers:
    """2 KiB a turn beneath requests that come and go: their answers are there or not when it is read."""
    return np.arange(turns) * 2 * KIB * 500 / turns + np.abs(_noise(rng, turns, 40 * KIB))


def of_any_size(rng: np.random.Generator, turns: int) -> Numbers:
    """A request keeps its text."""
    return np.cumsum(rng.exponential(2 * KIB, turns))


def now_and_then(rng: np.random.Generator, turns: int) -> Numbers:
    """One request of a few is aborted, and stays."""
    return np.cumsum((rng.random(turns) < rng.uniform(0.25, 1)) * 8 * KIB)


def in_arenas(rng: np.random.Generator, turns: int) -> Numbers:
    """The allocator takes memory in pieces, of which a turn uses a part."""
    pieces = np.floor(np.arange(turns) * rng.uniform(16, 60) / turns)
    return pieces * 128 * KIB


def after_a_warm_up(rng: np.random.Generator, turns: int) -> Numbers:
    """First uses at the beginning, and a leak from there."""
    warm = 8 * MIB * (1 - np.exp(-np.arange(turns) / (turns / 30)))
    return warm + np.arange(turns) * 16 * KIB * 500 / turns


def beneath_a_saw(rng: np.random.Generator, turns: int) -> Numbers:
    """A collection gives back what was garbage, but not all."""
    period = int(rng.integers(2, 8))
    return np.arange(turns) * 4 * KIB + np.arange(turns) % period * 3 * KIB


def constant(rng: np.random.Generator, turns: int) -> Numbers:
    return np.full(turns, float(rng.integers(1 << 30)))


def noisy(rng: np.random.Generator, turns: int) -> Numbers:
    return _noise(rng, turns, 100 * KIB)


def sluggish(rng: np.random.Generator, turns: int) -> Numbers:
    return _autocorrelated(rng, turns, 100 * KIB, float(rng.uniform(0.5, 0.98)))


def wandering(rng: np.random.Generator, turns: int) -> Numbers:
    """A heap's own level: what is freed stays here and there."""
    return np.cumsum(_noise(rng, turns, 100 * KIB))


def filling(rng: np.random.Generator, turns: int) -> Numbers:
    """A cache of a fixed number of keys that are asked for at random."""
    keys = max(int(turns * rng.uniform(0.02, 0.2)), 2)
    seen: set[int] = set()
    levels = np.zeros(turns)
    for turn, key in enumerate(rng.integers(0, keys, turns)):
        seen.add(int(key))
        levels[turn] = len(seen) * 4 * KIB
    return levels


def full(rng: np.random.Generator, turns: int) -> Numbers:
    """A cache that takes everything until it is full."""
    room = max(int(turns * rng.uniform(0.02, 0.4)), 2)
    return np.minimum(np.arange(turns), room) * 4 * KIB


def saw(rng: np.random.Generator, turns: int) -> Numbers:
    """What is flushed when there is enough of it."""
    period = int(rng.integers(3, max(turns // 3, 4)))
    return (np.arange(turns) + rng.integers(period)) % period * 4 * KIB


def uneven_saw(rng: np.random.Generator, turns: int) -> Numbers:
    """The same, whenever the collector happens to run."""
    levels, level = np.zeros(turns), 0.0
    for turn in range(turns):
        level = 0.0 if rng.random() < 8 / turns else level + rng.exponential(4 * KIB)
        levels[turn] = level
    return levels


def first_uses(rng: np.random.Generator, turns: int) -> Numbers:
    """Libraries take something when they are first used: ever more seldom."""
    taken = rng.random(turns) < 3 / (1 + np.arange(turns))
    return np.cumsum(taken * rng.exponential(1 * MIB, turns))


def high_water(rng: np.random.Generator, turns: int) -> Numbers:
    """An allocator keeps the most that was ever needed."""
    return np.maximum.accumulate(rng.exponential(1 * MIB, turns))


def jump(rng: np.random.Generator, turns: int) -> Numbers:
    """Somebody loads a model once."""
    return (np.arange(turns) > rng.integers(turns)) * 100.0 * MIB + _noise(rng, turns, 10 * KIB)


GROWING = (with_noise, of_any_size, now_and_then, in_arenas, after_a_warm_up, beneath_a_saw)
QUIET = (constant, noisy, sluggish, wandering, filling, full, saw, uneven_saw, first_uses, high_water, jump)


def at_end(levels: Numbers) -> bool:
    series = TurnSeries()
    for value in levels:
        series.add(float(value))
    return series.growth().kind == "growth"


def told_at(levels: Numbers) -> int | None:
    """After how many turns it is told, if it is asked at the end of runs that are longer and longer."""
    lengths = (turns for turns in (*TURNS, 1000, 2000, 5000, LONG) if turns <= len(levels))
    return next((turns for turns in lengths if at_end(levels[:turns])), None)


def threshold(levels: Numbers) -> bool:
    """More at the end than 1 MiB above the beginning."""
    return bool(levels[-1] - levels[0] > MIB)


def least_squares(levels: Numbers) -> bool:
    """A line whose slope is above 0 with a chance of 1 %, as of independent noise."""
    turns = np.arange(len(levels))
    if np.ptp(levels) == 0:
        return False
    rate, start = np.polyfit(turns, levels, 1)
    rest = levels - rate * turns - start
    error = math.sqrt(float((rest**2).sum()) / (len(levels) - 2) / float(((turns - turns.mean()) ** 2).sum()))
    return bool(rate > 2.33 * error)


def mann_kendall(levels: Numbers) -> bool:
    """A trend with a chance of 1 %, as of independent noise."""
    signs = float(np.sign(levels[None, :] - levels[:, None])[np.triu_indices(len(levels), 1)].sum())
    count = len(levels)
    return (signs - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18) > 2.33


RULES: dict[str, Callable[[Numbers], bool]] = {
    "lowtide": at_end,
    "threshold of 1 MiB": threshold,
    "least squares": least_squares,
    "Mann-Kendall": mann_kendall,
}


def parts_told(
    shapes: tuple[Shape, ...], rule: Callable[[Numbers], bool], each: int, lengths: tuple[int, ...]
) -> dict[str, float]:
    """Of each shape, the part of its series that a rule takes for growth."""
    found = {}
    for shape in shapes:
        told = 0
        for seed in range(each):
            rng = np.random.default_rng(seed)
            told += rule(shape(rng, lengths[seed % len(lengths)]))
        found[shape.__name__] = round(told / each, 4)
    return found


def summary(each: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, rule in RULES.items():
        growing, quiet = (parts_told(shapes, rule, each, TURNS) for shapes in (GROWING, QUIET))
        results[name] = {
            "recall": round(sum(growing.values()) / len(growing), 4),
            "alarms": round(sum(quiet.values()) / len(quiet), 4),
            "growing": growing,
            "quiet": quiet,
        }
    return results


def turns_needed(seeds: int = 100) -> dict[str, Any]:
    """After how many turns a leak is told that is as small as may be, in the worst case."""
    small = [
        told_at(np.arange(500) * 2.0 * KIB + np.abs(_noise(np.random.default_rng(seed), 500, 40 * KIB)))
        for seed in range(seeds)
    ]
    tiny = [
        told_at(np.arange(LONG) * 48.0 + np.abs(_noise(np.random.default_rng(seed), LONG, 16 * KIB)))
        for seed in range(max(seeds // 10, 1))
    ]
    return {
        "2 KiB a turn beneath 40 KiB of noise, within 500": _within(small),
        "48 B a turn beneath 16 KiB of noise, within 20,000": _within(tiny),
    }


def _within(turns: list[int | None]) -> dict[str, Any]:
    known = sorted(turn for turn in turns if turn is not None)
    return {
        "told": len(known),
        "of": len(turns),
        "median": known[len(known) // 2] if known else None,
        "latest": known[-1] if known else None,
    }


def soak(turns: int = 100_000) -> dict[str, int]:
    """Alarms in long quiet series."""
    shapes = (noisy, sluggish, wandering, high_water)
    return {
        shape.__name__: sum(at_end(shape(np.random.default_rng(seed), turns)) for seed in range(5)) for shape in shapes
    }


def cost(turns: int = LONG) -> dict[str, float]:
    series = TurnSeries()
    began = time.perf_counter()
    for turn in range(turns):
        series.add(float(turn))
    series.growth()
    return {"microseconds_a_turn": round((time.perf_counter() - began) / turns * 1e6, 2)}


def readings(objects: int = 500_000) -> dict[str, float]:
    """Seconds of a reading of all containers, beside one walk over the same heap; of the split of the memory."""
    heap = [{"held": [turn]} for turn in range(objects // 2)]
    gc.collect()
    walked, lengths, split = [], [], []
    for _ in range(5):
        walk = SharedWalk()
        began = time.perf_counter()
        walk.graph()
        walked.append(time.perf_counter() - began)
        walk.close()
        began = time.perf_counter()
        read_lengths()
        lengths.append(time.perf_counter() - began)
        began = time.perf_counter()
        parts = read_parts()
        split.append(time.perf_counter() - began)
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in rollup}
    assert len(heap) == objects // 2
    return {
        "tracked_objects": len(gc.get_objects()),
        "walk_seconds": round(min(walked), 4),
        "lengths_seconds": round(min(lengths), 4),
        "lengths_in_walks": round(min(lengths) / min(walked), 2),
        "split_milliseconds": round(min(split) * 1000, 3),
        "split_off_by": round(abs(parts.total / (sizes["Rss"] + sizes["Swap"]) - 1), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100, help="of each shape")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    results = {
        "rules": summary(args.series),
        "turns_needed": turns_needed(args.series),
        "alarms_in_soaks_of_100000_turns": soak(),
        "cost": cost(),
        "readings": readings(),
    }
    import machine

    machine.write("growth-cpu", results, args.out)


if __name__ == "__main__":
    main()
