"""Where a command runs lowtide's own engine."""

from __future__ import annotations

from enum import Enum


class Device(str, Enum):
    """Where the engine runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def device_name(device: Device) -> str:
    """The name that torch has for it; `auto` takes a card if there is one."""
    import torch

    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda"
