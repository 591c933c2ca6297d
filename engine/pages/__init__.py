"""Where an arena's pages come from: one backend per kind of device, all with the same few operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from lowtide.engine.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.engine.pages.card import Driver, VmmPages, _Range
    from lowtide.engine.pages.cpu import CpuPages, _Mapping


Lease: TypeAlias = "_Mapping | _Range"
"""Keeps an address range alive, of `nbytes` bytes from `address` on.

Every tensor over the range holds the lease through its storage, so the range goes when the arena *and* the last tensor
are gone: a tensor that somebody leaked can hold memory, but can never read somebody else's.
"""

PageBackend: TypeAlias = "CpuPages | VmmPages"
"""Address ranges whose physical pages come and go.  Sizes are bytes, multiples of `granularity`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A mapped part of a range: where it lies, bytes, and the driver's handle of its pages."""

    offset: int
    size: int
    handle: int = 0


def check_device(device: str) -> torch.device:
    """Return the device that `device` names; `ConfigError`: it is none of "cpu", "cuda" and "cuda:N", or not here."""
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
    """Return the backend for `device`; errors as `check_device`, and where its driver's bindings are missing."""
    wanted = check_device(device)
    if wanted.type == "cpu":
        from lowtide.engine.pages.cpu import CpuPages

        return CpuPages()
    from lowtide.engine.pages.card import VmmPages

    return VmmPages(open_driver(wanted.index), wanted.index)


def open_driver(index: int) -> Driver:
    """Return the memory calls of a card's driver, CUDA's or ROCm's; `ConfigError`: its bindings are missing."""
    if torch.version.hip is not None:
        from lowtide.engine.pages.card import HipDriver, load_hip

        return HipDriver(load_hip(), index)
    from lowtide.engine.pages.card import CudaDriver

    return CudaDriver(index)
