"""Layers whose parameters are cut over ranks, under vLLM's names; with a single rank they are plain layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import embedding, linear, pad

from lowtide.engine.config import Allocator
from lowtide.engine.model_executor.tensor_parallel import TensorParallelGroup, split


def parameter(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocator) -> nn.Parameter:
    """A parameter that lives where the allocator says from the start; contents come from a `WeightSource` later."""
    return nn.Parameter(allocate(shape, dtype), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features of one rank, weight [out, in]; torch's own would allocate by itself.

    Args:
        in_features: of the input, which every rank has whole.
        out_features: of this rank.
        bias: whether there is one.
        dtype: of the parameters.
        allocate: gives their memory.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, allocate: Allocator
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), dtype, allocate)
        self.bias = parameter((out_features,), dtype, allocate) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias)


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
