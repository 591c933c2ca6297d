"""Whole lives of an engine against the limits that the design sets for its memory; every figure beside its limit.

Floor of decoding, batch and all: one step reads every weight once, so its time is at least the weights' bytes over the
card's bandwidth, which is measured here as a device-to-device copy (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import machine
import torch

from lowtide.engine import EngineConfig
from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife
from lowtide.leakcheck.targets.reference import MAX_TOKENS, PROMPT_LENGTHS, FixedReference
from lowtide.probes.device.driver import find_driver
from lowtide.reports.schema import Ledger, Readings, Stage

MIB = 1 << 20


def ledger(readings: Readings, device: str) -> Ledger:
    return next(item for item in readings.ledgers if item.device == device)


def named(readings: Readings, device: str, *lines: str) -> int:
    return sum(line.bytes for line in ledger(readings, device).lines if line.name in lines)


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    stop.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / (start.elapsed_time(stop) / 1000)


def memory_limits(stages: list[Stage], device: str) -> dict[str, Any]:
    """Of one cycle: how far memory is from where it must be."""
    before = stages[0].before
    deep = next(stage for stage in stages if stage.name == "sleep(2)")
    down = stages[-1]
    rows: dict[str, Any] = {
        "unexplained_moves_bytes": max(
            abs((ledger(stage.after, device).unexplained or 0) - (ledger(before, device).unexplained or 0))
            for stage in stages
        ),
        "unexplained_limit_bytes": 32 * MIB,
        "tensors_after_shutdown_bytes": down.after.tensors - before.tensors,
        "arenas_after_shutdown_bytes": sum(down.after.arenas.values()),
        "descriptors_after_shutdown": down.after.descriptors - before.descriptors,
        "threads_after_shutdown": down.after.threads - before.threads,
    }
    if device == "cpu":
        rows["asleep_at_level_2_rss_falls_share_of_mapped"] = (deep.before.rss - deep.after.rss) / sum(
            deep.before.arenas.values()
        )
        rows["limit_share"] = 0.95
    elif before.driver is not None and deep.after.driver is not None and down.after.driver is not None:
        lines = ("context", "kernels and libraries", "library workspaces")
        rows |= {
            "driver_asleep_at_level_2_above_before_create_bytes": deep.after.driver - before.driver,
            "driver_asleep_limit_bytes": 64 * MIB,
            "driver_after_shutdown_above_named_lines_bytes": down.after.driver - named(down.after, device, *lines),
            "driver_after_shutdown_above_before_create_bytes": down.after.driver - before.driver,
            "driver_after_shutdown_limit_bytes": 8 * MIB,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    config = EngineConfig(model=args.preset, device=args.device)
    driver = find_driver()
    run = LifecycleRun(
        f"run[{args.preset}]",
        lambda: TargetLife(lambda: FixedReference(config)),
        device=args.device,
        driver=driver,
        cycles=args.cycles,
    )
    subject = run.run()
    driver.close()
    results: dict[str, Any] = {
        "preset": args.preset,
        "device": args.device,
        "outcome": subject.outcome,
        "reason": subject.reason,
        "findings": [finding.message for finding in subject.findings],
        "returns": [f"{item.resource} at {item.rung}" for item in subject.returns],
        "cycles": [],
    }
    for cycle in range(2, args.cycles + 1):
        stages = [stage for stage in subject.stages if stage.cycle == cycle]
        results["cycles"].append(
            {
                **memory_limits(stages, args.device),
                "seconds": {f"{turn} {stage.name}": round(stage.seconds, 4) for turn, stage in enumerate(stages)},
                "tokens_per_second": [stage.tokens_per_second for stage in stages if stage.tokens_per_second],
            }
        )
    if args.device != "cpu":
        bandwidth = copy_bandwidth(args.device)
        weights = subject.stages[0].after.arenas["weights"]
        results["copy_bandwidth_bytes_per_second"] = bandwidth
        results["tokens_per_second_limit"] = len(PROMPT_LENGTHS) * bandwidth / weights
        results["tokens_per_life_and_infer"] = len(PROMPT_LENGTHS) * MAX_TOKENS
    machine.write("lifecycle", results, args.out)


if __name__ == "__main__":
    main()
