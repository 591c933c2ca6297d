"""A process group of the engine's own, on which the ranks add up what they compute and agree on the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import distributed
from torch.distributed import FileStore, HashStore, PrefixStore  # type: ignore[attr-defined]  # torch's stubs leave them out

from lowtide.engine.errors import CollectiveError, EngineError
from lowtide.engine.model_executor.parallel_layers import TensorParallelGroup


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
