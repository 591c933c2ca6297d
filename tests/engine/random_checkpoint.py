"""A small checkpoint of random weights, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lowtide.engine.config import PRESETS, read_model_config
from lowtide.engine.model_executor.weights import SINGLE_FILE, RandomWeights, parameter_shapes

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def write_random_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a small checkpoint without transformers, for tests that ask only whether the same tokens come again.

    Args:
        folder: which is made.
        seed: another one gives other weights.
        changes: to the model's `config.json`.
    """
    folder.mkdir()
    config = {**SHAPE, "architectures": ["LlamaForCausalLM"], "dtype": "float32", **changes}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(read_model_config(folder))
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / SINGLE_FILE)
    return folder


def write_preset(folder: Path, seed: int) -> Path:
    """Write the weights of `tiny` as a checkpoint: those that an engine of this seed draws."""
    folder.mkdir()
    model = PRESETS["tiny"]
    save_file(dict(RandomWeights(model, seed).parameters(model.torch_dtype, "cpu")), folder / SINGLE_FILE)
    return folder
