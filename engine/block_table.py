"""Which KV blocks each running sequence has, on the device for the attention and mirrored on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lowtide.engine.config import Allocator


class BlockTable:
    """One row of block numbers per running sequence: int32 [max_num_seqs, max_blocks_per_seq].

    Rows are changed on the host and come to the device with `commit`. Entries past a row's end mean nothing.

    Attributes:
        device_table: the tensor on the device; its address never changes.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, allocate: Allocator) -> None:
        self.block_size = block_size
        self.device_table = allocate((max_num_seqs, max_blocks_per_seq), torch.int32)
        self.device_table.zero_()
        self._host = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._changed: set[int] = set()

    def num_blocks(self, row: int) -> int:
        """Blocks in a row."""
        return self._num_blocks[row]

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Adds blocks at a row's end."""
        if not block_ids:
            return
        start = self._num_blocks[row]
        self._host[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
        self._changed.add(row)

    def clear(self, row: int) -> None:
        """Empties a row; what the device still has of it is not read any more."""
        self._num_blocks[row] = 0

    def commit(self) -> None:
        """Copies the rows that changed to the device, as one range."""
        if self._changed:
            first, last = min(self._changed), max(self._changed) + 1
            self.device_table[first:last].copy_(torch.from_numpy(self._host[first:last]))
            self._changed.clear()

    def slots(self, row: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots (block x block_size + offset) of a row's tokens from `start` to `stop`: int64 [stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = self._host[row, positions // self.block_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots
