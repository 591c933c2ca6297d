"""What a process holds after a stage as a report has it, with what of it nothing explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.leakcheck.processes.messages import Levels
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage

SHOWN = 16 << 20
"""Bytes of host memory from which on a process without torch and without a card is listed: a bare Python has less."""

NOTHING_SAID = Levels(tensors={}, arenas={}, reserved={}, has_torch=False)
"""Of a process that is seen from outside alone."""


def is_shown(process: ProcessName, levels: Levels, host: int | None, cards: Mapping[str, int | None]) -> bool:
    """Whether a process is listed: it has torch, or a card, or `SHOWN` bytes of host memory and is no helper."""
    is_helper = process.role == "python resource-tracker"
    return levels.has_torch or bool(cards) or ((host or 0) >= SHOWN and not is_helper)


def as_stage(
    process: ProcessName,
    levels: Levels,
    host: int | None,
    cards: Mapping[str, int | None],
    context: Callable[[str], int | None] = lambda device: None,
) -> ProcessStage:
    """What a process holds.

    Args:
        process: which it is.
        levels: what it says itself.
        host: bytes of host memory that only it has; None where that may not be read.
        cards: bytes that the driver counts for it, by device.
        context: gives the bytes of a context alone on a device; None where that is not known.
    """
    contexts = {device: size for device in cards if (size := context(device)) is not None}
    left = {
        device: None if size is None else max(0, size - contexts.get(device, 0))
        for device, size in _on_cards(levels, cards).items()
    }
    return ProcessStage(
        process=process,
        tensors=levels.tensors,
        arenas=levels.arenas,
        reserved=levels.reserved,
        cards=dict(cards),
        host=host,
        contexts=contexts,
        unexplained={"cpu": None if host is None else max(0, host - levels.resident), **left},
    )


def _on_cards(levels: Levels, cards: Mapping[str, int | None]) -> dict[str, int | None]:
    own = {device for device in (*levels.reserved, *levels.arenas) if device != "cpu"}
    # The process numbers the cards that it may use by itself: one card is known under two names, of several none is.
    names = dict(zip(cards, own, strict=True)) if len(own) == len(cards) == 1 else {device: device for device in cards}
    if not own <= set(names.values()):
        return dict.fromkeys(cards, None)
    return {device: _left(levels, names[device], size) for device, size in cards.items()}


def _left(levels: Levels, device: str, size: int | None) -> int | None:
    reserved = levels.reserved.get(device, 0)
    if size is None or reserved is None:
        return None
    return max(0, size - reserved - sum(levels.arenas.get(device, {}).values()))
