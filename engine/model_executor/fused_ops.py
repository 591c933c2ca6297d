"""What a step computes beside attention: one kernel each where Triton and a card are there, torch elsewhere.

Both round at the same places, which are those of transformers: tokens are compared with its.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

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


def rotary_table(config: ModelConfig, max_model_len: int, allocate: Allocator) -> torch.Tensor:
    """Cosines and sines of every position: one tensor [max_model_len, head_dim], cosines in the first half.

    In the model's dtype, as transformers rounds them. Belongs to the engine that allocates it: a table cached at module
    level would outlive the engine.
    """
    table = allocate((max_model_len, config.head_dim), config.torch_dtype)
    # On the host: a float32 copy on the device would stay in its allocator's cache.
    positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
    cosines, sines = table.chunk(2, dim=-1)
    cosines.copy_(angles.cos())
    sines.copy_(angles.sin())
    return table


_HAS_TRITON = find_spec("triton") is not None


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether Triton's kernels compute on a tensor: it is on a card, and Triton is installed."""
    return _HAS_TRITON and tensor.is_cuda


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b, [..., out], of x [..., in], W [out, in] and b [out].

    One row is a pass over the weights: on a card a kernel reads them once, at more of the bandwidth than cuBLAS, whose
    tiles are made for several rows.
    """
    if x.numel() == x.shape[-1] and has_kernels(x):
        from lowtide.engine.model_executor import triton_kernels

        return triton_kernels.multiply_row(x, weight, bias)
    return torch_linear(x, weight, bias)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x [T, hidden_size] to the residual stream, and return sum / rms(sum) * weight, and the sum.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. In float32 at least, and rounded before the weight
    is multiplied in. The residual may be overwritten, and is None where the stream begins with x.
    """
    if has_kernels(x):
        from lowtide.engine.model_executor import triton_kernels

        return triton_kernels.add_rms_norm(x, residual, weight, eps)
    total = x if residual is None else residual + x
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(total.dtype), total


def rotate_and_cache(
    projected: torch.Tensor,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions, and put keys and values into the KV cache; returns all three.

    Dimension i is paired with i + head_dim / 2, as in Hugging Face checkpoints (the original pairs neighbours).  What
    is `projected`, [T, num_heads + 2 * num_kv_heads, head_dim], may be overwritten; the caches are contiguous
    [num_blocks, block_size, num_kv_heads, head_dim], rotations [T, head_dim], slots int64 [T], and a negative one is
    none.
    """
    num_kv_heads = key_cache.shape[2]
    num_heads = projected.shape[1] - 2 * num_kv_heads
    if has_kernels(projected):
        from lowtide.engine.model_executor import triton_kernels

        triton_kernels.rotate_and_cache(projected, rotation, key_cache, value_cache, slots)
        query, key, value = torch.split(projected, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        return query, key, value
    heads, value = torch.split(projected, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    cosines, sines = rotation.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    query, key = torch.split(turned, [num_heads, num_kv_heads], dim=1)
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
    return query, key, value


def silu_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * inner] -> [T, inner]: silu(first half) * second half."""
    if has_kernels(gate_and_up):
        from lowtide.engine.model_executor import triton_kernels

        return triton_kernels.silu_and_mul(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return silu(gate) * up
