"""Layers whose parameters are cut over ranks, under vLLM's names; with a single rank they are plain layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import embedding, linear, pad

from lowtide.engine.config import Allocator
from lowtide.engine.model_executor.tensor_parallel import TensorParallelGroup, split


def parameter(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocator) -> nn.Parameter:
    """A parameter that lives where the allocator says from the start; contents come from a `WeightSource` later."""
    return nn.Parameter(allocate(shape, dtype), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """Parameters of y = x W^T + b with the output features of one rank; who has several computes them in one product.

    Args:
        weight: [out of this rank, in].
        bias: [out of this rank]; None where there is none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class MergedColumns:
    """Column-parallel layers of one input, whose weights lie one behind the other: one product computes all.

    Their parameters are views, because a checkpoint knows them one by one. vLLM has a module for it,
    MergedColumnParallelLinear, and renames what it loads.

    Args:
        in_features: of the input, which every rank has whole.
        out_features: of each layer, on this rank.
        bias: whether they have one.
        dtype: of the parameters.
        allocate: gives their memory.
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
    """y = x W^T + b with the input features of one rank, added up over all ranks; weight [out, in].

    Args:
        in_features: of this rank.
        out_features: of the sum, which every rank gets whole.
        bias: whether there is one; rank 0 alone adds it.
        dtype: of the parameters.
        allocate: gives their memory.
        group: the ranks.
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
    """Logits of all tokens on every rank, from heads that each have the rows of their rank's tokens.

    Args:
        hidden: [N, hidden_size].
        weight: of this rank's head.
        vocab_size: of all ranks together.
        group: the ranks.

    Returns:
        [N, vocab_size].
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
