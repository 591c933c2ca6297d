"""Where an arena's pages come from: one backend per kind of device, all with the same few operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from lowtide.engine.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.engine.pages.card import CudaDriver, HipDriver


class Lease(Protocol):
    """Keeps an address range alive.

    Every tensor over the range holds the lease through its storage, so the range goes when the arena *and* the last
    tensor are gone: a tensor that somebody leaked can hold memory, but can never read somebody else's.
    """

    @property
    def address(self) -> int:
        """First byte of the range."""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""


@dataclass(frozen=True, slots=True)
class Part:
    """A mapped part of a range: where it lies, bytes, and the driver's handle of its pages."""

    offset: int
    size: int
    handle: int = 0


class PageBackend:
    """Address ranges whose physical pages come and go.  Sizes are bytes, multiples of `granularity`.

    What a CPU has no use for does nothing here: its memory is the host's, and nothing of it is ever queued or cached.
    """

    device: torch.device
    granularity: int
    pins_host_memory = False

    def reserve(self, size: int) -> Lease:
        """Reserve a range without any page; `OutOfMemoryError`: there is no address range of this size."""
        raise NotImplementedError

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        """Put physical pages behind one part of the range, with undefined contents, if there is room for all of it."""
        raise NotImplementedError

    def unmap(self, lease: Lease, part: Part) -> None:
        """Give the pages of one part back."""
        raise NotImplementedError

    def dispose(self, address: int, size: int, parts: list[Part]) -> None:
        """Give back what is still mapped, taking it off `parts`, and the address range; called after the lease died."""
        raise NotImplementedError

    def tensor(self, lease: Lease, offset: int, size: int) -> torch.Tensor:
        """A uint8 tensor of shape [size] over mapped pages, with a storage of its own that holds the lease."""
        raise NotImplementedError

    def pin(self, address: int, size: int) -> None:
        """Lock host pages for direct copies; an `OutOfMemoryError` where the system does not let so much be locked."""

    def unpin(self, address: int) -> None:
        """Undo `pin` for the range that starts at `address`."""

    def record(self) -> torch.cuda.Event | None:
        """Mark this point on the device's current stream; None where copies are synchronous."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    def empty_cache(self) -> None:
        """Make torch give cached, unused device memory back to the driver."""


def check_device(device: str) -> torch.device:
    """The device that `device` names: "cpu", "cuda" or "cuda:N" (which is also what torch calls an AMD card).

    Raises:
        ConfigError: the device is of another kind, or there is none here.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not one that torch knows: use 'cpu' or 'cuda:N'") from error
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise ConfigError(f"device {device!r} is not supported: use 'cpu' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch sees no card here: use device 'cpu'")
    index = wanted.index if wanted.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device 'cuda:{index}' does not exist: torch sees {torch.cuda.device_count()} card(s)")
    return torch.device("cuda", index)


def open_backend(device: str) -> PageBackend:
    """The backend for `device`; errors as `check_device`, and where its driver's bindings are missing."""
    wanted = check_device(device)
    if wanted.type == "cpu":
        from lowtide.engine.pages.cpu import CpuPages

        return CpuPages()
    from lowtide.engine.pages.card import VmmPages

    return VmmPages(open_driver(wanted.index), wanted.index)


def open_driver(index: int) -> CudaDriver | HipDriver:
    """The memory calls of a card's driver, CUDA's or ROCm's; `ConfigError`: its bindings are missing."""
    if torch.version.hip is not None:
        from lowtide.engine.pages.card import HipDriver, load_hip

        return HipDriver(load_hip(), index)
    from lowtide.engine.pages.card import CudaDriver

    return CudaDriver(index)
