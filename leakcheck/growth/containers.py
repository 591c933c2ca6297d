"""Which containers take something in every turn, from a few readings of the lengths of all of them.

A cache that fills takes ever less, and a registry something now and then; what is kept of every turn grows by as many
things as there are turns, in each stretch between two readings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowtide.leakcheck.growth.series import KEEPS_ON
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.original_numpy import np

FEWEST_READINGS = 5
"""Readings between which it must have grown each time."""

CANDIDATE = 3
"""Readings after which one that has grown between them is a candidate."""

_EACH_TURN = 0.9
"""Things that a container must take in a turn: in the one or other turn nothing may happen."""


@dataclass
class Course:
    """A container's lengths at readings between which it has taken something in every turn.

    Attributes:
        identity: the container's.
        kind: its type's.
        turns: the turns after which it was read.
        lengths: how much it held.
    """

    identity: int
    kind: int
    turns: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def items(self) -> int:
        """How many things it has taken."""
        return self.lengths[-1] - self.lengths[0]

    @property
    def span(self) -> int:
        """In how many turns."""
        return self.turns[-1] - self.turns[0]

    @property
    def goes_on(self) -> bool:
        """Whether it was read often enough, and does not slow down."""
        return len(self.turns) >= FEWEST_READINGS and self._keeps_on

    @property
    def may_go_on(self) -> bool:
        """Whether it does not slow down, and was not read often enough to say that it goes on."""
        return len(self.turns) < FEWEST_READINGS and self._keeps_on

    @property
    def longest_rest(self) -> int:
        """How many turns at most there were from one of its readings to the next."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.turns))

    @property
    def _keeps_on(self) -> bool:
        steps = zip(itertools.pairwise(self.turns), itertools.pairwise(self.lengths), strict=True)
        rates = [(more - less) / (later - earlier) for (earlier, later), (less, more) in steps]
        half = len(rates) // 2
        return _mean(rates[-half:]) >= KEEPS_ON * _mean(rates[:half])


def _mean(rates: Sequence[float]) -> float:
    return sum(rates) / len(rates)


class ContainerCourses:
    """The containers that have taken something in every turn since some reading.

    One that does so no more has filled, and one that shrinks is emptied now and then: both are forgotten.

    Args:
        may_rest: whether there may be nothing to do in a turn, as in an interval of a server without requests: one in
            which none of them takes anything does not count.
    """

    def __init__(self, *, may_rest: bool = False) -> None:
        self._may_rest = may_rest
        self._rested = 0
        self._first: ContainerLengths | None = None
        self._last: ContainerLengths | None = None
        self._turn = 0
        self._courses: dict[int, Course] = {}

    def note(self, turn: int, now: ContainerLengths) -> None:
        """Note the lengths after a turn."""
        before, earlier = self._last, self._turn
        if before is not None and self._rests(before, now):
            self._rested += 1
            return
        worked = max(1, turn - earlier - self._rested)
        self._last, self._turn, self._rested = now, turn, 0
        if before is None:
            self._first = now
        if before is None or turn <= earlier:
            return
        places = before.places_of(now.ids)
        there = np.flatnonzero(places >= 0)
        places = places[there]
        steps = now.lengths[there] - before.lengths[places]
        grown = (before.kinds[places] == now.kinds[there]) & (steps >= _EACH_TURN * worked)
        places, there = places[grown], there[grown]
        courses = {}
        figures = (now.ids[there], now.kinds[there], before.lengths[places], now.lengths[there])
        for identity, kind, less, more in zip(*(figure.tolist() for figure in figures), strict=True):
            course = self._courses.get(identity) or Course(identity, kind, [earlier], [less])
            course.turns.append(turn)
            course.lengths.append(more)
            courses[identity] = course
        self._courses = courses

    def _rests(self, before: ContainerLengths, now: ContainerLengths) -> bool:
        """Return whether nothing that has grown until the reading before has since; what has shrunk is forgotten."""
        if not self._may_rest or not self._courses:
            return False
        ids = np.array(sorted(self._courses), np.int64)
        then, places = before.places_of(ids), now.places_of(ids)
        there = (then >= 0) & (places >= 0)
        steps = np.where(there, now.lengths[places] - before.lengths[then], -1)
        if (steps > 0).any():
            return False
        for identity in ids[steps < 0].tolist():
            del self._courses[identity]
        return bool(self._courses)

    def _lasts(self, course: Course, turn: int) -> bool:
        """Return whether a container has grown until a turn, or rests since for less long than it did before."""
        gap = turn - course.turns[-1]
        return gap == 0 or (self._may_rest and gap < course.longest_rest)

    def candidates(self) -> dict[int, Course]:
        """Return those that have done so between three readings or more, by identity."""
        return {identity: course for identity, course in self._courses.items() if len(course.turns) >= CANDIDATE}

    def risen(self) -> list[Course]:
        """Return those that have taken something in every turn until the last reading, of however few."""
        return list(self._courses.values())

    def drop(self, identity: int) -> None:
        """What a container has taken is known, or of no interest: its course begins anew."""
        self._courses.pop(identity, None)

    def break_off(self) -> None:
        """What comes until the next reading is not judged."""
        self._first, self._last, self._courses, self._rested = None, None, {}, 0

    def fixed(self, least: int) -> frozenset[int]:
        """Return the containers that have held as many things, `least` or more, at the first reading as at the last."""
        first, last = self._first, self._last
        if first is None or last is None:
            return frozenset()
        large = np.flatnonzero(last.lengths >= least)
        places = first.places_of(last.ids[large])
        same = (places >= 0) & (first.lengths[places] == last.lengths[large])
        return frozenset(last.ids[large[same]].tolist())

    def undecided(self, turn: int) -> list[Course]:
        """Return those that may grow, and were not seen to for long enough; `turn` as that of `growing`."""
        return [course for course in self.candidates().values() if self._lasts(course, turn) and course.may_go_on]

    def growing(self, turn: int) -> list[Course]:
        """Return those that have taken something in every turn until this one, the longest first.

        Where it was not read after the last turn, it is not known that they go on.
        """
        found = [course for course in self._courses.values() if course.goes_on and self._lasts(course, turn)]
        return sorted(found, key=lambda course: -course.items)
