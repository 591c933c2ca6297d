"""Which containers take something in every turn, from a few readings of the lengths of all of them.

A cache that fills takes ever less, and a registry something now and then; what is kept of every turn grows by as many
things as there are turns, in each stretch between two readings. Where turns do the same, so does what is kept in every
third of them, or in one of several containers at a time: as evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.growth.series import KEEPS_ON
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.original_numpy import np

FEWEST_READINGS = 5
"""Readings between which it must have grown each time."""

CANDIDATE = 3
"""Readings after which one that has grown between them is a candidate."""

_EACH_TURN = 0.9
"""Things that a container must take in a turn: in the one or other turn nothing may happen."""

_REGULAR = 10
"""Things that one which takes less must have taken, as evenly as that can be."""

_MOST_NEW = 1000
"""Containers that have come from one reading to the next, of which it is followed how they grow: of more, of none."""


class Course(msgspec.Struct):
    """A container's lengths at readings between which it has taken something in every turn.

    Attributes:
        identity: the container's.
        kind: its type's.
        turns: the turns after which it was read.
        lengths: how much it held.
        by_turns: whether it may take something in some of the turns only.
        is_remade: whether it takes the place of a shorter one each time that it is read.
        together: of how many such containers it is the course: of all that they have held.
    """

    identity: int
    kind: int
    turns: list[int] = msgspec.field(default_factory=list)
    lengths: list[int] = msgspec.field(default_factory=list)
    by_turns: bool = False
    is_remade: bool = False
    together: int = 1

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
    def is_of_every_turn(self) -> bool:
        """Whether it goes on, and has taken something in every turn."""
        return self.goes_on and all(step >= _EACH_TURN * span for step, span in self.steps)

    @property
    def is_regular(self) -> bool:
        """Whether it goes on, and has taken something in every second turn, or third, or so on, to the last one.

        What is taken by chance, or fills, is not as even: it takes ever less.
        """
        every = round(self.span / self.items)
        whole = [*self.steps, (self.items, self.span)]
        is_even = every > 1 and self.has_taken and all(abs(step - span / every) <= 1 for step, span in whole)
        half = len(self.steps) // 2
        early, late = (sum(step for step, _ in steps) for steps in (self.steps[:half], self.steps[-half:]))
        return self.goes_on and self.items >= _REGULAR and is_even and early <= late + 1

    @property
    def has_taken(self) -> bool:
        """Whether it has taken something from each reading to the next."""
        return all(step for step, _ in self.steps)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Return what it has taken from each reading to the next, and in how many turns."""
        steps = (more - less for less, more in itertools.pairwise(self.lengths))
        return [*zip(steps, (later - earlier for earlier, later in itertools.pairwise(self.turns)), strict=True)]

    @property
    def longest_rest(self) -> int:
        """How many turns at most there were from one of its readings to the next."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.turns))

    @property
    def _keeps_on(self) -> bool:
        rates = [step / span for step, span in self.steps]
        half = len(rates) // 2
        return _mean(rates[-half:]) >= KEEPS_ON * _mean(rates[:half])


def together(courses: Sequence[Course]) -> Course:
    """Return what several containers that were read after the same turns have held, as one course: the largest's."""
    largest = max(courses, key=lambda course: course.items)
    lengths = [sum(lengths) for lengths in zip(*(course.lengths for course in courses), strict=True)]
    return replace(largest, lengths=lengths, together=len(courses))


def _unlike(these: ContainerLengths, others: ContainerLengths) -> Any:
    """Return of which containers there is none among others in the same place, and as long."""
    at = others.places_of(these.ids)
    return (at < 0) | (others.kinds[at] != these.kinds) | (others.lengths[at] != these.lengths)


def _mean(rates: Sequence[float]) -> float:
    return sum(rates) / len(rates)


class SwellingTypes:
    """Types of which objects come and go in any turn, as of lists: whether there are more of them with late ones.

    Args:
        kinds: the types' identities.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self._kinds = np.array(kinds, np.int64)
        self._turns: list[int] = []
        self._counts = np.zeros((0, len(kinds)), np.int64)

    def note(self, turn: int, now: ContainerLengths, own: Sequence[int]) -> None:
        """Note how many there are after a turn, but for those of each type that whoever reads has himself."""
        counts = np.append(now.lengths, 0)[now.places_of(self._kinds)] - np.array(own)
        self._turns.append(turn)
        self._counts = np.vstack([self._counts, counts])

    def forget(self) -> None:
        """Begin again with the next reading."""
        self._turns.clear()
        self._counts = self._counts[:0]

    def growing(self) -> list[Course]:
        """Return those of which each quarter of the later half has left half as many as it had turns, or more."""
        last = len(self._turns) - 1
        if last + 1 < FEWEST_READINGS:
            return []
        places, counts = [last // 2, last * 3 // 4, last], self._counts
        steps, spans = np.diff(counts[places], axis=0), np.diff(np.array(self._turns)[places])
        swell = (2 * steps >= spans[:, None]).all(0) & (counts[last] > counts[0])
        return [
            Course(int(self._kinds[at]), id(type), [*self._turns], counts[:, at].tolist())
            for at in np.flatnonzero(swell)
        ]


_Replaced: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]

_AT_ONCE = range(1, 5)
"""Things with each turn by which what takes the place of a shorter one may be longer."""

_NONE = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int64))
"""No containers: their identities, those of their types, and their lengths at one reading."""


class ContainerCourses:
    """The containers that have taken something in every turn since some reading.

    One that does so no more has filled, and one that shrinks is emptied now and then: both are forgotten.

    Args:
        may_rest: whether there may be nothing to do in a turn, as in an interval of a server without requests: one in
            which none of them takes anything does not count.
        by_turns: whether those count, too, that take something in some of the turns, alone or by turns with others.
    """

    def __init__(self, *, may_rest: bool = False, by_turns: bool = False) -> None:
        self._may_rest = may_rest
        self._by_turns = by_turns
        # Those that have never shrunk since the first reading, with their lengths at each. (Arrays, since lists here
        # would be containers that grow.)
        self._read = np.zeros(0, np.int64)
        self._slow = _NONE
        # What each time gives way to a longer one: its type, how many things each turn adds, and since when, how long.
        self._replaced: tuple[_Replaced, ...] = ()
        # In arrays, too: lists of them would be a few more of these at each reading.
        self._new = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
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
            self._read, self._slow, self._replaced = np.array([turn]), _NONE, ()
            return
        if self._by_turns:
            self._note_slow(turn, before, now)
            self._note_replaced(turn, turn - earlier, before, now)
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

    def own(self, kind: type) -> int:
        """Return how many objects of a type hold what is known here: the lists of courses, the tuples of others."""
        return 2 * len(self._courses) if kind is list else 3 * len(self._replaced) if kind is tuple else 0

    def drop(self, identity: int) -> None:
        """Begin a container's course anew: what it has taken is known, or of no interest."""
        self._courses.pop(identity, None)

    def break_off(self) -> None:
        """Leave out what comes until the next reading."""
        self._first, self._last, self._courses, self._rested = None, None, {}, 0
        self._slow, self._replaced = _NONE, ()

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

    def _note_slow(self, turn: int, before: ContainerLengths, now: ContainerLengths) -> None:
        places = before.places_of(now.ids)
        are_new = (places < 0) | (before.kinds[places] != now.kinds)
        less = np.where(are_new, 0, before.lengths[places])
        risen = now.lengths > less
        if (risen & are_new).sum() > _MOST_NEW:
            risen &= ~are_new
        ids, kinds, lengths = self._slow
        at = now.places_of(ids)
        lasts = (at >= 0) & (now.kinds[at] == kinds) & (now.lengths[at] >= lengths[:, -1])
        ids, kinds, lengths = ids[lasts], kinds[lasts], lengths[lasts]
        risen &= ~np.isin(now.ids, ids)
        self._read = np.append(self._read, turn)
        lengths = np.concatenate([lengths, np.repeat(less[risen, None], lengths.shape[1], 1)])
        ids, kinds = np.concatenate([ids, now.ids[risen]]), np.concatenate([kinds, now.kinds[risen]])
        self._slow = ids, kinds, np.column_stack([lengths, now.lengths[now.places_of(ids)]])

    def _note_replaced(self, turn: int, span: int, before: ContainerLengths, now: ContainerLengths) -> None:
        # An object may be where the last one but one was.
        gone, new = _unlike(before, now), _unlike(now, before) & (now.lengths >= span)
        if new.sum() > _MOST_NEW:
            new[:] = False
        self._new = now.ids[new], now.kinds[new], now.lengths[new]
        there = {*zip(self._new[1].tolist(), self._new[2].tolist(), strict=True)}
        of_gone = {*zip(before.kinds[gone].tolist(), before.lengths[gone].tolist(), strict=True)}
        begun = ((kind, each, (turn - span,), (length - each * span,)) for kind, length in there for each in _AT_ONCE)
        longer: dict[tuple[int, int], _Replaced] = {}
        for kind, each, turns, lengths in (*self._replaced, *begun):
            length = lengths[-1] + each * span
            if (kind, lengths[-1]) in of_gone and (kind, length) in there:
                longer.setdefault((kind, length), (kind, each, (*turns, turn), (*lengths, length)))
        self._replaced = (*longer.values(),)

    def replaced(self) -> list[Course]:
        """Return those that have each time taken the place of a shorter one, by as many things as there were turns."""
        ids, kinds, new = self._new
        found = [
            Course(identity, kind, [*turns], [*lengths], is_remade=True)
            for kind, _, turns, lengths in self._replaced
            if len(turns) >= FEWEST_READINGS
            for identity in ids[(kinds == kind) & (new == lengths[-1])].tolist()
        ]
        told = {identity for identity, course in self._courses.items() if course.goes_on}
        return [course for course in found if course.identity not in told]

    def slow(self) -> list[Course]:
        """Return those that have grown since the first reading, and never shrunk; but `risen` ones.

        One that has come since has held nothing before; one that has been as it is since then is none of them. None
        where all of them together have not taken enough from each reading to the next: beside some that fill, others
        may go on.
        """
        ids, kinds, lengths = self._slow
        often = (np.diff(lengths, axis=1) > 0).sum(1) > 1
        often &= ~np.isin(ids, np.fromiter(self._courses, np.int64, len(self._courses)))
        turns = self._read.tolist()
        figures = (ids[often].tolist(), kinds[often].tolist(), lengths[often].tolist())
        found = [Course(*figure[:2], turns, figure[2], by_turns=True) for figure in zip(*figures, strict=True)]
        all_ = together(found) if found else None
        are_enough = all_ is not None and all_.items >= _REGULAR and all_.has_taken
        return found if are_enough and len(turns) >= FEWEST_READINGS else []

    def growing(self, turn: int) -> list[Course]:
        """Return those that have taken something in every turn until this one, the longest first.

        Where it was not read after the last turn, it is not known that they go on.
        """
        found = [course for course in self._courses.values() if course.goes_on and self._lasts(course, turn)]
        return sorted(found, key=lambda course: -course.items)
