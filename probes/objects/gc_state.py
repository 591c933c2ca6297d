"""The garbage collector's own state: what it froze, what it could not collect, and how it is set."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.probes.originals import gc


@dataclass(frozen=True, slots=True)
class GcReading:
    """The garbage collector at one moment.

    Attributes:
        frozen: objects in the permanent generation (`gc.freeze()`).
        uncollectable: objects in `gc.garbage`.
        enabled: whether automatic collection is on.
        thresholds: what `gc.get_threshold()` says.
    """

    frozen: int
    uncollectable: int
    enabled: bool
    thresholds: tuple[int, int, int]


def read_gc() -> GcReading:
    """Reads the collector's state without running it."""
    return GcReading(gc.get_freeze_count(), len(gc.garbage), gc.isenabled(), gc.get_threshold())
