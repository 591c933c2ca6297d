"""What `--leakcheck` adds to a clean test under a fixture that holds an engine, whose heap is frozen as vLLM's is.

Each variant is one pytest process over the same tests, plain and with `--leakcheck`; what is reported is the median of
the processor time of a test's whole protocol, less that of the plain run. What a test leaves under the fixture takes
the place of what the test before it left there: nothing; views of a buffer of the engine's, in a new object; tensors
of their own.  And beside two processes of the fixture's that hold some memory each, as an engine's core and worker do;
the floor of that is to read once what each of them holds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

from lowtide.probes.host.process_files import anonymous_bytes_of, rollup

GOALS_MS = {"nothing": 0.3, "views": 5.0, "tensors": 5.0}

_CHILDREN, _CHILDREN_GOAL_MS = 2, 5.0
_READINGS = 20
_CHILD = "import torch; held = torch.ones({held} >> 2); print(flush=True); input()"

_CONFTEST = """
import gc, json, subprocess, sys, time
import pytest, torch

def start():
    pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
    child = subprocess.Popen([sys.executable, "-c", {child!r}], **pipes)
    child.stdout.readline()
    return child

class Batch:
    def __init__(self, **tensors):
        self.__dict__.update(tensors)

class Engine:
    def __init__(self):
        self.state = [[index] for index in range({size})]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
        self.kv_cache = [torch.zeros(16, 64) for _ in range(4)]
        self.buffer = torch.zeros(8)
        self.batch = Batch()
        self.runner = {{"engine": self}}

    def nothing(self, turn):
        self.kv_cache[0][turn % 16] = turn

    def views(self, turn):
        self.nothing(turn)
        self.batch = Batch(temperature=self.buffer[:2], top_p=self.buffer[2:4], sizes=[turn])

    def tensors(self, turn):
        self.nothing(turn)
        self.batch = Batch(logits=torch.full((64,), float(turn)), hidden=torch.full((8, 8), float(turn)))

@pytest.fixture(scope="module")
def engine():
    made = Engine()
    children = [start() for _ in range({children})]
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
    made.__dict__.clear()
    for child in children:
        child.communicate(b"\\n")

TIMES = []

class Clock:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        started = time.process_time()
        try:
            return (yield)
        finally:
            TIMES.append(time.process_time() - started)

    def pytest_sessionfinish(self):
        with open({out!r}, "w") as file:
            json.dump(TIMES[3:-1], file)

def pytest_configure(config):
    config.pluginmanager.register(Clock())
"""

_TESTS = """
import pytest
@pytest.mark.parametrize("turn", range({count}))
def test_step(turn, engine):
    engine.{step}(turn)
"""


def _median(size: int, step: str, count: int, *options: str, held: int = 0) -> float:
    """Milliseconds of processor time of a test that is neither among the first nor the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "times.json"
        child, children = _CHILD.format(held=held), _CHILDREN if held else 0
        (folder / "conftest.py").write_text(_CONFTEST.format(size=size, out=str(out), child=child, children=children))
        (folder / "test_it.py").write_text(_TESTS.format(count=count, step=step))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise SystemExit(f"the run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return statistics.median(json.loads(out.read_text())) * 1e3


def _added(size: int, step: str, count: int) -> dict[str, Any]:
    bare = _median(size, step, count)
    checked = _median(size, step, count, "--leakcheck")
    return {
        "frozen_objects": size,
        "left_under_the_fixture": step,
        "tests": count,
        "bare_ms": round(bare, 3),
        "added_ms": round(checked - bare, 3),
        "goal_ms": GOALS_MS[step],
    }


def _beside_children(size: int, count: int, held: int) -> dict[str, Any]:
    bare = _median(size, "nothing", count, held=held)
    checked = _median(size, "nothing", count, "--leakcheck", held=held)
    return {
        "frozen_objects": size,
        "processes": _CHILDREN,
        "bytes_of_each": held,
        "tests": count,
        "bare_ms": round(bare, 3),
        "added_ms": round(checked - bare, 3),
        "floor_ms": {name: round(_CHILDREN * milliseconds, 3) for name, milliseconds in _readings(held).items()},
        "goal_ms": _CHILDREN_GOAL_MS,
    }


def _readings(held: int) -> dict[str, float]:
    """Return the milliseconds of processor time that it takes to read what such a process holds, in two ways."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _CHILD.format(held=held)], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = {}
        for read in (rollup, anonymous_bytes_of):
            started = time.process_time()
            for _ in range(_READINGS):
                read(child.pid)
            found[read.__name__] = (time.process_time() - started) / _READINGS * 1e3
        child.communicate(b"\n")
    return found


def main() -> None:
    """Measure each heap with each kind of test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="*", default=[50_000, 1_200_000])
    parser.add_argument("--tests", type=int, default=24)
    parser.add_argument("--held", type=int, nargs="*", default=[1 << 28, 1 << 30], help="bytes of each process")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    results = [_added(size, step, args.tests) for size in args.objects for step in GOALS_MS]
    beside = [_beside_children(args.objects[0], args.tests, held) for held in args.held]
    machine.write("engine_fixture", {"added_per_clean_test": results, "beside_processes": beside}, args.out)


if __name__ == "__main__":
    main()
