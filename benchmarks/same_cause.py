"""What a leaking test costs under `--leakcheck`, and what each later one of the same cause costs, by size of the heap.

Four causes (a tensor and a file in a list of a module, a thread, a setting), each in tests that leave the same thing in
the same place, over heaps of given sizes.  Each heap is two pytest processes over the same tests, without and with
`--leakcheck`, whose protocols are timed one by one: in seconds, which count what is waited for, and in processor time,
which a busy machine does not change.  Floor: one `gc.collect()` of the same heap in the same run, since nothing that no
living path leads to may be said to leak before everything is collected.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

_CONFTEST = """
import gc, json, statistics, time
import pytest, torch

class Layer:
    def __init__(self, place): self.place, self.parts = place, [place]

LAYERS = []
while len(gc.get_objects()) < {objects}:
    LAYERS.append([Layer(place) for place in range(10_000)])
gc.collect()

def collection():
    started = time.process_time()
    gc.collect()
    return time.process_time() - started

COLLECTION = statistics.median(collection() for _ in range(5))
OBJECTS = len(gc.get_objects())
TIMES = {{}}

class Clock:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        started, spent = time.perf_counter(), time.process_time()
        try:
            return (yield)
        finally:
            took = time.perf_counter() - started, time.process_time() - spent
            TIMES.setdefault(item.originalname, []).append(took)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            with open({out!r}, "w") as file:
                json.dump({{"objects": OBJECTS, "collection": COLLECTION, "tests": TIMES,
                    "end": time.perf_counter() - started}}, file)

def pytest_configure(config):
    config.pluginmanager.register(Clock())
"""

_TESTS = """
import gc, os, threading
import pytest, torch

KEPT, FILES, WORKERS, DONE = [], [], [], threading.Event()

def wait(): DONE.wait()

@pytest.mark.parametrize("turn", range(20))
def test_clean(turn): assert torch.ones(4).sum() == 4

@pytest.mark.parametrize("turn", range({turns}))
def test_tensor(turn): KEPT.append(torch.ones(1024))

@pytest.mark.parametrize("turn", range({turns}))
def test_descriptor(turn): FILES.append(open(os.devnull))

@pytest.mark.parametrize("turn", range({turns}))
def test_thread(turn):
    WORKERS.append(threading.Thread(target=wait, daemon=True))
    WORKERS[-1].start()

@pytest.mark.parametrize("turn", range({turns}))
def test_setting(turn): torch.manual_seed(0); torch.set_printoptions(precision=5 + turn)
"""

_CAUSES = ("test_tensor", "test_descriptor", "test_thread", "test_setting")


def _times(objects: int, turns: int, *options: str) -> dict[str, Any]:
    """What one pytest process has measured.

    Args:
        objects: how many the collector tracks.
        turns: how many tests of each cause.
        options: pytest's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "times.json"
        (folder / "conftest.py").write_text(_CONFTEST.format(objects=objects, out=str(out)))
        (folder / "test_it.py").write_text(_TESTS.format(turns=turns))
        (folder / "pytest.ini").write_text("[pytest]\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise SystemExit(f"the run did not finish:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return {**found, "last_line": done.stdout.strip().rpartition("\n")[2]}


def measure(objects: int, turns: int) -> dict[str, Any]:
    """What leaking tests take more than without lowtide; collections: of the same heap, by processor time."""
    bare, judged = _times(objects, turns), _times(objects, turns, "--leakcheck")
    floor = judged["collection"]
    causes = {}
    for cause in _CAUSES:
        without = [statistics.median(each) for each in zip(*bare["tests"][cause], strict=True)]
        first, *later = (
            [took - own for took, own in zip(each, without, strict=True)] for each in judged["tests"][cause]
        )
        each = [statistics.median(part) for part in zip(*later, strict=True)]
        rows = {"first leaking test": first, "each later one, same cause": each}
        causes[cause] = {
            row: {"seconds": round(wall, 4), "processor_s": round(own, 4), "collections": round(own / floor, 2)}
            for row, (wall, own) in rows.items()
        }
    return {
        "tracked_objects": judged["objects"],
        "one_collection_s": round(floor, 4),
        "tests_of_each_cause": turns,
        "causes": causes,
        "end_s": round(judged["end"], 3),
        "last_line": judged["last_line"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="*", default=[260_000, 1_500_000], help="tracked objects")
    parser.add_argument("--turns", type=int, default=30, help="tests of each cause")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    machine.write("same_cause", {"heaps": [measure(objects, args.turns) for objects in args.objects]}, args.out)


if __name__ == "__main__":
    main()
