"""Which KV blocks each running sequence has, on the device for the attention and mirrored on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lowtide.engine.config import Allocator
from lowtide.engine.errors import EngineError
from lowtide.engine.model_executor.fused_ops import has_kernels


class BlockTable:
    """One row of block numbers per running sequence: int32 [max_num_seqs, max_blocks_per_seq].

    Rows are changed on the host and come to the device with `commit`. Entries past a row's end mean nothing.

    Kernels find the table through three small tensors on the device, as in vLLM's V2 model runner: what a captured
    graph has baked in is then where those lie, and nothing about the table itself.

    Attributes:
        device_table: the tensor on the device; its address never changes.
        pointers: what leads to it, by name: its address, int64 [1]; elements from one row to the next, int64 [1];
            blocks per row, int32 [1].
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, allocate: Allocator) -> None:
        self.block_size = block_size
        self.device_table = allocate((max_num_seqs, max_blocks_per_seq), torch.int32)
        self.device_table.zero_()
        self._host = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._changed: set[int] = set()
        self.create_pointers(allocate)

    def create_pointers(self, allocate: Allocator) -> None:
        """Make the pointer, stride and size tensors and fills them; nobody ever writes them again.

        So their contents must outlive every sleep, and graphs captured before must be captured anew
        (vllm#40648 is both going wrong).
        """
        kinds = {"table_ptrs": torch.int64, "table_strides": torch.int64, "table_sizes": torch.int32}
        self.pointers = {name: allocate((1,), dtype) for name, dtype in kinds.items()}
        for tensor, value in zip(self.pointers.values(), self._where(), strict=True):
            tensor.fill_(value)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows of the table, by the pointer tensors: int32 [B, max_blocks_per_seq] for rows int64 [B].

        Raises:
            EngineError: the pointer tensors do not lead to the table. Only where the host can look at them without
                waiting: on a card with Triton, a kernel follows them wherever they lead.
        """
        if has_kernels(rows):
            from lowtide.engine.model_executor.triton_kernels import gather_rows

            return gather_rows(self.pointers.values(), rows, self.device_table.shape[1])
        found = tuple(int(tensor.item()) for tensor in self.pointers.values())
        if found != self._where():
            raise EngineError(
                f"the block table's pointer tensors say {_written(found)}, "
                f"and the table has {_written(self._where())}: their contents were lost; "
                "keep them in memory that no sleep drops"
            )
        return self.device_table[rows]

    def _where(self) -> tuple[int, int, int]:
        return self.device_table.data_ptr(), self.device_table.stride(0), self.device_table.shape[1]

    def num_blocks(self, row: int) -> int:
        """Blocks in a row."""
        return self._num_blocks[row]

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks at a row's end."""
        if not block_ids:
            return
        start = self._num_blocks[row]
        self._host[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
        self._changed.add(row)

    def clear(self, row: int) -> None:
        """Empty a row; what the device still has of it is not read any more."""
        self._num_blocks[row] = 0

    def commit(self) -> None:
        """Copy the rows that changed to the device, as one range."""
        if self._changed:
            first, last = min(self._changed), max(self._changed) + 1
            self.device_table[first:last].copy_(torch.from_numpy(self._host[first:last]), non_blocking=True)
            self._changed.clear()

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots (block x block_size + offset) of tokens, by their rows and positions: int64, as long as both."""
        slots: npt.NDArray[np.int64] = self._host[rows, positions // self.block_size] * np.int64(self.block_size)
        slots += positions % self.block_size
        return slots


def _written(where: tuple[int, ...]) -> str:
    address, stride, size = where
    return f"address {address % (1 << 64):#x}, stride {stride}, size {size}"
