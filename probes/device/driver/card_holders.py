"""Who holds how much of each card, as far as the driver lists it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec

from lowtide.probes.device.driver import Driver

MOST_CARDS = 16
"""How many cards of one host are asked for at most."""


@runtime_checkable
class _TellsReserve(Protocol):
    """A driver that counts its own reserve as used, and says how large it is."""

    def reserved(self, device_index: int) -> int: ...


class CardHolders(msgspec.Struct, frozen=True):
    """One card and the processes that the driver lists there, in bytes.

    Attributes:
        device: `cuda:0`, as torch numbers it.
        used: what programs have in use; None where the driver does not report it.
        total: the card's memory, with `reserved`.
        reserved: what driver and firmware keep for themselves; it is not in `used`.
        processes: by process identifier; None where the driver lists a process without its memory.
        note: why something is None; empty if all is known.
    """

    device: str
    used: int | None
    total: int | None
    reserved: int
    processes: Mapping[int, int | None]
    note: str = ""

    @property
    def unlisted(self) -> int | None:
        """Bytes in use that belong to no process of the list: other containers', or those of one without its figure."""
        if self.used is None:
            return None
        return max(0, self.used - sum(size or 0 for size in self.processes.values()))


def count_cards(driver: Driver) -> int:
    """Return how many cards the driver shows to this environment, up to `MOST_CARDS`."""
    return next((index for index in range(MOST_CARDS) if driver.read(index).card_total is None), MOST_CARDS)


def read_card_holders(driver: Driver) -> tuple[CardHolders, ...]:
    """Return all cards that this environment may use, in torch's order; empty where the driver shows none."""
    return tuple(_read(driver, index) for index in range(count_cards(driver)))


def _read(driver: Driver, index: int) -> CardHolders:
    # The list first: what a process takes afterwards is then in `unlisted`, and never the other way round.
    processes = dict(driver.processes(index))
    reading = driver.read(index)
    reserved = driver.reserved(index) if isinstance(driver, _TellsReserve) else 0
    used = None if reading.card_used is None else max(0, reading.card_used - reserved)
    note = reading.note if used is None else ""
    return CardHolders(reading.device, used, reading.card_total, reserved, processes, note)
