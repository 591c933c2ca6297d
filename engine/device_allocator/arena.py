"""Arenas: memory with a tag, at addresses that stay while its physical pages come and go."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch

from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import Lease, PageBackend, Part
from lowtide.engine.teardown import WhenDropped, undone_by
from lowtide.probes import stages
from lowtide.probes.stages import stage

# Tensors start where every vectorised load is aligned, as torch's own allocators do.
ALIGNMENT = 512
# Pages are mapped in parts of this many bytes: few driver calls (16 GiB in 64 of them take 3 ms on an H200), and still
# fine enough for a copy into one part to run while the next is mapped.
PART_BYTES = 256 << 20

# References to what only one local variable holds: that, and the argument of `getrefcount`.
_HELD_HERE = 2


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def padded(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in an arena."""
    return round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)


class _Record:
    """What outlives the arena object for as long as a tensor holds its memory; it is what the probes read."""

    def __init__(self, tag: str, backend: PageBackend, lease: Lease, size: int) -> None:
        self.tag = tag
        self.backend = backend
        self.address = lease.address
        self._lease = weakref.ref(lease)
        self.size = size
        self.parts: list[Part] = []
        self.error: BaseException | None = None
        self.is_given_back = False

    @property
    def mapped(self) -> int:
        return sum(part.size for part in self.parts)

    def read_pools(self) -> tuple[stages.PoolReading, ...]:
        if self._lease() is None:
            # On its way back: who reads has the level that it comes to.
            WhenDropped.wait()
            if self.is_given_back:
                return ()
        ranges = tuple((self.address + part.offset, part.size) for part in self.parts)
        device, span = str(self.backend.device), (self.address, self.size)
        return (stages.PoolReading("arena", self.tag, device, self.size, self.mapped, ranges, span),)

    def dispose(self) -> None:
        """Give the memory back, once the lease is gone: with the arena's close, or later with the last tensor."""
        try:
            self.backend.dispose(self.address, self.size, self.parts)
        except BaseException as error:  # noqa: BLE001 - nobody would see it; `Arena.close` hands the error on
            self.error = error
        else:
            self.is_given_back = True
            stages.withdraw(self)


class Arena:
    """A range of `capacity` bytes that tensors are carved out of, one after the other.

    The pages can be dropped and mapped again at any time; addresses, and so tensors and captured graphs, stay valid,
    contents do not survive.  The memory is the arena's *and* its tensors': `close` gives it back at once if no tensor
    is left, else it goes with the last one, exactly as memory of torch's own allocator would.
    """

    def __init__(self, tag: str, capacity: int, backend: PageBackend) -> None:
        self.tag = tag
        self.capacity = round_up(max(capacity, 1), backend.granularity)
        self._backend = backend
        self.used = 0
        """Bytes that `allocate` has handed out."""
        self._failed = False
        self._lease: Lease | None = backend.reserve(self.capacity)
        self._record = _Record(tag, backend, self._lease, self.capacity)
        # At exit the process gives everything back anyway, and the driver may be gone before us.
        self._dropped = WhenDropped(self._lease, self._record.dispose, at_exit=False)
        stages.announce(self._record)

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._backend.device

    @property
    def mapped(self) -> int:
        """Bytes with pages behind them, from the start of the range."""
        return self._record.mapped

    def map_to(self, size: int) -> None:
        """Map pages until the first `size` bytes have them; without room for all, the arena is as it was before."""
        target = round_up(size, self._backend.granularity)
        if target > self.capacity:
            raise OutOfMemoryError(f"arena {self.tag!r} has {self.capacity} bytes of addresses, {target} are needed")
        before = self.mapped
        with undone_by(lambda undo: undo.run("giving the new pages back", partial(self.unmap_to, before))):
            while self.mapped < target:
                self.map_part(target)

    def map_part(self, target: int) -> None:
        """Map the next part on the way to `target` bytes; for a caller that fills one part while it maps the next."""
        # What others have dropped may be all that there is.
        WhenDropped.wait()
        offset = self.mapped
        size = min(PART_BYTES, round_up(target, self._backend.granularity) - offset)
        try:
            part = self._backend.map(self._require_lease(), offset, size)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"arena {self.tag!r} cannot grow from {offset} to {target} bytes: {error}"
            ) from error
        self._record.parts.append(part)

    def unmap_to(self, size: int) -> None:
        """Give back the parts that lie wholly past the first `size` bytes."""
        parts = self._record.parts
        while parts and parts[-1].offset >= size:
            # Taken off the list only afterwards: what the driver refuses to unmap is still mapped.
            self._backend.unmap(self._require_lease(), parts[-1])
            parts.pop()

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor of shape [size] over mapped bytes of the arena."""
        return self._backend.tensor(self._require_lease(), offset, size)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined contents at the next free address, in a storage of its own, if it fits."""
        start, size, nbytes = self.used, padded(shape, dtype), math.prod(shape) * dtype.itemsize
        self.map_to(start + size)
        # The storage has exactly the tensor's bytes, so that whoever counts storages counts what is really used.
        raw = self.bytes_at(start, nbytes) if size else torch.empty(0, device=self._backend.device)
        self.used = start + size
        return tensor_over(raw, 0, shape, dtype)

    def close(self) -> None:
        """Give up the arena's own hold on its memory; called again, it tries again what the driver has refused."""
        lease, self._lease = self._lease, None
        if lease is None:
            if self._failed:
                self._record.dispose()
        elif sys.getrefcount(lease) == _HELD_HERE:
            self._failed = True
            # Called here: while the last reference is dropped, what a signal handler raises is lost, and the call too.
            self._dropped.cancel()
            self._record.dispose()
        del lease
        self._failed = self._record.error is not None
        if self._record.error is not None:
            error, self._record.error = self._record.error, None
            raise error

    def _require_lease(self) -> Lease:
        if self._lease is None:
            raise ValueError(f"arena {self.tag!r} is closed")
        return self._lease


def tensor_over(raw: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor in the storage of `raw`, not a view, which would keep `raw` alive as its base."""
    tensor = torch.empty(0, dtype=dtype, device=raw.device)
    # Without strides it is laid out row by row.
    return tensor.set_(raw.untyped_storage(), offset // dtype.itemsize, tuple(shape), ())


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
        """Tensors of the given shapes and types, side by side, with undefined contents, valid until the next `get`."""
        offsets, size = _layout(specs)
        whole = self.reserve(size)
        return [tensor_over(whole, offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, specs, strict=True)]

    def reserve(self, size: int) -> torch.Tensor:
        """Return all of the memory, uint8 [at least size], after growing if need be; errors as `get`."""
        if self._all is None or self._all.numel() < size:
            if size > self._arena.capacity:
                raise OutOfMemoryError(
                    f"a workspace of {self._arena.capacity} bytes cannot give {size} bytes: "
                    "lower max_num_batched_tokens or max_model_len"
                )
            with stage("grow_workspace"):
                self._all = self._grow(size)
        return self._all

    @property
    def mapped(self) -> int:
        """Bytes with pages behind them."""
        return self._arena.mapped

    def drop_pages(self) -> None:
        """Give the pages back; the next `get` maps what it needs."""
        self._all = None
        self._arena.unmap_to(0)

    def _grow(self, size: int) -> torch.Tensor:
        self._arena.map_to(size)
        return self._arena.bytes_at(0, self._arena.mapped)

    def close(self) -> None:
        """Give up the memory for good; `DriverError`: the driver did not take it back."""
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
        """Do as `Workspace.get`."""
        _, size = _layout(specs)
        # After a sleep there are no pages behind the views.
        self._workspace.reserve(size)
        if specs != self._specs:
            self._views = self._workspace.get(*specs)
            self._specs = specs
        return self._views


def _layout(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Return where each tensor starts, and how many bytes all of them take."""
    offsets, size = [], 0
    for shape, dtype in specs:
        offsets.append(size)
        size += padded(shape, dtype)
    return offsets, size
