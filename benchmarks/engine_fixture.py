"""What `--leakcheck` adds to a clean test under a fixture that holds an engine, whose heap is frozen as vLLM's is.

Each variant is one pytest process over the same tests, plain and with `--leakcheck`; what is reported is the median of
the processor time of a test's whole protocol, less that of the plain run. What a test leaves under the fixture takes
the place of what the test before it left there: nothing; views of a buffer of the engine's, in a new object; tensors
of their own.
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

GOALS_MS = {"nothing": 0.3, "views": 5.0, "tensors": 5.0}

_CONFTEST = """
import gc, json, time
import pytest, torch

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
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
    made.__dict__.clear()

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


def _median(size: int, step: str, count: int, *options: str) -> float:
    """Milliseconds of processor time of a test that is neither among the first nor the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "times.json"
        (folder / "conftest.py").write_text(_CONFTEST.format(size=size, out=str(out)))
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


def main() -> None:
    """Measure each heap with each kind of test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="*", default=[50_000, 1_200_000])
    parser.add_argument("--tests", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    results = [_added(size, step, args.tests) for size in args.objects for step in GOALS_MS]
    machine.write("engine_fixture", {"added_per_clean_test": results}, args.out)


if __name__ == "__main__":
    main()
