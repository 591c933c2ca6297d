"""The process's own memory turn by turn, and which part of it is what grew."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from lowtide.leakcheck.growth.series import Rise, Slope, TurnSeries
from lowtide.leakcheck.resources.resource import MIB
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.memory_parts import NAMES, MemoryParts, malloc_in_use, read_parts
from lowtide.probes.originals import sys
from lowtide.reports.sizes import format_bytes

LEAST_A_TURN = 128 * 1024
"""Bytes that each turn must add: a runner's notes, tables of libraries and a heap's own moves are below."""

LEAST_IN_ALL = 8 * MIB
"""Bytes that must have come in all in a process that runs, whose turns nobody counts."""

_LEAST_OF_TURNS = 4 * MIB
"""The same where they are: what a heap moves by itself is not spread over them."""

_SUSPECTED = 4
"""Turns in a row with more in each after which it may be growth: of chance one in sixteen series does that."""


class HostGrowth(msgspec.Struct, frozen=True):
    """By how much the process's own memory has grown.

    Attributes:
        slope: by how many bytes in a turn.
        turns: in how many.
        bytes: by how many in all of them.
        part: the name of the part of it that has grown most.
        part_bytes: by how many bytes that has.
        levels: both levels then.
    """

    slope: Slope
    turns: int
    bytes: int
    part: str
    part_bytes: int
    levels: tuple[int, int]


class HostLevels:
    """Follows the memory that the kernel counts for the process, and what malloc has given out of it.

    Both: where what is kept lies in pages that were there before, only malloc knows of it. By what a turn adds in which
    modules are imported for the first time they do not grow: two late imports look like a steady rise of few turns. So
    does a library's part that a few turns are the first to use, beside the little that each turn adds.

    Args:
        levels: reads both; those of this process unless said otherwise, as the parts.
        parts: reads what the memory is made of.
        modules: counts what is imported.
    """

    def __init__(
        self,
        levels: Callable[[], tuple[int, int]] | None = None,
        parts: Callable[[], MemoryParts] = read_parts,
        modules: Callable[[], int] = lambda: len(sys.modules),
    ) -> None:
        self._read_levels, self._read_parts, self._count_modules = levels or read_levels, parts, modules
        self._resident, self._malloc = TurnSeries(LEAST_A_TURN), TurnSeries(LEAST_A_TURN)
        self._first = self._last = (0, 0)
        self._modules = 0
        self._parts: MemoryParts | None = None
        self._lately: deque[tuple[int, int]] = deque(maxlen=_SUSPECTED + 1)

    def note(self, levels: tuple[int, int]) -> None:
        """Note what a `LevelReader` has read after a turn."""
        modules = self._count_modules()
        if self._parts is None:
            self._first, self._parts = levels, self._read_parts()
        elif modules > self._modules:
            added = (max(0, now - then) for now, then in zip(levels, self._last, strict=True))
            self._first = (self._first[0] + next(added), self._first[1] + next(added))
        self._last, self._modules = levels, modules
        self._lately.append(levels)
        self._resident.add(levels[0] - self._first[0])
        self._malloc.add(levels[1] - self._first[1])

    def leave_out_next(self) -> None:
        """Leave out what the next turn adds: it is not the program's, as if it imported modules."""
        self._modules = 0

    def may_grow(self) -> bool:
        """Return whether one of them has risen in each of the last few turns: a suspicion, and no more."""
        if len(self._lately) <= _SUSPECTED:
            return False
        return any(
            series[-1] - series[0] >= _SUSPECTED * LEAST_A_TURN
            and all(after > before for before, after in itertools.pairwise(series))
            for series in zip(*self._lately, strict=True)
        )

    def seem_to_grow(self) -> bool:
        """Return whether one of them grows as far as can be seen before anything is collected."""
        return any(self._rising())

    def undecided(self) -> int:
        """Return how many more turns may tell whether it grows; 0 where that is known."""
        found = [series.growth() for series in (self._resident, self._malloc)]
        # What is too little to speak of in any case need not be known.
        matter = (each for each in found if each.slope is None or each.slope.rate >= LEAST_A_TURN)
        return max((each.more for each in matter), default=0)

    def said(self) -> str:
        """Say what the kernel's count does, where it does not grow by what matters."""
        growth = self._resident.growth()
        if growth.kind == "bounded" or growth.slope is None or growth.slope.high <= 0:
            return "host memory is bounded"
        if growth.kind == "sawtooth":
            return "host memory rises and falls back"
        return f"host memory rises by {format_bytes(round(growth.slope.high))} with each at most"

    def grown(self) -> HostGrowth | None:
        """Say by how much it has grown; to be asked when what can go back has gone."""
        if self._parts is None:
            return None
        now, parts = self._read_levels(), self._read_parts().since(self._parts)
        for place, (slope, turns) in self._rising():
            held = now[place] - self._first[place]
            if place == _RESIDENT:
                # What was free in heaps at the start, or mapped, and is no longer, hides as much of what grows. What
                # Python's heap has free now nobody holds; what malloc's has is told as what grows.
                held -= parts[NAMES["python_free"]] + min(0, parts[NAMES["malloc_free"]] + parts[NAMES["other"]])
            # A step beside what each turn adds, such as the table of a reading, is none of it.
            kept = min(held, round(slope.high * turns))
            if kept >= max(_LEAST_OF_TURNS, slope.rate * turns / 2):
                part = max(parts, key=lambda name: parts[name])
                # What imports have added is in the parts.
                return HostGrowth(slope, turns, kept, part, min(parts[part], kept), now)
        return None

    def _rising(self) -> Iterator[tuple[int, Rise]]:
        for place, series in enumerate((self._resident, self._malloc)):
            rise = series.rise(LEAST_A_TURN)
            if rise is not None:
                yield place, rise


_RESIDENT = 0
"""The place of the kernel's count among the levels."""


class LevelReader:
    """Reads both levels turn after turn; asks malloc only now and then while neither has moved by what matters.

    To ask takes as long as malloc has free blocks: in a process with torch up to half a millisecond. What has moved is
    asked for after each turn; what has not, after an eighth more of the turns, at most: so growth that begins late, in
    pages that were there before, is seen so much later, and from then on in each turn.
    """

    def __init__(self) -> None:
        self._turns = self._waits = self._held = self._malloc = 0
        self._is_quiet = False

    def forget(self) -> None:
        """Begin again: the next turn is the first one of a stretch."""
        self._turns = self._waits = 0
        self._is_quiet = False

    def read(self, held: int | None = None) -> tuple[int, int]:
        """Return both levels, in bytes; where malloc is not asked, what it said last.

        The first of them is `held`, where it has just been read.
        """
        held = anonymous_bytes() if held is None else held
        self._turns += 1
        if self._is_quiet and self._waits and abs(held - self._held) < LEAST_A_TURN:
            self._waits -= 1
            return held, self._malloc
        malloc = malloc_in_use()
        moved = max(abs(held - self._held), abs(malloc - self._malloc))
        self._is_quiet = moved < LEAST_A_TURN
        self._waits = min(self._turns // _WAITS_A_TURN, _MOST_WAITS)
        self._held, self._malloc = held, malloc
        return held, malloc


_WAITS_A_TURN = 8
"""Of so many turns one is not asked for."""

_MOST_WAITS = 7


def read_levels() -> tuple[int, int]:
    """Read the process's own memory and what malloc has given out, in bytes."""
    return anonymous_bytes(), malloc_in_use()
