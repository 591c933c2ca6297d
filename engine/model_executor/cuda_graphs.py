"""CUDA graphs of the decode step: one per batch size, over static buffers, their memory given back by `close`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lowtide.engine.config import Allocator
from lowtide.engine.device_allocator.arena import ALIGNMENT, round_up
from lowtide.engine.errors import ConfigError, OutOfMemoryError
from lowtide.engine.model_executor.attention import PagedDecodes
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.teardown import Teardown, release_frames

Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, PagedDecodes], torch.Tensor]
"""Token ids and positions, int64 [B] each, to hidden states [B, hidden_size]."""

INPUTS = ("input_ids", "positions", "slot_mapping", "rows", "seq_lens")
# What an unused place of a batch holds: it reads no key and is written nowhere.
_PADDING = np.array([[0], [0], [-1], [0], [0]], dtype=np.int64)


def check_cuda_graphs(device: str) -> None:
    """Refuse a device on which graphs cannot be captured; the `ConfigError` says what is missing."""
    if device == "cpu":
        raise ConfigError("cuda_graphs needs a card, and device is 'cpu': leave it off, or use device 'cuda'")
    if find_spec("triton") is None:
        raise ConfigError('cuda_graphs needs Triton, which is not installed: pip install "lowtide[gpu]"')


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Sizes that graphs are captured for: the powers of two below the largest, and the largest."""
    return (*(1 << power for power in range(largest.bit_length()) if 1 << power < largest), largest)


class DecodeGraphs:
    """The decode step as CUDA graphs, one per batch size; a batch runs in the next larger one, padded.

    A graph has addresses baked in: of weights, KV cache, block table pointers and of its own buffers here. All of them
    lie in arenas, whose addresses outlive a sleep, so that nothing is captured anew at a wake. What a graph needs in
    between comes from a memory pool of torch's that all sizes share. It stays while the engine sleeps, and goes when
    the last graph does and torch's cache is emptied.

    `forward` launches on the current stream alone and waits for nothing; no sleep drops the memory of `allocate`.

    Attributes:
        addresses: (address, bytes) of what the graphs read and write at fixed places, by name, as it was at capture.
    """

    def __init__(
        self,
        forward: Forward,
        block_table: BlockTable,
        *,
        max_batch_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        allocate: Allocator,
    ) -> None:
        self.sizes = batch_sizes(max_batch_size)
        self.addresses: dict[str, tuple[int, int]] = {}
        self._forward = forward
        self._block_table = block_table
        # One copy to the device brings all inputs; each starts where a tensor would.
        self._staged = np.empty((len(INPUTS), round_up(max_batch_size, ALIGNMENT // 8)), dtype=np.int64)
        self._inputs = allocate(self._staged.shape, torch.int64)
        self._hidden = allocate((max_batch_size, hidden_size), dtype)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def capture(self, read: Mapping[str, torch.Tensor]) -> None:
        """Capture a graph for every batch size; without room on the card, none is held.

        Of what they `read` beside their own inputs, by name, addresses are recorded, and nothing is kept.
        """
        handled = sys.exc_info()[1]
        static = {f"decode_graphs.{name}": buffer for name, buffer in zip(INPUTS, self._inputs, strict=True)}
        named = {**read, **static, "decode_graphs.hidden": self._hidden}
        self.addresses = {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in named.items()}
        try:
            self._upload(())
            self._capture_all()
        except BaseException as error:
            # The tensors of the failed forward lie in the graphs' pool, which could not go while they are there.
            release_frames(error, handled)
            undo = Teardown("capturing CUDA graphs")
            undo.run("giving up those captured", self.close)
            undo.finish_into(error)
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemoryError(
                    f"the card has no room to capture CUDA graphs for batches of up to {self.sizes[-1]}: "
                    "lower max_num_seqs or the size of the KV cache, or leave cuda_graphs off"
                ) from error
            raise

    def run(
        self,
        token_ids: Sequence[int],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        seq_lens: Sequence[int],
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one token of each of B sequences, to [B, hidden_size] in a static buffer, valid until the next run.

        Arguments are as in `PagedDecodes`; token ids that are on the device alone come as `sampled`, int64 [B].
        """
        count = len(token_ids)
        self._upload((token_ids, positions, slots, rows, seq_lens))
        if sampled is not None:
            self._inputs[0, :count].copy_(sampled)
        self._graphs[next(size for size in self.sizes if size >= count)].replay()
        return self._hidden[:count]

    def close(self) -> None:
        """Give the graphs up, and let go of all that they use: their pool's memory is torch's cache then."""
        teardown = Teardown("giving the CUDA graphs up")
        if self._graphs:
            # A step that failed may still be running.
            teardown.run("waiting for the card", partial(torch.cuda.synchronize, self._inputs.device))
        while self._graphs:
            size, graph = self._graphs.popitem()
            teardown.run(f"the graph for {size}", graph.reset)
        for name in ("_forward", "_block_table", "_inputs", "_hidden"):
            self.__dict__.pop(name, None)
        teardown.finish()

    def _upload(self, inputs: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> None:
        """Put a batch into the static inputs, and padding behind it."""
        self._staged[:] = _PADDING
        for place, values in zip(self._staged, inputs, strict=False):
            place[: len(values)] = values
        self._inputs.copy_(torch.from_numpy(self._staged), non_blocking=True)

    def _compute(self, size: int) -> None:
        """Do what one graph does: hidden states of the inputs' first `size` places."""
        input_ids, positions, slots, rows, seq_lens = self._inputs[:, :size]
        metadata = PagedDecodes(self._block_table, rows, seq_lens, slots)
        self._hidden[:size].copy_(self._forward(input_ids, positions, metadata))

    def _capture_all(self) -> None:
        with torch.cuda.device(self._inputs.device):
            try:
                self._capture_on(torch.cuda.Stream())  # type: ignore[no-untyped-call]
            finally:
                _clear_library_workspaces()

    def _capture_on(self, stream: torch.cuda.Stream) -> None:
        # Kernels are compiled and loaded, and libraries choose theirs for each size, while it is still allowed to wait.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in self.sizes:
                self._compute(size)
        torch.cuda.current_stream().wait_stream(stream)
        _clear_library_workspaces()
        pool = torch.cuda.graph_pool_handle()
        # From the largest on, so that the smaller ones find room in what the pool has already.
        for size in reversed(self.sizes):
            self._graphs[size] = torch.cuda.CUDAGraph()
            # The error mode: other threads of the program may allocate meanwhile.
            with torch.cuda.graph(self._graphs[size], pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._compute(size)


def _clear_library_workspaces() -> None:
    """Take cuBLAS's workspaces, one per stream, out of the list in which torch keeps them for ever.

    Before a capture, the next one is made in the graphs' pool; after it, that one goes with the pool, and no clearing
    by anybody takes it from the graphs.  As torch does it for graphs of its own (torch/_inductor/cudagraph_trees.py).
    """
    torch._C._cuda_clearCublasWorkspaces()
