"""Whether a level that is read after every turn grows: by its exact readings, or by one statistic for any quantity.

Where a level is a number of things, or of bytes to the last one, nothing need be guessed (`KeptSteps`): the smallest
of a reading and all later ones is what was never given back since, and by how much that rises in a turn, the turn added
for good. That tells it from three turns on: a fixture of three tests, or a life of four inferences, has no more. By
which turns left something that is there at the end, it is told whether a leak grows.

Any other quantity takes eight turns (`TurnSeries`): what it keeps is its floor, the smallest of some turns that follow
each other. So what comes and goes within these is no growth, and a series of any length is kept in 64 figures.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

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


class KeptSteps(msgspec.Struct, frozen=True):
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


_MOST_FLOORS = 64

FEWEST_TURNS = 8
"""Turns before a series is judged."""

_FALSE_ALARMS = 0.01
"""How many of the series that do not grow may be taken to do so, all questions about each of them together."""

KEEPS_ON = 0.5
"""What later turns add must be so much of what as many before them did: filling up slows down."""

_FEWEST_FLOORS = 12
"""Floors are of as many turns as leave so many: saws that one of few turns follows are below one of more."""

_DEPTH = 8
"""Down to such a part of its height above its lowest a saw has to fall back."""

_MOST_EXACT = 12
"""Steps whose signs are tried in every combination: of more, their sum is nearly normal."""

_CONFIDENCE = statistics.NormalDist().inv_cdf(0.975)

Kind = Literal["growth", "bounded", "sawtooth", "undecided"]


class Slope(msgspec.Struct, frozen=True):
    """How steeply a series rises.

    Attributes:
        rate: by how much from one value to the next.
        low: the lower end of the interval that has the true rate in 95 of 100 cases.
        high: its upper end.
    """

    rate: float
    low: float
    high: float


class Growth(msgspec.Struct, frozen=True):
    """What can be said of a series.

    Attributes:
        kind: `growth`; `bounded`: it has stopped, or never grew; `sawtooth`: it rises, and falls back; `undecided`.
        turns: how many there were.
        slope: by how much it rises in a turn; None where there were too few turns.
        more: how many more turns may decide it, at most as many as there were; 0 where it is decided.
    """

    kind: Kind
    turns: int
    slope: Slope | None = None
    more: int = 0


class Rise(NamedTuple):
    """A growth that matters.

    Attributes:
        slope: by how much each turn adds.
        turns: how many have: the first one is the level from which it has grown.
    """

    slope: Slope
    turns: int


class TurnSeries(msgspec.Struct):
    """The values of one quantity.

    Attributes:
        least: a turn that moves the level by less says neither that it grows nor that it does not: where something
            small is added each time, a few large steps would look as if all turns had made them.
        turns: how many values there were.
        width: how many turns share one floor.
    """

    least: float = 0.0
    turns: int = 0
    width: int = 1
    _floors: list[float] = msgspec.field(default_factory=list)

    def add(self, value: float) -> None:
        """Note the value after a turn."""
        if self.turns % self.width:
            self._floors[-1] = min(self._floors[-1], value)
        else:
            self._floors.append(value)
        self.turns += 1
        if len(self._floors) == _MOST_FLOORS and not self.turns % self.width:
            self._floors = [min(pair) for pair in zip(self._floors[::2], self._floors[1::2], strict=True)]
            self.width *= 2

    def growth(self) -> Growth:
        """Say whether it has grown, once it is over."""
        if self.turns < FEWEST_TURNS:
            return Growth("undecided", self.turns, more=FEWEST_TURNS - self.turns)
        # The last floor may be that of a few turns only.
        fine = self._floors[: self.turns // self.width]
        coarse = _coarse(fine)
        questions = (fine,) if len(coarse) == len(fine) else (fine, coarse)
        widths = [self.width * (len(fine) // len(floors)) for floors in questions]
        each = [
            _Look(floors, width, self.turns, self.least * width)
            for floors, width in zip(questions, widths, strict=True)
        ]
        # Of two questions each may err half as often.
        grown = next((look for look in each if look.grows(_FALSE_ALARMS / len(each))), None)
        if grown is not None:
            return Growth("growth", self.turns, grown.slope)
        return each[-1].without_growth(_FALSE_ALARMS)

    def rise(self, least: float, in_all: float = 0) -> Rise | None:
        """Return the growth, when it is over; None where it does not grow, or by too little to speak of.

        Args:
            least: what each turn must add.
            in_all: what all of them must.
        """
        growth = self.growth()
        slope = growth.slope
        if growth.kind != "growth" or slope is None or slope.low < least or slope.rate * growth.turns < in_all:
            return None
        return Rise(slope, growth.turns - 1)


def _coarse(floors: Sequence[float]) -> Sequence[float]:
    while len(floors) // 2 >= _FEWEST_FLOORS:
        floors = [min(pair) for pair in zip(floors[::2], floors[1::2], strict=False)]
    return floors


class _Look:
    """One look at a series, by its floors, each that of as many turns.

    What moves by less than `least` from one floor to the next does not move.
    """

    def __init__(self, floors: Sequence[float], width: int, turns: int, least: float) -> None:
        self._floors, self._width, self._turns = floors, width, turns
        # What is filled once is filled in the first third, or it is not known to be.
        self._late = floors[len(floors) // 3 :]
        steps = (after - before for before, after in itertools.pairwise(self._late))
        self._steps = [step if abs(step) >= least else 0.0 for step in steps]
        self._rise = self._late[-1] - self._late[0]
        self._fall = max(_falls(floors), default=0)

    @property
    def slope(self) -> Slope:
        """By how much it rises in a turn."""
        found, width = slope_of(self._late), self._width
        return Slope(found.rate / width, found.low / width, found.high / width)

    def grows(self, chance: float) -> bool:
        """Return whether it grows, but for a chance."""
        return self._rise > 2 * self._fall and self._keeps_on and chance_of_rise(self._steps) <= chance

    def without_growth(self, chance: float) -> Growth:
        """Say what it does, as it does not grow, or is not known to."""
        if self._comes_back:
            return Growth("sawtooth", self._turns, self.slope)
        if self._rise <= 0 or not self._keeps_on:
            return Growth("bounded", self._turns, self.slope)
        if not any(self._steps):
            # It rises by less than matters, and no number of turns makes that more.
            return Growth("undecided", self._turns, self.slope)
        # The certainty of a steady rise grows at least with the root of the number of turns.
        certainty = self._rise / math.sqrt(sum(step * step for step in self._steps))
        more = math.ceil(self._turns * (-2 * math.log(chance) / certainty**2 - 1))
        return Growth("undecided", self._turns, self.slope, min(max(more, 1), self._turns))

    @property
    def _comes_back(self) -> bool:
        """Whether it has fallen, in the later half, to about where it has been in the first third."""
        height = max(self._floors) - min(self._floors)
        then, lately = self._floors[: len(self._floors) // 3], self._floors[len(self._floors) // 2 :]
        return height > 0 and self._fall * 2 >= height and min(lately) - min(then) <= height / _DEPTH

    @property
    def _keeps_on(self) -> bool:
        """Whether the last third of the turns adds about what the one before it did."""
        floors, third = self._floors, len(self._floors) // 3
        before, last = floors[-third - 1] - floors[-2 * third - 1], floors[-1] - floors[-third - 1]
        return last > 0 and last >= KEEPS_ON * before


def _falls(floors: Iterable[float]) -> Iterable[float]:
    """Yield by how much the level has fallen each time, from a height to the depth that follows."""
    height = depth = -math.inf
    for floor in floors:
        if floor > depth:
            if height > depth > -math.inf:
                yield height - depth
            height = floor
        depth = floor
    if height > depth:
        yield height - depth


def slope_of(values: Sequence[float]) -> Slope:
    """Return the median of the slopes between all pairs of values: outliers do not move it (Theil 1950, Sen 1968).

    There are at least two, one behind the other at equal distances.
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
