"""By how much a series rises from one value to the next, and whether that may be chance.

Written out here, since the series are short: with `scipy`, of which the tests ask the same, a plain `--leakcheck` would
load 60 MB for two formulas.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_EXACT = 12
"""Steps whose signs are tried in every combination: of more, their sum is nearly normal."""

_CONFIDENCE = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Slope:
    """How steeply a series rises.

    Attributes:
        rate: by how much from one value to the next.
        low: the lower end of the interval that has the true rate in 95 of 100 cases.
        high: its upper end.
    """

    rate: float
    low: float
    high: float


def slope_of(values: Sequence[float]) -> Slope:
    """Return the median of the slopes between all pairs of values: outliers do not move it (Theil 1950, Sen 1968).

    Args:
        values: one behind the other, at equal distances; at least two.
    """
    pairs = itertools.combinations(enumerate(values), 2)
    slopes = sorted((later - earlier) / (right - left) for (left, earlier), (right, later) in pairs)
    half = _CONFIDENCE * math.sqrt(_variance_of_ranks(values))
    first = max(round((len(slopes) - half) / 2) - 1, 0)
    last = min(round((len(slopes) + half) / 2), len(slopes) - 1)
    return Slope(statistics.median(slopes), slopes[first], slopes[last])


def _variance_of_ranks(values: Sequence[float]) -> float:
    """Return the variance of the number of rising less falling pairs, if the order of the values is chance."""
    count = len(values)
    ties = [len(list(same)) for _, same in itertools.groupby(sorted(values))]
    pairs = count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)
    return pairs / 18


def chance_of_rise(steps: Sequence[float]) -> float:
    """Return how likely steps add up to as much if each might as well have gone down: 0.5 ** n for n that all rise.

    The test of Fisher (1935) that turns the sign of each step. Unlike a test for a trend (Mann-Kendall), it does not
    take for growth that a level wanders, as that of a heap does, which keeps what it once had.

    Args:
        steps: from each value to the next, in their order.
    """
    moving = [step for step in steps if step]
    total = sum(moving)
    if not moving or total <= 0:
        return 1.0
    if len(moving) > _MOST_EXACT:
        return math.erfc(total / math.sqrt(2 * sum(step * step for step in moving))) / 2
    sums = [0.0]
    for step in moving:
        sums = [each + signed for each in sums for signed in (step, -step)]
    # What only rounding makes smaller counts.
    return sum(each >= total * (1 - 1e-9) for each in sums) / len(sums)
