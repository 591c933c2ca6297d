"""Whether a level grows turn after turn, from its readings alone: what was added and given back again is no growth.

A level that is read after every turn is made of what is kept for good, what comes and goes, and what fills once. The
smallest of a reading and all later ones is what was never given back since; by how much that rises in a turn, the turn
added for good. Whether a leak grows is told by which turns of a stage left something that is there at the end.

What growing a buffer leaves reserved (the old one's bytes, where nobody empties torch's cache between the two) is seen
by who listens to the engine's stages (`GrowthWatch`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import ACTIONS, release
from lowtide.leakcheck.resources.resource import MIB, Rung
from lowtide.probes.device.torch_allocator import AllocatedRanges, allocated_ranges
from lowtide.probes.memory.ranges import Range, common, total, without
from lowtide.probes.originals import gc, loaded
from lowtide.probes.stages import EnteredStage
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import format_bytes

Trend = Literal["residue", "bounded", "growth"]

FEWEST_TURNS = 3
"""Of a stage that ran less often, something left by each turn may be the last that a full cache takes."""


def trend_of(born_in: Iterable[int], turns: int) -> Trend | None:
    """Return how what is left at the end came to be, over the turns of one stage.

    Args:
        born_in: for each thing that is left, in which turn of the stage it was made, from 1.
        turns: how often the stage ran.

    Returns:
        `residue`: the first turn left it, and no later one did; `growth`: every turn did; `bounded`: some turns did, or
        what earlier ones left was replaced; None after too few turns.
    """
    left = set(born_in)
    if turns < 2 or not left:
        return None
    if left == {1}:
        return "residue"
    if left >= set(range(1, turns + 1)):
        return "growth" if turns >= FEWEST_TURNS else None
    return "bounded" if turns >= FEWEST_TURNS or 1 not in left else None


_FEWEST_UNLIKE = 5
"""Turns that must add something where they add different amounts: a cache fills so, by one size after the other."""

_ALIKE = 10
"""Amounts are alike within this part of the usual one: a tenth."""


_OUTWEIGHS = 2
"""How many times as much as was given back must have been kept, where a level goes up and down."""


def kept_steps(levels: Sequence[int]) -> list[int]:
    """Return how much each turn added for good, in the unit of the level.

    Args:
        levels: the level before the first turn, and after each.
    """
    kept = list(itertools.accumulate(reversed(levels), min))[::-1]
    return [after - before for before, after in itertools.pairwise(kept)]


def adding_turns(steps: Sequence[int], allowed: Sequence[int]) -> list[int]:
    """Return the turns, from 1, that added more than was allowed them."""
    return [turn for turn, (step, limit) in enumerate(zip(steps, allowed, strict=True), 1) if step > limit]


def grows(steps: Sequence[int], allowed: Sequence[int]) -> bool:
    """Return whether a level grows turn after turn, and has not stopped.

    At least three turns have added the same amount, or five some amount; and more than a third of the later half of all
    turns did, or turns that add alternate with turns that do not until the end. A cache that fills and stays has
    stopped.

    Args:
        steps: what each turn added for good.
        allowed: how much of that is no growth, for each turn.
    """
    turns = adding_turns(steps, allowed)
    if len(turns) < FEWEST_TURNS:
        return False
    sizes = [steps[turn - 1] for turn in turns]
    usual = statistics.median_low(sizes)
    alike = sum(abs(size - usual) * _ALIKE <= usual for size in sizes)
    if alike < FEWEST_TURNS and len(turns) < _FEWEST_UNLIKE:
        return False
    widest = max(after - before for before, after in itertools.pairwise(turns))
    alternates = widest > 1 and len(steps) - turns[-1] <= widest
    return adds_late(steps, allowed) or alternates


def adds_late(steps: Sequence[int], allowed: Sequence[int]) -> bool:
    """Return whether more than a third of the later half of all turns added something."""
    half = len(steps) // 2
    late = sum(turn > len(steps) - half for turn in adding_turns(steps, allowed))
    return late * 3 > half


def rises(levels: Sequence[int]) -> bool:
    """Return whether a level has lately kept much more than it gave back: at least twice as much, over the later half.

    What is replaced in each turn by something of another size (the last output, the entries of a full cache) goes up
    and down, and the smallest of a reading and all later ones rises with that, too.

    Args:
        levels: the level before the first turn, and after each.
    """
    half = (len(levels) - 1) // 2
    late = levels[-half - 1 :]
    fallen = sum(max(0, before - after) for before, after in itertools.pairwise(late))
    return sum(kept_steps(late)) > _OUTWEIGHS * fallen


def repeated(steps: Sequence[int], allowed: Sequence[int]) -> int:
    """Return how much of a level repeats: a turn that added more than the usual amount counts with that.

    So the first turn, which fills caches, does not count for more than the others; and one turn alone is 0.
    """
    sizes = [steps[turn - 1] for turn in adding_turns(steps, allowed)]
    if len(sizes) < 2:
        return 0
    usual = statistics.median_low(sizes)
    return sum(min(size, usual) for size in sizes)


def rate(steps: Sequence[int], allowed: Sequence[int], amount: Callable[[int], str]) -> str:
    """Return the growth in words, as `+4.0 MiB in each of 10 tests`.

    Args:
        steps: what each turn added for good.
        allowed: how much of that is no growth, for each turn.
        amount: a figure as text.
    """
    turns = adding_turns(steps, allowed)
    sizes = [steps[turn - 1] for turn in turns]
    least, most = amount(min(sizes)), amount(max(sizes))
    size = f"+{least}" if least == most else f"+{least} to +{most}"
    which = f"{len(turns)} tests" if len(turns) == len(steps) else f"{len(turns)} of {len(steps)} tests"
    return f"{size} in each of {which}"


GROWTH = "grow_workspace"
"""The stage that an engine marks around the growth of a buffer."""

LEAST = MIB
"""Bytes that a growth must leave to be reported: torch puts smaller blocks together into segments of 2 MiB."""

SLACK = 8 * MIB
"""The same where torch cannot list its blocks: it rounds large segments up by less than this."""


@dataclass(frozen=True, slots=True)
class _Opened:
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
        """Report what the growths since the last call left reserved, and what emptying the cache gives back; or None.

        Args:
            stage: in which they were.
        """
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
