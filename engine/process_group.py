"""A process group of the engine's own, on which the ranks agree on the sampled tokens."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs leave it out

from lowtide.engine.errors import EngineError


class ProcessGroup:
    """A group of one rank so far; gloo on a CPU, NCCL on a card.

    Where the program has no default group yet, the engine's is it, since torch wants one; else it is one beside it, and
    the program's own stays untouched.  The store belongs to the group and goes with it.

    Raises:
        EngineError: torch cannot make the group here.
    """

    def __init__(self, device: torch.device) -> None:
        backend = "gloo" if device.type == "cpu" else "nccl"
        if not distributed.is_available() or not distributed.is_backend_available(backend):
            raise EngineError(f"this torch has no {backend} process groups: leave process_group off")
        self._device = device
        self._group: distributed.ProcessGroup | None = None
        try:
            if distributed.is_initialized():
                ranks = [distributed.get_rank()]
                self._group = distributed.new_group(ranks, backend=backend, use_local_synchronization=True)
            else:
                # In this process's memory: no port, no file.
                distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
                self._group = distributed.group.WORLD
        except RuntimeError as error:
            raise EngineError(f"a {backend} process group cannot be made here: {error}") from error

    def broadcast(self, tokens: torch.Tensor) -> None:
        """All ranks get rank 0's tokens, in place: draws from equal logits must not differ in a last bit."""
        if self._group is not None:
            distributed.broadcast(tokens, group_src=0, group=self._group)

    def destroy(self) -> None:
        """Ends the group and its threads and gives its memory back; calling it again does nothing.

        Not only the reference: torch lists its groups, and a group that is set to None lives on (Megatron-LM#6897).
        """
        if self._group is None:
            return
        # The reference goes last: interrupted before that, it is still known what there is to destroy.
        with suppress(ValueError):  # torch's word for a group that is destroyed already
            distributed.destroy_process_group(self._group)
        self._group = None
