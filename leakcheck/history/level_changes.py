"""Finds the runs at which a series changed its level, with change-point detection (ruptures)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_SHORTEST = 2
"""Runs that make a level: what one run alone shows is a spike, and the gate reports that itself."""

_SHARE = 0.02
"""Of a series' usual value, the change that is not worth a look."""

_SPIKE = 5.0
"""How many times the noise a single value must stand out to be a spike."""

_CERTAINTY = 6.0
"""Factor of the penalty sigma² · ln n for each further level; noise alone exceeds the BIC's, 2, too often."""


class LevelChange(NamedTuple):
    """A step in a series.

    Attributes:
        place: the first run of the new level.
        before: the level until then, the median of its values.
        after: the level from then on.
    """

    place: int
    before: float
    after: float


def level_changes(values: Sequence[int], smallest: int) -> list[LevelChange]:
    """The steps in a series, oldest first.

    Single spikes are removed first.  The levels then minimise the squared error plus a penalty per level (Killick,
    Fearnhead and Eckley, 2012), with the noise estimated from the differences of neighbours, which a step does not
    disturb.

    Args:
        values: one for each run, in order.
        smallest: the smallest change that counts.
    """
    if len(values) < 2 * _SHORTEST or len(set(values)) == 1:
        return []
    raw = np.asarray(values, dtype=float)
    least = max(float(smallest), _SHARE * float(np.median(np.abs(raw))))
    noise = max(_noise(raw), least / 4)
    signal = _without_spikes(raw, max(_SPIKE * noise, least))
    if np.ptp(signal) < least:
        return []
    # It loads scipy, which most series do not need.
    from ruptures import KernelCPD

    # In units of the noise, since squares of bytes would lose the small differences.
    found = KernelCPD(kernel="linear", min_size=_SHORTEST).fit((signal / noise).reshape(-1, 1))
    places = [int(place) for place in found.predict(pen=_CERTAINTY * math.log(len(signal)))[:-1]]
    return _large_enough(signal, places, max(least, noise))


def _without_spikes(signal: npt.NDArray[np.float64], height: float) -> npt.NDArray[np.float64]:
    """The series with each value replaced that stands out by more than `height` from both of its neighbours."""
    # At an end the two inner neighbours count: what one run alone shows there is no level yet.
    left = np.concatenate((signal[2:3], signal[:-1]))
    right = np.concatenate((signal[1:], signal[-3:-2]))
    out = ((signal - left) * (signal - right) > 0) & (np.minimum(abs(signal - left), abs(signal - right)) > height)
    return np.where(out, np.median(np.stack([left, signal, right]), axis=0), signal)


def _noise(signal: npt.NDArray[np.float64]) -> float:
    """The standard deviation of values around their level, from the median absolute difference of neighbours."""
    return float(1.4826 * np.median(np.abs(np.diff(signal))) / math.sqrt(2))


def _large_enough(signal: npt.NDArray[np.float64], places: list[int], least: float) -> list[LevelChange]:
    """The changes that are left once the smallest one that is too small is taken out, again and again."""
    while True:
        bounds = [0, *places, len(signal)]
        levels = [float(np.median(signal[start:end])) for start, end in pairwise(bounds)]
        changes = [
            LevelChange(place, before, after) for place, before, after in zip(places, levels, levels[1:], strict=False)
        ]
        small = min(changes, key=lambda change: abs(change.after - change.before), default=None)
        if small is None or abs(small.after - small.before) >= least:
            return changes
        places.remove(small.place)
