"""What a path to a leak costs: the forward walk against objgraph's backward search, on the same heaps in the same run.

Each heap has 20 leaked tensors 13 references below a module: a bushy heap, in which some other objects refer to each
holder on the way, the same after `gc.freeze()`, one in which all objects refer to what holds the tensors, so that a
search backwards meets the whole heap (wide fan-in), and a larger bushy one. Each case in a process of its own;
`extra_bytes` is the growth of the process's peak since before the first walk. `explain` is a walk that also says, for
each of the leaks, what each edge of its path retains: a sweep over the heap per leak, as no two share their first edge.
`floor_seconds` is one `gc.get_referents` over the whole heap, below which no forward walk can be, `collect_seconds` one
full collection of it, and `without_c` the same paths by the walk in numpy.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import objgraph
import psutil
import torch

from lowtide.probes import native
from lowtide.probes.heap.holders import find_paths, trace
from lowtide.probes.objects.listed import all_instances, collector_paused

LEAKS = 20
DEPTH = 13
# How many objects of the filling refer to each holder on the way to a leak, in a bushy heap.
REFERRERS = 6
REPEATS = 5
# Objects asked at a time in the floor, so that it holds no more than the walk does.
CHUNK = 50_000


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
    with Neighbours() as neighbours:
        for turn in range(REPEATS):
            started = time.perf_counter()
            paths = find_paths(tensors, ignore={id(tensors)})
            seconds.append(time.perf_counter() - started)
            if turn == 0:
                extra = _peak_bytes() - peak
        explained = _explain(tensors)
    lengths = sorted({path.references for path in paths if path is not None})
    result = {
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
        "explain": {**explained, "extra_bytes": _peak_bytes() - peak},
        "neighbours_cores": neighbours.cores,
    }
    with neighbours:
        beside = _objgraph(tensors, module, limit)
    result["objgraph"] = {**beside, "neighbours_cores": neighbours.cores}
    if frozen:
        gc.unfreeze()
        result["same_paths_unfrozen"] = list(map(str, find_paths(tensors, ignore={id(tensors)}))) == list(
            map(str, paths)
        )
    result["floor_seconds"] = statistics.median(_floor() for _ in range(REPEATS))
    result["collect_seconds"] = statistics.median(_seconds(gc.collect) for _ in range(REPEATS))
    result["all_instances"] = _all_instances(result["collect_seconds"])
    result["without_c"] = _without_c(tensors, result["seconds"])
    return result


def _all_instances(collect: float) -> dict[str, float]:
    """Seconds to find all tensors: the first time, and once their order is known, which a full collection changes."""
    first = _seconds(lambda: all_instances(torch.Tensor))
    later = statistics.median(_seconds(lambda: all_instances(torch.Tensor)) for _ in range(REPEATS))
    return {"first_seconds": first, "seconds": later, "collect_ratio": later / collect}


def _without_c(tensors: list[Any], with_c: float) -> dict[str, Any]:
    """Seconds for the same paths where nothing written in C was built, and how many times as long that is."""
    built, native.Walk = native.Walk, None
    try:
        seconds = [_seconds(lambda: find_paths(tensors, ignore={id(tensors)})) for _ in range(REPEATS)]
    finally:
        native.Walk = built
    median = statistics.median(seconds)
    return {"is_built": built is not None, "seconds": median, "ratio": median / with_c}


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _floor() -> float:
    """Seconds to ask every object that the collector sees for its references, once."""
    with collector_paused():
        objects = gc.get_objects()
        started = time.perf_counter()
        for place in range(0, len(objects), CHUNK):
            list(map(gc.get_referents, objects[place : place + CHUNK]))
        return time.perf_counter() - started


def _explain(tensors: list[Any]) -> dict[str, Any]:
    """Seconds for the paths to all leaks and for what each edge retains, from the first that two leaks do not share."""
    seconds, sweeps = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with trace(tensors, ignore={id(tensors)}) as found:
            paths = [found.path(place) for place in range(len(tensors))]
            # The first step leads to the registry, which holds all of them.
            walked = time.perf_counter()
            freed = [found.freed_by_cutting(place, 1) for place in range(len(tensors))]
            sweeps.append(time.perf_counter() - walked)
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds),
        "seconds_per_sweep": statistics.median(sweeps) / len(tensors),
        "sweeps": len(freed),
        "distinct_first_edges": len({str(path).split(" .child")[0] for path in paths}),
        "edges_cut": sum(map(len, freed)),
        "leaks_that_one_cut_frees": sum(place in frozenset().union(*sets) for place, sets in enumerate(freed)),
    }


class Neighbours:
    """How many cores other processes kept busy meanwhile; what is measured beside them is slower than alone."""

    cores = 0.0

    def __enter__(self) -> Neighbours:
        self._started = self._busy_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        busy, started = self._started
        self.cores = round(max(0.0, self._busy_seconds() - busy) / (time.perf_counter() - started), 2)

    @staticmethod
    def _busy_seconds() -> float:
        machines, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return float(sum(machines) - machines.idle - machines.iowait - own.user - own.system)


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
