"""Scratch memory for a forward pass: one growing workspace per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from lowtide.engine.device_allocator.arena import Arena, padded, tensor_over
from lowtide.engine.errors import OutOfMemoryError
from lowtide.probes.stages import stage

Spec: TypeAlias = tuple[Sequence[int], torch.dtype]
"""Shape and type of a tensor."""


class Workspace:
    """One micro-batch's scratch memory, at an address that never changes.

    It grows by mapping more pages behind the ones it has; the old buffer is the beginning of the new one, so growing
    never holds both, and a view that somebody kept still reads the same bytes.  (vllm#39226 is what happens when a
    workspace grows by allocating anew.)
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._all: torch.Tensor | None = None

    def get(self, *specs: Spec) -> list[torch.Tensor]:
        """Tensors of the given shapes and types, side by side, with undefined contents, valid until the next `get`.

        Raises:
            OutOfMemoryError: the device has no room for the growth; the workspace is as it was.
        """
        offsets, size = _layout(specs)
        whole = self.reserve(size)
        return [tensor_over(whole, offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, specs, strict=True)]

    def reserve(self, size: int) -> torch.Tensor:
        """All of the memory, uint8 [at least size], after growing if need be.

        Raises:
            OutOfMemoryError: the device has no room for the growth; the workspace is as it was.
        """
        if self._all is None or self._all.numel() < size:
            if size > self._arena.capacity:
                raise OutOfMemoryError(
                    f"a workspace of {self._arena.capacity} bytes cannot give {size} bytes: "
                    "lower max_num_batched_tokens or max_model_len"
                )
            with stage("grow_workspace"):
                self._all = self._grow(size)
        return self._all

    def drop_pages(self) -> None:
        """Give the pages back; the next `get` maps what it needs."""
        self._all = None
        self._arena.unmap_to(0)

    def _grow(self, size: int) -> torch.Tensor:
        self._arena.map_to(size)
        return self._arena.bytes_at(0, self._arena.mapped)

    def close(self) -> None:
        """Give up the memory for good.

        Raises:
            DriverError: the driver did not take it back.
        """
        self._all = None
        self._arena.close()


class WorkspaceViews:
    """A workspace as one micro-batch uses it: every layer asks for the same tensors, and they are cut once.

    They stay valid over steps and sleeps, because a workspace never moves.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._specs: tuple[Spec, ...] = ()
        self._views: list[torch.Tensor] = []

    def get(self, *specs: Spec) -> list[torch.Tensor]:
        """As `Workspace.get`.

        Raises:
            OutOfMemoryError: see there.
        """
        _, size = _layout(specs)
        # After a sleep there are no pages behind the views.
        self._workspace.reserve(size)
        if specs != self._specs:
            self._views = self._workspace.get(*specs)
            self._specs = specs
        return self._views


def _layout(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Where each tensor starts, and how many bytes all of them take."""
    offsets, size = [], 0
    for shape, dtype in specs:
        offsets.append(size)
        size += padded(shape, dtype)
    return offsets, size
