"""What growing a buffer leaves reserved: the old one's bytes, where nobody empties torch's cache between the two."""

from __future__ import annotations

from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import ACTIONS, release
from lowtide.leakcheck.resources.resource import MIB, Rung
from lowtide.probes.device.torch_allocator import AllocatedRanges, allocated_ranges
from lowtide.probes.memory.ranges import Range, common, total, without
from lowtide.probes.originals import gc, loaded
from lowtide.probes.stages import EnteredStage
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes

GROWTH = "grow_workspace"
"""The stage that an engine marks around the growth of a buffer."""

LEAST = MIB
"""Bytes that a growth must leave to be reported: torch puts smaller blocks together into segments of 2 MiB."""

SLACK = 8 * MIB
"""The same where torch cannot list its blocks: it rounds large segments up by less than this."""


class _Opened(msgspec.Struct, frozen=True):
    """What there was when a growth began."""

    ranges: AllocatedRanges | None
    reserved: int
    allocated: int
    collects: bool


class GrowthWatch:
    """Listens to an engine's stages: what a growth lets go of must not stay reserved.

    That is what was in use before it, and afterwards is free in a segment of torch's. The sum that torch reserves does
    not tell: the new buffer may come out of what torch had cached. It is the measure only where torch cannot list its
    blocks (`cudaMallocAsync`, pluggable allocators): what it reserves more must be what it holds more.

    Args:
        device: `cpu`, where nothing is reserved, or `cuda:0`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._open: list[_Opened] = []
        self._left: list[Range] = []
        self._left_uncounted = 0
        self._times = 0

    def stage_entered(self, stage: EnteredStage) -> None:
        """Read, in some milliseconds, what there is before."""
        if stage.name != GROWTH or self._device == "cpu":
            return
        collects = gc.isenabled()
        # What a collection frees meanwhile is nothing that the growth let go of.
        gc.disable()
        self._open.append(_Opened(self._ranges(), *self._figures(), collects))

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Note what it left."""
        if stage.name != GROWTH or not self._open:
            return
        before = self._open.pop()
        if before.collects:
            gc.enable()
        now = self._ranges()
        if before.ranges is not None and now is not None:
            left = without(common(before.ranges.in_use, now.reserved), now.in_use)
            if total(left) >= LEAST:
                self._left += left
                self._times += 1
            return
        reserved, allocated = self._figures()
        more = (reserved - before.reserved) - max(0, allocated - before.allocated)
        if more > SLACK:
            self._left_uncounted += more
            self._times += 1

    def finding(self, stage: str) -> Finding | None:
        """Report what growths since the last call left reserved, and what emptying the cache gives back; or None."""
        left, uncounted, times = self._left, self._left_uncounted, self._times
        self._left, self._left_uncounted, self._times = [], 0, 0
        if not times:
            return None
        # What two growths left one after the other at one place is there once, and what is in use again is not left.
        now = self._ranges()
        left_now = left if now is None else list(without(common(left, now.reserved), now.in_use))
        amount = total(left_now) + uncounted
        if amount < LEAST:
            return None
        before, _ = self._figures()
        release(Rung.EMPTY_CACHE)
        if uncounted:
            returned = before - self._figures()[0]
        else:
            after = self._ranges()
            returned = amount - total(left_now if after is None else common(left_now, after.reserved))
        remedy = Remedy(action=ACTIONS[Rung.EMPTY_CACHE], returns_bytes=returned)
        growths = "a growth" if times == 1 else f"{times} growths"
        message = (
            f"{format_bytes(amount)} stay reserved on {self._device} after {growths} of a workspace in {stage}: "
            f"its old memory is kept beside the new; {remedy.action} returns {format_bytes(remedy.returns_bytes)}"
        )
        return finding_of(
            "reserved",
            cause="allocator-cache",
            bytes=amount,
            count=times,
            device=self._device,
            stage=stage,
            message=message,
            suspects=(GROWTH,),
            verdict="cached",
            holder=GROWTH,
            remedy=remedy,
        )

    def _figures(self) -> tuple[int, int]:
        """Return the bytes reserved and bytes allocated."""
        torch: Any = loaded("torch")
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]

    def _ranges(self) -> AllocatedRanges | None:
        _, _, index = self._device.partition(":")
        return allocated_ranges(int(index or 0))
