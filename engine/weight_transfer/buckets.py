"""Packs weights into buckets of a bounded size and has an engine load them, one after the other, all or none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import msgspec
import torch

from lowtide.engine.device_allocator.arena import padded
from lowtide.engine.errors import WeightUpdateError
from lowtide.engine.teardown import Teardown
from lowtide.engine.weight_transfer.bucket_memory import BucketMemory, Export, bucket_memory, opened

BUCKET_BYTES = 64 << 20
"""Bytes of a bucket, unless one tensor alone is larger."""

Named = tuple[str, torch.Tensor]


class PackedTensor(msgspec.Struct, frozen=True):
    """One tensor in a bucket.

    Attributes:
        name: of the parameter.
        dtype: as torch names it, without `torch.`.
        shape: of the whole parameter, or of the whole tensor that the trainer has.
        offset: bytes from the bucket's start.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int

    def over(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bucket's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        size = math.prod(self.shape) * dtype.itemsize
        return data[self.offset : self.offset + size].view(dtype).view(self.shape)


class SharedBucket(msgspec.Struct, frozen=True):
    """A bucket as one other process gets it."""

    export: Export
    tensors: list[PackedTensor]


class Bucket(Protocol):
    """Weights for every process of an engine."""

    def opened(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Whole tensors by name, in this process, for as long as the block lasts."""

    def shared(self, receivers: int) -> Sequence[SharedBucket]:
        """Return one export for each of so many other processes."""


class SentBucket:
    """A bucket in the sender's process.

    Args:
        memory: that has been filled.
        tensors: what lies where.
    """

    def __init__(self, memory: BucketMemory, tensors: Sequence[PackedTensor]) -> None:
        self._memory = memory
        self._tensors = list(tensors)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """As `Bucket.opened`; nothing is exported."""
        yield _named(self._tensors, self._memory.data)

    def shared(self, receivers: int) -> Sequence[SharedBucket]:
        """As `Bucket.shared`."""
        return [SharedBucket(self._memory.export(), self._tensors) for _ in range(receivers)]


class ReceivedBucket(msgspec.Struct, frozen=True):
    """A bucket of another process, in one that opens it or hands it on.

    Attributes:
        exports: of it, one for each process that may open it.
    """

    exports: list[SharedBucket]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """As `Bucket.opened`."""
        (own,) = self.exports
        with opened(own.export) as data:
            yield _named(own.tensors, data)

    def shared(self, receivers: int) -> Sequence[SharedBucket]:
        """As `Bucket.shared`: those that came."""
        assert receivers == len(self.exports)
        return self.exports


class Receiver(Protocol):
    """An engine that loads buckets: its core, or the client of one."""

    def begin_update(self) -> None:
        """Keep the present weights until the update has ended."""

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy what a bucket has into the weights."""

    def undo_update(self) -> None:
        """Put the weights back that were there before."""

    def end_update(self, loaded: bool) -> None:
        """Let go of the former weights; `loaded` where the new ones are there."""


def send_weights(
    receiver: Receiver, tensors: Mapping[str, torch.Tensor] | Iterable[Named], device: str, bucket_bytes: int
) -> None:
    """Send tensors to an engine, bucket by bucket; where that fails, the engine has its former weights.

    Args:
        receiver: the engine's core.
        tensors: whole parameters by name, all or some; taken one after the other, each when it is packed.
        device: where the engine keeps its memory.
        bucket_bytes: of a bucket.

    Raises:
        WeightUpdateError: there is no tensor, or one does not fit the model.
        OutOfMemoryError: no room for a bucket, or for the former weights.
    """
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    receiver.begin_update()
    try:
        _send(receiver, named, device, bucket_bytes)
    except BaseException as error:
        undo = Teardown("sending the weights")
        undo.run("putting the former weights back", receiver.undo_update)
        undo.run("letting go of their copy", partial(receiver.end_update, loaded=False))
        undo.finish_into(error)
        raise
    receiver.end_update(loaded=True)


def _send(receiver: Receiver, tensors: Iterable[Named], device: str, bucket_bytes: int) -> None:
    memory: BucketMemory | None = None
    try:
        for group in _groups(tensors, bucket_bytes):
            size = max(sum(_size(tensor) for _, tensor in group), 1)
            if memory is not None and memory.size < size:
                memory.close()
                memory = None
            if memory is None:
                memory = bucket_memory(size, device)
            receiver.load_bucket(_packed(memory, group))
        if memory is None:
            raise WeightUpdateError("no tensor was sent: give the parameters by name")
    finally:
        if memory is not None:
            memory.close()


def _groups(tensors: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yield as many tensors as fit into a bucket; one that is larger comes alone."""
    group: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if group and size + _size(tensor) > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += _size(tensor)
    if group:
        yield group


@torch.no_grad()
def _packed(memory: BucketMemory, group: Sequence[Named]) -> SentBucket:
    packed: list[PackedTensor] = []
    offset = 0
    for name, tensor in group:
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(PackedTensor(name, dtype, list(tensor.shape), offset))
        packed[-1].over(memory.data).copy_(tensor)
        offset += _size(tensor)
    return SentBucket(memory, packed)


def _size(tensor: torch.Tensor) -> int:
    return padded(tensor.shape, tensor.dtype)


def _named(tensors: Sequence[PackedTensor], data: torch.Tensor) -> dict[str, torch.Tensor]:
    return {each.name: each.over(data) for each in tensors}
