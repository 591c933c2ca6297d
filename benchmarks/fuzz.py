"""Random lives of the reference engine: their rate and findings, and which historical bugs they find, by seed.

Beside them, in the same run: the same number of lives of one fixed order (create, infer, sleep, wake, infer, shutdown)
without any check, which is what the engine itself takes. The limits: no finding, five lives per second on a CPU, each
bug found from each seed within 200 lives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import torch

from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.lives.fuzz import fuzz
from lowtide.leakcheck.lives.script import simplest
from lowtide.leakcheck.targets.reference import reference_target

ON_CPU = ("wake-oom", "undrained-offload", "block-table-contents", "frozen-heap", "bound-method-cache")
ON_CARD = (*ON_CPU, "workspace-resize")
WITHIN = 200


def clean(device: str, examples: int, seed: int) -> dict[str, Any]:
    """Random lives of an engine without a bug."""
    found = fuzz(reference_target(device, None).factory, examples=examples, seed=seed)
    seen = found.coverage
    return {
        "seed": seed,
        "lives": seen.lives,
        "calls": seen.calls,
        "states": len(seen.states),
        "edges": len(seen.edges),
        "seconds": found.seconds,
        "lives_per_second": seen.lives / found.seconds,
        "findings": [finding.message for finding in found.findings],
        "limits": {"findings": 0, "lives_per_second": 5 if device == "cpu" else None},
    }


def unchecked(device: str, lives: int) -> dict[str, Any]:
    """Lives of one order, of which nothing is judged."""
    factory = reference_target(device, None).factory

    def live() -> None:
        target: Any = factory()
        target.create(simplest(target.capabilities))
        target.infer([17, 40], 6)
        target.sleep(1, "wait")
        target.wake(None)
        target.infer([17, 40], 6)
        target.shutdown()

    live()
    started = time.perf_counter()
    for _ in range(lives):
        live()
    seconds = time.perf_counter() - started
    return {"lives": lives, "seconds": seconds, "lives_per_second": lives / seconds}


def bug(name: str, device: str, seeds: Sequence[int]) -> dict[str, Any]:
    """One historical bug, searched from each seed."""
    rows = []
    for seed in seeds:
        subjected = reference_target(device, DEFECTS[name])
        with subjected.context:
            found = fuzz(subjected.factory, examples=WITHIN, seed=seed)
        rows.append(
            {
                "seed": seed,
                "found": sorted({f"{finding.resource}/{finding.cause}" for finding in found.findings}),
                "messages": [finding.message for finding in found.findings],
                "life": [str(call) for call in found.life],
                "seconds": found.seconds,
                "reason": found.reason,
            }
        )
        print(name, seed, rows[-1]["found"], "; ".join(rows[-1]["life"]), f"{found.seconds:.1f} s", flush=True)
    return {
        "found": sum(bool(row["found"]) for row in rows),
        "of": len(rows),
        "minimal_lives": sorted({"; ".join(row["life"]) for row in rows}),
        "rows": rows,
    }


def main() -> None:
    """Run what is asked for, and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=None, help="clean lives [default: 500, 200 on a card]")
    parser.add_argument("--seeds", type=int, default=10, help="how many of them")
    parser.add_argument("--first-seed", type=int, default=0, help="to have several processes share the seeds")
    parser.add_argument("--seed", type=int, default=1, help="of the clean lives")
    parser.add_argument("--bugs", default=None, help="comma-separated [default: all that can show]")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    examples = options.examples if options.examples is not None else 500 if on_cpu else 200
    bugs = (ON_CPU if on_cpu else ON_CARD) if options.bugs is None else tuple(filter(None, options.bugs.split(",")))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results = {
        "device": options.device,
        "clean": clean(options.device, examples, options.seed) if examples else None,
        "unchecked": unchecked(options.device, 50),
        "within": WITHIN,
        "bugs": {name: bug(name, options.device, seeds) for name in bugs},
    }
    machine.write(f"fuzz-{options.device.partition(':')[0]}", results, options.out)


if __name__ == "__main__":
    main()
