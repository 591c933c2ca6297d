"""What `--leakcheck` adds to a clean test, beside other checkers; the smallest leak it sees; its false alarms.

Each variant is one pytest process over the same trivial tests, with a heap of a given size, and a plugin around all
others that measures the processor time of each test's whole protocol; what is reported is the median, less that of the
bare run.  The variants take turns, and of each the quietest round counts.  Floor: one reading of the process's counters
on each side of a test, some 0.1 ms each, and a look at the young objects.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

from lowtide.reports.schema import read

_CONFTEST = """
import gc, json, time
import pytest, torch

SIZE = int({size})
LIVE = torch.zeros(1, device={device!r}) if {live} else None
KEEP = [[index] for index in range(max(0, SIZE - len(gc.get_objects())))]
gc.collect()
TIMES = []

class Clock:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        started = time.thread_time()
        try:
            return (yield)
        finally:
            TIMES.append(time.thread_time() - started)

    def pytest_sessionfinish(self):
        with open({out!r}, "w") as file:
            json.dump({{"objects": len(gc.get_objects()), "seconds": TIMES[20:]}}, file)

def pytest_configure(config):
    config.pluginmanager.register(Clock())

@pytest.fixture(autouse=True)
def around():
    if {cuda_check}:
        from torch.testing._internal.common_utils import CudaMemoryLeakCheck
        class Case:
            def id(self): return "bench"
        with CudaMemoryLeakCheck(Case()):
            yield
    else:
        yield
"""

_TRIVIAL = """
import pytest, torch
@pytest.mark.parametrize("turn", range({count}))
def test_clean(turn):
    x = torch.ones(64, 64, device={device!r})
    assert float((x @ x).sum()) > 0
"""

_MIXED = """
import asyncio, functools, gc, io, os, tempfile, threading, weakref
import pytest, torch

class Node:
    def __init__(self): self.me, self.data = self, torch.ones(16)

@functools.lru_cache(maxsize=8)
def squares(n): return [i * i for i in range(n)]

def tensors(turn): return torch.rand(32, turn % 32 + 1).sum().item()
def cycle(turn): Node()
def training(turn):
    model = torch.nn.Linear(8, 8); step = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 8)).sum().backward(); step.step()
def cached(turn): squares(turn)
def thread(turn):
    worker = threading.Thread(target=lambda: torch.ones(8).sum()); worker.start(); worker.join()
def files(turn):
    with tempfile.TemporaryFile() as file: file.write(b"x" * turn)
def raises(turn):
    with pytest.raises(ValueError) as caught:
        data = torch.ones(64); raise ValueError(turn)
    assert caught
def loop(turn): asyncio.run(asyncio.sleep(0))
def collected(turn): x = Node(); del x; gc.collect() if turn % 25 == 9 else None
def objects(turn): return [[i] for i in range(20_000)]

SHAPES = [tensors, cycle, training, cached, thread, files, raises, loop, collected, objects]

@pytest.mark.parametrize("turn", range({count}))
def test_mixed(turn): SHAPES[turn % len(SHAPES)](turn)
"""

_SMALLEST = """
import ctypes, pytest, torch
KEPT = []
def test_one_byte(): KEPT.append(torch.zeros(1, dtype=torch.uint8, device={device!r}))
@pytest.mark.leakcheck(tolerance=4096)
def test_at_tolerance(): KEPT.append(torch.zeros(4096, dtype=torch.uint8))
@pytest.mark.leakcheck(tolerance=4095)
def test_one_byte_over(): KEPT.append(torch.zeros(4096, dtype=torch.uint8))
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@needs_card
def test_one_reserved_segment():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool): block = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    del block
    KEPT.append(pool)
@needs_card
def test_one_driver_segment():
    torch.cuda.init()
    cuda, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(2 << 20)) == 0
"""


def _pytest(folder: Path, files: dict[str, str], *options: str) -> str:
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *options]
    if not any(name.value == "lowtide.pytest_plugin.plugin" for name in _entry_points()):
        command += ["-p", "lowtide.pytest_plugin.plugin"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout[-2000:] + done.stderr[-2000:]


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group="pytest11")


def _median(
    size: int, count: int, device: str, live: bool, *options: str, cuda_check: bool = False
) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "times.json"
        conftest = _CONFTEST.format(size=size, out=str(out), cuda_check=cuda_check, device=device, live=live)
        said = _pytest(
            folder, {"conftest.py": conftest, "test_it.py": _TRIVIAL.format(count=count, device=device)}, *options
        )
        if not out.exists():
            raise SystemExit(f"the run did not finish:\n{said}")
        found = json.loads(out.read_text())
    return statistics.median(found["seconds"]), found["objects"]


def _added(size: int, count: int, device: str, live: bool, rounds: int) -> dict[str, Any]:
    variants: dict[str, tuple[str, ...]] = {"bare": (), "lowtide": ("--leakcheck",)}
    if importlib.util.find_spec("pytest_memray") is not None:
        variants["pytest-memray"] = ("--memray",)
    if device == "cuda" and importlib.util.find_spec("expecttest") is not None:
        variants["CudaMemoryLeakCheck"] = ()
    measured: dict[str, float] = {}
    objects = 0
    for _ in range(rounds):
        for name, options in variants.items():
            checks = name == "CudaMemoryLeakCheck"
            seconds, found = _median(size, count, device, live, *options, cuda_check=checks)
            measured[name] = min(seconds, measured.get(name, seconds))
            objects = found if name == "bare" else objects
    bare = measured.pop("bare")
    return {
        "tracked_objects": objects,
        "device": device,
        "a_tensor_lives_on_the_device": live,
        "tests": count,
        "bare_ms": round(bare * 1e3, 3),
        "rounds": rounds,
        "added_ms": {name: round((seconds - bare) * 1e3, 3) for name, seconds in measured.items()},
        "goal_ms": 0.3,
    }


def _judged(text: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = _pytest(folder, {"test_it.py": text}, "--leakcheck", f"--leakcheck-report={folder / 'report'}")
        if not (folder / "report" / "leakcheck.json").exists():
            raise SystemExit(f"the run did not finish:\n{said}")
        report = read(folder / "report")
    return {
        subject.id.partition("::")[2]: {
            "outcome": subject.outcome,
            "findings": [[found.resource, found.cause, found.bytes, found.message] for found in subject.findings],
        }
        for subject in report.subjects
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--objects", type=int, nargs="*", default=[150_000, 500_000])
    parser.add_argument("--tests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5, help="how often the variants take turns")
    parser.add_argument("--clean", type=int, default=1000, help="clean tests of mixed shapes")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    mixed = _judged(_MIXED.format(count=args.clean))
    results = {
        "added_per_clean_test": [
            _added(size, args.tests, args.device, live, args.rounds)
            for size in args.objects
            for live in ((False, True) if args.device == "cuda" else (False,))
        ],
        "smallest_leak": _judged(_SMALLEST.format(device=args.device)),
        "clean_tests": {
            "tests": len(mixed),
            "alarms": {name: found for name, found in mixed.items() if found["outcome"] != "clean"},
        },
    }
    machine.write("leakcheck", results, args.out)


if __name__ == "__main__":
    main()
