"""What grows turn by turn in a process that is watched: its containers, read at a few turns, and its own memory.

What grows of this and no container and no tensor explains is said with the part of the memory that it lies in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from lowtide.leakcheck.findings.growing_objects import (
    ADVICE,
    PLAIN,
    Stretch,
    growth_in_heap,
    ids_of,
    is_worth_a_look,
    kept_of_c,
    takes_of_c,
)
from lowtide.leakcheck.findings.host_memory import memory_holder
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.storage_watch import HostGarbage
from lowtide.leakcheck.findings.tensor_findings import frames
from lowtide.leakcheck.growth.containers import CANDIDATE, FEWEST_READINGS, ContainerCourses, Course, SwellingTypes
from lowtide.leakcheck.growth.host_levels import HostGrowth, HostLevels, LevelReader
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.probes.heap.container_lengths import ContainerLengths, read_lengths
from lowtide.probes.heap.large_values import read_values
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.memory_parts import NAMES, malloc_in_use
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.originals import gc, time
from lowtide.reports.schema import Cause, Finding, NotMeasured
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import Note, Statement, noted, with_holder

if TYPE_CHECKING:
    from lowtide.leakcheck.findings.allocating_calls import CallRecorder, RecordedTurns

_FREE = 4_000_000
"""Objects that all readings of containers together may go through in any case, at a fifth of a microsecond each."""

_READ_IN_ANY_CASE = 8
"""Readings that are made however large the heap is: those of one stretch, and what is read for its findings."""

_EACH_SECOND = 5_000_000
"""The same for each second since the first turn, of which a part may go so."""

_PART = 0.01
"""That part, unless said otherwise."""

INFERENCES = "inferences"
"""What turns of an engine are called."""

FEWEST_TURNS = 12
"""Of fewer turns it is not said whether something grows with each."""

_STRETCHES = 5
"""Parts of about as many turns, at the ends of which it is read what there is,"""

_FINE_STRETCHES = 8
"""or so many, where somebody has asked for that many times five turns: what grows from the middle on is seen then."""

SECOND = 2
"""The turn after which it is read first: the first one fills what is filled once."""

_FIRST = 5
"""The turn after which it is read first where nobody knows how many will follow: most lives have fewer."""

_WIDER = 1.2
"""How many times as many turns there are at a reading as at the one before, where nobody knows how many will follow."""

_ANEW = 4
"""The same for the beginning of the next stretch: what rested in this one may grow in that."""

_APART = 2
"""Intervals of a running program between two readings, each of which holds its threads up."""

_ENOUGH = 3
"""Readings of a stretch after which it shows whether any container may grow in it."""

_PARTS: Mapping[str, tuple[Cause, str, str]] = {
    NAMES["malloc"]: (
        "native",
        "`memray run --native`",
        "look for what is allocated in each turn and not freed, what C holds by a reference too many included: "
        "{tool} names the calls",
    ),
    NAMES["python"]: (
        "unknown",
        "`tracemalloc`",
        "look for small objects that each turn leaves, in no container that grows: {tool} names the line",
    ),
    NAMES["malloc_free"]: (
        "native",
        "",
        "the heap is fragmented, and keeps free memory: no leak; try MALLOC_ARENA_MAX=2",
    ),
    NAMES["other"]: (
        "native",
        "`strace -e mmap,munmap -k`",
        "look for what maps memory in each turn: {tool} names the calls",
    ),
}
"""The cause by the part of the memory that grows, what names the calls where nothing of lowtide's does, and advice."""

_FREE_IT = "free in each turn what this call allocates, or give back the reference by which C holds it"

_MATTERS = 4
"""A call that has allocated less than such a part of what the turns add is not what grows."""

_LEAST_OF_VALUES = 64 << 10
"""Bytes that malloc must have given out more than at an earlier reading of values, before they are read again,"""

_LEAST_A_TURN = 1024
"""or so many for each turn since then, where turns may take any time."""

_COST_OF_VALUES = 4
"""How many times as long it takes to read values as to read containers."""


_TRIMMED = 24 << 20
"""Bytes that must have come back at malloc_trim before that is told: what reading frees is less."""


class Grown(msgspec.Struct, frozen=True):
    """What has grown in a stretch of turns.

    Attributes:
        containers: a finding on each container that takes something in every turn, and on garbage of theirs.
        host: that on host memory that neither these nor anything else explains; None if there is none.
        levels: see `read_levels`, at the stretch's end, where there is such a one.
    """

    containers: tuple[Finding, ...] = ()
    host: Finding | None = None
    levels: tuple[int, int] = (0, 0)


class _Earlier(msgspec.Struct):
    """The identities of a type's objects; of a class of ours, so that a dict of them is seen to be no program's."""

    ids: Ints


class OpenEnd(msgspec.Struct):
    """Says after which turns it is read what there is, where it is not known how many there will be.

    Attributes:
        begins: whether the last of these has begun a stretch.
        first: the first of them.
    """

    begins: bool = False
    first: int = _FIRST
    _last: int = 0
    _began: int = 0

    def is_read(self, turn: int) -> bool:
        """Return whether it is read what there is after a turn; to be asked once for each, in their order."""
        if turn < max(self.first, self._last * _WIDER):
            return False
        self.begins = turn >= _ANEW * self._began
        self._last, self._began = turn, turn if self.begins else self._began
        return True


class TurnGrowth:
    """Reads what is there after turns, and says at the end of a stretch of them what grows.

    Args:
        turns: what a turn is, in the plural: `tests`.
        roots: gives what is held, by name, where no path can see it.
        by_frames: whether what running functions hold is the program's; else it is a test runner's.
        asked: whether somebody has asked for it: then it is read at every turn that it should be, at any cost.
        part: else the part of the time that it may take.
        seconds: how long a turn takes; 0 where it may take any time.
        apart: does what goes through the heap where the program does not notice it.
        calls: records those that allocate, while host memory seems to grow; None: nothing does.
        native_option: what asks for that; empty where nothing does.
    """

    def __init__(
        self,
        turns: str,
        roots: Callable[[], Iterable[tuple[str, object]]] = lambda: (),
        *,
        by_frames: bool = False,
        asked: bool = False,
        part: float = _PART,
        seconds: float = 0.0,
        apart: Callable[[Callable[[], dict[int, Finding]]], dict[int, Finding]] = lambda work: work(),
        calls: CallRecorder | None = None,
        native_option: str = "",
    ) -> None:
        self._turns, self._apart = turns, apart
        self._option = "" if calls else native_option
        self._calls = calls
        # Levels that have in them what recording takes, each with the bytes that it says to take.
        self._waiting: list[tuple[tuple[str, ...], tuple[int, int], int]] = []
        self._by_frames = by_frames
        self._asked, self._seconds = asked, seconds
        self._each_second = part * _EACH_SECOND
        self._roots = roots
        self._containers = ContainerCourses(may_rest=bool(seconds), by_turns=asked and not seconds)
        self._levels: dict[str, HostLevels] = {}
        self._reader = LevelReader()
        self._trimmed = self._noted = 0
        self._garbage = HostGarbage(turns) if asked and not seconds else None
        self._began = time.monotonic()
        self._gone_through = self._largest = 0
        self._readings = 0
        self._rises = self._gone_through_for_values = 0
        self._is_unread = False
        self._turn = 0
        self._earlier: dict[int, _Earlier] = {}
        self._plain, self._plain_earlier = SwellingTypes([*map(id, PLAIN)]), dict[int, Ints]()
        # How much single values have had of whoever refers to them, and what malloc had given out when they were read.
        self._values = ContainerCourses()
        self._malloc: int | None = None
        self._since = 0
        # Of the containers that grow, by identity: what was found, if anything, and over how many turns.
        self._told: dict[int, tuple[int, Finding | None]] = {}

    def last(self, seconds: float) -> None:
        """Note for how long turns last on average, as far as it is known by now; see the class."""
        self._seconds = seconds

    def note(self, *stretches: str, held: int | None = None) -> None:
        """Read the process's own memory after a turn of some stretches, which are known by their names.

        The bytes that the kernel counts are `held`, where they have just been read.
        """
        self._noted += 1
        if self._garbage is not None:
            self._garbage.look(self._noted)
        is_new = not set(stretches) <= set(self._levels)
        if is_new:
            self._reader.forget()
        now = self._reader.read(held)
        if self._calls is None:
            self._note(stretches, now)
            return
        if is_new:
            # What was recorded of the stretches before is not this one's.
            self.close()
        own = self._calls.own_bytes()
        if own:
            self._waiting.append((stretches, now, own))
            # What recording takes is in both: each turn must have its own.
            self._reader.forget()
        else:
            self._note(stretches, now)
        self._record(self._calls)

    def read(self, turn: int, *, begins: bool = False, ends: bool = False) -> None:
        """Read the containers after a turn; not where that has cost too much, or where none of them may grow by now.

        Args:
            turn: its number.
            begins: whether it is the first that is read of a stretch.
            ends: whether it is the last one.
        """
        apart = 1 if ends or not self._seconds else _APART
        if turn < self._turn + apart and not begins:
            return
        self._turn = turn
        if self._garbage is not None:
            self._garbage.look(turn)
        self._readings = 1 if begins else self._readings + 1
        if not self._asked:
            self._read_values_unasked(turn)
        candidates = self._containers.candidates()
        if not self._asked and self._readings > _ENOUGH and not candidates:
            return
        if not self._asked and self._costs_too_much:
            self._is_unread = True
            return
        if self._asked:
            held = anonymous_bytes()
            trim_heap()
            self._trimmed += max(0, held - anonymous_bytes())
        # The objects of a type that grows are known from where it was met first.
        wanted = {course.identity for course in self._containers.risen()} if self._asked else candidates.keys()
        read, found = read_lengths(wanted)
        self._gone_through += read.objects
        self._largest = max(self._largest, read.objects)
        if self._asked:
            self._note_plain(turn, read, begins=begins)
        self._containers.note(turn, read)
        self._note_types(found)
        if not self._asked:
            for identity, is_worth in self._worth_a_look(candidates, found).items():
                if not is_worth:
                    self._containers.drop(identity)
        else:
            self._read_values(turn)
            # What the reading has taken and freed would be in the next level.
            trim_heap()

    def _read_values_unasked(self, turn: int) -> None:
        """Read how large single values are where nobody has asked: while malloc gives out more from reading to reading.

        A value that is worth a message grows by more than tests need for their reports.
        """
        if self._seconds:
            return
        now = malloc_in_use()
        self._rises += 1
        if self._malloc is None or now - self._malloc < self._rises * _LEAST_OF_VALUES or self._values_cost_too_much:
            self._values.break_off()
            self._malloc, self._rises = now, 0
            return
        self._values.note(turn, read_values()[0])
        self._gone_through_for_values += _COST_OF_VALUES * self._largest

    def _read_values(self, turn: int) -> None:
        """Read how large single values are, where there may be more of them.

        It takes as long as several other readings. What runs by itself goes up and down: there its heights count.
        """
        now = malloc_in_use()
        if self._malloc is not None and now - self._malloc < self._least_of_values(turn):
            return
        if self._malloc is None or self._seconds:
            self._malloc, self._since = now, turn
        self._values.note(turn, read_values()[0])

    def _least_of_values(self, turn: int) -> int:
        """Return the bytes that malloc must have given out more than at an earlier reading of values."""
        return _LEAST_OF_VALUES if self._seconds else min(_LEAST_OF_VALUES, (turn - self._since) * _LEAST_A_TURN)

    def _growing_values(self) -> Sequence[Course]:
        """Return the values that have grown until the last reading: none that has stopped since it was read."""
        if self._seconds and any(course.goes_on for course in self._values.risen()):
            self._values.note(self._turn, read_values()[0])
        return self._values.growing(self._turn)

    def _note_types(self, found: Mapping[int, Any]) -> None:
        """Note which objects there are of the types that may grow, when these are met first."""
        types = {identity: item for identity, item in found.items() if is_a(item, type)}
        self._earlier = {identity: ids for identity, ids in self._earlier.items() if identity in types}
        met = ids_of(item for identity, item in types.items() if identity not in self._earlier)
        self._earlier |= {identity: _Earlier(ids) for identity, ids in met.items()}

    def _note_plain(self, turn: int, read: ContainerLengths, *, begins: bool) -> None:
        """Note how many of what everybody makes there are, and at the first reading of a stretch which."""
        if begins or not self._plain_earlier:
            self._plain.forget()
            self._plain_earlier = ids_of(PLAIN)
        self._plain.note(turn, read, [self._containers.own(kind) + self._values.own(kind) for kind in PLAIN])

    def _worth_a_look(self, courses: Mapping[int, Course], there: Mapping[int, object]) -> dict[int, bool]:
        return {
            identity: is_worth_a_look(courses[identity], container, tensors=self._counts_tensors, at_a_glance=True)
            or takes_of_c(courses[identity], container) != ""
            for identity, container in there.items()
            if identity in courses
        }

    def close(self) -> None:
        """Record no calls any more, and forget those that are known."""
        if self._calls is not None and self._calls.drop():
            self._recorded(self._calls)

    def take_unread(self) -> bool:
        """Return whether a container may have grown unseen since this was last asked, as reading it would have cost."""
        unread, self._is_unread = self._is_unread, False
        return unread

    @property
    def _counts_tensors(self) -> bool:
        """Return whether what is under tensors counts: of tests and inferences tensors are followed by themselves."""
        return bool(self._seconds)

    @property
    def _costs_too_much(self) -> bool:
        return self._gone_through > self._may_cost(_READ_IN_ANY_CASE)

    @property
    def _values_cost_too_much(self) -> bool:
        return self._gone_through_for_values > self._may_cost(FEWEST_READINGS * _COST_OF_VALUES)

    def _may_cost(self, times: int) -> float:
        """Return how many objects may have been gone through, of the largest heap so often in any case."""
        return max(_FREE, times * self._largest) + self._each_second * (time.monotonic() - self._began)

    def _note(self, stretches: tuple[str, ...], now: tuple[int, int]) -> None:
        for stretch in stretches:
            if stretch not in self._levels:
                self._levels[stretch] = HostLevels()
            self._levels[stretch].note(now)

    def _record(self, calls: CallRecorder) -> None:
        """Record the calls of the turns that follow if memory has come to grow, and no more than are needed."""
        if calls.turn():
            self._recorded(calls)
        if calls.may_begin and any(levels.may_grow() for levels in self._levels.values()):
            calls.begin()
            # What recording takes when it begins would be growth.
            self._leave_out_next()

    def _recorded(self, calls: CallRecorder) -> None:
        """Note the levels that had records in them, without these: nothing is recorded any more."""
        waiting, self._waiting = self._waiting, []
        for stretches, levels, own in waiting:
            took = calls.took * own // max(1, waiting[-1][-1])
            self._note(stretches, (levels[0] - took, levels[1] - took))
        # What they took is free, and would be in the next level.
        trim_heap()
        self._leave_out_next()

    def _catch_up(self) -> None:
        """Note the levels that wait for the end of what is recorded: they are asked for."""
        if self._calls is not None and self._waiting:
            self._calls.stop()
            self._recorded(self._calls)

    def _leave_out_next(self) -> None:
        for levels in self._levels.values():
            levels.leave_out_next()

    def break_off(self) -> None:
        """Leave out what has come since the last reading, and comes until the next one."""
        self._containers.break_off()
        self._values.break_off()
        self._plain_earlier = {}
        self._malloc = None
        self.forget_levels()

    def forget_levels(self) -> None:
        """Forget what host memory has grown by until now: it is known."""
        self._levels.clear()
        self._waiting.clear()

    def end(self, stretch: str, module: str, explained: Callable[[], int] = lambda: 0, *, since: int = 0) -> Grown:
        """Say what has grown in a stretch that ends; each container once.

        Args:
            stretch: which.
            module: the module to which its turns belong; empty if to none.
            explained: gives the bytes of what else has grown, and is known.
            since: the turn before its first one: what has grown for longer belongs to no module.
        """
        growing = self._containers.growing(self._turn)
        containers = (*self._growing_containers(module, since), *self._told_garbage)
        self._catch_up()
        levels = self._levels.pop(stretch, None)
        if levels is None or not levels.seem_to_grow():
            if not self._levels:
                self.close()
            return Grown(containers)
        # What it takes must not be in the level at the end.
        recorded = None if self._calls is None else self._calls.recorded()
        # Nothing of it may be garbage, or what only the heap keeps.
        gc.collect()
        trim_heap()
        grown = levels.grown()
        known = explained() + sum(finding.bytes for finding in containers)
        if grown is None or 2 * known >= grown.bytes:
            return Grown(containers)
        found = growth_of_host_memory(grown, self._turns, module, self._seconds, option=self._option)
        # No container takes anything where one object becomes larger and larger, or gives way to a larger one. It has
        # what each turn adds, perhaps the first one, too, from whose level on it is counted; and no heap's own moves.
        size = round(grown.slope.rate * (grown.turns + 0.5))
        holder = memory_holder(size, Context(roots=tuple(self._roots()), living=True))
        facts = None if holder is None else msgspec.structs.replace(holder[0], advice=ADVICE)
        if facts is None and recorded is not None:
            found = with_call(found, recorded, self._turns, grown.slope.rate)
        if facts is None:
            facts = kept_of_c(
                growing, read_lengths({course.identity for course in growing})[1], self._stretch(module, 0)
            )
        if facts is not None:
            found = with_holder(found, facts)
        return Grown(containers, found, grown.levels)

    def undecided(self, stretch: str) -> int:
        """Return how many more turns of a stretch may tell whether anything grows; 0 where that is known."""
        self._catch_up()
        courses = {course.identity: course for course in self._containers.undecided(self._turn)}
        # Where nobody has asked, each reading has dropped what was a candidate before it and is worth no look.
        unseen = {each: course for each, course in courses.items() if self._asked or len(course.turns) == CANDIDATE}
        are_worth = self._worth_a_look(unseen, read_lengths(unseen)[1]) if unseen else {}
        spans = [course.span for each, course in courses.items() if each not in unseen or are_worth.get(each)]
        levels = self._levels.get(stretch)
        return max([*spans, 0 if levels is None else levels.undecided()])

    def said(self, stretch: str) -> str:
        """Say what host memory has done in a stretch, where nothing of it is known to grow."""
        self._catch_up()
        said = self._levels[stretch].said() if stretch in self._levels else ""
        if self._trimmed < _TRIMMED:
            return said
        return (
            f"{said}; {format_bytes(self._trimmed)} came back at malloc_trim: no leak, MALLOC_ARENA_MAX=2 keeps it less"
        )

    def so_far(self) -> tuple[Finding, ...]:
        """Return a finding on each container that grows, while it goes on; its holder is looked for now and then."""
        growing = {course.identity: course for course in self._containers.growing(self._turn)}
        self._told = {identity: told for identity, told in self._told.items() if identity in growing}
        times = 1 if self._asked else 2
        anew = [each for each in growing.values() if each.span >= times * self._told.get(each.identity, (0,))[0]]
        found = self._findings_on(anew, "", 0)
        self._told |= {course.identity: (course.span, found.get(course.identity)) for course in anew}
        return (*(finding for _, finding in self._told.values() if finding is not None), *self._told_garbage)

    @property
    def _told_garbage(self) -> tuple[Finding, ...]:
        found = None if self._garbage is None else self._garbage.found
        return () if found is None else (found,)

    def _growing_containers(self, module: str, since: int) -> tuple[Finding, ...]:
        growing = self._containers.growing(self._turn)
        swelling = self._plain.growing()
        growing = [course for course in growing if course.identity not in {each.identity for each in swelling}]
        others = (*self._containers.slow(), *self._containers.replaced(), *swelling)
        values = self._growing_values()
        found = self._findings_on([*growing, *others], module, since, values)
        for course in growing:
            self._containers.drop(course.identity)
        for course in values:
            self._values.drop(course.identity)
        return tuple(found.values())

    def _findings_on(
        self, growing: Sequence[Course], module: str, since: int, values: Sequence[Course] = ()
    ) -> dict[int, Finding]:
        if not growing and not values:
            return {}
        return self._apart(lambda: self._explained(growing, module, since, values))

    def _explained(
        self, growing: Sequence[Course], module: str, since: int, values: Sequence[Course]
    ) -> dict[int, Finding]:
        _, there = read_lengths({course.identity for course in growing})
        stretch = msgspec.structs.replace(
            self._stretch(module, since),
            fixed=self._containers.fixed(min((course.items for course in growing), default=0)),
            earlier={identity: each.ids for identity, each in self._earlier.items()} | self._plain_earlier,
        )
        return growth_in_heap(growing, there, stretch, values)

    def _stretch(self, module: str, since: int) -> Stretch:
        return Stretch(
            self._turns,
            module_of=lambda course: module if course.turns[0] >= since else "",
            roots=tuple(self._roots()),
            by_frames=self._by_frames,
            seconds=self._seconds,
            tensors=self._counts_tensors,
        )


def growth_of_host_memory(
    grown: HostGrowth, turns: str, module: str, seconds: float = 0.0, since: str = "", option: str = ""
) -> Finding:
    """Return the finding on host memory that grows.

    Args:
        grown: by how much.
        turns: what a turn is, in the plural: `tests`.
        module: the module to which the turns belong; empty if to none.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which it has grown, where nobody has counted the turns.
        option: what asks for recording the calls that allocate; empty where nothing does.
    """
    rate, low, high = (format_bytes(round(size)) for size in (grown.slope.rate, grown.slope.low, grown.slope.high))
    each = f"{rate} with each" if low == high else f"{rate} with each ({low} to {high})"
    each += f" ({format_bytes(round(grown.slope.rate / seconds))} a second)" if seconds else ""
    cause, tool, advice = _PARTS.get(grown.part, ("unknown", "", ""))
    tool = f"`{option}`" if option else tool
    said = f"host memory grew by {format_bytes(grown.bytes)} over {grown.turns} {turns}, {each}"
    if since:
        said = f"host memory is {format_bytes(grown.bytes)} more than at {since}"
    return finding_of(
        "host-memory",
        cause=cause,
        bytes=grown.bytes,
        count=grown.turns,
        device="",
        stage=f"{turns} of {module}" if module else turns,
        statement=Statement(
            amount=said, came=None, notes=(Note(f": {grown.part} has {format_bytes(grown.part_bytes)} more"),)
        ),
        suspects=("growth", grown.part),
        known_by={"stage": turns, "module": module},
        advice=advice.format(tool=tool) or None,
        trend="growth",
    )


def with_call(finding: Finding, recorded: RecordedTurns, turns: str, rate: float) -> Finding:
    """Return what `growth_of_host_memory` has given with the call that has allocated most of it, or why none is known.

    A turn adds `rate` bytes.
    """
    call, turn = recorded.call, turns.removesuffix("s")
    if recorded.why:
        return noted(finding, f"; which call allocates it is not known: {recorded.why}")
    each = 0 if call is None else call.bytes // max(1, recorded.turns)
    if call is None or each * _MATTERS < rate:
        return noted(finding, f"; no call has kept as much of what it allocated in the last {recorded.turns} {turns}")
    line = f"{PurePath(call.place.file).name}:{call.place.line}"
    where = f"at {line} in {call.place.function}"
    if call.native:
        where = f"in {call.native} ({PurePath(call.library).name}), called {where}"
    said = f"; {format_bytes(each)} of it with each {turn} allocated {where}"
    return noted(finding, said, allocated_at=frames(call.stack), advice=_FREE_IT)


def call_recorder(*, wanted: bool) -> CallRecorder | None:
    """Return what records the calls that allocate, if that is asked for; to be made before what is judged begins."""
    if not wanted:
        return None
    from lowtide.leakcheck.findings.allocating_calls import CallRecorder

    return CallRecorder()


def is_read(turn: int, count: int, *, is_last: bool, asked: bool = False) -> bool:
    """Return whether it is read what there is after a turn, one of `count` that there are to be, from 1."""
    if count < FEWEST_TURNS or turn < SECOND:
        return False
    stretches = _FINE_STRETCHES if asked and count >= _FINE_STRETCHES * _STRETCHES else _STRETCHES
    return is_last or turn == SECOND or turn * stretches // count > (turn - 1) * stretches // count


def not_decided(
    turns: int, more: int, process: str = "", turn: str = "inference", remedy: str = "--until-decided"
) -> NotMeasured:
    """Return that it is not known whether anything grows, after so many turns of so many `more` that may tell.

    It is in this process, or in one that is named; `remedy` makes more turns.
    """
    where = f" in {process}" if process else ""
    return NotMeasured(
        what=f"whether host memory grows with each {turn}{where}",
        why=f"not decided after {turns}: {more} more may tell ({remedy})",
    )
