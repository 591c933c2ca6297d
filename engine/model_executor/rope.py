"""Rotary position embedding: its frequencies, and one table of cosines and sines that the engine owns."""

from __future__ import annotations

import math

import torch

from lowtide.engine.config import Allocator, ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2], float32, on the host.

    theta ** (-2i / head_dim) (Su et al., "RoFormer", 2021). `linear` divides all by the factor (Chen et al., "Extending
    Context Window of Large Language Models via Position Interpolation", 2023). `llama3` divides only the slow ones,
    which turn less than `low_freq_factor` times within the original context, leaves alone those that turn more than
    `high_freq_factor` times, and blends in between (Llama 3.1 release).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / rope.factor
    return frequencies


class RotaryEmbedding:
    """Cosines and sines of every position: one tensor [max_model_len, head_dim], cosines in the first half.

    In the model's dtype, as transformers rounds them. Belongs to the engine that allocates it: a table cached at module
    level would outlive the engine.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, allocate: Allocator) -> None:
        self.table = allocate((max_model_len, config.head_dim), config.torch_dtype)
        # On the host: a float32 copy on the device would stay in its allocator's cache.
        positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        cosines, sines = self.table.chunk(2, dim=-1)
        cosines.copy_(angles.cos())
        sines.copy_(angles.sin())

    def lookup(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines, [T, head_dim], of positions [T]."""
        return self.table[positions]


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn heads [T, num_heads, head_dim] by the cosines and sines of their positions, [T, head_dim].

    Dimension i is paired with i + head_dim / 2, as in Hugging Face checkpoints (the original pairs neighbours).
    """
    cosines, sines = rotation.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
