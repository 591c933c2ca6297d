"""Scratch memory for a forward pass: one growing workspace per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.engine.arena import Arena, padded, tensor_over
from lowtide.engine.errors import OutOfMemoryError


class Workspace:
    """One micro-batch's scratch memory, at an address that never changes.

    It grows by mapping more pages behind the ones it has; the old buffer is the beginning of the new one, so growing
    never holds both, and a view that somebody kept still reads the same bytes.  (vllm#39226 is what happens when a
    workspace grows by allocating anew.)
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._all: torch.Tensor | None = None

    def get(self, *specs: tuple[Sequence[int], torch.dtype]) -> list[torch.Tensor]:
        """Tensors of the given shapes and types, side by side, with undefined contents, valid until the next `get`.

        Raises:
            OutOfMemoryError: the device has no room for the growth; the workspace is as it was.
        """
        offsets, size = [], 0
        for shape, dtype in specs:
            offsets.append(size)
            size += padded(shape, dtype)
        if self._all is None or self._all.numel() < size:
            if size > self._arena.capacity:
                raise OutOfMemoryError(
                    f"a workspace of {self._arena.capacity} bytes cannot give {size} bytes: "
                    "lower max_num_batched_tokens or max_model_len"
                )
            self._arena.map_to(size)
            self._all = self._arena.bytes_at(0, self._arena.mapped)
        return [
            tensor_over(self._all, offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, specs, strict=True)
        ]

    def drop_pages(self) -> None:
        """Give the pages back; the next `get` maps what it needs."""
        self._all = None
        self._arena.unmap_to(0)

    def close(self) -> None:
        """Give up the memory for good.

        Raises:
            DriverError: the driver did not take it back.
        """
        self._all = None
        self._arena.close()
