"""A series of figures as one line of bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], width: int) -> str:
    """Return one bar for each of up to `width` equal parts of a series, as high as the largest value in it."""
    parts = min(width, len(values))
    bounds = [len(values) * turn // parts for turn in range(parts + 1)]
    # From zero, so that noise on a high level does not fill the line.
    lowest, highest = min(0, *values), max(0, *values)
    largest = [max(values[start:end], key=abs) for start, end in pairwise(bounds)]
    span = (highest - lowest) or 1
    return "".join(_BARS[round((value - lowest) / span * (len(_BARS) - 1))] for value in largest)
