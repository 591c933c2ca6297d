"""Which part of each parameter a rank has, and what ranks exchange to compute one model together.

The split is Megatron-LM's (Shoeybi et al., "Megatron-LM", 2019): the first projections of a block are cut by output
features, so that each rank has whole heads and neurons; the last one is cut by input features, and the ranks' outputs
are added up. Embedding and head are cut by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import embedding, pad

from lowtide.engine.config import Allocator
from lowtide.engine.model_executor.fused_ops import linear

_COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW_PARALLEL = ("o_proj", "down_proj")
_VOCAB_PARALLEL = ("embed_tokens", "lm_head")


class TensorParallelGroup:
    """The ranks that compute a model together, this process among them; here one alone, which exchanges nothing."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, on every rank; may be computed in place."""
        return partial

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, of one shape [N, n], side by side in the order of ranks: [N, size x n]."""
        return part


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that one rank has, from `start` to `stop` along `dim`; None is all of it."""

    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        if self.dim is None:
            return self.full_shape
        return (*self.full_shape[: self.dim], self.stop - self.start, *self.full_shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """Selects the part from the whole parameter."""
        if self.dim is None:
            return (slice(None),)
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))


def split(length: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of a rank's part of `length`; parts differ by at most 1."""
    return length * rank // size, length * (rank + 1) // size


def shard_parameter(name: str, shape: tuple[int, ...], rank: int = 0, size: int = 1) -> Shard:
    """Return the part of one parameter that a rank has.

    A bias that is added to a sum over ranks is whole on each of them, and rank 0 adds it.
    """
    layer, _, kind = name.rpartition(".")
    if size > 1 and layer.endswith((*_COLUMN_PARALLEL, *_VOCAB_PARALLEL)):
        return Shard(shape, 0, *split(shape[0], rank, size))
    if size > 1 and layer.endswith(_ROW_PARALLEL) and kind == "weight":
        return Shard(shape, 1, *split(shape[1], rank, size))
    return Shard(shape)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocator) -> nn.Parameter:
    """Return a parameter that lives where the allocator says; contents come from a `WeightSource` later."""
    return nn.Parameter(allocate(shape, dtype), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """Parameters of y = x W^T + b, weight [out of this rank, in]; who has several computes them in one product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class MergedColumns:
    """Column-parallel layers of one input, whose weights lie one behind the other: one product computes all.

    Their parameters are views, because a checkpoint knows them one by one. vLLM has a module for it,
    MergedColumnParallelLinear, and renames what it loads.  `out_features` are those of each layer on this rank.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], bias: bool, dtype: torch.dtype, allocate: Allocator
    ) -> None:
        self._out_features = list(out_features)
        self._weight = allocate((sum(out_features), in_features), dtype)
        self._bias = allocate((sum(out_features),), dtype) if bias else None

    def layers(self) -> list[ColumnParallelLinear]:
        """Return the layers, new ones at each call."""
        weights = torch.split(self._weight, self._out_features)
        biases = [None] * len(weights) if self._bias is None else torch.split(self._bias, self._out_features)
        return [ColumnParallelLinear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out of all layers]."""
        return linear(x, self._weight, self._bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features of one rank, added up over all ranks, which have the sum whole.

    The weight is [out, in of this rank]; the bias is added by rank 0 alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        allocate: Allocator,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), dtype, allocate)
        self.bias = parameter((out_features,), dtype, allocate) if bias else None
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in of this rank] -> [..., out]."""
        return self._group.all_reduce(linear(x, self.weight, self.bias if self._group.rank == 0 else None))


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [vocab_size, hidden_size], of which each rank has those of its tokens."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, allocate: Allocator, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        self._group = group
        self._start, self._stop = split(vocab_size, group.rank, group.size)
        self.weight = parameter((self._stop - self._start, hidden_size), dtype, allocate)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]."""
        if self._group.size == 1:
            return embedding(token_ids, self.weight)
        others = (token_ids < self._start) | (token_ids >= self._stop)
        rows = embedding((token_ids - self._start).masked_fill(others, 0), self.weight)
        # One rank has the row, and the others add zeros: the sum is exact.
        return self._group.all_reduce(rows.masked_fill(others.unsqueeze(-1), 0.0))


def gather_logits(
    hidden: torch.Tensor, weight: torch.Tensor, vocab_size: int, group: TensorParallelGroup
) -> torch.Tensor:
    """Logits of all tokens, [N, vocab_size] on every rank, of hidden states [N, hidden_size].

    Each rank's head has the rows of its tokens; `vocab_size` is that of all ranks together.
    """
    logits = linear(hidden, weight)
    if group.size == 1:
        return logits
    # A collective takes tensors of one size; parts differ by one token at most.
    parts = [split(vocab_size, rank, group.size) for rank in range(group.size)]
    longest = max(stop - start for start, stop in parts)
    gathered = group.all_gather(pad(logits, (0, longest - logits.shape[-1])))
    if longest * group.size == vocab_size:
        return gathered
    each = torch.split(gathered, longest, dim=-1)
    return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(each, parts, strict=True)], dim=-1)
