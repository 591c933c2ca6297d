"""What grows in the processes of a running program, by time: a turn is an interval, whatever happens in it.

A server has no turns that are seen from outside. So the time after its start is cut into intervals of equal length, and
what each process holds after these is judged as after any turns: containers and host memory by its own agent, memory on
cards by the same series. No tensors are listed: that would hold them for a moment while the program's threads run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS, not_decided
from lowtide.leakcheck.growth.host_levels import LEAST_A_TURN
from lowtide.leakcheck.growth.series import TurnSeries
from lowtide.leakcheck.processes import messages
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.process_growth import card_by_time
from lowtide.leakcheck.processes.process_levels import describe_process
from lowtide.probes.host.process_files import stat
from lowtide.probes.originals import time
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_amount
from lowtide.reports.statement import in_process

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


_STARTING_S = 600.0
"""Seconds from the first reading for which a program may be seen to be starting still."""

_ENDING_S = 10.0
"""Seconds before the end of the program in which a process that does not answer is one that ends."""


@dataclass
class Start:
    """Sees from outside when a program has started: its processes are there, and rest or have been there for long.

    Attributes:
        warm_up: seconds after which it has started in any case; None: to be seen.
        began: when it was looked at first, in seconds, as the others.
    """

    warm_up: float | None
    began: float
    _pids: Collection[int] = ()
    _since: float = 0.0
    _rests_since: float = 0.0
    _faults: int = 0
    _looked: float = 0.0

    def is_over(self, pids: Collection[int], now: float) -> bool:
        """Return whether it has started.

        Args:
            pids: its processes that can be asked.
            now: the time.
        """
        if self.warm_up is not None:
            return bool(pids) and now - self.began >= self.warm_up
        faults = sum(process.faults for pid in pids if (process := stat(pid)) is not None)
        if set(pids) != set(self._pids):
            self._pids, self._since, self._rests_since = pids, now, now
        elif faults - self._faults > _RESTING_PAGES * (now - self._looked):
            self._rests_since = now
        self._faults, self._looked = faults, now
        return bool(pids) and (now - self._rests_since >= _RESTS_S or now - self._since >= _SETTLED_S)


@dataclass
class TimedGrowth:
    """Reads the processes of a tree at intervals, once the program has started, until it is known what grows.

    Where a process comes to stay, or modules are imported, before that is known, the program was starting still: what
    a start fills is no growth, and it is watched anew.

    Attributes:
        engine: asks the processes.
        seconds: for how long, `SHORTEST_S` or more.
        warm_up: seconds from the start of the program to the first reading; None: as soon as its processes are there,
            and have been at rest, or have been there for half a minute.
        tell: takes what is to be said while the program goes on.
        is_over: whether what grows is known, or the time is over.
    """

    engine: EngineProcesses
    seconds: float
    warm_up: float | None
    tell: Callable[[str], object]
    is_over: bool = field(default=False, init=False)
    _start: Start = field(init=False)
    _began: float | None = None
    _began_first: float | None = None
    _turn: int = 0
    _readings: int = 0
    # At the readings before: those that were there, and those that were not at the one before that.
    _known: frozenset[int] = frozenset()
    _new: frozenset[int] = frozenset()
    _named: dict[int, ProcessName] = field(default_factory=dict)
    _grown: dict[int, messages.GrownContainers] = field(default_factory=dict)
    _on_cards: dict[tuple[int, str], TurnSeries] = field(default_factory=dict)
    _of_cards: list[Finding] = field(default_factory=list)
    # When each did not answer, in seconds.
    _silent: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin: the program is started now."""
        self._start = Start(self.warm_up, time.monotonic())

    @property
    def interval(self) -> float:
        """Return the seconds of one interval."""
        return intervals(self.seconds)

    def look(self) -> None:
        """Read what grows, if that is due; to be called a few times a second."""
        now = time.monotonic()
        if self.is_over:
            return
        if self._began is None:
            pids = self._pids()
            if not self._start.is_over(pids, now):
                return
            self._began = now
            self._began_first = self._began_first or now
            self.tell(f"growth of {_processes(pids)} is watched for {self.seconds:g} s")
        # Each reading takes its time: the next one is where it is due, not an interval later.
        turn = 1 + int((now - self._began) / self.interval)
        if turn > self._turn:
            self._read(turn)

    @property
    def seconds_read(self) -> float:
        """Return the seconds from the first reading to the last one; 0 before there are two."""
        return max(0, self._turn - 1) * self.interval

    @property
    def has_begun(self) -> bool:
        """Return whether the first reading has been made."""
        return self._turn > 0

    def _pids(self) -> list[int]:
        engine = self.engine
        engine.tree.adopt(engine.agents.elsewhere(engine.tree.descendants()))
        return [pid for pid in engine.tree.descendants() if engine.agents.has_agent(pid)]

    def _read(self, turn: int) -> None:
        is_first, self._turn = not self._turn, turn
        self._readings += 1
        known = set(self.engine.not_measured)
        pids = self._pids()
        grown = self.engine.read_turn(pids, self._question(begins=is_first, anew=is_first))
        if self._starts_still(grown, is_first=is_first):
            self._begin_anew()
            return
        for pid, now in grown.items():
            self._named[pid] = describe_process(pid, variables=now.variables, called=now.called)
            for device, size in now.cards.items():
                self._on_cards.setdefault((pid, device), TurnSeries()).add(size)
        self._silent |= dict.fromkeys(self.engine.not_measured.keys() - known, time.monotonic())
        self._grown |= grown
        is_last = turn > round(self.seconds / self.interval)
        is_known = any(each.findings for each in grown.values()) and not any(each.more for each in grown.values())
        # Whoever has come just now may stay.
        if self._tells and (is_last or (is_known and not self._new)):
            self._grown |= self.engine.read_turn(list(grown), self._question(ends=True))
            self._of_cards = [
                finding
                for (pid, device), series in self._on_cards.items()
                if pid in grown
                and (finding := growth_on_card(self._named[pid], device, series, self.interval)) is not None
            ]
            self.is_over = True
            self._tell_end(grown)

    def _starts_still(self, grown: Mapping[int, messages.GrownContainers], *, is_first: bool) -> bool:
        """Return whether a process has come since the watch began and is there for a second reading, or imports."""
        new = frozenset[int]() if is_first else frozenset(grown) - self._known
        stays = self._new & grown.keys()
        self._known, self._new = frozenset(grown), new
        has_imported = not is_first and any(each.imported for each in grown.values())
        may_start = self.warm_up is None and time.monotonic() - (self._began_first or 0.0) < _STARTING_S
        return may_start and (bool(stays) or has_imported)

    def _begin_anew(self) -> None:
        """Wait again until the program has started."""
        self._start = Start(None, time.monotonic())
        self._began, self._turn, self._readings, self._new = None, 0, 0, frozenset()
        self._grown.clear()
        self._on_cards.clear()
        self.tell("the program was starting still: its growth is watched anew once it has started")

    @property
    def _tells(self) -> bool:
        return self._readings >= FEWEST_TURNS

    def _question(self, *, begins: bool = False, anew: bool = False, ends: bool = False) -> messages.ReadTurn:
        return messages.ReadTurn(
            turns=INTERVALS,
            turn=self._turn,
            begins=begins,
            anew=anew,
            asked=True,
            tells=self._tells,
            ends=ends,
            seconds=self.interval,
        )

    def _tell_end(self, pids: Collection[int]) -> None:
        found = self.findings()
        for finding in found:
            self.tell(finding.message)
        if not found:
            where, grows = _processes(pids), "is known to grow" if self.not_judged else "grows"
            self.tell(f"nothing {grows} over {self._turn - 1} intervals of {self.interval:g} s in {where}")

    def findings(self) -> list[Finding]:
        """Return what grows, each cause once: containers explain what grows on cards and on the host."""
        found: list[Finding] = []
        by_pid = Counter[int]()
        of_processes = [
            in_process(each, self._named[pid]) for pid, grown in self._grown.items() for each in grown.findings
        ]
        for finding in (
            *(each for each in of_processes if each.holder),
            *self._of_cards,
            *(each for each in of_processes if not each.holder),
        ):
            pid = _pid_of(finding)
            if finding.holder or 2 * by_pid[pid] < finding.bytes:
                found.append(finding)
                by_pid[pid] += finding.bytes
        return found

    def end(self, status: int | None = None, *, asked: bool = False) -> None:
        """Note that the program has ended, however it did: who did not answer meanwhile was about to."""
        if not self.is_over:
            for pid, since in self._silent.items():
                if time.monotonic() - since <= _ENDING_S:
                    self.engine.not_measured.pop(pid, None)

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
                self._named[pid].text,
                turn=f"interval of {self.interval:g} s",
                remedy="--growth",
            )
            for pid, grown in self._grown.items()
            if grown.more and not grown.findings
        )


def growth_on_card(process: ProcessName, device: str, series: TurnSeries, seconds: float) -> Finding | None:
    """Return the finding on memory on a card that grows in a process; None if it does not.

    Args:
        process: which.
        device: the card.
        series: bytes there after each interval.
        seconds: of an interval.
    """
    growth = series.growth_at_end()
    if growth.kind != "growth" or growth.slope is None or growth.slope.low < LEAST_A_TURN:
        return None
    return card_by_time(process, device, growth.slope, growth.turns - 1, seconds)


def intervals(seconds: float) -> float:
    """Return the seconds of one of the intervals into which a time is cut."""
    return max(1.0, seconds / _READINGS)


def grown_above(findings: Sequence[Finding], allowed: int) -> set[int]:
    """Return the processes that grow by more than some bytes, all that grows in each together."""
    by_pid = Counter[int]()
    for finding in findings:
        by_pid[_pid_of(finding)] += finding.bytes
    return {pid for pid, size in by_pid.items() if size > allowed}


def _pid_of(finding: Finding) -> int:
    return 0 if finding.process is None else finding.process.pid


def _processes(pids: Collection[int]) -> str:
    return format_amount(len(pids), "processes")
