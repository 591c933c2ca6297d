"""Fingerprints: the same for the same leak in every process, on every machine and Python, and different for others."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.judging.fingerprints import fingerprint, identity_of
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP

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
    root = str(Path(__file__).parents[3])
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


HELPER = """
import collections, contextvars, functools, threading

class Engine:
    cache = []

    def __init__(self):
        self.items = {}

@functools.lru_cache(maxsize=4)
def bounded(key):
    return key

@functools.lru_cache(maxsize=None)
def unbounded(key):
    return key

engine = Engine()
REGISTRY = {}
VARIABLE = contextvars.ContextVar("var", default=None)
LOCAL = threading.local()
DEQUE = collections.deque()

def closure(x):
    def inner():
        return x
    return inner

def default(x):
    def inner(a=x):
        return a
    return inner

def generate(x):
    yield x

def suspend(x):
    global suspended
    suspended = generate(x)
    next(suspended)

def fail(x):
    global error
    try:
        raise ValueError(x)
    except ValueError as caught:
        error = caught
"""


class Thing:
    """What leaks."""


HOLDERS: dict[str, tuple[Callable[[Any, Thing], object], str]] = {
    "attribute": (lambda helper, thing: setattr(helper.engine, "model", thing), "4d5d2ce681c6d84c"),
    "entry": (lambda helper, thing: helper.engine.items.__setitem__("kv", [thing]), "3be43e9851076c03"),
    "class attribute": (lambda helper, thing: helper.Engine.cache.append(thing), "28b7bc85a65f8b6a"),
    "bounded cache": (lambda helper, thing: helper.bounded((thing,)), "ce29b3b7077adbe2"),
    "unbounded cache": (lambda helper, thing: helper.unbounded((thing,)), "71c66bdd915c2d73"),
    "entry with a key of parts": (
        lambda helper, thing: helper.REGISTRY.__setitem__(("a", 1), {"x": thing}),
        "a685a63d7b1b0add",
    ),
    "deque": (lambda helper, thing: helper.DEQUE.append(thing), "813bece69747cd03"),
    "closure": (lambda helper, thing: setattr(helper, "inner", helper.closure(thing)), "f4bef94f724fe8ca"),
    "default": (lambda helper, thing: setattr(helper, "defaulted", helper.default(thing)), "a3ff6f69f657c20e"),
    "suspended generator": (lambda helper, thing: helper.suspend(thing), "89252ce37ed824fc"),
    "thread local": (lambda helper, thing: setattr(helper.LOCAL, "thing", thing), "3a40f5a0e40a6495"),
    "exception": (lambda helper, thing: helper.fail(thing), "58d751a62e8f8e5b"),
    "context variable": (lambda helper, thing: helper.VARIABLE.set([thing]), "872a38d0d40a2dfd"),
}


@pytest.fixture(scope="module", params=[False, True], ids=["unfrozen", "frozen"])
def suspects(request: pytest.FixtureRequest) -> dict[str, Sequence[str]]:
    """The suspects of each holder's thing, by one walk."""
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    exec(HELPER, vars(module))
    things = [Thing() for _ in HOLDERS]
    for (hold, _), thing in zip(HOLDERS.values(), things, strict=True):
        hold(module, thing)
    del thing
    assert gc.get_freeze_count() <= FROZEN_AT_STARTUP
    if request.param:
        gc.freeze()
    try:
        reported = explain(things, ignore={id(things)})
    finally:
        gc.unfreeze()
        vars(module)["VARIABLE"].set(None)
        del sys.modules["helper"]
    return {holder: each.suspects for holder, each in zip(HOLDERS, reported, strict=True)}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_holder_has_the_fingerprint_that_it_always_had(suspects: dict[str, Sequence[str]], holder: str) -> None:
    _, expected = HOLDERS[holder]
    assert fingerprint(resource="tensors", device="cpu", stage="call", suspects=suspects[holder]) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("offload-di0_dic5", "offload-*"),
        ("kv.a1b2c3d4", "kv.*"),
        ("offload-segments", "offload-segments"),
        ("model_weights", "model_weights"),
    ],
)
def test_what_tempfile_makes_up_is_no_part_of_the_name_of_shared_memory(name: str, text: str) -> None:
    assert identity_of("shared-memory", [name]).names == (text,)
    assert identity_of("file-descriptors", [f"7 -> /dev/shm/{name}"]).names == (text,)
