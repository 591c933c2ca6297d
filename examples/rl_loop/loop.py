"""A reinforcement-learning loop: roll out with an inference engine, put it to sleep, train, send it the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lowtide
from lowtide.engine import PRESETS, EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.model_executor.weights import parameter_shapes

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
HISTORY: list[torch.Tensor] = []


class KeepsSent(LLMEngine):
    """An engine that keeps some of what each update brings."""

    def update_weights(self, tensors: Any, **options: Any) -> None:
        """As an engine does, with the final norm put aside to compare it with the next one."""
        self.__dict__.setdefault("sent", []).append(tensors["model.norm.weight"].clone())
        super().update_weights(tensors, **options)


def make_engine(kind: type[LLMEngine] = LLMEngine) -> LLMEngine:
    """Lowtide's reference engine; vLLM's `LLM` has the same calls but for the update."""
    return kind(EngineConfig(model="tiny", device="cpu", kv_cache_bytes=4 << 20))


class Trainer:
    """Stands for a trainer: each step moves its weights."""

    def __init__(self) -> None:
        self.weights = {name: torch.randn(shape) * 0.02 for name, shape in parameter_shapes(PRESETS["tiny"]).items()}

    def step(self, rollout: torch.Tensor) -> None:
        """One step."""
        for weight in self.weights.values():
            weight += 1e-4 * rollout.mean()

    def step_and_remember(self, rollout: torch.Tensor) -> None:
        """The same, by a trainer that keeps every rollout for its statistics."""
        HISTORY.append(rollout)
        self.step(rollout)


def run(engine: Any, weights: dict[str, torch.Tensor], step: Callable[[torch.Tensor], None], turns: int) -> None:
    """Some turns; the engine sleeps while the trainer has the memory, and takes its weights when it wakes.

    Args:
        engine: makes tokens, sleeps, wakes and takes weights.
        weights: the trainer's, by name.
        step: one step of the trainer.
        turns: how many.
    """
    for _ in range(turns):
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=4))
        engine.sleep(level=1)
        with lowtide.stage("train"):
            step(torch.tensor([output.token_ids for output in outputs], dtype=torch.float32))
        engine.wake("weights")
        engine.update_weights(weights)
        engine.wake("kv_cache")
