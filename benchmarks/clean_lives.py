"""Lives of the reference engine in random configurations, with nothing wrong in any: how many findings there are.

The limit is 0. Each run is two lives in this process, so that a later one also answers for what an earlier one left.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import machine
import torch

from lowtide.engine import EngineConfig
from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife
from lowtide.leakcheck.targets.reference import FixedReference
from lowtide.probes.device.driver import find_driver

MIB = 1 << 20


def random_settings(source: random.Random, device: str) -> dict[str, Any]:
    """Settings of an engine that can serve the reference prompts."""
    caching = source.random() < 0.8
    micro_batches = source.choice([1, 1, 2])
    settings: dict[str, Any] = {
        "seed": source.randrange(1000),
        "dtype": source.choice([None, "float32", "bfloat16"]),
        "block_size": source.choice([4, 16, 32]),
        "kv_cache_bytes": source.choice([2, 8, 64]) * MIB,
        "max_num_seqs": source.choice([2, 8, 64]),
        "max_num_batched_tokens": source.choice([64, 256, 2048]),
        "num_micro_batches": micro_batches,
        "enable_prefix_caching": caching,
        "keep_host_copy": source.random() < 0.5,
        "freeze_heap": source.random() < 0.3,
        "process_group": source.random() < 0.3,
        "kv_transport_bytes": source.choice([0, 0, 48 * MIB]),
        "kv_offload_bytes": source.choice([0, 4 * MIB]) if caching else 0,
        "poison_pages": source.random() < 0.5,
    }
    if device != "cpu":
        settings["cuda_graphs"] = micro_batches == 1 and source.random() < 0.5
    return settings


def main() -> None:
    """Run them and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    source = random.Random(options.seed)
    driver = find_driver()
    found = []
    started = time.perf_counter()
    for turn in range(options.runs):
        settings = random_settings(source, options.device)
        config = EngineConfig(device=options.device, **settings)

        def make(config: EngineConfig = config) -> TargetLife:
            return TargetLife(lambda: FixedReference(config))

        subject = LifecycleRun(f"run {turn}", make, device=options.device, driver=driver, cycles=2).run()
        if subject.outcome != "clean":
            reported = [f"{item.resource}/{item.cause} at {item.stage}: {item.message}" for item in subject.findings]
            found.append(
                {"settings": settings, "outcome": subject.outcome, "reason": subject.reason, "found": reported}
            )
            print(found[-1], flush=True)
    driver.close()
    results = {
        "device": options.device,
        "runs": options.runs,
        "seed": options.seed,
        "not_clean": len(found),
        "limit": 0,
        "seconds": time.perf_counter() - started,
        "found": found,
    }
    machine.write(f"clean_lives-{options.device.partition(':')[0]}", results, options.out)


if __name__ == "__main__":
    main()
