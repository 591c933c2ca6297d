"""What grows in running programs: by time, in intervals, whatever happens in them; and between two moments.

A server has no turns that are seen from outside. So the time after its start is cut into intervals of equal length, and
what each process holds after these is judged as after any turns. Where it has an agent (`TimedGrowth`), that follows
containers and host memory itself, and no tensors are listed, which would hold them for a moment while the program's
threads run. Where it has none (`LookedGrowth`), each look is at a fork of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from lowtide.leakcheck.findings.life_findings import LEAST
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS, growth_of_host_memory, not_decided
from lowtide.leakcheck.growth.containers import ContainerCourses, Course
from lowtide.leakcheck.growth.host_levels import LEAST_IN_ALL, HostGrowth, HostLevels
from lowtide.leakcheck.growth.quantities import COUNTED, QUANTITIES, counted, most_of, things_of
from lowtide.leakcheck.growth.series import LevelKey, Slope, TurnSeries
from lowtide.leakcheck.processes import messages
from lowtide.leakcheck.processes.attachment import Attachment
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.messages import ExplainGrown, ExplainNew, Look, Seen
from lowtide.leakcheck.processes.process_growth import CountedThings, ToldGrowth, held_by, is_on_card, risen
from lowtide.leakcheck.processes.process_levels import describe_process, pid_of
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.host.memory_parts import NAMES, MemoryParts
from lowtide.probes.host.process_files import anonymous_bytes_of, has_ended, stat
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import time
from lowtide.probes.processes.agents import AgentError, NoAgentError
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, NotMeasured, ResourceName
from lowtide.reports.sizes import format_amount
from lowtide.reports.statement import HolderFacts, in_process

INTERVALS = "intervals"
"""What turns of a running program are called."""

SHORTEST_S = 12.0
"""Seconds for which it can be watched: fewer readings than `FEWEST_TURNS` tell nothing, and none follows within 1 s."""

_READINGS = 20
"""Intervals into which the time is cut, where each has a second or more."""

_RESTS_S = 3.0
"""Seconds for which all processes must be at rest, so that the program has started."""

_RESTING_PAGES = 256
"""Pages of new memory that all processes together may touch in a second at rest: one that imports touches thousands."""

_SETTLED_S = 30.0
"""Seconds without a new process after which a program that never rests has started."""

_STAYS_S = 1.0
"""Seconds after which a process is no child that a server forks for a request."""

_STARTING_S = 600.0
"""Seconds from the first reading for which a program may be seen to be starting still."""

_ENDING_S = 10.0
"""Seconds before the end of the program in which a process that does not answer is one that ends."""

_ENDED = "it has ended"

REQUESTS = "requests"
"""What turns are called that somebody has counted."""

_MARKED = "marks"
"""The same where nobody has, in a fingerprint."""

_CAME = 2
"""Of so many requests that somebody says to have sent one must have come, so that what it left is told."""

Explain = Callable[[ExplainGrown], list[Finding]]
"""Asks the process who holds what has grown in it."""

_Answer = TypeVar("_Answer")


class Start(msgspec.Struct):
    """Sees from outside when a program has started: its processes are there, and rest or have been there for long.

    Attributes:
        warm_up: seconds after which it has started in any case; None: to be seen.
        began: when it was looked at first, in seconds, as the others.
    """

    warm_up: float | None
    began: float
    _pids: Collection[int] = ()
    # When each was seen first.
    _seen: Mapping[int, float] = msgspec.field(default_factory=dict)
    _since: float = 0.0
    _rests_since: float = 0.0
    _faults: int = 0
    _looked: float = 0.0

    def is_over(self, pids: Collection[int], now: float) -> bool:
        """Return whether it has started, by now and those of its processes that can be asked."""
        if self.warm_up is not None:
            return bool(pids) and now - self.began >= self.warm_up
        self._seen = {pid: self._seen.get(pid, now if self._seen else now - _STAYS_S) for pid in pids}
        pids = [pid for pid in pids if now - self._seen[pid] >= _STAYS_S]
        faults = sum(process.faults for pid in pids if (process := stat(pid)) is not None)
        if set(pids) != set(self._pids):
            self._pids, self._since, self._rests_since = pids, now, now
        elif faults - self._faults > _RESTING_PAGES * (now - self._looked):
            self._rests_since = now
        self._faults, self._looked = faults, now
        return bool(pids) and (now - self._rests_since >= _RESTS_S or now - self._since >= _SETTLED_S)


class TimeWindow(ABC):
    """A time in which processes are read at intervals, until it is known what grows.

    Args:
        seconds: for how long, `SHORTEST_S` or more.
        tell: takes what is to be said meanwhile.
        ask: as of `CountedThings`.

    Attributes:
        seconds: as given.
        interval: seconds of one of the intervals into which the time is cut.
        is_over: whether what grows is known, or the time is over.
        tensors: bytes that torch had given out on each card, by process, at the last reading.
        named: what each process is called.
    """

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], object],
        ask: Callable[[int, ExplainNew], HolderFacts | None] = lambda pid, question: None,
    ) -> None:
        self.seconds, self.tell, self._ask = seconds, tell, ask
        self.interval = max(1.0, seconds / _READINGS)
        self.is_over = False
        self.tensors: Mapping[int, Mapping[str, int]] = {}
        self.named: dict[int, ProcessName] = {}
        self._turn = 0
        self._series: dict[int, dict[LevelKey, TurnSeries]] = {}
        self._things = CountedThings(ask)

    @property
    def has_begun(self) -> bool:
        """Return whether the first reading has been made."""
        return self._turn > 0

    @property
    def seconds_read(self) -> float:
        """Return the seconds from the first reading to the last one; 0 before there are two."""
        return max(0, self._turn - 1) * self.interval

    def look(self) -> None:
        """Read what grows, if that is due; to be called a few times a second."""
        began = None if self.is_over else self._beginning()
        # Each reading takes its time: the next one is where it is due, not an interval later.
        turn = 0 if began is None else 1 + int((time.monotonic() - began) / self.interval)
        if turn > self._turn:
            self._turn = turn
            self._read()

    @abstractmethod
    def _beginning(self) -> float | None:
        """Return when the first reading is due, in seconds; None where that is not known yet."""

    @abstractmethod
    def _read(self) -> None:
        """Make the reading that is due."""

    @property
    def _is_last(self) -> bool:
        return self._turn > round(self.seconds / self.interval)

    def _name(self, pid: int, variables: Mapping[str, str], called: str) -> None:
        """Note what a process is called: while it is there that may change, and one that ends has no title."""
        name = describe_process(pid, variables=variables, called=called)
        if has_ended(pid):
            self.named.setdefault(pid, name)
        else:
            self.named[pid] = name

    def _note_levels(self, tensors: Mapping[int, Mapping[str, int]]) -> None:
        """Note what the processes that have answered hold of what is followed here: on cards, and what is counted."""
        self.tensors = {
            pid: {device: size for device, size in sizes.items() if device != "cpu"} for pid, sizes in tensors.items()
        }
        for pid, cards in self.tensors.items():
            levels = {LevelKey("tensors", device): size for device, size in cards.items()} | self._things.levels(pid)
            series = self._series.setdefault(pid, {})
            for key, level in levels.items():
                series.setdefault(key, TurnSeries()).add(level)

    def _causes(self, pid: int, found: Sequence[Finding]) -> list[Finding]:
        """Return what grows in a process, each cause once: containers, and then what these do not explain."""
        containers = [each for each in found if each.holder]
        known = _explained_by(containers)
        rising = [each for key in self._series.get(pid, {}) if (each := self._risen(pid, key)) is not None]
        counted = [self._with_holder(each) for each in rising if each.resource in COUNTED]
        others = (each for each in (*rising, *found) if each.resource not in COUNTED and not each.holder)
        # A list of sockets is said with the descriptors that it holds.
        holders = {each.holder for each in counted}
        containers = [each for each in containers if each.holder not in holders]
        told = [*containers, *counted, *(each for each in others if not known.explains(is_on_card(each), each.bytes))]
        return [in_process(each, self.named[pid]) for each in told]

    def _risen(self, pid: int, key: LevelKey) -> Finding | None:
        series, quantity = self._series[pid][key], QUANTITIES[key.resource]
        in_all = quantity.in_all if quantity.things else 0
        rise = series.rise(quantity.least, in_all) if series.turns >= FEWEST_TURNS else None
        if rise is None:
            return None
        rate, more = rise.slope.rate, round(rise.slope.rate * rise.turns)
        # A reading may take longer than an interval.
        apart = self.seconds_read / (series.turns - 1)
        each = f"{quantity.rate(rate)} with each ({quantity.rate(rate / apart)} a second)"
        said = f"{quantity.more(more, key.device)} over {rise.turns} {INTERVALS}, {each}"
        count = more if quantity.things else rise.turns
        return risen(key, more, said, INTERVALS, turn="interval", process=self.named[pid], count=count)

    def _with_holder(self, finding: Finding) -> Finding:
        """Return a finding on what is counted with what the new things are, and who holds them."""
        facts = self._things.named(finding)
        return finding if facts is None else held_by(finding, facts)

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return what grows, each cause once."""

    def end(self, status: int | None = None, *, asked: bool = False) -> None:  # noqa: B027 - as most do nothing then
        """Note that the program has ended, however it did."""

    @property
    @abstractmethod
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what could not be read."""

    @property
    def not_judged(self) -> tuple[NotMeasured, ...]:
        """Return that of which it is not known whether it grows."""
        return ()

    @property
    def is_gone(self) -> bool:
        """Return whether all the processes have ended."""
        return False


class TimedGrowth(TimeWindow):
    """Reads the processes of a tree at intervals, once the program has started, until it is known what grows.

    Where a process comes to stay, or modules are imported, before that is known, the program was starting still: what
    a start fills is no growth, and it is watched anew. Containers explain what grows on cards and on the host.

    Args:
        engine: asks the processes.
        seconds: as of `TimeWindow`.
        warm_up: seconds from the start of the program, which is now, to the first reading; None: as soon as its
            processes are there, and have been at rest, or have been there for half a minute.
        tell: as of `TimeWindow`.
        option: what gives it more time.
    """

    def __init__(
        self,
        engine: EngineProcesses,
        seconds: float,
        warm_up: float | None,
        tell: Callable[[str], object],
        option: str = "--growth",
    ) -> None:
        super().__init__(seconds, tell, engine.ask)
        self._engine, self._warm_up, self._option = engine, warm_up, option
        self._start = Start(warm_up, time.monotonic())
        self._began: float | None = None
        self._began_first: float | None = None
        self._readings = 0
        # At the readings before: those that were there, and those that were not at the one before that.
        self._known: frozenset[int] = frozenset()
        self._new: frozenset[int] = frozenset()
        self._grown: dict[int, messages.GrownContainers] = {}
        # At which reading each was there first, and how many it has had.
        self._came: dict[int, int] = {}
        self._read_of: Counter[int] = Counter()
        # When each did not answer, in seconds.
        self._silent: dict[int, float] = {}
        self._told: list[Finding] | None = None

    def _beginning(self) -> float | None:
        now = time.monotonic()
        if self._began is None and self._start.is_over(pids := self._pids(), now):
            self._began = now
            self._began_first = self._began_first or now
            self.tell(f"growth of {_processes(pids)} is watched for {self.seconds:g} s")
        return self._began

    def _pids(self) -> list[int]:
        engine = self._engine
        engine.tree.adopt(engine.agents.elsewhere(engine.tree.descendants()))
        return [pid for pid in engine.tree.descendants() if engine.agents.has_agent(pid)]

    def _read(self) -> None:
        is_first = not self._readings
        self._readings += 1
        known = set(self._engine.not_measured)
        pids = self._pids()
        grown = self._engine.read_turn(pids, self._question(begins=is_first, anew=is_first))
        self._note_levels({pid: now.cards for pid, now in grown.items()})
        if self._starts_still(grown, is_first=is_first):
            self._begin_anew()
            return
        for pid, now in grown.items():
            self._name(pid, now.variables, now.called)
        self._silent |= dict.fromkeys(self._engine.not_measured.keys() - known, time.monotonic())
        self._grown |= grown
        self._came = dict.fromkeys(grown, self._readings) | self._came
        self._read_of.update(grown.keys())
        is_known = any(each.findings for each in grown.values()) and not any(each.more for each in grown.values())
        # Whoever has come just now may stay.
        is_last = self._is_last and not any(map(self._waits_for, grown))
        if self._tells and (is_last or (is_known and not self._new)):
            self._grown |= self._engine.read_turn(list(grown), self._question(ends=True))
            # While they are there to be asked.
            self._told = self.findings()
            self.is_over = True
            self._tell_end(grown)

    def _starts_still(self, grown: Mapping[int, messages.GrownContainers], *, is_first: bool) -> bool:
        """Return whether a process has come since the watch began and is there for a second reading, or imports."""
        new = frozenset[int]() if is_first else frozenset(grown) - self._known
        stays = self._new & grown.keys()
        self._known, self._new = frozenset(grown), new
        has_imported = not is_first and any(each.imported for each in grown.values())
        may_start = self._warm_up is None and time.monotonic() - (self._began_first or 0.0) < _STARTING_S
        return may_start and (bool(stays) or has_imported)

    def _waits_for(self, pid: int) -> bool:
        """Return whether a process that came in the first half of the readings has had too few to be judged."""
        return self._read_of[pid] < FEWEST_TURNS and 2 * self._came[pid] * self.interval <= self.seconds

    def _begin_anew(self) -> None:
        self._start = Start(None, time.monotonic())
        self._began, self._turn, self._readings, self._new = None, 0, 0, frozenset()
        self._grown.clear()
        self._came.clear()
        self._read_of.clear()
        self._series.clear()
        self._things = CountedThings(self._ask)
        self.tell("the program was starting still: its growth is watched anew once it has started")

    @property
    def _tells(self) -> bool:
        return self._readings >= FEWEST_TURNS

    def _question(self, *, begins: bool = False, anew: bool = False, ends: bool = False) -> messages.ReadTurn:
        return messages.ReadTurn(
            turns=INTERVALS,
            turn=self._readings,
            begins=begins,
            anew=anew,
            asked=True,
            tells=self._tells,
            ends=ends,
            seconds=self._apart,
        )

    @property
    def _apart(self) -> float:
        """Return the seconds from one reading to the next: where processes answer slowly, more than an interval."""
        return self.seconds_read / (self._readings - 1) if self._readings > 1 else self.interval

    def _tell_end(self, pids: Collection[int]) -> None:
        found = self.findings()
        for finding in found:
            self.tell(finding.message)
        if not found:
            where, grows = _processes(pids), "is known to grow" if self.not_judged else "grows"
            self.tell(f"nothing {grows} over {self._readings - 1} intervals of {round(self._apart, 1):g} s in {where}")

    def findings(self) -> list[Finding]:
        """See `TimeWindow`."""
        if self._told is not None:
            return self._told
        return [each for pid, grown in self._grown.items() for each in self._causes(pid, grown.findings)]

    def end(self, status: int | None = None, *, asked: bool = False) -> None:
        """See `TimeWindow`; who did not answer meanwhile was about to end, too."""
        if not self.is_over:
            for pid, since in self._silent.items():
                if time.monotonic() - since <= _ENDING_S:
                    self._engine.not_measured.pop(pid, None)

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return that it is not known what grows, where the program has ended too early."""
        if self._tells:
            return ()
        why = f"the command ended after {self._readings} of {FEWEST_TURNS} readings that it takes"
        if self._began is None:
            why = "the command ended before it was seen to have started: --warm-up says after how many seconds it has"
        return (NotMeasured(what="what grows in its processes", why=why),)

    @property
    def not_judged(self) -> tuple[NotMeasured, ...]:
        """Return the processes of which it is not known whether something grows that has begun to."""
        return tuple(
            not_decided(
                self._readings,
                grown.more,
                self.named[pid].text,
                turn=f"interval of {round(self._apart, 1):g} s",
                remedy=self._option,
            )
            for pid, grown in self._grown.items()
            if grown.more and not grown.findings
        )


class WatchedLooks:
    """Judges looks at one process that follow each other at equal distances, as of any turns."""

    def __init__(self) -> None:
        self._containers = ContainerCourses(may_rest=True)
        self._host = HostLevels(lambda: self._levels, lambda: self._parts, lambda: 0)
        self._levels = (0, 0)
        self._parts = MemoryParts(0, 0, 0, 0, 0, 0, 0, 0)
        self.turn = self.looks = 0

    def note(self, turn: int, seen: Seen, anonymous: int) -> None:
        """Note a look after an interval, and how many bytes of its memory the kernel counts that are no file's."""
        self.turn, self.looks = turn, self.looks + 1
        self._levels, self._parts = (anonymous, seen.malloc), MemoryParts(**seen.parts)
        self._containers.note(turn, lengths_in(seen))
        self._host.note(self._levels)

    @property
    def is_known(self) -> bool:
        """Return whether a container has grown in each of enough looks, and no other one may yet."""
        is_enough = self.looks >= FEWEST_TURNS
        return is_enough and bool(self._containers.growing(self.turn)) and self.is_decided

    @property
    def is_decided(self) -> bool:
        """Return whether no container has begun to grow of which it is not known whether it does."""
        return not self._containers.undecided(self.turn)

    def found_by(self, asked: Attachment, seconds: float) -> list[Finding]:
        """Return the containers that grow, with holders that the process is asked for, and host memory that does.

        From one look to the next there are so many seconds.
        """
        growing = self._containers.growing(self.turn)
        fixed = _fixed_beside(growing, self._containers)
        question = ExplainGrown(containers=asked_for(growing), turns=INTERVALS, seconds=seconds, fixed=fixed)
        found = asked.ask(question) if growing else []
        host = self._host.grown() if self._host.seem_to_grow() else None
        # A look may take longer than an interval.
        apart = seconds * (self.turn - 1) / (self.looks - 1)
        return found if host is None else [*found, growth_of_host_memory(host, INTERVALS, "", apart)]


class LookedGrowth(TimeWindow):
    """Looks at processes at intervals until it is known what grows; each is asked by its number."""

    def __init__(
        self, looks: Mapping[int, Attachment], seconds: float, tell: Callable[[str], object] = lambda text: None
    ) -> None:
        super().__init__(seconds, tell)
        self._asked = dict(looks)
        self._began = time.monotonic()
        self._watched = {pid: WatchedLooks() for pid in looks}
        self.named = {pid: describe_process(pid) for pid in looks}
        self._silent: dict[int, str] = {}
        self._found: list[Finding] = []

    def _beginning(self) -> float:
        return self._began

    def _read(self) -> None:
        tensors = {}
        for pid in self._asked.keys() - self._silent.keys():
            seen = self._answer(pid, lambda asked: asked.ask(Look()))
            if seen is not None:
                self._name(pid, seen.variables, seen.called)
                self._watched[pid].note(self._turn, seen, anonymous_bytes_of(pid))
                tensors[pid] = seen.tensors
        self._note_levels(tensors)
        watched = [self._watched[pid] for pid in self._asked.keys() - self._silent.keys()]
        is_known = any(each.is_known for each in watched) and all(each.is_decided for each in watched)
        # On a machine that has other work to do, looks take longer than the time for which they were asked.
        is_enough = all(each.looks >= FEWEST_TURNS for each in watched)
        if is_known or (is_enough and (self._is_last or not watched)):
            self._end()

    def _end(self) -> None:
        self.is_over = True
        for pid in self._asked.keys() - self._silent.keys():
            found = self._answer(pid, partial(self._watched[pid].found_by, seconds=self.interval))
            for finding in () if found is None else self._causes(pid, found):
                self._found.append(finding)
                self.tell(finding.message)

    def _answer(self, pid: int, question: Callable[[Attachment], _Answer]) -> _Answer | None:
        try:
            return question(self._asked[pid])
        except NoAgentError:
            self._silent[pid] = _ENDED
        except AgentError as error:
            self._silent[pid] = str(error)
        return None

    def findings(self) -> list[Finding]:
        """Return what grows, once the looks are over."""
        return self._found

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what is not known of those that did not answer; a server may end a worker, but not all there is."""
        if not self._asked:
            return (NotMeasured(what="what grows in the server", why="none of its Python processes is there"),)
        silent = {pid: why for pid, why in self._silent.items() if self.is_gone or why != _ENDED}
        return tuple(NotMeasured(what=f"what grows in {self.named[pid].text}", why=why) for pid, why in silent.items())

    @property
    def is_gone(self) -> bool:
        """See `TimeWindow`."""
        return all(self._silent.get(pid) == _ENDED for pid in self._asked)


def grown_above(findings: Sequence[Finding], allowed: int) -> set[int]:
    """Return the processes that grow by more than some bytes, all that grows in each together."""
    by_pid = Counter[int]()
    for finding in findings:
        by_pid[pid_of(finding)] += finding.bytes
    return {pid for pid, size in by_pid.items() if size > allowed}


def _explained_by(containers: Iterable[Finding]) -> ToldGrowth:
    """Return what containers explain, by whether that is on a card: what one takes may lie there, too, in part."""
    known = ToldGrowth()
    for each in containers:
        known.add(True, each.bytes)
        known.add(False, 0 if is_on_card(each) else each.bytes)
    return known


def _processes(pids: Collection[int]) -> str:
    return format_amount(len(pids), "processes")


class Moment(msgspec.Struct, frozen=True):
    """A process at one moment: what it says itself, and how many it has of each kind, of what is counted.

    It is told by when it began, in ticks since boot: another one may have its number.
    """

    started: int
    seen: Seen
    things: Mapping[ResourceName, Mapping[str, int]]


def moment_of(pid: int, seen: Seen) -> Moment:
    """Return a process as it is, with what it has just said itself."""
    process = stat(pid)
    return Moment(
        started=0 if process is None else process.started,
        seen=seen,
        things={resource: counted(each.values()) for resource, each in things_of(pid, mapped=True).items()},
    )


def lengths_in(seen: Seen) -> ContainerLengths:
    """Return the lengths of containers that a process has said."""
    ids, kinds, lengths = (np.frombuffer(each, np.int64) for each in (seen.ids, seen.kinds, seen.lengths))
    return ContainerLengths(ids, kinds, lengths)


def asked_for(courses: Iterable[Course]) -> tuple[tuple[int, int, list[int], list[int]], ...]:
    """Return containers as a process is asked who holds them."""
    return tuple((each.identity, each.kind, each.turns, each.lengths) for each in courses)


def grown_between(before: Moment, now: Moment, since: str, requests: int, explain: Explain) -> list[Finding]:
    """Return what a process has more of than at an earlier moment, each cause once.

    Containers come with their holders; host memory and tensors are told where these do not explain half of them.

    Args:
        before: the earlier moment.
        now: this one.
        since: what the earlier one is called.
        requests: how many the process has had in between; 0 where nobody has counted: then what is more by as little as
            `FEWEST_TURNS` turns would add is none.
        explain: see `Explain`.
    """
    found = _containers(before.seen, now.seen, since, requests, explain)
    known = _explained_by(found)
    for device, size in now.seen.tensors.items():
        more = size - before.seen.tensors.get(device, 0)
        if more >= LEAST and not known.explains(device != "cpu", more):
            found.append(_risen(LevelKey("tensors", device), more, since, requests))
    host = _host_growth(before.seen, now.seen, requests)
    if host is not None and not known.explains(False, host.bytes):
        turns = REQUESTS if requests else _MARKED
        found.append(growth_of_host_memory(host, turns, "", since="" if requests else since))
    for resource, things in now.things.items():
        grown = Counter(things)
        grown.subtract(before.things[resource])
        if grown.total() >= FEWEST_TURNS:
            found.append(_risen(LevelKey(resource), grown.total(), since, requests, grown))
    return found


def _risen(key: LevelKey, more: int, since: str, requests: int, kinds: Counter[str] | None = None) -> Finding:
    quantity, suspects, count = QUANTITIES[key.resource], ["growth"], max(1, requests)
    over = f"over {requests} {REQUESTS}, {quantity.rate(more / requests)} with each" if requests else f"than at {since}"
    said = f"{quantity.more(more, key.device)} {over}"
    if kinds:
        said, count = f"{said}: {most_of(kinds)}", more
        suspects.append(kinds.most_common(1)[0][0])
    found = risen(key, more, said, _MARKED, suspects=suspects, count=count)
    return msgspec.structs.replace(found, stage=REQUESTS) if requests else found


def _containers(before: Seen, now: Seen, since: str, requests: int, explain: Explain) -> list[Finding]:
    courses = ContainerCourses()
    courses.note(0, lengths_in(before))
    # That there were so many has somebody said who may have sent more than came.
    courses.note(max(1, requests // _CAME) if requests else FEWEST_TURNS, lengths_in(now))
    risen = [msgspec.structs.replace(each, turns=[0, requests]) if requests else each for each in courses.risen()]
    if not risen:
        return []
    question = ExplainGrown(
        containers=asked_for(risen),
        turns=REQUESTS if requests else _MARKED,
        since="" if requests else since,
        fixed=_fixed_beside(risen, courses),
    )
    return explain(question)


def _fixed_beside(growing: Collection[Course], courses: ContainerCourses) -> tuple[int, ...]:
    return tuple(courses.fixed(min(course.items for course in growing))) if growing else ()


def _host_growth(before: Seen, now: Seen, requests: int) -> HostGrowth | None:
    """Return by how much host memory that is no file's has grown; what Python's heap has free nobody holds."""
    parts = MemoryParts(**now.parts).since(MemoryParts(**before.parts))
    own = {name: size for name, size in parts.items() if name not in (NAMES["files"], NAMES["shared"])}
    kept = sum(own.values()) - max(0, own[NAMES["python_free"]])
    if kept < LEAST_IN_ALL:
        return None
    part = max(own, key=lambda name: own[name])
    rate = kept / max(1, requests)
    return HostGrowth(Slope(rate, rate, rate), max(1, requests), kept, part, own[part], (0, 0))
