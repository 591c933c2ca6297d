"""KV blocks: who holds them, who shares them, and that the count always adds up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lowtide.engine.config import PRESETS
from lowtide.engine.errors import EngineError
from lowtide.engine.kv.kv_cache import (
    BlockPool,
    KVCache,
    KVCacheManager,
    KVCacheUsage,
    kv_cache_bytes_per_block,
    kv_cache_shape,
)
from lowtide.engine.request import Request, SamplingParams

BLOCK = 4


def request(request_id: str, tokens: list[int]) -> Request:
    return Request(request_id, tokens, SamplingParams())


def run(manager: KVCacheManager, made: Request) -> Request:
    """Computes all tokens of a request in one step."""
    found = manager.get_computed_blocks(made)
    num_computed = len(found) * manager.block_size
    assert manager.allocate_slots(made, made.num_tokens - num_computed, found) is not None
    made.num_computed_tokens = made.num_tokens
    manager.cache_blocks(made, made.num_tokens - num_computed)
    return made


def test_a_prefix_is_shared_block_by_block() -> None:
    manager = KVCacheManager(8, BLOCK)
    run(manager, request("a", [1] * 4 + [2] * 4 + [3]))
    second = request("b", [1] * 4 + [2] * 4 + [9] * 4)
    found = manager.get_computed_blocks(second)
    assert [block.block_id for block in found] == list(manager.block_ids("a"))[:2]
    run(manager, second)
    assert manager.usage == KVCacheUsage(total=8, available=4, evictable=0, held=4)


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    manager = KVCacheManager(8, BLOCK)
    run(manager, request("a", [1] * 4 + [2] * 4))
    assert manager.get_computed_blocks(request("b", [7] * 4 + [2] * 4 + [0])) == []


@pytest.mark.parametrize(("num_tokens", "num_found"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, num_found: int) -> None:
    manager = KVCacheManager(8, BLOCK)
    run(manager, request("a", [1] * 12))
    assert len(manager.get_computed_blocks(request("b", [1] * num_tokens))) == num_found


def test_a_block_is_found_only_once_it_is_computed() -> None:
    manager = KVCacheManager(8, BLOCK)
    manager.allocate_slots(request("a", [1] * 8), 8)
    assert manager.get_computed_blocks(request("b", [1] * 8)) == []


def test_a_block_that_is_not_full_is_not_found() -> None:
    manager = KVCacheManager(8, BLOCK)
    made = request("a", [1] * 8)
    manager.allocate_slots(made, 7)
    made.num_computed_tokens = 7
    manager.cache_blocks(made, 7)
    assert len(manager.get_computed_blocks(request("b", [1] * 9))) == 1


def test_generated_tokens_are_found_too() -> None:
    manager = KVCacheManager(8, BLOCK)
    made = run(manager, request("a", [1] * 6))
    made.token_ids += [5, 6]
    manager.allocate_slots(made, 2)
    made.num_computed_tokens = 8
    manager.cache_blocks(made, 2)
    assert len(manager.get_computed_blocks(request("b", [1] * 6 + [5, 6, 0]))) == 2


def test_freed_blocks_are_found_until_they_are_needed() -> None:
    manager = KVCacheManager(4, BLOCK)
    manager.free(run(manager, request("a", [1] * 8)))
    assert manager.usage == KVCacheUsage(total=4, available=2, evictable=2, held=0)
    assert len(manager.get_computed_blocks(request("b", [1] * 9))) == 2
    run(manager, request("c", [2] * 16))
    assert manager.get_computed_blocks(request("b", [1] * 9)) == []


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    manager = KVCacheManager(4, BLOCK)
    manager.free(run(manager, request("a", [1] * 16)))
    run(manager, request("c", [2] * 4))
    assert len(manager.get_computed_blocks(request("b", [1] * 17))) == 3


def test_what_was_freed_longest_ago_is_evicted_first() -> None:
    manager = KVCacheManager(2, BLOCK)
    first, second = run(manager, request("a", [1] * 4)), run(manager, request("b", [2] * 4))
    manager.free(second)
    manager.free(first)
    run(manager, request("c", [3] * 4))
    assert len(manager.get_computed_blocks(request("d", [1] * 5))) == 1
    assert manager.get_computed_blocks(request("d", [2] * 5)) == []


def test_too_few_blocks_change_nothing() -> None:
    manager = KVCacheManager(3, BLOCK)
    manager.free(run(manager, request("a", [1] * 8)))
    before = manager.usage
    wanting = request("b", [1] * 8 + [2] * 8)
    # Two blocks are found and one is free besides: the two that are found do not count as free for the rest.
    assert manager.allocate_slots(wanting, 8, manager.get_computed_blocks(wanting)) is None
    assert manager.usage == before
    assert list(manager.block_ids("b")) == []


def test_room_that_is_there_is_not_taken_twice() -> None:
    manager = KVCacheManager(4, BLOCK)
    made = request("a", [1] * 8)
    assert len(manager.allocate_slots(made, 8) or ()) == 2
    assert manager.allocate_slots(made, 8) == []


def test_a_shared_block_stays_while_anybody_holds_it() -> None:
    manager = KVCacheManager(4, BLOCK)
    first, second = run(manager, request("a", [1] * 8)), run(manager, request("b", [1] * 8))
    manager.free(first)
    assert manager.usage.held == 2
    manager.free(second)
    assert manager.usage.held == 0


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(EngineError, match="KV block 0 is released twice"):
        pool.release(blocks)


def test_taking_more_than_there_is_is_an_error() -> None:
    with pytest.raises(EngineError, match="3 KV blocks were asked for and 2 are free"):
        BlockPool(2).take(3)


def test_freeing_a_request_that_holds_nothing_is_nothing() -> None:
    manager = KVCacheManager(2, BLOCK)
    manager.free(request("a", [1]))
    assert manager.usage.available == 2


def test_reset_forgets_every_prefix() -> None:
    manager = KVCacheManager(4, BLOCK)
    manager.free(run(manager, request("a", [1] * 8)))
    assert manager.reset_prefix_cache()
    assert manager.usage == KVCacheUsage(total=4, available=4, evictable=0, held=0)
    assert manager.get_computed_blocks(request("b", [1] * 8)) == []


def test_reset_is_refused_while_blocks_are_held() -> None:
    manager = KVCacheManager(4, BLOCK)
    made = run(manager, request("a", [1] * 8))
    assert not manager.reset_prefix_cache()
    assert len(manager.get_computed_blocks(request("b", [1] * 9))) == 2
    manager.free(made)


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(4, BLOCK, enable_prefix_caching=False)
    manager.free(run(manager, request("a", [1] * 8)))
    assert manager.get_computed_blocks(request("b", [1] * 9)) == []
    assert manager.usage.available == 4


def test_the_cache_asks_for_keys_and_values_of_each_layer() -> None:
    tiny = PRESETS["tiny"]
    cache = KVCache(tiny, 3, BLOCK, lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype))
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert {tuple(tensor.shape) for tensor in tensors} == {kv_cache_shape(tiny, 3, BLOCK)}
    assert sum(tensor.nbytes for tensor in tensors) == 3 * kv_cache_bytes_per_block(tiny, BLOCK)


class BlockAccounting(RuleBasedStateMachine):
    """Any order of operations, against a model that knows which tokens each block of a request must hold."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(10, 2)
        self.requests: dict[str, Request] = {}
        self.contents: dict[int, tuple[int, ...]] = {}
        self.count = 0

    @rule(target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, tokens: list[int]) -> object:
        made = request(str(self.count), tokens)
        self.count += 1
        found = self.manager.get_computed_blocks(made)
        for index, block in enumerate(found):
            assert self.contents[block.block_id] == tuple(tokens[: 2 * (index + 1)])
        free = self.manager.usage.free
        new = len(tokens) - 2 * len(found)
        if self.manager.allocate_slots(made, new, found) is None:
            assert self.manager.usage.free == free
            assert not self.manager.block_ids(made.request_id)
            return multiple()
        self.requests[made.request_id] = made
        made.num_computed_tokens = len(tokens)
        self.write(made, 2 * len(found))
        self.manager.cache_blocks(made, new)
        return made

    @rule(made=running, token=st.integers(0, 1))
    def grow(self, made: Request, token: int) -> None:
        if made.request_id not in self.requests:
            return
        if self.manager.allocate_slots(made, 1) is None:
            assert self.manager.usage.free == 0
            return
        made.token_ids.append(token)
        made.num_computed_tokens += 1
        self.write(made, made.num_computed_tokens - 1)
        self.manager.cache_blocks(made, 1)

    @rule(made=consumes(running))
    def finish(self, made: Request) -> None:
        self.requests.pop(made.request_id)
        self.manager.free(made)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.requests)

    def write(self, made: Request, start: int) -> None:
        ids = self.manager.block_ids(made.request_id)
        for index in range(start // 2, len(ids)):
            others = [other for other in self.requests.values() if other is not made]
            assert all(ids[index] not in self.manager.block_ids(other.request_id) for other in others)
            self.contents[ids[index]] = tuple(made.token_ids[: min(2 * (index + 1), made.num_computed_tokens)])

    @invariant()
    def the_count_adds_up(self) -> None:
        usage = self.manager.usage
        held = {block for made in self.requests.values() for block in self.manager.block_ids(made.request_id)}
        assert usage.available + usage.evictable == usage.total - usage.held
        assert usage.held == len(held)

    @invariant()
    def every_request_still_has_its_tokens(self) -> None:
        for made in self.requests.values():
            for index, block_id in enumerate(self.manager.block_ids(made.request_id)):
                end = min(2 * (index + 1), made.num_computed_tokens)
                assert self.contents[block_id] == tuple(made.token_ids[:end])


TestBlockAccounting = BlockAccounting.TestCase
TestBlockAccounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
