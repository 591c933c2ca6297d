"""What a path to a leak costs: the forward walk against objgraph's backward search, on the same heaps in the same run.

Each heap has 20 leaked tensors 13 references below a module: a bushy heap, in which some other objects refer to each
holder on the way, the same after `gc.freeze()`, one in which all objects refer to what holds the tensors, so that a
search backwards meets the whole heap (wide fan-in), and a larger bushy one. Each case in a process of its own;
`extra_bytes` is the growth of the process's peak.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import signal
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import machine
import objgraph
import torch

from lowtide.probes.heap import find_paths

LEAKS = 20
DEPTH = 13
# How many objects of the filling refer to each holder on the way to a leak, in a bushy heap.
REFERRERS = 6


class Node:
    """An object with attributes, as programs have them."""


def build(objects: int, shape: str) -> Any:
    """A module that holds a heap of so many tracked objects, and in `registry` what leads to the leaked tensors."""
    module: Any = types.ModuleType("leaky")
    sys.modules["leaky"] = module
    module.registry = {}
    holders = []
    for name in range(LEAKS):
        held: Any = torch.zeros(1)
        for level in range((DEPTH - 3) // 2):
            node = Node()
            node.child = [held]
            node.others = {"child": node.child}
            held = node
            if level == 0 or shape == "bushy":
                holders.append(node)
        module.registry[name] = held
    filling: list[Any] = []
    # So deep that what the filling refers to is not nearer to the module through it.
    module.filling = filling
    for _ in range(DEPTH):
        module.filling = [module.filling]
    while len(gc.get_objects()) < objects:
        for place in range(10_000):
            node = Node()
            node.values = [place]
            node.by_name = {"values": node.values}
            referred = holders[len(filling) % len(holders)]
            if shape == "bushy" and len(filling) >= REFERRERS * len(holders):
                referred = node
            node.pair = (node.values, referred)
            filling.append(node)
    gc.collect()
    return module


def leaks(module: Any) -> list[Any]:
    found = []
    for held in module.registry.values():
        while type(held) is Node:
            held = held.child[0]
        found.append(held)
    return found


def measure(objects: int, shape: str, frozen: bool, limit: int) -> dict[str, Any]:
    module = build(objects, shape)
    if frozen:
        gc.freeze()
    tensors = leaks(module)
    peak = _peak_bytes()
    seconds = []
    for turn in range(5):
        started = time.perf_counter()
        paths = find_paths(tensors, ignore={id(tensors)})
        seconds.append(time.perf_counter() - started)
        if turn == 0:
            extra = _peak_bytes() - peak
    lengths = sorted({path.references for path in paths if path is not None})
    return {
        "objects": objects,
        "shape": shape,
        "frozen": frozen,
        "leaks": len(tensors),
        "found": sum(path is not None for path in paths),
        "references": lengths,
        "example": str(paths[0]),
        "seconds": statistics.median(seconds),
        "first_seconds": seconds[0],
        "extra_bytes": extra,
        "objgraph": _objgraph(tensors, module, limit),
    }


def _objgraph(tensors: list[Any], module: Any, limit: int) -> dict[str, Any]:
    """How many of the leaks objgraph finds within `limit` seconds, and how long it takes."""
    lengths: list[int] = []
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(limit)
    started = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        for tensor in tensors:
            chain = objgraph.find_backref_chain(
                tensor, lambda item: item is module, max_depth=DEPTH + 2, extra_ignore=[id(tensors)]
            )
            lengths.append(len(chain) - 1)
    signal.alarm(0)
    return {
        "seconds": time.perf_counter() - started,
        "limit_seconds": limit,
        "searches_ended": len(lengths),
        "references": sorted(set(lengths)),
    }


def _give_up(*_: object) -> None:
    raise TimeoutError


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CASES = {
    "bushy": (500_000, "bushy", False),
    "frozen": (500_000, "bushy", True),
    "fan-in": (500_000, "fan-in", False),
    "large": (2_000_000, "bushy", False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="measure this one in this process, and print it")
    parser.add_argument("--limit", type=int, default=300, help="seconds after which objgraph is given up, per case")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*CASES[args.case], args.limit)))
        return
    results = {}
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--limit", str(args.limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[case] = json.loads(done.stdout)
    machine.write("heap", results, args.out)


if __name__ == "__main__":
    main()
