"""Weights: the same contents at every fill, wherever the parameters live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowtide.engine.config import PRESETS, ModelConfig, read_model_config
from lowtide.engine.model_executor.weights import (
    SINGLE_FILE,
    CheckpointWeights,
    RandomWeights,
    WeightSource,
    parameter_shapes,
)

TINY = PRESETS["tiny"]


def empty(shapes: WeightSource, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.shapes().items()}


def filled(source: WeightSource, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    parameters = empty(source, dtype)
    source.fill(parameters)
    return parameters


def test_a_checkpoint_fills_in_place_and_casts(write_checkpoint: Callable[[str], Path]) -> None:
    folder = write_checkpoint("qwen2-biases")
    source = CheckpointWeights(folder, read_model_config(folder))
    parameters = empty(source, torch.bfloat16)
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    source.fill(parameters)
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == addresses
    saved = load_file(folder / SINGLE_FILE)
    assert all(torch.equal(parameters[name], saved[name].bfloat16()) for name in parameters)


def test_random_weights_are_the_same_at_every_fill() -> None:
    source = RandomWeights(TINY, seed=3)
    first, second = filled(source), filled(source)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_random_weights_do_not_depend_on_what_else_is_filled() -> None:
    shallow = filled(RandomWeights(replace(TINY, num_layers=1), seed=3))
    deep = filled(RandomWeights(TINY, seed=3))
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_random_weights_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    filled(RandomWeights(TINY, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_another_seed_gives_other_weights(name: str) -> None:
    assert not torch.equal(filled(RandomWeights(TINY, seed=1))[name], filled(RandomWeights(TINY, seed=2))[name])


def test_no_two_random_matrices_are_alike() -> None:
    parameters = filled(RandomWeights(TINY, seed=0))
    gate, up = (parameters[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert not torch.equal(gate, up)


def test_norms_are_ones_and_biases_zeros() -> None:
    parameters = filled(RandomWeights(replace(TINY, attention_bias=True), seed=0))
    assert torch.equal(parameters["model.norm.weight"], torch.ones(TINY.hidden_size))
    assert torch.equal(parameters["model.layers.0.self_attn.q_proj.bias"], torch.zeros(TINY.hidden_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_weights_in_half_precision_are_finite(dtype: torch.dtype) -> None:
    parameters = filled(RandomWeights(TINY, seed=0), dtype)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters.values())


@pytest.mark.parametrize(
    ("changes", "absent", "present"),
    [
        ({"tie_word_embeddings": True}, "lm_head.weight", "model.norm.weight"),
        ({"attention_bias": True}, "model.layers.0.self_attn.o_proj.bias", "model.layers.0.self_attn.q_proj.bias"),
        (
            {"attention_output_bias": True},
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.self_attn.o_proj.bias",
        ),
        ({"mlp_bias": True}, "model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.down_proj.bias"),
    ],
)
def test_which_parameters_there_are(changes: dict[str, bool], absent: str, present: str) -> None:
    config: ModelConfig = replace(TINY, **changes)  # type: ignore[arg-type]
    names = parameter_shapes(config).keys()
    assert present in names
    assert absent not in names
