"""Weights that a trainer sends: packed into buckets that every process of the engine opens, loaded all or none."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from lowtide.engine.device_allocator.arena import padded
from lowtide.engine.errors import OutOfMemoryError, WeightUpdateError
from lowtide.engine.model_executor.parallel_layers import Shard
from lowtide.engine.pages import check_device

FILE_NAME = "lowtide-weights"
"""What the mappings of a bucket on a CPU are called in `/proc/PID/maps`, after `/memfd:`."""


class FileExport(msgspec.Struct, frozen=True, tag=True):
    """A bucket of a CPU: the path at which its file can be opened, and its bytes."""

    path: str
    size: int


class CudaExport(msgspec.Struct, frozen=True, tag=True):
    """A bucket of a card, as torch's `UntypedStorage._share_cuda_` gives it, for one importer.

    Each export counts one importer in torch's counter file: one that two processes import falls below 0, and the memory
    is never freed (pytorch#149187, vllm#51258).

    Attributes:
        handle: the device, the handle of CUDA IPC, bytes, and the offset in what the handle is of.
        counter: the counter file and the place in it, the handle of an event, and whether that must be waited for.
    """

    handle: tuple[int, bytes, int, int]
    counter: tuple[bytes, int, bytes, bool]


Export: TypeAlias = FileExport | CudaExport


class FileMemory:
    """Memory that the sender fills, `data`, uint8 [size]: a file without a name, of which nothing stays."""

    data: torch.Tensor

    def __init__(self, size: int) -> None:
        self.size = size
        self._file = os.memfd_create(FILE_NAME)
        try:
            # Else a write would find out that there is no room, by a signal that ends the process.
            os.posix_fallocate(self._file, 0, size)
            self.data = _mapped(self._file, size)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise OutOfMemoryError(f"no room for a bucket of {size} bytes in shared memory: {error}") from error
            raise

    def export(self) -> FileExport:
        """Return what one other process opens it by; another one needs another export."""
        return FileExport(f"/proc/{os.getpid()}/fd/{self._file}", self.size)

    def close(self) -> None:
        """Unmap it, with the last tensor over it, and close the file; what others have open goes when they close it."""
        self.__dict__.pop("data", None)
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class CudaMemory:
    """Memory of torch's on a card; as `FileMemory`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._copy: FileMemory | None = None
        try:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"no room for a bucket of {size} bytes on {device}: {error}") from error

    def export(self) -> CudaExport:
        """Return a handle for one importer."""
        shared = self.data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return CudaExport(shared[:4], shared[4:])

    def on_host(self) -> FileMemory:
        """Return a copy of what it holds now, in shared memory; valid until the next one."""
        if self._copy is None:
            self._copy = FileMemory(self.size)
        self._copy.data.copy_(self.data)
        return self._copy

    def close(self) -> None:
        """Let go of it and its copy, and of the storages that importers have closed."""
        self.__dict__.pop("data", None)
        if self._copy is not None:
            self._copy.close()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


BucketMemory: TypeAlias = FileMemory | CudaMemory


def release_cached(device: str) -> None:
    """Give back what torch has cached of closed buckets, and all else that it has cached in this process."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def bucket_memory(size: int, device: str) -> BucketMemory:
    """Return new memory of `size` bytes on a device; `OutOfMemoryError`: no room, and nothing is held."""
    place = check_device(device)
    return FileMemory(size) if place.type == "cpu" else CudaMemory(size, place)


@contextlib.contextmanager
def opened(export: Export) -> Iterator[torch.Tensor]:
    """Open a bucket of another process while the block lasts, as uint8 [size], or raise `WeightUpdateError`."""
    if isinstance(export, FileExport):
        try:
            file = os.open(export.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightUpdateError(
                f"the bucket {export.path} cannot be opened: {error}; send the weights again"
            ) from error
        try:
            data = _mapped(file, export.size)
        finally:
            os.close(file)
        yield data
        return
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device, handle, size, offset = export.handle
    whole = (torch.Tensor, torch.Size([size]), (1,), 0, torch.UntypedStorage, torch.uint8)
    data = rebuild_cuda_tensor(*whole, device, handle, size, offset, False, *export.counter)  # type: ignore[no-untyped-call]
    try:
        yield data
    finally:
        # The sender fills it again, or frees it, once it has heard that it was copied.
        torch.cuda.current_stream(data.device).synchronize()


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


BUCKET_BYTES = 64 << 20
"""Bytes of a bucket, unless one tensor alone is larger."""

Named = tuple[str, torch.Tensor]


class PackedTensor(msgspec.Struct, frozen=True):
    """One tensor in a bucket, `offset` bytes from its start; its dtype as torch names it, without `torch.`."""

    name: str
    dtype: str
    shape: list[int]
    offset: int

    def over(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bucket's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        size = math.prod(self.shape) * dtype.itemsize
        return data[self.offset : self.offset + size].view(dtype).view(self.shape)


class ReceivedBucket(msgspec.Struct, frozen=True):
    """A bucket of another process, in one that opens it or hands it on: one export for each process that may."""

    tensors: list[PackedTensor]
    exports: list[Export]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Do as `SentBucket.opened`."""
        (own,) = self.exports
        with opened(own) as data:
            yield {each.name: each.over(data) for each in self.tensors}

    def shared(self, receivers: int) -> ReceivedBucket:
        """Return it, which came with so many exports."""
        assert receivers == len(self.exports)
        return self


class SentBucket(NamedTuple):
    """A filled bucket in the sender's process, and what lies where in it."""

    tensors: list[PackedTensor]
    memory: BucketMemory

    @contextlib.contextmanager
    def opened(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors by name, in this process, for as long as the block lasts; nothing is exported."""
        yield {each.name: each.over(self.memory.data) for each in self.tensors}

    def shared(self, receivers: int) -> ReceivedBucket:
        """Return it with an export for each of so many other processes, which are the ranks in their order.

        Of ranks on cards only the first has that of the bucket. To open it there, another one would need a context on
        that card, which would be there for ever (vime#4): it gets a copy on the host.
        """
        if receivers == 1 or isinstance(self.memory, FileMemory):
            return ReceivedBucket(self.tensors, [self.memory.export() for _ in range(receivers)])
        copy = self.memory.on_host()
        exports: list[Export] = [self.memory.export(), *(copy.export() for _ in range(1, receivers))]
        return ReceivedBucket(self.tensors, exports)


Bucket: TypeAlias = SentBucket | ReceivedBucket
"""Weights for every process of an engine."""


def packed(
    tensors: Mapping[str, torch.Tensor] | Iterable[Named], device: str, bucket_bytes: int
) -> Generator[SentBucket, None, None]:
    """Yield buckets of whole parameters, all in the same memory: one is valid until the next.

    The tensors are taken one after the other, each when it is packed.
    """
    memory: BucketMemory | None = None
    try:
        for group in _groups(tensors.items() if isinstance(tensors, Mapping) else tensors, bucket_bytes):
            size = max(sum(_size(tensor) for _, tensor in group), 1)
            if memory is not None and memory.size < size:
                memory.close()
                memory = None
            if memory is None:
                memory = bucket_memory(size, device)
            yield _packed(memory, group)
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
    return SentBucket(packed, memory)


def _size(tensor: torch.Tensor) -> int:
    return padded(tensor.shape, tensor.dtype)


_AT_ONCE = 1 << 20
"""Elements that are taken at a time: each takes some ten bytes meanwhile."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: torch.Tensor, shard: Shard | None = None) -> int:
    """Return the sum, in 64 bits, of each element's bits times an odd number that its place in the parameter gives.

    One element that changes changes it, whichever; and parts (`shard`) of a parameter add up to that of the whole.
    """
    part = shard or Shard(tuple(tensor.shape))
    bits = tensor.detach().contiguous().view(_BITS[tensor.dtype.itemsize])
    rows = bits.reshape(bits.shape[0] if bits.ndim else 1, -1)
    width = math.prod(part.full_shape[1:])
    first_row, first_column = (part.start if part.dim == dim else 0 for dim in (0, 1))
    columns = torch.arange(first_column, first_column + rows.shape[1], device=tensor.device)
    total = 0
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        some = rows[start : start + step].to(torch.int64)
        places = torch.arange(first_row + start, first_row + start + some.shape[0], device=tensor.device)
        # Not from the card at once: torch would keep page-locked memory for the number.
        total += int((some * _factors(places[:, None] * width + columns)).sum().cpu())
    return _signed(total)


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the checksums of whole parameters, of the parts that ranks have."""
    found: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = _signed(found.get(name, 0) + value)
    return found


def _factors(places: torch.Tensor) -> torch.Tensor:
    """Spread the places over all 64 bits, as Fibonacci hashing does (Knuth, TAOCP 3, 6.4)."""
    mixed = places * -7046029254386353131
    return (mixed ^ (mixed >> 29)) | 1


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
