"""Greedy tokens equal those of transformers at every point of an engine's life."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.config import read_model_config

pytestmark = pytest.mark.nightly

GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


def test_before_and_after_either_sleep(golden: Any) -> None:
    config = EngineConfig(model=str(golden.folder), block_size=8, num_blocks=256, max_num_batched_tokens=24)
    with LLMEngine(config) as engine:
        for level in (None, 1, 2, 1):
            if level is not None:
                engine.sleep(level)
                engine.wake()
            outputs = engine.generate(golden.prompts, GREEDY)
            assert [output.token_ids for output in outputs] == list(golden.tokens)
            assert sum(output.num_cached_tokens > 0 for output in outputs) >= 2


def test_on_two_ranks_in_processes_of_their_own(golden: Any) -> None:
    if read_model_config(golden.folder).num_kv_heads % 2:
        pytest.skip("this variety has one key head, which is not divided")
    config = EngineConfig(
        model=str(golden.folder), block_size=8, num_blocks=256, max_num_batched_tokens=24, tensor_parallel_size=2
    )
    with LLMEngine(config) as engine:
        for level in (None, 1, 2):
            if level is not None:
                engine.sleep(level)
                engine.wake()
            outputs = engine.generate(golden.prompts, GREEDY)
            assert [output.token_ids for output in outputs] == list(golden.tokens)
