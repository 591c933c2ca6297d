"""A card that several processes use: how much more it has in use than before, apart from what the others took."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lowtide.probes.device.driver import Driver, DriverError


@dataclass(frozen=True)
class CardUse:
    """A card at one moment.

    Attributes:
        used: bytes in use, by all processes.
        processes: bytes by process identifier, as far as the driver lists them; None if it reports none.
    """

    used: int
    processes: Mapping[int, int | None]


def card_use(driver: Driver, index: int) -> CardUse:
    """What a card has in use now.

    Args:
        driver: is asked.
        index: of the card, as torch numbers it.

    Raises:
        DriverError: the driver does not report it; the message is its reason.
    """
    reading = driver.read(index)
    if reading.card_used is None:
        raise DriverError(reading.note)
    return CardUse(reading.card_used, driver.processes(index))


def grown_by_nobody_else(before: CardUse, now: CardUse, own: Collection[int], *, distinguished: bool) -> int:
    """Bytes by which a card has more in use, less what processes of others have taken and given back since.

    Args:
        before: the card then.
        now: the card now.
        own: identifiers of the processes whose memory is looked for.
        distinguished: whether the driver was seen to list one of them by its identifier.  If not, it may number
            processes otherwise (a PID namespace), and what is new in its list may be their memory.
    """
    grown = now.used - before.used
    for pid in before.processes.keys() | now.processes.keys():
        if pid not in own and (distinguished or pid in before.processes):
            grown -= (now.processes.get(pid, 0) or 0) - (before.processes.get(pid, 0) or 0)
    return grown
