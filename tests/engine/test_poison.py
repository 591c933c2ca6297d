"""Pages that a wake maps are poisoned where that was asked for, and only what nobody fills keeps the poison."""

from __future__ import annotations

import pytest
import torch

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.core import EngineCore
from lowtide.engine.device_allocator.memory import POISON


def asleep_and_awake(level: int, *, poison: bool) -> tuple[LLMEngine, list[tuple[int, ...]]]:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=1 << 20, poison_pages=poison))
    engine.create()
    tokens = [tuple(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids)]
    engine.sleep(level)
    engine.wake()
    assert isinstance(engine._core, EngineCore)
    keys, _ = engine._core.worker.model_runner._kv_cache.layers[0]
    found = keys.view(torch.uint8).unique().tolist()
    assert found == ([POISON] if poison else [0])
    tokens.append(tuple(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids))
    return engine, tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("poison", [True, False])
def test_the_cache_is_poisoned_and_everything_else_is_filled(level: int, poison: bool) -> None:
    engine, (before, after) = asleep_and_awake(level, poison=poison)
    assert before == after
    engine.shutdown()
