"""The model: its parameters are those of a checkpoint, its memory is the engine's, its numbers are transformers'."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine.config import PRESETS, ModelConfig, RopeConfig, read_model_config
from lowtide.engine.model_executor.attention import MAX_GATHERED_TOKENS, split_decodes, workspace_bytes
from lowtide.engine.model_executor.fused_ops import inverse_frequencies, rotary_table
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.model_executor.weights import parameter_shapes
from lowtide.engine.request import SamplingParams


class Memory:
    """An allocator that remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.asked.append((tuple(shape), dtype))
        return torch.zeros(tuple(shape), dtype=dtype)


def build(config: ModelConfig, weights: Memory) -> LlamaForCausalLM:
    return LlamaForCausalLM(config, weights, rotary_table(config, 64, Memory()))


@pytest.mark.parametrize(
    "variety", ["llama-grouped-heads", "llama-tied-head", "llama-all-biases", "qwen2-biases", "llama-llama3-rope"]
)
def test_parameters_are_those_of_transformers(variety: str, write_checkpoint: Callable[[str], Path]) -> None:
    folder = write_checkpoint(variety)
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    model = build(read_model_config(folder), Memory())
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == expected


@pytest.mark.parametrize("variety", ["llama-tied-head", "llama-all-biases", "qwen2-biases"])
def test_the_allocator_is_asked_for_what_parameter_shapes_says(
    variety: str, write_checkpoint: Callable[[str], Path]
) -> None:
    config = read_model_config(write_checkpoint(variety))
    weights = Memory()
    model = build(config, weights)
    shapes = parameter_shapes(config)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    # Some lie one behind the other, in one piece.
    assert {dtype for _, dtype in weights.asked} == {config.torch_dtype}
    assert sum(map(math.prod, (shape for shape, _ in weights.asked))) == sum(map(math.prod, shapes.values()))


def test_parameters_want_no_gradient() -> None:
    assert not any(parameter.requires_grad for parameter in build(PRESETS["tiny"], Memory()).parameters())


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=500_000.0),
        RopeConfig(theta=500_000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ],
)
def test_rotary_frequencies_are_those_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    parameters = {
        "rope_type": rope.rope_type,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    if rope.rope_type == "default":
        parameters = {"rope_type": "default", "rope_theta": rope.theta}
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131_072)
    if rope.rope_type == "default":
        expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0.0)


def test_linear_scaling_slows_every_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(), 16)
    assert torch.equal(inverse_frequencies(RopeConfig(rope_type="linear", factor=4.0), 16), plain / 4)


def test_the_rotary_table_is_one_tensor_of_the_engines() -> None:
    runtime = Memory()
    rotary_table(PRESETS["1b"], 100, runtime)
    assert runtime.asked == [((100, 64), torch.bfloat16)]


@pytest.mark.parametrize(
    ("seq_lens", "limit", "ranges"),
    [
        ([], 10, []),
        ([4, 3, 1], 12, [(0, 3)]),
        ([4, 3, 1], 11, [(0, 2), (2, 3)]),
        ([50, 2, 2, 1], 4, [(0, 1), (1, 3), (3, 4)]),
    ],
)
def test_decodes_are_gathered_together_up_to_a_limit(
    seq_lens: list[int], limit: int, ranges: list[tuple[int, int]]
) -> None:
    assert split_decodes(seq_lens, limit) == ranges


def test_the_workspace_bound_covers_one_sequence_beyond_the_limit() -> None:
    model = PRESETS["8b"]
    per_token = 2 * model.num_kv_heads * model.head_dim * 2
    assert workspace_bytes(model, max_num_seqs=2, max_model_len=100) == 200 * per_token
    assert workspace_bytes(model, max_num_seqs=64, max_model_len=4096) == MAX_GATHERED_TOKENS * per_token
    assert workspace_bytes(model, max_num_seqs=64, max_model_len=131_072) == 131_072 * per_token


def test_a_step_computes_without_recording_gradients_or_inference_tensors(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=8)
    seen: list[torch.Tensor] = []
    loop.model.compute_logits, logits = seen.append, loop.model.compute_logits
    loop.model.compute_logits = lambda hidden: (seen.append(hidden), logits(hidden))[1]
    loop.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert not seen[0].requires_grad
    assert not seen[0].is_inference()


def test_everything_goes_by_reference_count_alone(make_loop: Callable[..., Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        loop = make_loop(num_blocks=64)
        loop.generate([[1, 2, 3], list(range(40))], SamplingParams(max_tokens=4, temperature=1.0))
        parts = [
            loop.model,
            loop.scheduler,
            loop.runner,
            loop.kv_cache_manager,
            loop.runner._kv_cache,
            loop.model.rotary_table,
        ]
        tensors = [*loop.model.parameters(), loop.runner.block_table.device_table, loop.runner._input_ids]
        tensors += [tensor for layer in loop.runner._kv_cache.layers for tensor in layer]
        gone = [weakref.ref(item) for item in (*parts, *tensors)]
        del loop, parts, tensors
        assert [ref() for ref in gone if ref() is not None] == []
    finally:
        gc.enable()
