"""Which part of each parameter a rank has, and what ranks exchange to compute one model together.

The split is Megatron-LM's (Shoeybi et al., "Megatron-LM", 2019): the first projections of a block are cut by output
features, so that each rank has whole heads and neurons; the last one is cut by input features, and the ranks' outputs
are added up. Embedding and head are cut by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

_COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW_PARALLEL = ("o_proj", "down_proj")
_VOCAB_PARALLEL = ("embed_tokens", "lm_head")


class TensorParallelGroup(Protocol):
    """The ranks that compute one model together."""

    @property
    def rank(self) -> int:
        """Of this process, from 0 on."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on every rank; may be computed in place."""

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, of one shape [N, n], side by side in the order of ranks: [N, size x n]."""


class SingleRank:
    """One process that has the whole model and exchanges nothing."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return partial

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return part


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that one rank has.

    Attributes:
        full_shape: of the whole parameter.
        dim: along which it is cut; None where each rank has all of it.
        start: of the part along that dimension.
        stop: its end.
    """

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
    """The part of one parameter that a rank has.

    A bias that is added to a sum over ranks is whole on each of them, and rank 0 adds it.

    Args:
        name: its Hugging Face name.
        shape: of the whole parameter.
        rank: whose part.
        size: how many ranks there are.
    """
    layer, _, kind = name.rpartition(".")
    if size > 1 and layer.endswith((*_COLUMN_PARALLEL, *_VOCAB_PARALLEL)):
        return Shard(shape, 0, *split(shape[0], rank, size))
    if size > 1 and layer.endswith(_ROW_PARALLEL) and kind == "weight":
        return Shard(shape, 1, *split(shape[1], rank, size))
    return Shard(shape)
