"""The engine's other processes in a report of a life: who they are, and what each held after a stage."""

from __future__ import annotations

import msgspec


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts: immutable, named fields only, and unknown ones are an error."""


class ProcessName(_Record, frozen=True, kw_only=True):
    """A process of the program's other than the checked one, and how a person knows it."""

    pid: int
    name: str


class ProcessStage(_Record, frozen=True, kw_only=True):
    """What another process of the engine's held after a stage.

    Attributes:
        tensors: bytes under live tensors outside of arenas, by device.
        arenas: bytes mapped by announced arenas, by device and tag.
        reserved: bytes that torch's allocator took from the driver, by device; None where it does not say.
        cards: bytes that the driver counts for the process, by device; None where it does not say.
    """

    process: ProcessName
    tensors: dict[str, int]
    arenas: dict[str, dict[str, int]]
    reserved: dict[str, int | None]
    cards: dict[str, int | None] = {}

    @property
    def bytes(self) -> int:
        """Bytes on cards, as the driver counts them; on the CPU those under tensors and in arenas."""
        if self.cards:
            return sum(size or 0 for size in self.cards.values())
        return sum(self.tensors.values()) + sum(sum(tags.values()) for tags in self.arenas.values())
