"""Clean: a small Llama with random weights, made without a download, generates and is dropped."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")


def make_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.inference_mode()
def generate(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    prompt = torch.arange(8)[None]
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def test_generates_as_many_tokens_as_asked() -> None:
    assert generate(make_model(), 4).shape[1] <= 12


def test_is_deterministic() -> None:
    model = make_model()
    assert generate(model, 4).equal(generate(model, 4))
