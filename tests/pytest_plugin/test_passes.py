"""How often a test's verdict, and the remedies of a session, go through the whole heap."""

from __future__ import annotations

import json

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

# Counts, by test: lists of the whole heap, walks through its references, full collections. A card with private pools of
# torch's allocator is put in the place of the one that is not here: a pool's memory is there for as long as the pool.
CONFTEST = """
import gc, json
from collections import Counter
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from lowtide.leakcheck.judging import device_memory as cards
from lowtide.probes.host import counters
from lowtide.probes.heap import graph as heap_graph
from lowtide.probes.device.torch_allocator import UnexplainedBlocks

PASSES, NOW = {}, []
POOLS = WeakSet()
MIB = 1 << 20

def count(what):
    if NOW:
        PASSES.setdefault(NOW[-1], Counter())[what] += 1

def get_objects(generation=None, list_all=gc.get_objects):
    if generation in (None, 2):
        count("lists")
    return list_all(generation=generation)

def collect(generation=2, collect_all=gc.collect):
    if generation == 2:
        count("collections")
    return collect_all(generation)

def walked(walk):
    def counted(*args, **kwargs):
        count("walks")
        return walk(*args, **kwargs)
    return counted

gc.get_objects, gc.collect = get_objects, collect
heap_graph.Graph.__init__ = walked(heap_graph.Graph.__init__)

class FakePool:
    def __init__(self, number):
        self.id = (0, number)
        POOLS.add(self)

torch.cuda.MemPool = FakePool

def segments():
    return [((0, pool.id[1]), pool.id[1] * 0x1000_0000 + place * 32 * MIB, 20 * MIB, False)
            for pool in sorted(POOLS, key=lambda pool: pool.id) for place in range(4)]

def read_with_card(read):
    def reading(self, *args, **kwargs):
        found = read(self, *args, **kwargs)
        found.amounts.update({"reserved cuda:0": sum(size for _, _, size, _ in segments()), "allocated cuda:0": 0})
        return found
    return reading

counters.CounterReader.read_in_part = read_with_card(counters.CounterReader.read_in_part)
cards.read_allocations = lambda index, among=None, known=(): None
cards.read_segments = lambda index: segments()
cards.unexplained_blocks = lambda index, claimed: UnexplainedBlocks({}, {}, {}, {})

class Passes:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        NOW.append(item.name)
        try:
            return (yield)
        finally:
            NOW.pop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        NOW.append("remedies")
        try:
            return (yield)
        finally:
            NOW.pop()
            Path(__file__).with_name("passes.json").write_text(json.dumps(PASSES))

def pytest_configure(config):
    config.pluginmanager.register(Passes())
"""

TESTS = """
import functools, gc, os, threading
import torch
from conftest import FakePool

class Engine:
    def __init__(self):
        self.weight = torch.ones(1024)
        self.itself = self

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.name = "m"
    @functools.lru_cache
    def supports(self, name): return True

KEPT, STATE, DONE = [], {}, threading.Event()

def test_first(): pass

def test_clean():
    assert float(torch.ones(64).sum()) == 64

def test_without_memory():
    KEPT.append([torch.empty(0), torch.ones(64, device="meta")])

def test_settling():
    Engine()

def test_settling_late():
    engine = Engine()
    gc.collect(0), gc.collect(1), gc.collect(1)

def test_one_leak():
    KEPT.append(torch.ones(1024))

def test_leaks():
    KEPT.append(Engine())
    STATE["table"] = {"a": torch.ones(2048), "b": (torch.ones(512), [torch.ones(256)])}
    Engine.shared = torch.ones(4096)
    Model().supports("tasks")
    KEPT.extend(os.pipe() for _ in range(3))
    for _ in range(4):
        thread = threading.Thread(target=DONE.wait, daemon=True)
        thread.start()
        STATE.setdefault("threads", []).append(thread)
    os.environ["LEFT"] = "1"

def test_pools():
    STATE["graphs"] = {"decode": FakePool(1), "prefill": FakePool(2)}
    STATE["buffers"] = [torch.ones(1024) for _ in range(5)]

def test_more_pools():
    KEPT.append({"pool": FakePool(3)})
"""


@pytest.fixture(scope="module")
def inner(run_inner: RunInner) -> InnerRun:
    return run_inner({"conftest.py": CONFTEST, "test_it.py": TESTS})


@pytest.fixture(scope="module")
def passes(inner: InnerRun) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads((inner.folder / "passes.json").read_text())
    return found


MOST = {
    "test_clean": {},
    "test_without_memory": {},
    "test_settling": {"lists": 1},
    "test_settling_late": {"lists": 3, "collections": 1},
    "test_one_leak": {"lists": 2, "collections": 1, "walks": 1},
    "test_leaks": {"lists": 4, "collections": 1, "walks": 2},
    "test_pools": {"lists": 2, "collections": 1, "walks": 1},
    "test_more_pools": {"lists": 2, "collections": 1, "walks": 1},
    "remedies": {"lists": 5, "collections": 4, "walks": 3},
}
"""How often each test may go through the heap at most: lists of all its objects, full collections, and walks."""


@pytest.mark.parametrize("test", MOST)
def test_a_verdict_goes_through_the_heap_so_often_at_most(test: str, passes: dict[str, dict[str, int]]) -> None:
    found = passes.get(test, {})
    assert found == {what: min(count, MOST[test].get(what, 0)) for what, count in found.items()}


def test_what_is_counted_is_found_and_given_back(inner: InnerRun) -> None:
    assert inner.report is not None
    found = {subject.id.partition("::")[2]: subject.findings for subject in inner.report.subjects}
    assert {test for test, findings in found.items() if findings} == {
        "test_one_leak",
        "test_leaks",
        "test_pools",
        "test_more_pools",
    }
    assert {finding.resource for finding in found["test_leaks"]} == {
        "lru-cache",
        "threads",
        "file-descriptors",
        "globals",
        "tensors",
    }
    (first,) = [finding for finding in found["test_pools"] if finding.resource == "reserved"]
    (second,) = found["test_more_pools"]
    # What was added to the program is one dict, which holds both.
    assert "; the pools are held by test_it.STATE['graphs']; " in first.message
    assert first.remedy is not None
    assert first.remedy.action == "del test_it.STATE['graphs']; gc.collect(); torch.cuda.empty_cache()"
    assert (first.bytes, first.remedy.returns_bytes) == (160 << 20, 160 << 20)
    assert second.remedy is not None
    # By the place that it has when it is cut: what lay before it in the list has been deleted by then.
    assert second.remedy.action == "del test_it.KEPT[4]; gc.collect(); torch.cuda.empty_cache()"
    assert second.remedy.returns_bytes == 80 << 20
