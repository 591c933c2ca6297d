"""KV offload: prefixes come back from the host, nobody loses a block to a copy, and every copy's end is taken in."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lowtide.engine import (
    EngineConfig,
    EngineState,
    KVTransferError,
    LLMEngine,
    OutOfMemoryError,
    RequestOutput,
    SamplingParams,
)
from lowtide.engine.config import PRESETS
from lowtide.engine.core import EngineCore
from lowtide.engine.defects import find_defect
from lowtide.engine.kv import kv_offload
from lowtide.engine.kv.kv_cache import (
    BlockPool,
    HostBlockStore,
    KVCacheBlock,
    KVCacheManager,
    OffloadingManager,
    Transfer,
    kv_cache_bytes_per_block,
)
from lowtide.engine.pages import Lease, Part
from lowtide.engine.pages.cpu import CpuPages
from lowtide.engine.request import Request, SchedulerOutput
from lowtide.engine.scheduler import Scheduler
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.stages import announced_pools
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

BLOCK = 2
THREAD = "lowtide-kv-offload"


class BrokenError(Exception):
    """What a planted failure raises."""


# --- what the host has ----------------------------------------------------------------------------------------------


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(length)]


def fill(store: HostBlockStore, hashes: Sequence[bytes]) -> None:
    for block_hash in hashes:
        block = store.reserve(block_hash, hashes)
        assert block is not None
        block.ready = True
    store.touch(hashes)


def test_the_prefix_that_was_used_longest_ago_gives_way_from_its_end() -> None:
    store = HostBlockStore(4)
    old, new = chain("old", 2), chain("new", 2)
    fill(store, old)
    fill(store, new)
    store.touch(old)
    assert store.reserve(b"next", ()) is not None
    assert (len(store.find(old)), len(store.find(new))) == (2, 1)


def test_a_prefix_too_long_for_the_host_keeps_its_beginning() -> None:
    pool, long = BlockPool(4), chain("long", 4)
    manager = OffloadingManager(pool, 3)
    manager.plan_save(pool.take(4), long)
    connector = FakeConnector({}, {})
    manager.submit(connector)
    connector.flush()
    manager.take_in(connector.take_completed())
    assert len(manager.find(long)) == 3


def test_a_host_block_that_is_copied_does_not_give_way() -> None:
    store = HostBlockStore(1)
    (first,) = chain("a", 1)
    fill(store, [first])
    store.find([first])[0].num_transfers = 1
    assert store.reserve(b"next", ()) is None


def test_a_block_is_loaded_only_after_its_copy_was_taken_in() -> None:
    store = HostBlockStore(2)
    store.reserve(b"a", ())
    assert store.find([b"a"]) == []


def test_what_was_forgotten_in_mid_copy_does_not_come_back() -> None:
    pool = BlockPool(2)
    manager, connector = OffloadingManager(pool, 2), FakeConnector({}, {})
    (block,) = pool.take(1)
    manager.plan_save([block], [b"a"])
    manager.submit(connector)
    manager.forget()
    connector.flush()
    manager.take_in(connector.take_completed())
    assert manager.find([b"a"]) == []
    assert (block.ref_count, block.num_transfers) == (1, 0)


def test_a_load_that_was_forgotten_in_mid_copy_publishes_nothing() -> None:
    pool = BlockPool(2)
    manager, connector = OffloadingManager(pool, 2), FakeConnector({}, {})
    taken = pool.take(1)
    manager.plan_save(taken, [b"a"])
    manager.submit(connector)
    connector.flush()
    manager.take_in(connector.take_completed())
    pool.release(taken)
    manager.plan_load([], manager.find([b"a"]))
    manager.submit(connector)
    manager.forget()
    connector.flush()
    manager.take_in(connector.take_completed())
    assert pool.find(b"a") is None
    assert pool.usage().available == 2


def saved(manager: OffloadingManager, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]) -> None:
    """Saves a prefix to the end."""
    connector = FakeConnector({}, {})
    manager.plan_save(blocks, hashes)
    manager.submit(connector)
    connector.flush()
    assert manager.take_in(connector.take_completed()) == []


def test_the_beginning_of_a_saved_prefix_stays_longest() -> None:
    pool, old = BlockPool(4), chain("old", 3)
    manager = OffloadingManager(pool, 3)
    taken = pool.take(4)
    saved(manager, taken[:3], old)
    saved(manager, taken[3:], chain("new", 1))
    assert len(manager.find(old)) == 2


def test_blocks_that_come_back_from_a_save_are_given_out_from_the_prefixs_end() -> None:
    pool = BlockPool(3)
    manager, connector = OffloadingManager(pool, 3), FakeConnector({}, {})
    taken = pool.take(3)
    manager.plan_save(taken, chain("a", 3))
    manager.submit(connector)
    pool.release(taken)
    assert pool.num_free == 0
    connector.flush()
    manager.take_in(connector.take_completed())
    assert pool.take(1) == [taken[2]]


def test_a_cancelled_copy_is_as_if_it_had_never_been() -> None:
    pool = BlockPool(1)
    manager, connector = OffloadingManager(pool, 1), FakeConnector({}, {})
    manager.plan_save(pool.take(1), [b"a"])
    manager.submit(connector)
    (transfer,) = connector.under_way
    transfer.cancelled = True
    assert manager.take_in([transfer]) == []
    assert manager.find([b"a"]) == []
    manager.plan_save(pool.blocks, [b"a"])
    assert len(manager._planned) == 1


def test_a_slot_that_was_forgotten_in_mid_copy_is_given_once() -> None:
    store = HostBlockStore(2)
    gone = store.reserve(b"gone", ())
    assert gone is not None
    store.forget()
    store.discard(gone)
    slots = [block.slot for block in (store.reserve(b"a", ()), store.reserve(b"b", ())) if block is not None]
    assert sorted(slots) == [0, 1]


def test_what_the_host_lost_of_a_prefix_is_saved_again_when_the_prefix_grows() -> None:
    manager = KVCacheManager(4, BLOCK, num_host_blocks=4)
    assert manager.offload is not None
    connector = FakeConnector({}, {})
    request = Request("a", [1] * 6, SamplingParams())
    for num_computed in (4, 6):
        manager.allocate_slots(request, num_computed - request.num_computed_tokens)
        manager.offload.forget()
        num_new = num_computed - request.num_computed_tokens
        request.num_computed_tokens = num_computed
        manager.cache_blocks(request, num_new)
        manager.offload.submit(connector)
        connector.flush()
        manager.offload.take_in(connector.take_completed())
    assert len(manager.offload.find(request.block_hashes)) == 3


def test_a_load_does_not_push_out_the_prefix_that_it_continues() -> None:
    pool, hashes = BlockPool(4), chain("a", 4)
    manager, connector = OffloadingManager(pool, 4), FakeConnector({}, {})
    taken = pool.take(4)
    manager.plan_save(taken, hashes)
    manager.submit(connector)
    connector.flush()
    manager.take_in(connector.take_completed())
    for block, block_hash in zip(taken[:2], hashes, strict=False):
        pool.publish(block, block_hash)
    # The two of the prefix were freed first, so they would be given out first.
    pool.release(taken)
    manager.plan_load(taken[:2], manager.find(hashes[2:]))
    manager.submit(connector)
    connector.flush()
    manager.take_in(connector.take_completed())
    assert all(pool.find(block_hash) is not None for block_hash in hashes)


# --- any order of steps and of copies' ends -------------------------------------------------------------------------


class FakeConnector:
    """A connector to a pretended host, whose copies end when the test says so, and are done as late as that."""

    def __init__(self, device: dict[int, list[Any]], host: dict[int, list[Any]]) -> None:
        self.device = device
        self.host = host
        self.under_way: deque[Transfer] = deque()
        self.ended: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        self.under_way.append(transfer)

    def end_one(self, error: BaseException | None = None) -> None:
        transfer = self.under_way.popleft()
        for block, host_block in transfer.copies:
            source, target = (self.host, self.device) if transfer.is_load else (self.device, self.host)
            here, there = block.block_id, host_block.slot
            here, there = (there, here) if transfer.is_load else (here, there)
            target[there] = ["garbage"] * BLOCK if error else list(source.get(here, []))
        transfer.error = error
        self.ended.append(transfer)

    def flush(self) -> None:
        while self.under_way:
            self.end_one()

    def take_completed(self) -> list[Transfer]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        raise NotImplementedError

    @property
    def blocks(self) -> set[int]:
        """What copies under way read or write."""
        return {block.block_id for transfer in self.under_way for block, _ in transfer.copies}


class FakeWorker:
    """Writes into each slot all tokens up to it, and refuses to compute after anything else."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self.requests = requests
        self.device: dict[int, list[Any]] = {}
        self.kv_connector = FakeConnector(self.device, {})
        self.fails_next = False

    def execute_model(self, output: SchedulerOutput) -> dict[str, int]:
        sampled = {}
        for item in output.scheduled:
            tokens = self.requests[item.request_id].token_ids
            end = item.num_computed_tokens + item.num_tokens
            for position in range(end):
                block_id, offset = item.block_ids[position // BLOCK], position % BLOCK
                if position < item.num_computed_tokens:
                    assert self.device[block_id][offset] == tokens[: position + 1]
                else:
                    assert block_id not in self.kv_connector.blocks
                    self.device.setdefault(block_id, [None] * BLOCK)[offset] = tokens[: position + 1]
            if item.samples:
                sampled[item.request_id] = next_token(tokens)
        if self.fails_next:
            self.fails_next = False
            raise BrokenError
        return sampled


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) + len(tokens)) % 2


class OffloadedEngine(RuleBasedStateMachine):
    """Requests come and go, steps fail, copies end late or fail: contents and counts are always right."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(7, BLOCK, num_host_blocks=9)
        scheduler = Scheduler(self.manager, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=14, vocab_size=2)
        self.requests: dict[str, Request] = {}
        self.worker = FakeWorker(self.requests)
        self.connector = self.worker.kv_connector
        self.core = EngineCore(scheduler, self.worker)  # type: ignore[arg-type]
        self.num_cached = 0
        self.failed = False

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10), max_tokens=st.integers(1, 4))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        request = Request(str(len(self.requests)), prompt, SamplingParams(max_tokens=max_tokens))
        self.requests[request.request_id] = request
        self.core.scheduler.add_request(request)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.reported(self.core.step)
            self.the_count_adds_up()

    @rule()
    def step_that_fails(self) -> None:
        self.worker.fails_next = True
        with contextlib.suppress(BrokenError):
            self.reported(self.core.step)
        self.worker.fails_next = False

    @precondition(lambda self: self.connector.under_way)
    @rule(fails=st.booleans())
    def end_a_copy(self, fails: bool) -> None:
        self.connector.end_one(BrokenError() if fails else None)
        self.failed |= fails

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort([data.draw(st.sampled_from(sorted(self.requests)))])

    @rule()
    def reset(self) -> None:
        idle = not any(self.manager.block_ids(name) for name in self.requests)
        if self.failed:
            self.reported(self.core.reset_prefix_cache)
        assert self.core.reset_prefix_cache() is idle
        if idle:
            assert self.manager.usage.available == 7

    def reported(self, call: Callable[[], object]) -> None:
        """A failure is told once, by the first call after it; that call can be made again."""
        expected = pytest.raises(KVTransferError) if self.failed else contextlib.nullcontext()
        self.failed = False
        with expected:
            call()

    @invariant()
    def the_count_adds_up(self) -> None:
        usage = self.manager.usage
        of_requests = {block for name in self.requests for block in self.manager.block_ids(name)}
        assert usage.available + usage.evictable == usage.total - usage.held
        assert usage.held - usage.pending_transfer == len(of_requests)
        assert usage.pending_transfer >= len(self.connector.blocks - of_requests)

    def teardown(self) -> None:
        for _ in range(300):
            if not self.core.has_unfinished_requests():
                break
            self.reported(self.core.step)
        assert not self.core.has_unfinished_requests()
        for request in self.requests.values():
            tokens = list(request.prompt_token_ids)
            for token in request.output_token_ids:
                assert token == next_token(tokens)
                tokens.append(token)
        self.reset()


TestOffloadedEngine = OffloadedEngine.TestCase
TestOffloadedEngine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# --- the engine -----------------------------------------------------------------------------------------------------

BLOCK_BYTES = kv_cache_bytes_per_block(PRESETS["tiny"], 16)
PARAMS = SamplingParams(max_tokens=6)
# Each fills the whole device cache of `SMALL`, so each pushes the others out.
LONG = [[(7 * index + 101 * number) % 1000 for index in range(70)] for number in range(3)]
SMALL = {"num_blocks": 5, "kv_offload_bytes": 32 * BLOCK_BYTES}
ROOMY = {"num_blocks": 24, "kv_offload_bytes": 32 * BLOCK_BYTES}


class Gate:
    """Stands in every copy's way: counts those that came, holds them while shut, and lets them fail."""

    def __init__(self) -> None:
        self.copy = kv_offload._copy_bytes
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self.error: Exception | None = None
        self.num_copied = 0
        self.copying = False

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copying = True
        self.reached.set()
        assert self.opened.wait(HANG_S)
        try:
            if self.error is not None:
                raise self.error
            self.copy(target, source)
            self.num_copied += 1
        finally:
            self.copying = False

    def shut(self) -> None:
        self.opened.clear()
        self.reached.clear()

    def open_later(self, seconds: float = 0.1) -> threading.Timer:
        timer = threading.Timer(seconds, self.opened.set)
        timer.start()
        return timer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(kv_offload, "_copy_bytes", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_offload, "TIMEOUT_S", 0.05)


@pytest.fixture
def make(gate: Gate) -> Iterator[Callable[..., LLMEngine]]:
    engines: list[LLMEngine] = []

    def make(**changes: Any) -> LLMEngine:
        engine = LLMEngine(EngineConfig(**changes))
        engine.create()
        engines.append(engine)
        return engine

    yield make
    gate.opened.set()
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens of `LONG` without offload."""
    with LLMEngine(EngineConfig(num_blocks=64)) as engine:
        return [output.token_ids for output in engine.generate(LONG, PARAMS)]


def run(engine: LLMEngine, *prompts: Sequence[int]) -> list[RequestOutput]:
    return [engine.generate([prompt], PARAMS)[0] for prompt in prompts]


def prefill(engine: LLMEngine, prompt: Sequence[int]) -> None:
    """After its last step, four full blocks of the prompt are being copied."""
    engine.generate([prompt], SamplingParams(max_tokens=1))


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def connector_of(engine: LLMEngine) -> Any:
    assert isinstance(engine._core, EngineCore)
    return engine._core.worker.kv_connector


def footprint() -> tuple[Any, ...]:
    """Everything that must be as it was before the engine."""
    return (
        [(pool.kind, pool.tag, pool.mapped) for pool in announced_pools()],
        sum(survey_storages().sizes.values()),
        threading.active_count(),
        psutil.Process().num_fds(),
    )


def test_evicted_prefixes_come_back_from_the_host(
    make: Callable[..., LLMEngine], expected: list[tuple[int, ...]]
) -> None:
    engine = make(**SMALL)
    assert tokens(run(engine, *LONG)) == expected
    again = run(engine, *LONG)
    assert [output.num_cached_tokens for output in again] == [64, 64, 64]
    assert tokens(again) == expected
    without = make(num_blocks=5)
    assert [output.num_cached_tokens for output in run(without, *LONG, *LONG)] == [0] * 6


@pytest.mark.parametrize("num_blocks", [5, 8, 13])
@pytest.mark.parametrize("num_host_blocks", [1, 7, 40])
def test_a_batch_that_fights_for_blocks_gets_the_same_tokens(
    make: Callable[..., LLMEngine], expected: list[tuple[int, ...]], num_blocks: int, num_host_blocks: int
) -> None:
    engine = make(num_blocks=num_blocks, kv_offload_bytes=num_host_blocks * BLOCK_BYTES, max_num_batched_tokens=40)
    for _ in range(2):
        assert tokens(engine.generate([*LONG, *LONG], PARAMS)) == expected * 2
    assert engine.reset_prefix_cache()
    assert engine.kv_cache_usage().held == 0


def test_slots_that_do_not_fill_a_group_are_all_used(
    make: Callable[..., LLMEngine], expected: list[tuple[int, ...]]
) -> None:
    # 67 slots: a group of 64 that fills a huge page, and three more.
    engine = make(num_blocks=5, kv_offload_bytes=67 * BLOCK_BYTES)
    fillers = [[number] * 70 for number in range(14)]
    run(engine, *fillers, *LONG)
    again = run(engine, *LONG)
    assert tokens(again) == expected
    assert [output.num_cached_tokens for output in again] == [64, 64, 64]
    (pool,) = [pool for pool in announced_pools() if pool.tag == "offloaded kv cache"]
    assert 67 * BLOCK_BYTES <= pool.mapped < 68 * BLOCK_BYTES


def test_blocks_that_are_copied_are_held_and_distinguished(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(**ROOMY)
    gate.shut()
    prefill(engine, LONG[0])
    usage = engine.kv_cache_usage()
    assert (usage.held, usage.pending_transfer) == (4, 4)
    assert usage.available + usage.evictable == usage.total - usage.held
    engine.add_request(LONG[1], PARAMS)
    engine.step()
    usage = engine.kv_cache_usage()
    assert (usage.held, usage.pending_transfer) == (9, 4)


def test_blocks_that_are_copied_are_given_to_nobody_else(
    make: Callable[..., LLMEngine], gate: Gate, impatient: None, expected: list[tuple[int, ...]]
) -> None:
    engine = make(**SMALL)
    gate.shut()
    prefill(engine, LONG[0])
    engine.add_request(LONG[1], PARAMS, request_id="next")
    with pytest.raises(KVTransferError, match=r"have not ended after 0\.05 s"):
        engine.step()
    assert engine.kv_cache_usage().held == engine.kv_cache_usage().pending_transfer == 4
    gate.opened.set()
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert tokens(outputs) == [expected[1]]
    assert run(engine, LONG[0])[0].num_cached_tokens == 64


def test_a_load_runs_beside_the_step_that_planned_it(
    make: Callable[..., LLMEngine], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(num_blocks=12, kv_offload_bytes=32 * BLOCK_BYTES)
    run(engine, *LONG, [9] * 70)
    engine.step()
    assert isinstance(engine._core, EngineCore)
    worker, begun = engine._core.worker, []
    execute = worker.execute_model

    def execute_model(output: SchedulerOutput) -> dict[str, int]:
        begun.append(gate.reached.wait(HANG_S))
        return execute(output)

    engine.add_request([1], SamplingParams(max_tokens=8))
    engine.step()
    gate.shut()
    engine.add_request(LONG[0], PARAMS)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "execute_model", execute_model)
        engine.step()
    assert begun == [True]


def test_a_request_waits_for_room_rather_than_compute_what_the_host_has(make: Callable[..., LLMEngine]) -> None:
    engine = make(num_blocks=7, kv_offload_bytes=32 * BLOCK_BYTES, max_num_batched_tokens=48)
    run(engine, *LONG)
    engine.add_request([5] * 40, SamplingParams(max_tokens=4))
    engine.step()
    # Four blocks are free: enough for a first chunk of it, but not for what the host has and the rest.
    name = engine.add_request(LONG[0], PARAMS)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs[name].num_cached_tokens == 64


def test_who_has_room_runs_on_while_another_waits_for_blocks(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(num_blocks=7, kv_offload_bytes=32 * BLOCK_BYTES)
    gate.shut()
    prefill(engine, LONG[0])
    first = engine.add_request([5] * 32, SamplingParams(max_tokens=3))
    second = engine.add_request([6] * 3, SamplingParams(max_tokens=3))
    late = engine.add_request([7] * 3, SamplingParams(max_tokens=3))
    assert [output.request_id for output in engine.step()] == [first, second]
    # The first needs a third block, and none is free.
    assert [output.request_id for output in engine.step()] == [second]
    gate.opened.set()
    connector_of(engine).flush()
    assert [output.request_id for output in engine.step()] == [first, second, late]


def test_who_comes_takes_no_block_that_another_waits_for(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(num_blocks=8, kv_offload_bytes=32 * BLOCK_BYTES, max_num_batched_tokens=48)
    gate.shut()
    prefill(engine, LONG[0])
    first = engine.add_request([5] * 80, SamplingParams(max_tokens=1))
    engine.step()
    # Two blocks are missing, and one is free.
    late = engine.add_request([7] * 3, SamplingParams(max_tokens=1))
    timer = gate.open_later()
    assert engine.step() == []
    timer.join()
    assert [output.request_id for output in engine.step()] == [first, late]


def test_nobody_gives_way_while_blocks_are_about_to_come_free(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(num_blocks=6, kv_offload_bytes=32 * BLOCK_BYTES)
    gate.shut()
    prefill(engine, LONG[0])
    # Two blocks are left, and the third is needed while four are copied.
    engine.add_request([5] * 32, SamplingParams(max_tokens=3))
    engine.step()
    gate.open_later()
    while engine.has_unfinished_requests():
        assert isinstance(engine._core, EngineCore)
        assert [request.num_preemptions for request in engine._core.scheduler.running] == [0]
        engine.step()


def test_a_step_without_requests_takes_completions_in(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(**ROOMY)
    gate.shut()
    prefill(engine, LONG[0])
    assert engine.step() == []
    assert engine.kv_cache_usage().pending_transfer == 4
    gate.opened.set()
    connector_of(engine).flush()
    assert engine.kv_cache_usage().pending_transfer == 4
    assert engine.step() == []
    assert engine.kv_cache_usage().held == 0


def test_a_reset_drains_by_itself(make: Callable[..., LLMEngine], gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(**ROOMY)
    gate.shut()
    prefill(engine, LONG[0])
    monkeypatch.setattr(EngineCore, "step", None)
    gate.open_later()
    assert engine.reset_prefix_cache()
    usage = engine.kv_cache_usage()
    assert (usage.available, usage.held) == (usage.total, 0)


def test_without_the_drain_blocks_are_held_until_a_request_comes_by(
    make: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#38503, put back by replacing one method."""
    monkeypatch.setattr(EngineCore, "drain_transfers", lambda self: None)
    engine = make(**ROOMY)
    prefill(engine, LONG[0])
    connector_of(engine).flush()
    assert [engine.reset_prefix_cache() for _ in range(3)] == [False] * 3
    assert engine.kv_cache_usage().pending_transfer == 4
    # Sleeping is safe all the same: no page goes under a copy, and no contents outlive their pages.
    engine.sleep()
    engine.wake()
    assert engine.kv_cache_usage().pending_transfer == 4
    assert run(engine, LONG[0])[0].num_cached_tokens == 0


def test_a_reset_forgets_what_the_host_has(make: Callable[..., LLMEngine], expected: list[tuple[int, ...]]) -> None:
    engine = make(**ROOMY)
    run(engine, LONG[0])
    assert run(engine, LONG[0])[0].num_cached_tokens == 64
    assert engine.reset_prefix_cache()
    (cold,) = run(engine, LONG[0])
    assert (cold.num_cached_tokens, cold.token_ids) == (0, expected[0])


def test_a_reset_with_running_requests_forgets_nothing(make: Callable[..., LLMEngine]) -> None:
    engine = make(**ROOMY)
    run(engine, LONG[0])
    engine.add_request(LONG[1], PARAMS)
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort([request.request_id for request in engine._core.scheduler.running])  # type: ignore[union-attr]
    assert run(engine, LONG[0])[0].num_cached_tokens == 64


def test_a_reset_while_copies_are_stuck_says_so_and_can_be_tried_again(
    make: Callable[..., LLMEngine], gate: Gate, impatient: None
) -> None:
    engine = make(**ROOMY)
    gate.shut()
    prefill(engine, LONG[0])
    with pytest.raises(KVTransferError, match="try again, or shut the engine down"):
        engine.reset_prefix_cache()
    assert (engine.state, engine.kv_cache_usage().pending_transfer) == (EngineState.RUNNING, 4)
    gate.opened.set()
    assert run(engine, LONG[0])[0].num_cached_tokens == 64
    assert engine.reset_prefix_cache()


def test_an_interrupted_drain_can_be_tried_again(make: Callable[..., LLMEngine], gate: Gate) -> None:
    engine = make(**ROOMY)
    gate.shut()
    prefill(engine, LONG[0])
    main = threading.main_thread().ident
    assert main is not None
    # A shell starts its background jobs deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.reset_prefix_cache()
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine.kv_cache_usage().pending_transfer == 4
    gate.opened.set()
    assert engine.reset_prefix_cache()
    assert engine.kv_cache_usage().held == 0


@pytest.mark.parametrize("lost", ["take_completed", "begin"])
def test_an_interrupt_beside_a_drain_loses_no_block(
    make: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    engine = make(**ROOMY)
    connector = connector_of(engine)

    def interrupted(*args: object) -> None:
        if lost == "take_completed":
            real()
        raise KeyboardInterrupt

    real = connector.take_completed
    if lost == "take_completed":
        run(engine, LONG[0])
    with monkeypatch.context() as patched:
        patched.setattr(connector, lost, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.reset_prefix_cache() if lost == "take_completed" else run(engine, LONG[0])
    assert engine.reset_prefix_cache()
    assert engine.kv_cache_usage().available == 24


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "reset_prefix_cache", "sleep", "reload_weights"])
def test_a_failed_copy_is_reported_once_and_costs_only_itself(
    make: Callable[..., LLMEngine], gate: Gate, call: str, expected: list[tuple[int, ...]]
) -> None:
    engine = make(**ROOMY)
    gate.error = BrokenError("bus")
    prefill(engine, LONG[0])
    connector_of(engine).flush()
    before = sum(survey_storages().sizes.values())
    gate.error = None
    with pytest.raises(KVTransferError, match=r"1 transfers .* failed \(BrokenError\('bus'\)\)") as caught:
        getattr(engine, call)()
    assert isinstance(caught.value.__cause__, BrokenError)
    assert sum(survey_storages().sizes.values()) == before
    assert engine.state is EngineState.RUNNING
    assert engine.kv_cache_usage().held == 0
    assert tokens(run(engine, *LONG)) == expected
    assert engine.reset_prefix_cache()


def test_what_failed_to_be_copied_is_not_loaded(
    make: Callable[..., LLMEngine], gate: Gate, expected: list[tuple[int, ...]]
) -> None:
    engine = make(**SMALL)
    gate.error = BrokenError("bus")
    prefill(engine, LONG[0])
    connector_of(engine).flush()
    gate.error = None
    with pytest.raises(KVTransferError):
        engine.step()
    run(engine, LONG[1])
    (again,) = run(engine, LONG[0])
    assert (again.num_cached_tokens, again.token_ids) == (0, expected[0])


def test_a_failed_load_is_computed_again(
    make: Callable[..., LLMEngine], gate: Gate, expected: list[tuple[int, ...]]
) -> None:
    engine = make(**SMALL)
    run(engine, *LONG)
    engine.add_request(LONG[0], PARAMS)
    gate.error = BrokenError("bus")
    with pytest.raises(KVTransferError, match="computed again when it is needed"):
        engine.step()
    gate.error = None
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert (outputs[0].token_ids, outputs[0].num_cached_tokens) == (expected[0], 0)


def test_a_request_aborted_in_mid_load_leaves_its_blocks_in_the_prefix_cache(
    make: Callable[..., LLMEngine], gate: Gate
) -> None:
    engine = make(num_blocks=12, kv_offload_bytes=32 * BLOCK_BYTES)
    run(engine, *LONG)
    # Four more, so that nothing of the first is on the device.
    run(engine, [9] * 70)
    engine.step()
    # It runs beside the load, so that no step waits for the load.
    engine.add_request([1], SamplingParams(max_tokens=8))
    engine.step()
    gate.shut()
    loading = engine.add_request(LONG[0], PARAMS)
    engine.step()
    assert engine.kv_cache_usage().pending_transfer == 4
    engine.step()
    assert engine.kv_cache_usage().pending_transfer == 4
    engine.abort(loading)
    assert engine.kv_cache_usage().pending_transfer == 4
    gate.opened.set()
    connector_of(engine).flush()
    engine.step()
    usage = engine.kv_cache_usage()
    assert (usage.held, usage.pending_transfer) == (1, 0)
    assert usage.evictable >= 4


def test_too_little_host_memory_is_missed_in_create_and_nothing_is_kept() -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(num_blocks=8, kv_offload_bytes=1 << 50))
    with pytest.raises(OutOfMemoryError, match="lower kv_offload_bytes"):
        engine.create()
    assert footprint() == before
    assert engine.state is EngineState.NEW
    engine.shutdown()


def test_a_create_that_fails_after_the_connector_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = footprint()
    monkeypatch.setattr("lowtide.engine.worker.HeapFreeze.freeze", lambda self: 1 / 0)
    engine = LLMEngine(EngineConfig(**SMALL, freeze_heap=True))
    with pytest.raises(ZeroDivisionError):
        engine.create()
    assert footprint() == before


def test_a_create_that_is_interrupted_after_the_worker_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = footprint()
    made: list[Any] = []
    real = kv_offload.OffloadingConnector

    def make_and_fail(*args: Any) -> Any:
        made.append(real(*args))
        return made[0]

    monkeypatch.setattr("lowtide.engine.worker.OffloadingConnector", make_and_fail)
    monkeypatch.setattr("lowtide.engine.core.EngineCore", lambda *args, **settings: 1 / 0)
    engine = LLMEngine(EngineConfig(**SMALL))
    with pytest.raises(ZeroDivisionError):
        engine.create()
    assert made
    made.clear()
    wait_until(lambda: footprint() == before)


# --- pinning --------------------------------------------------------------------------------------------------------


class PinningPages(CpuPages):
    """CPU pages that keep the books of pinning, refuse it from some point on, and watch what is unmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.pins_host_memory = True
        self.refuses = False
        self.interrupted_at: int | None = None
        self.pinned: dict[int, int] = {}
        self.on_unmap: Callable[[], None] = lambda: None

    def pin(self, address: int, size: int) -> None:
        if self.refuses:
            raise OutOfMemoryError("limit on locked memory")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        if self.interrupted_at is not None:
            self.interrupted_at -= 1
            if self.interrupted_at < 0:
                self.interrupted_at = None
                raise KeyboardInterrupt
        del self.pinned[address]

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        return super().map(lease, offset, size)

    def unmap(self, lease: Lease, part: Part) -> None:
        self.on_unmap()
        super().unmap(lease, part)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> PinningPages:
    pages = PinningPages()
    monkeypatch.setattr("lowtide.engine.worker.open_backend", lambda device: pages)
    return pages


def test_whatever_ctrl_c_keeps_from_being_unpinned_at_a_shutdown_is_unpinned_at_the_next(
    pages: PinningPages, make: Callable[..., LLMEngine]
) -> None:
    held: list[set[str]] = []
    while True:
        engine = make(**SMALL, kv_transport_bytes=1 << 16, keep_host_copy=True)
        run(engine, *LONG)
        engine.sleep(1)
        engine.wake()
        pages.interrupted_at = len(held)
        try:
            engine.shutdown()
        except BaseExceptionGroup:
            held.append({pool.tag for pool in announced_pools() if pool.kind == "pinned"})
        else:
            break
        assert pages.pinned
        engine.shutdown()
        assert pages.pinned == {}
        assert announced_pools() == ()
        del engine
    assert set.union(*held) == {"offloaded kv cache", "kv transport", "sleeping weights", "transfer ring"}
    assert all(len(tags) == 1 for tags in held)


def offloaded_pools() -> list[tuple[str, int]]:
    return [(pool.kind, pool.mapped) for pool in announced_pools() if pool.tag == "offloaded kv cache"]


def test_host_memory_is_pinned_when_it_is_first_used_and_unpinned_at_shutdown(
    pages: PinningPages, make: Callable[..., LLMEngine]
) -> None:
    engine = make(**SMALL)
    before = dict(pages.pinned)
    assert offloaded_pools() == []
    run(engine, LONG[0])
    connector_of(engine).flush()
    assert sum(pages.pinned.values()) - sum(before.values()) == 32 * BLOCK_BYTES
    assert offloaded_pools() == [("pinned", 32 * BLOCK_BYTES)]
    engine.shutdown()
    assert pages.pinned == {}
    assert offloaded_pools() == []


def test_a_shutdown_tells_of_memory_that_could_not_be_unpinned(
    pages: PinningPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(EngineConfig(**SMALL))
    engine.create()
    before = set(pages.pinned)
    run(engine, LONG[0])
    connector_of(engine).flush()
    unpin = pages.unpin

    def refuse(address: int) -> None:
        if address not in before:
            raise BrokenError("busy")
        unpin(address)

    with monkeypatch.context() as patched:
        patched.setattr(pages, "unpin", refuse)
        with pytest.raises(BaseExceptionGroup) as caught:
            engine.shutdown()
    assert "busy" in repr(caught.value.exceptions)
    assert set(pages.pinned).isdisjoint(before)
    assert [kind for kind, _ in offloaded_pools()] == ["pinned"]
    engine.shutdown()
    assert pages.pinned == {}
    assert offloaded_pools() == []


def test_memory_that_may_not_be_pinned_is_used_all_the_same(
    pages: PinningPages, make: Callable[..., LLMEngine], expected: list[tuple[int, ...]]
) -> None:
    engine = make(**SMALL)
    pages.refuses = True
    run(engine, *LONG)
    again = run(engine, *LONG)
    assert (tokens(again), again[0].num_cached_tokens) == (expected, 64)
    assert [kind for kind, _ in offloaded_pools()] == ["host"]


# --- sleep and shutdown ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["wait", "abort"])
@pytest.mark.parametrize("drains", [True, False])
def test_no_page_goes_under_a_copy(
    pages: PinningPages,
    make: Callable[..., LLMEngine],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    mode: Any,
    drains: bool,
) -> None:
    if not drains:
        monkeypatch.setattr(EngineCore, "drain_transfers", lambda self: None)
    engine = make(**ROOMY)
    gate.shut()
    engine.add_request(LONG[0], PARAMS)
    engine.step()
    assert gate.reached.wait(HANG_S)
    copying: list[bool] = []
    pages.on_unmap = lambda: copying.append(gate.copying)
    gate.open_later()
    engine.sleep(level, mode)
    assert copying
    assert not any(copying)
    usage = engine.kv_cache_usage()
    assert usage.evictable == 0
    assert (usage.held == 0) is drains


def test_a_sleep_while_copies_are_stuck_changes_nothing(
    make: Callable[..., LLMEngine], gate: Gate, impatient: None, expected: list[tuple[int, ...]]
) -> None:
    engine = make(**ROOMY)
    gate.shut()
    engine.add_request(LONG[0], PARAMS, request_id="kept")
    engine.step()
    mapped = engine.memory_mapped()
    with pytest.raises(KVTransferError, match="have not ended"):
        engine.sleep(1, "abort")
    assert (engine.state, engine.memory_mapped()) == (EngineState.RUNNING, mapped)
    gate.opened.set()
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert tokens(outputs) == expected[:1]
    engine.sleep()


@pytest.mark.parametrize("level", [1, 2])
def test_the_kv_of_old_weights_never_comes_back(make: Callable[..., LLMEngine], level: int) -> None:
    def change(engine: LLMEngine) -> None:
        model: Any = engine._core.worker.model_runner.model  # type: ignore[union-attr]
        with torch.no_grad():
            model.model.norm.weight.mul_(-1)
            for name, parameter in model.named_parameters():
                if name.endswith("v_proj.weight"):
                    parameter.neg_()

    fresh = make(num_blocks=64)
    change(fresh)
    new = tokens(run(fresh, *LONG))
    engine = make(**SMALL)
    assert tokens(run(engine, *LONG)) != new
    engine.sleep(level)
    engine.wake("weights")
    change(engine)
    engine.wake("kv_cache")
    assert [(output.num_cached_tokens, output.token_ids) for output in run(engine, *LONG)] == [
        (0, wanted) for wanted in new
    ]


def _has_ended(completed: Any) -> bool:
    return bool(completed.qsize())


def test_nothing_is_left_by_reference_count_alone() -> None:
    gc.collect()
    gc.disable()
    try:
        before = footprint()
        engine = LLMEngine(EngineConfig(**SMALL))
        engine.create()
        run(engine, *LONG, *LONG)
        engine.sleep()
        engine.wake()
        run(engine, *LONG)
        engine.shutdown()
        assert footprint() == before
    finally:
        gc.enable()


def test_a_shutdown_in_mid_transfer_waits_for_one_copy_and_cancels_the_rest(gate: Gate) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(**ROOMY))
    engine.create()
    gate.shut()
    run(engine, *LONG)
    assert gate.reached.wait(HANG_S)
    manager = engine._core.scheduler.kv_cache_manager  # type: ignore[union-attr]
    timer = gate.open_later()
    engine.shutdown()
    timer.join()
    # Keys and values of four layers: the block under way, of twelve.
    assert gate.num_copied == 8
    assert manager.usage.held == 0
    assert footprint() == before
    engine.shutdown()


def test_a_shutdown_tells_of_copies_that_failed(gate: Gate) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(**ROOMY))
    engine.create()
    gate.error = BrokenError("bus")
    prefill(engine, LONG[0])
    connector_of(engine).flush()
    with pytest.raises(BaseExceptionGroup, match="the KV transfers failed") as caught:
        engine.shutdown()
    (error,) = caught.value.exceptions
    assert isinstance(error, KVTransferError)
    assert engine.state is EngineState.CLOSED
    assert footprint() == before


def test_a_shutdown_with_a_stuck_copy_ends_and_its_memory_goes_with_the_copy(gate: Gate, impatient: None) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(**ROOMY))
    engine.create()
    gate.shut()
    prefill(engine, LONG[0])
    assert gate.reached.wait(HANG_S)
    with pytest.raises(BaseExceptionGroup, match="the worker failed") as caught:
        engine.shutdown()
    assert "the memory that it uses stays until it ends" in repr(caught.value.exceptions)
    assert engine.state is EngineState.CLOSED
    assert any(thread.name == THREAD for thread in threading.enumerate())
    assert [pool.tag for pool in announced_pools() if pool.mapped] == ["kv_cache", "offloaded kv cache"]
    gate.opened.set()
    wait_until(lambda: footprint() == before)
    engine.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_dropped_without_a_shutdown_ends_its_thread(gate: Gate, fails: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before = footprint()
        engine = LLMEngine(EngineConfig(**SMALL))
        engine.create()
        gate.error = BrokenError("bus") if fails else None
        prefill(engine, LONG[0])
        # No flush: the last that the thread did is the copy.
        wait_until(partial(_has_ended, connector_of(engine)._completed))
        del engine
        wait_until(lambda: footprint() == before)
    finally:
        gc.enable()


def test_the_defect_of_the_workers_shutdown_keeps_no_thread_and_no_host_memory() -> None:
    engine = LLMEngine(EngineConfig(**SMALL))
    engine.create()
    run(engine, LONG[0])
    with find_defect("worker-keeps-everything").activate():
        engine.shutdown()
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    assert offloaded_pools() == []


def test_no_thread_and_no_host_memory_without_offload(make: Callable[..., LLMEngine]) -> None:
    engine = make(num_blocks=8)
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    assert offloaded_pools() == []
    assert connector_of(engine) is None
    assert engine._core.scheduler.kv_cache_manager.offload is None  # type: ignore[union-attr]
