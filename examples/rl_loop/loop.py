"""A reinforcement-learning loop: roll out with an inference engine, put it to sleep, train, wake it."""

from __future__ import annotations

from typing import Any

import torch

import lowtide
from lowtide.engine import EngineConfig, LLMEngine, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
HISTORY: list[torch.Tensor] = []


def make_engine() -> LLMEngine:
    """Lowtide's reference engine; vLLM's `LLM` has the same calls."""
    return LLMEngine(EngineConfig(model="tiny", device="cpu"))


def train(rollout: torch.Tensor) -> float:
    """Stands for a step of the trainer."""
    return float(rollout.mean())


def train_and_remember(rollout: torch.Tensor) -> float:
    """The same, by a trainer that keeps every rollout for its statistics."""
    HISTORY.append(rollout)
    return train(rollout)


def run(engine: Any, step: Any, turns: int) -> None:
    """Some turns; the engine sleeps while the trainer has the memory.

    Args:
        engine: makes tokens, sleeps and wakes.
        step: one step of the trainer.
        turns: how many.
    """
    for _ in range(turns):
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=4))
        engine.sleep(level=1)
        with lowtide.stage("train"):
            step(torch.tensor([output.token_ids for output in outputs], dtype=torch.float32))
        engine.wake()
