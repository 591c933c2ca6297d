"""What the probes cost: a stage mark that nobody hears, and a snapshot of a heap of a given size.

Floor of a snapshot: the collector's own list of the heap (`gc.get_objects`), and one look at each object's type.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import timeit
from pathlib import Path

import machine

from lowtide.probes.device.driver import find_driver
from lowtide.probes.snapshot import take_snapshot
from lowtide.probes.stages import stage


def marks() -> None:
    with stage("infer"):
        pass


def seconds(call: object, repeats: int = 9) -> float:
    return statistics.median(timeit.repeat(call, number=1, repeat=repeats))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="*", default=[0, 300_000])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    number = 200_000
    mark = min(timeit.repeat(marks, number=number, repeat=5)) / number
    empty = min(timeit.repeat("pass", number=number, repeat=5)) / number
    driver = find_driver()
    snapshots = []
    for more in args.objects:
        heap = [[index] for index in range(more)]
        gc.collect()
        started = time.perf_counter()
        gc.collect()
        collection = time.perf_counter() - started
        snapshots.append(
            {
                "tracked_objects": len(gc.get_objects()),
                "snapshot_seconds": seconds(lambda: take_snapshot(driver=driver)),
                "get_objects_and_types_seconds": seconds(lambda: [type(item) for item in gc.get_objects()]),
                "one_collection_seconds": collection,
            }
        )
        del heap
    driver.close()
    results = {
        "stage_mark_seconds": mark - empty,
        "stage_mark_limit_seconds": 1e-6,
        "snapshots": snapshots,
    }
    machine.write("probes", results, args.out)


if __name__ == "__main__":
    main()
