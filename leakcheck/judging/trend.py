"""Whether a leak grows: judged by which turns of a stage left something that is there at the end, never by totals.

The rule is that of LeakCanary's Shark for growing objects: what grew in every turn is growing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Trend = Literal["residue", "bounded", "growth"]

FEWEST_TURNS = 3
"""Of a stage that ran less often, something left by each turn may be the last that a full cache takes."""


def trend_of(born_in: Iterable[int], turns: int) -> Trend | None:
    """How what is left at the end came to be, over the turns of one stage.

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
