"""What the driver says this process holds on a card: through NVML, amdsmi, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec


class DriverError(RuntimeError):
    """A driver library that cannot be used; the message says why."""


class DriverReading(msgspec.Struct, frozen=True):
    """One card as its driver sees it; None where the driver reports nothing.

    Attributes:
        device: `cuda:0`, as torch numbers it.
        source: `nvml`, `amdsmi` or `none`.
        process_bytes: bytes that this process holds on the card.
        card_used: bytes in use on the card, by all processes.
        card_total: bytes of memory on the card.
        note: why something is None; empty if all is known.
    """

    device: str
    source: str
    process_bytes: int | None
    card_used: int | None
    card_total: int | None
    note: str


class Driver(Protocol):
    """A way to ask the driver."""

    @property
    def name(self) -> str:
        """`nvml`, `amdsmi` or `none`."""

    def read(self, device_index: int) -> DriverReading:
        """Read one card, by torch's index; never raises: what cannot be read is None, with a note."""

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        """Bytes on one card by process identifier, of all processes that the driver lists; never raises.

        None where it lists one without its memory. Empty where it lists none or reports nothing.
        """

    def close(self) -> None:
        """Let go of the library; legal twice."""


def find_driver() -> Driver:
    """Return the first of NVML, amdsmi and none that works here; never raises."""
    from lowtide.probes.device.driver import NoDriver
    from lowtide.probes.device.driver.amdsmi import AmdsmiDriver
    from lowtide.probes.device.driver.nvml import NvmlDriver

    kinds: tuple[Callable[[], Driver], ...] = (NvmlDriver, AmdsmiDriver)
    reasons: list[str] = []
    for kind in kinds:
        driver = _opened(kind, reasons)
        if driver is not None:
            return driver
    return NoDriver("; ".join(reasons))


def _opened(kind: Callable[[], Driver], reasons: list[str]) -> Driver | None:
    """Return the driver, or None with the reason added."""
    try:
        return kind()
    except DriverError as error:
        reasons.append(str(error))
        return None


class NoDriver:
    """Reads nothing, and says why."""

    name = "none"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self, device_index: int) -> DriverReading:
        """Everything unknown."""
        return DriverReading(f"cuda:{device_index}", self.name, None, None, None, f"no driver to ask: {self._reason}")

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        """None known."""
        return {}

    def close(self) -> None:
        """Nothing to let go of."""
