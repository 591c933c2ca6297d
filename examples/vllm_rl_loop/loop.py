"""A reinforcement-learning loop with a real vLLM, in its default mode: core and worker are processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

# For the bytes that `collective_rpc` carries; for a model without tokenizer there is nothing to be fetched.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import vllm
from transformers import AutoConfig, AutoModelForCausalLM

import lowtide

MODEL = os.environ.get("LT_MODEL", "facebook/opt-125m")
CARD = torch.cuda.is_available()
PROMPTS = [{"prompt_token_ids": list(range(10, 26))}, {"prompt_token_ids": list(range(30, 38))}]


class Trainer:
    """Stands for a trainer: has the model's weights, and moves one of them with each step."""

    def __init__(self) -> None:
        with torch.device("cuda" if CARD else "cpu"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.bfloat16)
        if not CARD:
            # By name, as a worker can open it that is no child of this process.
            torch.multiprocessing.set_sharing_strategy("file_system")
        self.weights = [(name, weight.detach()) for name, weight in self.model.named_parameters()]

    def step(self, rollout: list[int]) -> None:
        """One step."""
        self.weights[0][1].add_(1e-4 * sum(rollout) / len(rollout))

    def sent(self) -> bytes:
        """The weights as another process opens them: pickled handles, no contents."""
        return bytes(ForkingPickler.dumps(self.weights))


class Engine:
    """vLLM's `LLM` with a call that takes a trainer's weights.

    Args:
        worker: what its workers do with them, "module.Class".
    """

    def __init__(self, worker: str = "workers.TakesWeights") -> None:
        self.llm = vllm.LLM(
            MODEL,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            enable_sleep_mode=CARD,
            worker_extension_cls=worker,
            **({"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3} if CARD else {}),
        )

    def generate(self, prompts: list[Any], tokens: int = 8) -> list[list[int]]:
        """Greedy tokens for each prompt."""
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def sleep(self) -> None:
        """Give the card's memory back; a CPU's engine stays awake."""
        if CARD:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Take it again."""
        if CARD:
            self.llm.wake_up()

    def update_weights(self, sent: bytes) -> int:
        """What the trainer has sent, into each worker.

        Returns:
            How many bytes came to the first.
        """
        self.llm.reset_prefix_cache()
        return int(self.llm.collective_rpc("take_weights", args=(sent,))[0])

    def shutdown(self) -> None:
        """End core and worker."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def running(worker: str = "workers.TakesWeights") -> Iterator[Engine]:
    """An engine, shut down at the end."""
    engine = Engine(worker)
    try:
        yield engine
    finally:
        engine.shutdown()


def run(engine: Any, trainer: Trainer, turns: int) -> list[list[int]]:
    """Some turns; the engine sleeps while the trainer has the memory, and takes its weights when it is awake.

    Returns:
        The first prompt's tokens in each turn.
    """
    rollouts = []
    for _ in range(turns):
        rollouts.append(engine.generate(PROMPTS)[0])
        engine.sleep()
        with lowtide.stage("train"):
            trainer.step(rollouts[-1])
        engine.wake()
        assert engine.update_weights(trainer.sent()) == sum(weight.nbytes for _, weight in trainer.weights)
    return rollouts
