"""Greedy tokens equal those of transformers at every point of an engine's life."""

from __future__ import annotations

from typing import Any

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams

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
