"""What growing a buffer leaves reserved: the old one's bytes, where nobody empties torch's cache between the two."""

from __future__ import annotations

import sys
from typing import Any

from lowtide.leakcheck.fingerprints import fingerprint
from lowtide.leakcheck.ladder import ACTIONS, Rung, release
from lowtide.leakcheck.metrics import MIB
from lowtide.probes.stages import Stage
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes

GROWTH = "grow_workspace"
"""The stage that an engine marks around the growth of a buffer."""

SLACK = 8 * MIB
"""Bytes by which torch's segments may grow beyond what they hold more: it rounds large ones up by less."""


class GrowthWatch:
    """Listens to an engine's stages: what torch's allocator reserves more in a growth must be what it holds more.

    Args:
        device: `cpu`, where nothing is reserved, or `cuda:0`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._open: list[tuple[int, int]] = []
        self._left = 0
        self._times = 0

    def stage_entered(self, stage: Stage) -> None:
        """Reads, in a tenth of a millisecond, what there is before."""
        if stage.name == GROWTH and self._device != "cpu":
            self._open.append(self._figures())

    def stage_left(self, stage: Stage, error: BaseException | None) -> None:
        """Counts what it left."""
        if stage.name != GROWTH or not self._open:
            return
        reserved, allocated = self._open.pop()
        reserved_now, allocated_now = self._figures()
        left = (reserved_now - reserved) - max(0, allocated_now - allocated)
        if left > SLACK:
            self._left += left
            self._times += 1

    def finding(self, stage: str) -> Finding | None:
        """What the growths since the last call left reserved, and whether emptying the cache gives it back; or None.

        Args:
            stage: in which they were.
        """
        left, times = self._left, self._times
        self._left = self._times = 0
        if not times:
            return None
        before, _ = self._figures()
        release(Rung.EMPTY_CACHE)
        after, _ = self._figures()
        remedy = Remedy(action=ACTIONS[Rung.EMPTY_CACHE], returns_bytes=before - after)
        message = (
            f"{format_bytes(left)} stay reserved on {self._device} after {times} growths of a workspace in {stage}: "
            f"its old memory is kept beside the new; {remedy.action} returns {format_bytes(remedy.returns_bytes)}"
        )
        return Finding(
            resource="reserved",
            cause="allocator-cache",
            bytes=left,
            count=times,
            device=self._device,
            stage=stage,
            message=message,
            fingerprint=fingerprint(resource="reserved", device=self._device, stage=stage, suspects=(GROWTH,)),
            verdict="cached",
            holder=GROWTH,
            remedy=remedy,
        )

    def _figures(self) -> tuple[int, int]:
        """Bytes reserved and bytes allocated."""
        torch: Any = sys.modules["torch"]
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]
