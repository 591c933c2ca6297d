"""What `--leakcheck` costs on a heap of a real engine's measure: clean, importing, compiling and leaking tests.

The heap is that of a vLLM process: 1.5 million tracked objects, 3,000 modules of generated classes and functions, 300
filled `lru_cache`s, torch's compiler.  Each variant (without lowtide, without remedies, with them) is one pytest
process over the same tests, whose protocols are timed one by one.  Beside the seconds stands how many full collections
of the same heap they are, which any machine can compare.  Floor of a leaking test: one `gc.get_objects` and one forward
walk of that heap (`gc.get_referents` of all of it).

A second result, `many_tests`, is of 10,000 trivial tests in one run: what each adds, by thousands, since that must not
grow with the tests before it; and what memory the checker has at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

_CONFTEST = """
import functools, gc, json, sys, time, types
import pytest, torch
import torch._dynamo, torch._inductor.compile_fx

SOURCE = '''
import functools
class Base:
    table = {{}}
    def __init__(self, value): self.value, self.parts = value, [value]
    def run(self, x): return x + self.value
    @property
    def size(self): return len(self.parts)
class Layer(Base):
    def run(self, x): return super().run(x) * 2
def build(count): return [Layer(place) for place in range(count)]
'''
CACHED = '''
@functools.lru_cache(maxsize=None)
def cached(key): return (key, [key])
'''

def module(place):
    made = types.ModuleType(f"engine_module_{{place}}")
    sys.modules[made.__name__] = made
    exec(compile(SOURCE + (CACHED if place < 300 else ""), f"{{made.__name__}}.py", "exec"), vars(made))
    if place < 300:
        for key in range(20):
            made.cached(key)
    return made

MODULES = [module(place) for place in range(3000)]
while len(gc.get_objects()) < {objects}:
    made = MODULES[len(MODULES) // 2]
    for made in MODULES:
        vars(made).setdefault("layers", []).extend(made.build(20))
gc.collect()
started = time.perf_counter()
gc.collect()
COLLECTION = time.perf_counter() - started
objects = gc.get_objects()
TRACKED = len(objects)
# As the walk does: else the lists that it makes would be collected for all the while.
gc.disable()
started = time.perf_counter()
for start in range(0, len(objects), 50_000):
    list(map(gc.get_referents, objects[start : start + 50_000]))
WALK = time.perf_counter() - started
gc.enable()
del objects
started = time.perf_counter()
gc.get_objects()
LIST = time.perf_counter() - started
TIMES, ENDED, HELD = {{}}, [], []

def held():
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

class Clock:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            TIMES.setdefault(item.originalname, []).append(time.perf_counter() - started)
            ENDED.append(item.originalname)
            if len(ENDED) % 1000 == 0:
                HELD.append(held())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            with open({out!r}, "w") as file:
                json.dump({{"objects": TRACKED, "collection": COLLECTION, "walk": WALK, "list": LIST, "tests": TIMES,
                    "held": HELD, "end": time.perf_counter() - started}}, file)

def pytest_configure(config):
    config.pluginmanager.register(Clock())
"""

_TESTS = """
import functools, gc, importlib, os, sys, threading
import pytest, torch

KEPT, STARTED = [], []

class Model:
    def __init__(self): self.weight = torch.ones(1024)
    @functools.lru_cache
    def supports(self, name): return True

@pytest.mark.parametrize("turn", range({clean}))
def test_clean(turn):
    x = torch.ones(64, 64)
    assert float((x @ x).sum()) > 0

@pytest.mark.parametrize("turn", range(5))
def test_importing(turn, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for place in range(100):
        (tmp_path / f"lazy_{{turn}}_{{place}}.py").write_text("class Lazy: pass\\n")
    gc.collect()
    for place in range(100):
        importlib.import_module(f"lazy_{{turn}}_{{place}}")

@pytest.mark.parametrize("turn", range(5))
def test_compiling(turn):
    torch._dynamo.reset()
    step = torch.compile(lambda x: torch.relu(x * turn).sum(), backend="aot_eager")
    assert float(step(torch.ones(8, requires_grad=True))) >= 0
    gc.collect()
    torch._dynamo.reset()

@pytest.mark.parametrize("turn", range({leaks}))
def test_leaking(turn):
    if turn % 2:
        Model().supports("tasks")
    else:
        KEPT.append(torch.ones(1024))

def test_leaking_ten_ways():
    for _ in range(5):
        KEPT.append({{"model": Model()}})
        Model().supports("tasks")

def test_leaking_as_an_engine_that_starts():
    KEPT.extend(os.pipe() for _ in range(15))
    done = threading.Event()
    for _ in range(30):
        STARTED.append(threading.Thread(target=done.wait, daemon=True))
        STARTED[-1].start()
    KEPT.append(done)
"""

_MANY = """
import pytest
@pytest.mark.parametrize("turn", range({count}))
def test_clean(turn): assert [turn]
"""


def _run(files: dict[str, str], *options: str, profile: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The times of one pytest process, its seconds, and the functions of lowtide in which most of them went."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text.replace("@OUT@", str(folder / "times.json")))
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, *(["-m", "cProfile", "-o", str(folder / "profile")] if profile else [])]
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:asyncio", *options]
        path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        started = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        if not (folder / "times.json").exists():
            raise SystemExit(f"the run did not finish:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads((folder / "times.json").read_text())
        found["seconds"], found["last_line"] = seconds, done.stdout.strip().rpartition("\n")[2]
        return found, _top(folder / "profile", seconds) if profile else []


def _top(path: Path, seconds: float) -> list[dict[str, Any]]:
    """The ten functions that took most time, what they call in C counted with them, and their share of the whole."""
    stats: dict[Any, Any] = vars(pstats.Stats(str(path)))["stats"]
    own: dict[str, float] = {}
    for (file, line, function), (_, _, spent, _, callers) in stats.items():
        if "lowtide" in file:
            place = f"{file.rpartition('lowtide/')[2]}:{line} {function}"
            own[place] = own.get(place, 0.0) + spent
        elif file == "~":
            for (caller_file, caller_line, caller), (_, _, inside, _) in callers.items():
                if "lowtide" in caller_file:
                    place = f"{caller_file.rpartition('lowtide/')[2]}:{caller_line} {caller}"
                    own[place] = own.get(place, 0.0) + inside
    largest = sorted(own.items(), key=lambda entry: -entry[1])[:10]
    return [
        {"function": name, "seconds": round(spent, 2), "share": round(spent / seconds, 3)} for name, spent in largest
    ]


def _summary(found: dict[str, Any], bare: dict[str, Any] | None) -> dict[str, Any]:
    """What each kind of test takes, and what it takes more than without lowtide, in seconds and in collections."""
    kinds = {}
    for kind, times in found["tests"].items():
        typical = statistics.median(times)
        kinds[kind] = {"tests": len(times), "median_s": round(typical, 5), "first_s": round(times[0], 5)}
        if bare is not None:
            added = typical - statistics.median(bare["tests"][kind])
            kinds[kind] |= {
                "added_s": round(added, 5),
                "added_collections": round(added / bare["collection"], 3),
            }
    return {
        "seconds": round(found["seconds"], 2),
        "end_s": round(found["end"], 3),
        "tests": kinds,
        "last_line": found["last_line"],
    }


def measure(objects: int, clean: int, leaks: int) -> dict[str, Any]:
    """One heap, in the three variants, and a profile of the last of them."""
    files = {
        "conftest.py": _CONFTEST.format(objects=objects, out="@OUT@"),
        "test_it.py": _TESTS.format(clean=clean, leaks=leaks),
    }
    bare, _ = _run(files)
    judging, _ = _run(files, "--leakcheck", "--leakcheck-remedies=off")
    whole, _ = _run(files, "--leakcheck")
    _, profile = _run(files, "--leakcheck", profile=True)
    return {
        "tracked_objects": bare["objects"],
        "one_collection_s": round(bare["collection"], 4),
        "floor": {"get_objects_s": round(bare["list"], 4), "get_referents_s": round(bare["walk"], 4)},
        "without": _summary(bare, None),
        "without_remedies": _summary(judging, bare),
        "with_remedies": _summary(whole, bare),
        "most_time_in": profile,
    }


def measure_many(count: int) -> dict[str, Any]:
    """So many trivial tests: what each adds, whether that grows, and what memory the checker has at the end.

    Args:
        count: how many; a thousand or more.
    """
    files = {
        "conftest.py": _CONFTEST.format(objects=200_000, out="@OUT@").replace("range(3000)", "range(300)"),
        "test_it.py": _MANY.format(count=count),
    }
    bare, _ = _run(files)
    judged, _ = _run(files, "--leakcheck")
    (without,), (times,) = bare["tests"].values(), judged["tests"].values()
    return {
        "tracked_objects": bare["objects"],
        "tests": count,
        "without": _summary(bare, None),
        "with": _summary(judged, bare),
        "added_ms": round((statistics.median(times) - statistics.median(without)) * 1e3, 3),
        "added_mean_ms": round((statistics.fmean(times) - statistics.fmean(without)) * 1e3, 3),
        "added_ms_by_thousand": [
            round((statistics.median(times[at : at + 1000]) - statistics.median(without[at : at + 1000])) * 1e3, 3)
            for at in range(0, count, 1000)
        ],
        # What pytest keeps of each test is in both.
        "added_bytes_at_end": judged["held"][-1] - bare["held"][-1],
        "added_bytes_per_test": round(
            ((judged["held"][-1] - judged["held"][0]) - (bare["held"][-1] - bare["held"][0])) / max(count - 1000, 1)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--objects",
        type=int,
        help="tracked objects; the modules and the compiler alone are 490,000; without a number: no heap",
        nargs="*",
        default=[500_000, 1_500_000],
    )
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--leaks", type=int, default=20)
    parser.add_argument("--many", type=int, default=10_000, help="trivial tests in one run (1,000 or more); 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    if args.objects:
        heaps = [measure(objects, args.clean, args.leaks) for objects in args.objects]
        machine.write("real_heap", {"heaps": heaps}, args.out)
    if args.many:
        machine.write("many_tests", measure_many(args.many), args.out)


if __name__ == "__main__":
    main()
