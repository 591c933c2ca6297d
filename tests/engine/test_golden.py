"""Greedy tokens equal those of transformers, whatever way the engine takes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lowtide.engine.config import read_model_config
from lowtide.engine.request import SamplingParams
from tests.engine.rank_threads import on_ranks

pytestmark = pytest.mark.nightly

GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SMALL = {"block_size": 8, "num_blocks": 256, "max_num_seqs": 16}


def test_a_whole_batch_at_once(golden: Any, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(model=str(golden.folder), **SMALL)
    outputs = loop.generate(golden.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == list(golden.tokens)


def test_prompts_in_chunks_with_prefix_hits(golden: Any, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(model=str(golden.folder), max_num_batched_tokens=24, **SMALL)
    outputs = loop.generate(golden.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == list(golden.tokens)
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 2
    chunks = [item for step in loop.steps for item in step.scheduled if item.num_tokens > 1 and not item.samples]
    assert chunks


def test_requests_that_were_preempted(golden: Any, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(model=str(golden.folder), **{**SMALL, "num_blocks": 40}, max_num_batched_tokens=64)
    outputs = loop.generate(golden.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == list(golden.tokens)
    assert any(step.preempted_ids for step in loop.steps)


def test_two_micro_batches(golden: Any, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(model=str(golden.folder), num_micro_batches=2, max_num_batched_tokens=24, **SMALL)
    outputs = loop.generate(golden.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == list(golden.tokens)


def test_a_second_time_from_the_prefix_cache(golden: Any, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(model=str(golden.folder), **SMALL)
    loop.generate(golden.prompts, GREEDY)
    outputs = loop.generate(golden.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == list(golden.tokens)
    assert all(output.num_cached_tokens > 0 for output in outputs if len(output.prompt_token_ids) > 8)


def test_two_ranks(golden: Any, make_loop: Callable[..., Any]) -> None:
    if read_model_config(golden.folder).num_kv_heads % 2:
        pytest.skip("this variety has one key head, which is not divided")

    def generate(rank: Any) -> list[tuple[int, ...]]:
        loop = make_loop(model=str(golden.folder), group=rank, max_num_batched_tokens=24, **SMALL)
        return [output.token_ids for output in loop.generate(golden.prompts, GREEDY)]

    assert on_ranks(2, generate) == [list(golden.tokens)] * 2
