"""Slots of an engine's pools that no request has any more are told, in this process and in the engine's own.

vLLM's classes are here as far as they are read, with its names (0.24 to 0.32); a real one loses blocks in docs/vllm.md.
"""

from __future__ import annotations

import re

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

FILES = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/sched/__init__.py": "",
    "vllm/v1/core/block_pool.py": """
class Block:
    def __init__(self, block_id):
        self.block_id, self.ref_cnt, self.is_null = block_id, 0, not block_id

class Queue:
    def __init__(self, blocks):
        self.blocks = blocks

    @property
    def num_free_blocks(self):
        return len(self.blocks)

class BlockPool:
    def __init__(self, num_gpu_blocks):
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [Block(number) for number in range(num_gpu_blocks)]
        self.free_block_queue = Queue(self.blocks[1:])

    def get_new_blocks(self, count):
        new = [self.free_block_queue.blocks.pop(0) for _ in range(count)]
        for block in new:
            block.ref_cnt += 1
        return new

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            self.free_block_queue.blocks.append(block)
""",
    "vllm/v1/core/single_type_kv_cache_manager.py": """
class SingleTypeKVCacheManager:
    def __init__(self, pool):
        self.block_pool, self.req_to_blocks = pool, {}
""",
    "vllm/v1/core/encoder_cache_manager.py": """
class EncoderCacheManager:
    def __init__(self):
        self.cached = {}
""",
    "vllm/v1/core/sched/scheduler.py": """
import enum

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

class Status(enum.IntEnum):
    WAITING, RUNNING, PREEMPTED, FINISHED = range(4)

class Request:
    status = Status.RUNNING

class Manager:
    def __init__(self):
        self.block_pool = BlockPool(16)
        self.single = SingleTypeKVCacheManager(self.block_pool)

class Scheduler:
    def __init__(self):
        self.kv_cache_manager, self.encoder_cache_manager = Manager(), EncoderCacheManager()
        self.requests = {}

    def start(self, name, blocks=2):
        self.requests[name] = Request()
        self.kv_cache_manager.single.req_to_blocks[name] = self.kv_cache_manager.block_pool.get_new_blocks(blocks)
        self.encoder_cache_manager.cached.setdefault("picture", set()).add(name)

    def end(self, name):
        self.encoder_cache_manager.cached["picture"].discard(name)
        self.kv_cache_manager.block_pool.free_blocks(self.kv_cache_manager.single.req_to_blocks.pop(name))
        del self.requests[name]
""",
    "core.py": """
import multiprocessing

def serve(pipe):
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler()
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        scheduler.start(name)
        if name == "lost":
            del scheduler.requests[name]
            scheduler.encoder_cache_manager.cached.clear()
        else:
            scheduler.end(name)
        pipe.send(None)

class Core:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,))
        self.process.start()
        self.pipe.recv()

    def ask(self, name):
        self.pipe.send(name)
        self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.process.join()
        self.process.close()
        self.pipe.close()
""",
    "test_inner.py": """
import pytest
from core import Core
from vllm.v1.core.sched.scheduler import Scheduler, Status

@pytest.fixture(scope="module")
def engine():
    return Scheduler()

@pytest.fixture
def own():
    yield Scheduler()

@pytest.fixture(scope="module")
def core():
    core = Core()
    yield core
    core.close()

def infer(engine, *names):
    for name in names:
        engine.start(name)
    for name in names:
        engine.end(name)

def test_quiet(engine):
    infer(engine, "a", "b")

def test_one_that_runs_on(engine):
    engine.start("open")

def test_it_ends_later(engine):
    infer(engine, "a")
    engine.end("open")

def test_forgotten(engine):
    engine.start("forgotten")
    del engine.requests["forgotten"]
    engine.encoder_cache_manager.cached["picture"].clear()

def test_as_before(engine):
    infer(engine, "a")

def test_ended(engine):
    engine.start("ended", 1)
    engine.requests["ended"].status = Status.FINISHED
    engine.encoder_cache_manager.cached["picture"].clear()

def test_nobody(engine):
    engine.kv_cache_manager.block_pool.get_new_blocks(3)

def test_picture(engine):
    infer(engine, "a")
    engine.encoder_cache_manager.cached["picture"].add("a")

def test_own_engine(own):
    own.start("forgotten", 1)
    own.requests.clear()
    own.encoder_cache_manager.cached.clear()

def test_another_version(engine):
    pool = engine.kv_cache_manager.block_pool
    del pool.blocks
    pool.num_gpu_blocks += 1

def test_core_quiet(core):
    core.ask("a")

def test_core_lost(core):
    core.ask("lost")

def test_core_as_before(core):
    core.ask("b")
""",
}

UNKNOWN = "a request that the scheduler does not know"
BLOCKS, PICTURES = "vLLM's BlockPool", "vLLM's EncoderCacheManager"


@pytest.fixture(scope="module")
def inner(run_inner: RunInner) -> InnerRun:
    return run_inner(FILES)


@pytest.mark.parametrize(
    ("name", "count", "pool", "owner"),
    [
        ("test_forgotten", "2 KV blocks", BLOCKS, f"{UNKNOWN} (forgotten)"),
        ("test_ended", "1 KV block", BLOCKS, "a request that has ended (ended)"),
        ("test_nobody", "3 KV blocks", BLOCKS, "no request"),
        ("test_picture", "1 encoder output", PICTURES, f"{UNKNOWN} (a)"),
        ("test_own_engine", "1 KV block", BLOCKS, f"{UNKNOWN} (forgotten)"),
    ],
)
def test_slots_that_no_request_has_are_lost(inner: InnerRun, name: str, count: str, pool: str, owner: str) -> None:
    (subject,) = [each for each in inner.report.subjects if each.id.endswith(f"::{name}")]
    (finding,) = subject.findings
    assert finding.resource == "kv-blocks"
    assert str(finding.count) == count[0]
    assert (
        re.sub(r" \(.*?\)", "", finding.message, count=1)
        == f"{count} of {pool} not given back after call, held by {owner}"
    )
    assert finding.advice == "give them back wherever a request ends: finished, aborted and failed"


def test_those_that_the_engine_s_own_process_has_lost_are_told_with_it(inner: InnerRun) -> None:
    (subject,) = [each for each in inner.report.subjects if each.id.endswith("::test_core_lost")]
    (finding,) = [each for each in subject.findings if each.resource == "kv-blocks"]
    assert finding.process is not None
    assert finding.message.endswith(
        f"2 KV blocks of {BLOCKS} (3, 4) not given back after call, held by {UNKNOWN} (lost)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "test_quiet",
        "test_one_that_runs_on",
        "test_it_ends_later",
        "test_as_before",
        "test_core_quiet",
        "test_core_as_before",
    ],
)
def test_slots_that_were_given_back_or_are_in_use_are_not(inner: InnerRun, name: str) -> None:
    (subject,) = [each for each in inner.report.subjects if each.id.endswith(f"::{name}")]
    assert [each for each in subject.findings if each.resource == "kv-blocks"] == []


def test_a_pool_of_another_version_is_not_measured(inner: InnerRun) -> None:
    (subject,) = [each for each in inner.report.subjects if each.id.endswith("::test_another_version")]
    (missing,) = [each for each in subject.not_measured if each.what == "slots of vllm.v1.core.block_pool.BlockPool"]
    assert missing.why == "another version's: 'BlockPool' object has no attribute 'blocks'"
