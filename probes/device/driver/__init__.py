"""What the driver says this process holds on a card: through NVML, amdsmi, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.originals import initialized_torch, os


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
        """Return the bytes on one card by process identifier, of all processes that the driver lists; never raises.

        None where it lists one without its memory. Empty where it lists none or reports nothing.
        """

    def close(self) -> None:
        """Let go of the library; legal twice."""


def find_driver() -> Driver:
    """Return the first of NVML, amdsmi and none that works here; never raises."""
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
        """Return none known."""
        return {}

    def close(self) -> None:
        """Let go of nothing."""


CUDA = ("CUDA_VISIBLE_DEVICES",)
HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible_card(environment: Mapping[str, str], names: tuple[str, ...], device_index: int) -> int | str | None:
    """Return the card that will get number `device_index`: its own index or its (abbreviated) UUID; None if hidden.

    As CUDA reads the variable: a list ends at the first entry that is neither a card's number nor an identifier.
    """
    listed = next((environment[name] for name in names if name in environment), None)
    if listed is None:
        return device_index
    cards: list[int | str] = []
    for entry in listed.split(","):
        card = entry.strip()
        if card.isdigit():
            cards.append(int(card))
        elif card.startswith(("GPU-", "MIG-")):
            cards.append(card)
        else:
            break
    return cards[device_index] if 0 <= device_index < len(cards) else None


def own_bytes(listed: Mapping[int, int | None], library: str, device_index: int) -> tuple[int | None, str]:
    """Return the bytes that this process holds on a card, or None with the reason why that is not known.

    A process that is not listed holds nothing, unless torch says that it has a context there: then it is listed under
    another number (a PID namespace of its own).

    Args:
        listed: bytes by process identifier; None where the driver lists one without its memory.
        library: what was asked, as a message calls it.
        device_index: of the card, as torch numbers it.
    """
    pid = os.getpid()
    if pid not in listed:
        torch = initialized_torch()
        if torch is not None and has_context(torch, device_index):
            return None, f"{library} does not list process {pid}, which has a context: another PID namespace?"
        return 0, ""
    if listed[pid] is None:
        return None, f"{library} lists this process without its memory (a permission, or a driver model without it)"
    return listed[pid], ""
