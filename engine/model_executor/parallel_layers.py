"""Which part of each parameter a rank has, and what ranks exchange to compute one model together.

The split is Megatron-LM's (Shoeybi et al., "Megatron-LM", 2019): the first projections of a block are cut by output
features, so that each rank has whole heads and neurons; the last one is cut by input features, and the ranks' outputs
are added up. Embedding and head are cut by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed import FileStore, HashStore, PrefixStore  # type: ignore[attr-defined]  # torch's stubs leave them out
from torch.nn.functional import embedding, pad

from lowtide.engine.config import Allocator
from lowtide.engine.errors import CollectiveError, EngineError
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
class RankPlace:
    """One rank's place among those that compute a model together, and the file in which they alone find each other."""

    rank: int
    size: int
    store: str


class ProcessGroup(TensorParallelGroup):
    """The ranks of one engine, or one alone; gloo on a CPU, NCCL on a card.

    Where the program has no default group yet, the engine's is it, since torch wants one; else it is one beside it, and
    the program's own stays untouched.  The store belongs to the group and goes with it.
    """

    def __init__(self, device: torch.device, place: RankPlace | None = None) -> None:
        backend = "gloo" if device.type == "cpu" else "nccl"
        if not distributed.is_available() or not distributed.is_backend_available(backend):
            hint = "leave process_group off" if place is None else "set tensor_parallel_size to 1"
            raise EngineError(f"this torch has no {backend} process groups: {hint}")
        self.rank, self.size = (0, 1) if place is None else (place.rank, place.size)
        self._device = device
        self._backend = backend
        self._place = place
        self._num_made = 0
        self._group: distributed.ProcessGroup | None = None
        self._make()

    def _make(self) -> None:
        try:
            if self._place is not None:
                self._group = self._join(self._place)
            elif distributed.is_initialized():
                ranks = [distributed.get_rank()]
                self._group = distributed.new_group(ranks, backend=self._backend, use_local_synchronization=True)
            else:
                # In this process's memory: no port, no file.
                distributed.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
                self._group = distributed.group.WORLD
        except RuntimeError as error:
            raise EngineError(f"a {self._backend} process group cannot be made here: {error}") from error

    def _join(self, place: RankPlace) -> distributed.ProcessGroup | None:
        # What the ranks told each other to make the last group is still in the file.
        store = PrefixStore(str(self._num_made), FileStore(place.store, place.size))
        self._num_made += 1
        # A card's communicator is made now, and not by the first step.
        bound = self._device if self._backend == "nccl" else None
        distributed.init_process_group(
            self._backend, store=store, rank=place.rank, world_size=place.size, device_id=bound
        )
        return distributed.group.WORLD

    def break_off(self) -> None:
        """Let the ranks fail that wait for this one in a collective, until all `resume`; not with NCCL."""
        if self._place is not None and self._backend == "gloo":
            self.destroy()

    def resume(self) -> None:
        """Make the group again after `destroy`, together with the other ranks; else does nothing."""
        if self._group is None:
            self._make()

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in place; `CollectiveError`: another rank has broken off."""
        with _as_collective_error():
            distributed.all_reduce(partial, group=self._group)
        return partial

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Do as `TensorParallelGroup.all_gather`; `CollectiveError`: another rank has broken off."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _as_collective_error():
            distributed.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, tokens: torch.Tensor) -> None:
        """Give all ranks rank 0's tokens, in place: draws from equal logits must not differ in a last bit."""
        if self._group is not None:
            distributed.broadcast(tokens, group_src=0, group=self._group)

    def destroy(self) -> None:
        """End the group and its threads and gives its memory back, NCCL's buffers on a card above all; until `resume`.

        Not only the reference: torch lists its groups, and a group that is set to None lives on (Megatron-LM#6897).
        """
        if self._group is None:
            return
        # The reference goes last: interrupted before that, it is still known what there is to destroy.
        with suppress(ValueError):  # torch's word for a group that is destroyed already
            distributed.destroy_process_group(self._group)
        self._group = None


@contextmanager
def _as_collective_error() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"the ranks cannot exchange: {error}") from error


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
    """Logits of all tokens, [N, vocab_size] on every rank, of hidden states [N, hidden_size]."""
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
