"""Fingerprints: the same for the same leak in every process, on every machine and Python, and different for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.judging.fingerprints import fingerprint

_LEAKS = """
import sys
sys.path.insert(0, sys.argv[1])
import collections, contextvars, functools, threading, types
from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.judging.fingerprints import fingerprint

class Engine:
    def __init__(self, thing):
        self.model = thing

class Slotted:
    __slots__ = ("kept",)

class Thing:
    pass

helper = types.ModuleType("helper")
sys.modules["helper"] = helper
Engine.__module__ = Slotted.__module__ = Thing.__module__ = "helper"
things = [Thing() for _ in range(9)]
helper.ENGINE = Engine(things[0])
helper.CACHE = {"layer 17": [things[1]], 4711: things[2]}
helper.supports = functools.lru_cache(lambda argument: None)
helper.supports(Engine(things[3]))
helper.callback = (lambda kept: lambda: kept)(things[4])
slotted = Slotted()
slotted.kept = things[5]
helper.ROWS = collections.deque([None, slotted])
def waiting(variable):
    yield variable
helper.generator = waiting(things[6])
next(helper.generator)
helper.unbounded = functools.lru_cache(maxsize=None)(lambda argument: argument)
helper.unbounded(things[7])
helper.partial = functools.partial(print, things[8])
innocent = {id(helper.CACHE), id(helper.ROWS)}
del slotted
for told in explain(things, innocent=innocent):
    suspects = (told.cause, *told.suspects[:1])
    mark = fingerprint(resource="tensors", device="cpu", stage="create", suspects=suspects, allocated_in="load")
    print(mark, told.cause, told.suspects[0], sep="|")
"""

# Written down once: a change here breaks every suppression that people have by fingerprint.
EXPECTED = """\
7fa0e936e51653bf|module-global|helper .ENGINE
a2d5fb48c5d7d548|module-global|helper.CACHE ['layer *']
e4a1db2b9d4c88bf|module-global|helper.CACHE [*]
2976f1fe8e5037d5|lru-cache|helper.supports lru_cache key
e0ace1b5475ae2fe|closure|helper.callback cell 'kept'
b43858fdf07cad04|module-global|helper.ROWS [*]
9fc1cfe1e5414be8|module-global|helper .generator
f3a0de7c3a03f270|lru-cache|helper.unbounded lru_cache value
0a30eee334cfc47e|module-global|helper .partial
"""


def test_the_same_leak_has_the_same_fingerprint_on_every_machine_and_python() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", _LEAKS, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == EXPECTED


ONE = {"resource": "tensors", "device": "cuda:0", "stage": "create", "suspects": ("helper .CACHE",)}


@pytest.mark.parametrize(
    "changed",
    [
        {"resource": "reserved"},
        {"stage": "wake"},
        {"suspects": ("helper .OTHER",)},
        {"suspects": ("helper .CACHE", "dict ['a']")},
        {"allocated_in": "load"},
        {"device": "cpu"},
    ],
)
def test_what_makes_another_leak_makes_another_fingerprint(changed: dict[str, object]) -> None:
    assert fingerprint(**{**ONE, **changed}) != fingerprint(**ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "same", [{"device": "cuda:1"}, {"suspects": ("helper .CACHE",)}, {"allocated_in": ""}], ids=str
)
def test_what_changes_from_run_to_run_does_not(same: dict[str, object]) -> None:
    assert fingerprint(**{**ONE, **same}) == fingerprint(**ONE)  # type: ignore[arg-type]


def test_numbers_in_edges_do_not_count() -> None:
    marks = {
        fingerprint(resource="tensors", device="", stage="", suspects=(f"list [{place}]",)) for place in (0, 7, 4711)
    }
    assert len(marks) == 1


@pytest.mark.parametrize("stage", ["setup", "teardown", "setup of module fixture 'engine'"])
def test_the_phase_of_a_test_says_nothing_but_in_former_fingerprints(stage: str) -> None:
    def mark(since: str, **more: Any) -> str:
        return fingerprint(resource="tensors", device="cpu", stage=since, suspects=("lru-cache",), **more)

    assert mark(stage) == mark("call")
    assert mark(stage, by_phase=True) != mark("call", by_phase=True) == mark("call")
    assert len({mark(since) for since in ("call", "create", "sleep", "setup_weights")}) == 4
