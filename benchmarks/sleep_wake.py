"""How fast an engine sleeps and wakes, beside the raw pinned copy of the same bytes (the limit) in the same run.

Floor: the weights' bytes over the rate of one large copy between pinned host memory and the card.  A first sleep has no
pinned memory for the weights yet: pinning it all beforehand would limit it to the rate measured here as `pin_fresh`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import machine

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.device_allocator.memory import HostBuffer
from lowtide.engine.pages import PageBackend, open_backend

BLOCK = 1 << 30


def raw_copy(backend: PageBackend, size: int, repeats: int) -> dict[str, float]:
    """Bytes per second of plain copies of `size` bytes to and from pinned memory, medians; nothing is overlapped."""
    arena = Arena("weights", size, backend)
    arena.map_to(size)
    arena.bytes_at(0, size).random_(0, 256)
    host = HostBuffer("raw copy", size, BLOCK, backend)
    for offset in range(0, size, BLOCK):
        host.tensor(offset, min(BLOCK, size - offset)).zero_()
        host.pin(offset)
    rates: dict[str, list[float]] = {"to_host": [], "to_device": []}
    for _ in range(repeats):
        for name in rates:
            backend.synchronize()
            started = time.perf_counter()
            for offset in range(0, size, BLOCK):
                length = min(BLOCK, size - offset)
                on_host, on_device = host.tensor(offset, length), arena.bytes_at(offset, length)
                target, source = (on_host, on_device) if name == "to_host" else (on_device, on_host)
                target.copy_(source, non_blocking=True)
            backend.synchronize()
            rates[name].append(size / (time.perf_counter() - started))
    host.close()
    arena.close()
    return {name: statistics.median(values) for name, values in rates.items()}


def pin_fresh(backend: PageBackend, size: int) -> float:
    """Bytes per second of pinning memory that nothing has touched yet."""
    host = HostBuffer("fresh", size, BLOCK, backend)
    started = time.perf_counter()
    for offset in range(0, size, BLOCK):
        host.pin(offset)
    rate = size / (time.perf_counter() - started)
    host.close()
    return rate


def _median(cycles: list[dict[str, Any]], name: str) -> float:
    return statistics.median(cycle[name] for cycle in cycles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    backend = open_backend(args.device)
    engine = LLMEngine(EngineConfig(model=args.preset, device=args.device))
    prompts = [[1 + index, *range(2, 50)] for index in range(4)]
    results: dict[str, Any] = {"preset": args.preset, "cycles": []}
    # A trainer works between sleep and wake; a wake straight after a sleep waits for the driver, which clears the pages
    # that it just took back.  Both are measured.
    pauses = [0.5] * args.cycles + [0.0] * args.cycles
    engine.create()
    size = engine.memory_mapped()["weights"]
    tokens = [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))]
    for pause in pauses:
        cycle: dict[str, Any] = {"pause_seconds": pause}
        for name, call in (("sleep", engine.sleep), ("wake", engine.wake)):
            backend.synchronize()
            if name == "wake":
                time.sleep(pause)
            started = time.perf_counter()
            call()
            cycle[f"{name}_seconds"] = time.perf_counter() - started
            cycle[f"{name}_bytes_per_second"] = size / cycle[f"{name}_seconds"]
        results["cycles"].append(cycle)
        again = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))]
        cycle["tokens_equal"] = again == tokens
    engine.shutdown()

    raw = raw_copy(backend, size, 3)
    first, *later = results["cycles"]
    paused = [cycle for cycle in later if cycle["pause_seconds"]]
    at_once = [cycle for cycle in later if not cycle["pause_seconds"]]
    results |= {
        "weights_bytes": size,
        "raw_pinned_copy_bytes_per_second": raw,
        "pin_fresh_bytes_per_second": pin_fresh(backend, min(size, 4 << 30)),
        "first_sleep_bytes_per_second": first["sleep_bytes_per_second"],
        "later_sleep_share_of_raw": _median(later, "sleep_bytes_per_second") / raw["to_host"],
        "later_wake_share_of_raw": _median(paused, "wake_bytes_per_second") / raw["to_device"],
        "wake_at_once_share_of_raw": _median(at_once, "wake_bytes_per_second") / raw["to_device"],
    }
    machine.write("sleep_wake", results, args.out)


if __name__ == "__main__":
    main()
