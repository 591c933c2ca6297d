"""Fingerprints are what users write into their suppressions: the same on every Python, on every machine, frozen or not.

Whoever changes one of these makes every suppression of that kind of leak useless, and says so in the release.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP

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
