"""A `transformers` model as a target: create, generate, offload to the host and back, delete."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowtide.leakcheck.targets.target import Capabilities

SHAPE: Mapping[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large, so that random weights have an opinion.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A Llama of some 100,000 parameters."""


class TransformersTarget:
    """A small random Llama of `transformers`, which a user moves out of the way by hand.

    Args:
        device: "cpu" or "cuda:N".
    """

    capabilities: Capabilities

    def __init__(self, device: str = "cpu") -> None:
        self.capabilities = Capabilities(
            device=device,
            configs={"attn_implementation": ("eager", "sdpa")},
            prompt_lengths=(3, 17),
            max_requests=2,
            max_tokens=4,
            sleep_levels=(1,),
            preserving_levels=(1,),
        )
        self.engine: Any = None
        self._on_host: dict[str, torch.Tensor] = {}

    def create(self, config: Mapping[str, Any]) -> None:
        """Make a model with the same weights each time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
            model.set_attn_implementation(config["attn_implementation"])
        # In float64, so that the kind of attention does not decide between two tokens.
        self.engine = model.double().eval().to(self.capabilities.device)

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Greedy tokens of each prompt, one after the other."""
        outputs = []
        for length in prompt_lengths:
            source = random.Random(length)
            tokens = [source.randrange(SHAPE["vocab_size"]) for _ in range(length)]
            prompt = torch.tensor([tokens], device=self.capabilities.device)
            generated = self.engine.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            outputs.append(generated[0, length:].tolist())
        return outputs

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """Copy the weights to the host, and give their memory back."""
        weights = dict(self.engine.named_parameters())
        # All copies first: a copy that fails must leave the model as it was.
        self._on_host = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight.untyped_storage().resize_(0)
        return {}

    def wake(self, tags: Sequence[str] | None) -> None:
        """Take the memory again, and copy them back."""
        weights = dict(self.engine.named_parameters())
        try:
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.untyped_storage().resize_(weight.numel() * weight.itemsize)
                    weight.copy_(self._on_host[name])
        except BaseException:
            for weight in weights.values():
                weight.untyped_storage().resize_(0)
            raise
        self._on_host = {}

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """Return the weights, by name."""
        return dict(self.engine.named_parameters())

    def shutdown(self) -> None:
        """Delete the model."""
        self.engine = None
        self._on_host.clear()


def transformers_model(device: str = "cpu") -> TransformersTarget:
    """Return a small `transformers` model, as the fuzzer drives it."""
    return TransformersTarget(device)
