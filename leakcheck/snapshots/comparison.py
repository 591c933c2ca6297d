"""Snapshots beside each other: of one process from cycle to cycle, or of ranks at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, Survivors

By = Literal["cycle", "rank", "stage"]
"""What several snapshots are: of one process, by stack or by stage, or of ranks."""

Trend = Literal["new", "gone", "grown", "shrunk", "same"]


@dataclass(frozen=True, slots=True)
class Compared:
    """What was allocated from one stack, or in one stage, in each of the snapshots.

    Attributes:
        survivors: of the last snapshot that has some of it, the largest of those that are added up: functions of the
            same names may be in other files.
        bytes: in each snapshot.
        counts: blocks, likewise.
    """

    survivors: Survivors
    bytes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def growth(self) -> int:
        """Bytes in the last snapshot beyond those in the first."""
        return self.bytes[-1] - self.bytes[0]

    @property
    def spread(self) -> int:
        """Bytes between the snapshot with the most and that with the least of it."""
        return max(self.bytes) - min(self.bytes)

    @property
    def trend(self) -> Trend:
        """What became of it from the first snapshot to the last."""
        first, last = self.bytes[0], self.bytes[-1]
        if first == last:
            return "same"
        if not first:
            return "new"
        if not last:
            return "gone"
        return "grown" if last > first else "shrunk"

    @property
    def grows_always(self) -> bool:
        """Whether it is more in each snapshot than in the one before; two snapshots do not say so."""
        steps = list(zip(self.bytes, self.bytes[1:], strict=False))
        return len(steps) > 1 and all(before < after for before, after in steps)


def compare(snapshots: Sequence[AllocatorSnapshot], by: By = "cycle") -> list[Compared]:
    """What differs between snapshots; the largest difference first.

    Args:
        snapshots: in the order of their time, or of their ranks.
        by: `rank` where each is another rank's, whose card has another number: then those of one stack are the same,
            whatever the card, and not the growth counts but the spread. `stage` for the growth by stage.
    """
    compared = _side_by_side(snapshots, by)
    differing = [each for each in compared if (each.spread if by == "rank" else each.growth)]
    return sorted(differing, key=lambda each: -(each.spread if by == "rank" else abs(each.growth)))


def sum_stages(snapshot: AllocatorSnapshot) -> list[Compared]:
    """What was allocated in each stage of one snapshot; the most bytes first."""
    return sorted(_side_by_side([snapshot], "stage"), key=lambda each: -each.bytes[0])


def _side_by_side(snapshots: Sequence[AllocatorSnapshot], by: By) -> list[Compared]:
    held: dict[tuple[str | None, str], list[list[int]]] = {}
    latest: dict[tuple[str | None, str], Survivors] = {}
    seen: dict[tuple[str | None, str], int] = {}
    for turn, snapshot in enumerate(snapshots):
        for each in snapshot.survivors:
            key = (each.stage if by == "stage" else each.fingerprint, "" if by == "rank" else each.device)
            amounts = held.setdefault(key, [[0, 0] for _ in snapshots])[turn]
            amounts[0] += each.bytes
            amounts[1] += each.count
            # Within a snapshot the largest comes first.
            if seen.get(key) != turn:
                seen[key], latest[key] = turn, each
    return [
        Compared(latest[key], tuple(size for size, _ in amounts), tuple(count for _, count in amounts))
        for key, amounts in held.items()
    ]
