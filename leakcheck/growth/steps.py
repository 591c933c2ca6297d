"""Whether a level that is read exactly after every turn grows, told from three turns on.

That is what the statistic of a `TurnSeries` cannot do: it takes eight turns at least, and a fixture of three tests, or
a life of four inferences, has no more. Where a level is a number of things, or of bytes to the last one, it need not
guess: the smallest of a reading and all later ones is what was never given back since, and by how much that rises in a
turn, the turn added for good. Whether a leak grows is told by which turns left something that is there at the end.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lowtide.reports.schema import ResourceName

Trend = Literal["residue", "bounded", "growth"]

FEWEST_STEPS = 3
"""Of a stage that ran less often, something left by each turn may be the last that a full cache takes."""

_FEWEST_UNLIKE = 5
"""Turns that must add something where they add different amounts: a cache fills so, by one size after the other."""

_ALIKE = 10
"""Amounts are alike within this part of the usual one: a tenth."""

_OUTWEIGHS = 2
"""How many times as much as was given back must have been kept, where a level goes up and down."""


class LevelKey(NamedTuple):
    """What a level is of, and on which device; that is empty for what is on none."""

    resource: ResourceName
    device: str = ""


@dataclass(frozen=True)
class KeptSteps:
    """What each turn has added for good to a level, in its unit.

    Attributes:
        sizes: that, turn by turn.
        allowed: how much of it is no growth: of each turn, or of any.
    """

    sizes: Sequence[int]
    allowed: Sequence[int] | int = 0

    @classmethod
    def between(cls, levels: Sequence[int], allowed: Sequence[int] | int = 0) -> KeptSteps:
        """Return what turns have added to a level, which is given before the first of them and after each."""
        kept = list(itertools.accumulate(reversed(levels), min))[::-1]
        return cls([after - before for before, after in itertools.pairwise(kept)], allowed)

    @property
    def turns(self) -> list[int]:
        """Return the turns, from 1, that added more than was allowed them."""
        allowed = [self.allowed] * len(self.sizes) if isinstance(self.allowed, int) else self.allowed
        return [turn for turn, (size, limit) in enumerate(zip(self.sizes, allowed, strict=True), 1) if size > limit]

    @property
    def added(self) -> list[int]:
        """Return how much each of these turns added."""
        return [self.sizes[turn - 1] for turn in self.turns]

    @property
    def usual(self) -> int:
        """Return the usual one of these amounts."""
        return statistics.median_low(self.added)

    @property
    def grows(self) -> bool:
        """Return whether the level grows turn after turn, and has not stopped.

        At least three turns have added the same amount, or five some amount; and more than a third of the later half of
        all turns did, or turns that add alternate with turns that do not until the end. A cache that fills and stays
        has stopped.
        """
        turns = self.turns
        if len(turns) < FEWEST_STEPS:
            return False
        usual = self.usual
        alike = sum(abs(size - usual) * _ALIKE <= usual for size in self.added)
        if alike < FEWEST_STEPS and len(turns) < _FEWEST_UNLIKE:
            return False
        widest = max(after - before for before, after in itertools.pairwise(turns))
        alternates = widest > 1 and len(self.sizes) - turns[-1] <= widest
        return self.adds_late or alternates

    @property
    def adds_late(self) -> bool:
        """Return whether more than a third of the later half of all turns added something."""
        half = len(self.sizes) // 2
        return sum(turn > len(self.sizes) - half for turn in self.turns) * 3 > half

    @property
    def repeated(self) -> int:
        """Return how much of it repeats: a turn that added more than the usual amount counts with that.

        So the first turn, which fills caches, does not count for more than the others; and one turn alone is 0.
        """
        added = self.added
        if len(added) < 2:
            return 0
        usual = self.usual
        return sum(min(size, usual) for size in added)

    def said(self, amount: Callable[[int], str]) -> str:
        """Return the growth in words, as `+4.0 MiB in each of 10 tests`; `amount` gives a figure as text."""
        added = self.added
        least, most = amount(min(added)), amount(max(added))
        size = f"+{least}" if least == most else f"+{least} to +{most}"
        which = f"{len(added)} tests" if len(added) == len(self.sizes) else f"{len(added)} of {len(self.sizes)} tests"
        return f"{size} in each of {which}"


def rises(levels: Sequence[int]) -> bool:
    """Return whether a level has lately kept much more than it gave back: at least twice as much, over the later half.

    What is replaced in each turn by something of another size (the last output, the entries of a full cache) goes up
    and down, and the smallest of a reading and all later ones rises with that, too. The level is given before the first
    turn and after each.
    """
    half = (len(levels) - 1) // 2
    late = levels[-half - 1 :]
    fallen = sum(max(0, before - after) for before, after in itertools.pairwise(late))
    return sum(KeptSteps.between(late).sizes) > _OUTWEIGHS * fallen


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
        return "growth" if turns >= FEWEST_STEPS else None
    return "bounded" if turns >= FEWEST_STEPS or 1 not in left else None
