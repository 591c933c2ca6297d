"""The reference engine as something that can be driven through a life."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.leakcheck.judging.contract import holders

if TYPE_CHECKING:
    import torch

PROMPT_LENGTHS = (5, 17, 33, 64, 64, 100, 120, 150)
"""Tokens of the prompts; the two of 64 begin alike, so that prefix caching has something to do."""

SHARED_PREFIX = 48
MAX_TOKENS = 32


class ReferenceLife:
    """One life of the reference engine with a fixed set of prompts.

    Args:
        config: of the engine.
        vocab_size: of its model; the prompts are random tokens below it, the same for every life.
        prompt_scale: how many times as long as usual the prompts are.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, prompt_scale: int = 1) -> None:
        # What nobody writes again after a wake must not pass for the zeros that it may have been.
        self._engine = LLMEngine(replace(config, poison_pages=True))
        self._prompts = make_prompts(vocab_size, config.seed, prompt_scale)

    @property
    def engine(self) -> LLMEngine:
        """The engine itself."""
        return self._engine

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """What must survive a sleep, by name."""
        return self._engine.preserved_tensors()

    def create(self) -> None:
        """Create the engine."""
        self._engine.create()

    def infer(self) -> Sequence[Sequence[int]]:
        """Greedy tokens of every prompt."""
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        return [output.token_ids for output in self._engine.generate(self._prompts, params)]

    def graph_buffers(self) -> Mapping[str, tuple[int, int]]:
        """Address and bytes of what captured graphs read, by name."""
        return self._engine.graph_addresses()

    def kv_blocks_held(self) -> Mapping[str, int]:
        """Who holds KV blocks although no request does, with how many; the engine is asked to forget its prefixes."""
        if self._engine.reset_prefix_cache():
            return {}
        return holders(self._engine.kv_cache_usage())

    def step(self) -> None:
        """One step of the engine."""
        self._engine.step()

    def sleep(self, level: int) -> None:
        """Put the engine to sleep."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Wake all of the engine."""
        self._engine.wake()

    def shutdown(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()


def make_prompts(vocab_size: int, seed: int, scale: int = 1) -> list[list[int]]:
    """Prompts of mixed lengths, some with a common beginning, the same for the same seed."""
    source = random.Random(seed)
    shared = [source.randrange(vocab_size) for _ in range(SHARED_PREFIX)]
    prompts = []
    for length in PROMPT_LENGTHS:
        start = shared if length == 64 else []
        prompts.append(start + [source.randrange(vocab_size) for _ in range(length * scale - len(start))])
    return prompts
