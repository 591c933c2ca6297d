"""The memory of a bucket, and how another process gets at it: a file without a name on a CPU, CUDA IPC on a card."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec
import torch

from lowtide.engine.errors import OutOfMemoryError, WeightUpdateError
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
    """

    device: int
    handle: bytes
    size: int
    offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


Export: TypeAlias = FileExport | CudaExport


class BucketMemory(Protocol):
    """Memory that the sender fills.

    Attributes:
        size: its bytes.
    """

    size: int

    @property
    def data(self) -> torch.Tensor:
        """All of it, as uint8 of shape [size]."""

    def export(self) -> Export:
        """Return what one other process opens it by."""

    def close(self) -> None:
        """Give it up; what others have open of it goes when they close it."""


class FileMemory:
    """A file in memory that has no name: nothing of it stays, however its processes end.

    Raises:
        OutOfMemoryError: no room; nothing is held then.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._file = os.memfd_create(FILE_NAME)
        self._data: torch.Tensor | None = None
        try:
            # Else a write would find out that there is no room, by a signal that ends the process.
            os.posix_fallocate(self._file, 0, size)
            self._data = _mapped(self._file, size)
        except OSError as error:
            self.close()
            raise OutOfMemoryError(f"no room for a bucket of {size} bytes in shared memory: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> torch.Tensor:
        """All of it, as uint8 of shape [size]."""
        assert self._data is not None
        return self._data

    def export(self) -> FileExport:
        """Return the path of its file."""
        return FileExport(f"/proc/{os.getpid()}/fd/{self._file}", self.size)

    def close(self) -> None:
        """Unmap it, with the last tensor over it, and close the file."""
        self._data = None
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class CudaMemory:
    """Memory of torch's on a card.

    Raises:
        OutOfMemoryError: no room.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._data: torch.Tensor | None = None
        try:
            self._data = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"no room for a bucket of {size} bytes on {device}: {error}") from error

    @property
    def data(self) -> torch.Tensor:
        """All of it, as uint8 of shape [size]."""
        assert self._data is not None
        return self._data

    def export(self) -> CudaExport:
        """Return a handle for one importer; another one needs another export."""
        return CudaExport(*self.data.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Let go of it, and of the storages that importers have closed."""
        self._data = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def release_cached(device: str) -> None:
    """Give back what torch has cached of closed buckets, and all else that it has cached in this process."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def bucket_memory(size: int, device: str) -> BucketMemory:
    """Return new memory of `size` bytes on a device.

    Raises:
        ConfigError: the device does not exist.
        OutOfMemoryError: no room.
    """
    place = check_device(device)
    return FileMemory(size) if place.type == "cpu" else CudaMemory(size, place)


@contextlib.contextmanager
def opened(export: Export) -> Iterator[torch.Tensor]:
    """Open a bucket of another process for as long as the block lasts, as uint8 of shape [size].

    Whoever keeps a tensor over it keeps it open.

    Raises:
        WeightUpdateError: it cannot be opened; the sender may have ended.
    """
    if isinstance(export, FileExport):
        yield _opened_file(export)
        return
    data = _opened_on_card(export)
    try:
        yield data
    finally:
        # The sender fills it again, or frees it, once it has heard that it was copied.
        torch.cuda.current_stream(data.device).synchronize()


def _opened_file(export: FileExport) -> torch.Tensor:
    try:
        file = os.open(export.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightUpdateError(
            f"the bucket {export.path} cannot be opened: {error}; send the weights again"
        ) from error
    try:
        return _mapped(file, export.size)
    finally:
        os.close(file)


def _opened_on_card(export: CudaExport) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size([export.size]),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        export.device,
        export.handle,
        export.size,
        export.offset,
        False,
        export.ref_counter_handle,
        export.ref_counter_offset,
        export.event_handle,
        export.event_sync_required,
    )
    return tensor


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
