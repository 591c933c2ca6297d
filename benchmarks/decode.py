"""Tokens a second of decoding, by batch, with CUDA graphs and without, and what one step's time goes to.

Floor: a step reads every weight once, so it takes at least the weights' bytes over the card's bandwidth, which is
measured here as a device-to-device copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import torch
from lifecycle import copy_bandwidth

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams

MAX_TOKENS = 64
# Sequences, and tokens that each has before.
CASES = ((1, 16), (8, 16), (8, 4000))
# Rows of the table of kernels.
KERNELS = 12


def begin(engine: LLMEngine, batch: int, context: int) -> None:
    """Compute the prompts, each of `context` tokens, and the first token of each."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    begun = {
        engine.add_request([1 + (7 * row + 13 * at) % 1000 for at in range(context)], params) for row in range(batch)
    }
    while begun:
        begun -= {output.request_id for output in engine.step()}
    torch.cuda.synchronize()


def decode(engine: LLMEngine, batch: int, context: int) -> float:
    """Return the tokens a second of the steps after that, each one token a sequence."""
    begin(engine, batch, context)
    tokens = 0
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        tokens += len(engine.step())
    return tokens / (time.perf_counter() - started)


def kernels(engine: LLMEngine, batch: int, context: int) -> dict[str, Any]:
    """Microseconds of one step, those in which the card had something to do, and by kernel."""
    begin(engine, batch, context)
    steps = 16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    while engine.has_unfinished_requests():
        engine.step()
    rows = sorted(
        ((each.self_device_time_total / steps, each.count / steps, each.key[:70]) for each in profiler.key_averages()),
        reverse=True,
    )
    busy = sum(row[0] for row in rows)
    return {
        "step_us": took / steps * 1e6,
        "busy_us": busy,
        "launches": sum(row[1] for row in rows),
        "kernels": [{"us": round(us, 1), "count": count, "name": name} for us, count, name in rows[:KERNELS]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="decode")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    results: dict[str, Any] = {"preset": args.preset, "tokens": MAX_TOKENS, "runs": []}
    bandwidth = copy_bandwidth(args.device)
    torch.cuda.empty_cache()
    for cuda_graphs in (True, False):
        config = EngineConfig(
            model=args.preset, device=args.device, max_num_seqs=8, cuda_graphs=cuda_graphs, enable_prefix_caching=False
        )
        with LLMEngine(config) as engine:
            weights = engine.memory_mapped()["weights"]
            for batch, context in CASES:
                decode(engine, batch, context)
                rates = [decode(engine, batch, context) for _ in range(args.repeats)]
                results["runs"].append(
                    {
                        "cuda_graphs": cuda_graphs,
                        "batch": batch,
                        "context": context,
                        "tokens_per_second": statistics.median(rates),
                        "best": max(rates),
                        "floor": batch * bandwidth / weights,
                        "profile": kernels(engine, batch, context),
                    }
                )
    results["copy_bandwidth_bytes_per_second"] = bandwidth
    machine.write(args.name, results, args.out)


if __name__ == "__main__":
    main()
