"""False alarms and misses of gates with calibrated tolerances, simulated from recorded noise.

Recorded are lives of the reference engine with nothing planted, each run of lives in a process of its own. A simulated
gate calibrates with one run and judges cells of 2 to 8 lives from others with the judge that judges real lives. Goals:
no alarm in 200 gates without a leak, and 20 of 20 leaks of 16 MiB per life found in each metric.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine

from lowtide.leakcheck.gate.calibration import MUST_SEE, NULL_LIVES, NullLives, live_null_lives
from lowtide.leakcheck.judging.judge import judge
from lowtide.leakcheck.judging.ladder import LadderStep
from lowtide.leakcheck.judging.metrics import Metric, Reading
from lowtide.leakcheck.resources.resource import Rung

GATES, PLANTED, CELLS = 200, 20, 8
CYCLES = (2, 4, 8)
"""Lives of a cell; one of these is drawn for each."""

Level = Mapping[str, int]


def metrics(tolerances: Level) -> list[Metric]:
    return [Metric("host-memory", "", key, tolerance=tolerance, what=key) for key, tolerance in tolerances.items()]


def above(judged: Sequence[Metric], before: Level, after: Level) -> list[str]:
    """The metrics that a judgement reports, by key."""
    steps = [LadderStep(Rung.RAW, Reading(amounts=after), 0.0)]
    found = judge(judged, Reading(amounts=before), steps, stage="shutdown", cycle=1)
    return [metric.key for metric in found.metrics]


def findings(run: NullLives, cycles: int, tolerances: Level, leak: Level) -> set[str]:
    """What a cell reports: each life by the calibrated tolerances, and what all warm lives add up to by the table's."""
    judged, together = metrics(tolerances), metrics({key: run.table[key] for key in tolerances})
    level = warm = dict.fromkeys(tolerances, 0)
    found: set[str] = set()
    for life in run.lives[1:cycles]:
        after = {key: level[key] + (life.get(key) or 0) + leak.get(key, 0) for key in tolerances}
        found.update(above(judged, level, after))
        level = after
    return found | set(above(together, warm, level))


def gate(source: random.Random, runs: Sequence[NullLives], leak: Level) -> set[str]:
    """What the cells of one gate report; the leak is in the first of them."""
    own, *others = source.sample(runs, len(runs))
    noise = NullLives(own.lives[:NULL_LIVES], own.table).noise
    tolerances = {key: each.tolerance for key, each in noise.items()}
    found: set[str] = set()
    for turn in range(CELLS):
        found |= findings(source.choice(others), source.choice(CYCLES), tolerances, {} if turn else leak)
    return found


def simulate(runs: Sequence[NullLives], seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    keys = sorted(runs[0].noise)
    alarms = [sorted(found) for _ in range(GATES) if (found := gate(source, runs, {}))]
    found = {key: sum(key in gate(source, runs, {key: MUST_SEE}) for _ in range(PLANTED)) for key in keys}
    noise = {key: [run.noise[key] for run in runs] for key in keys}
    return {
        "gates_without_a_leak": GATES,
        "false_alarms": len(alarms),
        "alarms": alarms,
        "planted_in_each_metric": PLANTED,
        "planted_bytes_per_life": MUST_SEE,
        "found": found,
        "calibrated_tolerances": {
            key: {
                "least": min(each.tolerance for each in of_runs),
                "median": statistics.median(each.tolerance for each in of_runs),
                "most": max(each.tolerance for each in of_runs),
                "table": of_runs[0].table,
            }
            for key, of_runs in noise.items()
            if of_runs[0].table
        },
    }


def record(device: str, runs: int, lives: int) -> dict[str, Any]:
    """The noise of runs of lives: of each metric that moved in a warm life, its figures after each of them."""
    started = time.perf_counter()
    lived = [live_null_lives(device, lives) for _ in range(runs)]
    keys = sorted(lived[0].noise)
    moved = [key for key in keys if any(any(run.noise[key].lives) for run in lived)]
    return {
        "lives": lives,
        "seconds": time.perf_counter() - started,
        "not_clean": [run.problem for run in lived if run.problem],
        "table": {key: lived[0].table[key] for key in keys},
        "moved": {key: [" ".join(map(str, run.noise[key].lives)) for run in lived] for key in moved},
        "runs": runs,
    }


def restored(noise: Mapping[str, Any]) -> list[NullLives]:
    """The runs that `record` has recorded."""
    runs = []
    for turn in range(noise["runs"]):
        warm = {key: [int(word) for word in of_runs[turn].split()] for key, of_runs in noise["moved"].items()}
        lives = [
            {key: warm[key][life] if key in warm else 0 for key in noise["table"]} for life in range(noise["lives"] - 1)
        ]
        runs.append(NullLives(({}, *lives), noise["table"]))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=40, help="runs of lives to record")
    parser.add_argument("--lives", type=int, default=max(CYCLES), help="lives of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", type=Path, help="an earlier result: simulate from its noise, record nothing")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    if args.recorded is not None:
        noise = json.loads(args.recorded.read_text())["results"]["noise"]
    else:
        noise = record(args.device, args.runs, args.lives)
    machine.write("gate", {"simulated": simulate(restored(noise), args.seed), "noise": noise}, args.out)


if __name__ == "__main__":
    main()
