"""What vLLM's workers do with weights that a trainer sends: vLLM makes it part of each by `worker_extension_cls`."""

from __future__ import annotations

import pickle
from typing import Any

import torch


class TakesWeights:
    """Adds a method to vLLM's worker, which a trainer calls by `LLM.collective_rpc`."""

    model_runner: Any

    def take_weights(self, sent: bytes) -> int:
        """Copy what the trainer has sent into the model.

        Args:
            sent: pickled names and tensors: of shared memory, or handles of CUDA IPC.

        Returns:
            How many bytes came.
        """
        return self.load(pickle.loads(sent))

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> int:
        """Copy tensors of another process into the model; see `take_weights`."""
        self.model_runner.model.load_weights(weights)
        if weights[0][1].is_cuda:
            # The trainer may write into its tensors as soon as this returns.
            torch.cuda.synchronize()
        return sum(weight.nbytes for _, weight in weights)


class KeepsSent(TakesWeights):
    """The same, with some of each update put aside to compare it with the next."""

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> int:
        """See `TakesWeights`; one more tensor stays in the worker with each call."""
        self.__dict__.setdefault("sent", []).append(weights[0][1].clone())
        return super().load(weights)
