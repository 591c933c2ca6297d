"""What each process of a watched server has held since the server had started: for its page, its history, its verdict.

A watch that begins again goes on with what earlier ones have read of the same processes. Containers are not among that:
a process's agent follows them, and begins anew with each watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS
from lowtide.leakcheck.growth.quantities import QUANTITIES, HeldSource, counted, most_of
from lowtide.leakcheck.growth.series import LevelKey, TurnSeries
from lowtide.leakcheck.processes.process_growth import ToldGrowth, risen
from lowtide.leakcheck.processes.process_levels import describe_process
from lowtide.probes.host.process_files import stat
from lowtide.probes.originals import time
from lowtide.reports.schema import Finding, ResourceName
from lowtide.reports.statement import in_process

LEAST_S = 1.0
"""Seconds between two readings at least."""

_READINGS = 300
"""The next reading is due after such a part of the time so far: 8 hours are 1,700 readings."""

_MOST_TURNS = 60
"""Parts of equal length into which the time is cut when it is judged: as many floors as a series keeps."""


class HeldKey(NamedTuple):
    """What one series is about.

    Attributes:
        pid: the process.
        started: when it began, in ticks since boot: a later one may have its number.
        resource: what it holds.
        device: the card; empty for none.
    """

    pid: int
    started: int
    resource: ResourceName
    device: str


class Point(NamedTuple):
    """One value of a series.

    Attributes:
        at: when, in seconds since 1970.
        amount: bytes, or how many.
    """

    at: float
    amount: int


class HeldReading(NamedTuple):
    """What one process held at one moment, with what it is called."""

    key: HeldKey
    process: str
    point: Point


class HeldCourse(NamedTuple):
    """One series as it is shown.

    Attributes:
        process: what the process is called.
        key: what the series is about.
        stretches: its values in each watch that has read it, oldest first.
    """

    process: str
    key: HeldKey
    stretches: Sequence[Sequence[Point]]


class GrownLevel(NamedTuple):
    """A series that grows.

    Attributes:
        finding: by how much, in all the time that it was read.
        seconds: how long that was.
    """

    finding: Finding
    seconds: float

    @property
    def rate(self) -> float:
        """Return by how much it grows in a second: bytes, or how many."""
        return (self.finding.bytes or self.finding.count) / self.seconds


class HeldSeries:
    """Follows what some processes hold, from the moment on that their server has started.

    Args:
        source: where it is read.
        earlier: what earlier watches have read of them, each watch's by itself.
        keep: takes what is read, once it is known that the server had started.
        is_judged: whether it is asked what grows.
    """

    def __init__(
        self,
        source: HeldSource,
        earlier: Mapping[HeldKey, Sequence[Sequence[Point]]],
        keep: Callable[[Sequence[HeldReading]], object],
        *,
        is_judged: bool,
    ) -> None:
        self._source, self._earlier, self._keep, self._is_judged = source, earlier, keep, is_judged
        self._own: dict[HeldKey, list[Point]] = {}
        self._named: dict[tuple[int, int], str] = {}
        self._pending: list[HeldReading] = []
        self._has_settled = False
        self._read_before = max((_joined(each)[-1].at for each in earlier.values()), default=0.0)
        self._since: float | None = None
        self._due = 0.0

    def look(self, *, has_begun: bool) -> None:
        """Read what they hold, if that is due; to be called a few times a second.

        Args:
            has_begun: whether the server has started, as it seems now: until `settle` that may turn out to be wrong.
        """
        if not (has_begun or self._has_settled):
            self._own.clear()
            self._pending.clear()
            self._since, self._due = None, 0.0
            return
        now = time.monotonic()
        if now < self._due:
            return
        self._since = now if self._since is None else self._since
        self._due = now + max(LEAST_S, (self._read_before + now - self._since) / _READINGS)
        found = list(self._read())
        for key, _, point in found:
            self._own.setdefault(key, []).append(point)
        if self._has_settled:
            self._keep(found)
        else:
            self._pending += found

    def settle(self) -> None:
        """Note that the server had started before the first reading."""
        if not self._has_settled:
            self._has_settled = True
            self._keep(self._pending)
            self._pending = []

    def _read(self) -> Iterator[HeldReading]:
        at = time.time()
        started = {pid: process.started for pid in self._source.pids() if (process := stat(pid)) is not None}
        for resource, quantity in QUANTITIES.items():
            for pid, device, amount in quantity.read(self._source):
                # One that has just ended, or may not be read, has none of what each process has some of.
                if pid in started and (amount or device):
                    key = HeldKey(pid, started[pid], resource, device)
                    if key[:2] not in self._named:
                        self._named[key[:2]] = describe_process(pid).text
                    yield HeldReading(key, self._named[key[:2]], Point(at, amount))

    def courses(self) -> list[HeldCourse]:
        """Return all series of the processes that were there in this watch."""
        return [
            HeldCourse(self._named[key[:2]], key, [*self._earlier.get(key, ()), list(own)])
            for key, own in list(self._own.items())
        ]

    def grown(self, known: ToldGrowth) -> list[GrownLevel]:
        """Return what grows over all readings, each cause once.

        Args:
            known: bytes a second that are known to grow, by process and whether on a card.
        """
        found = []
        # In the order of the quantities: what the driver counts explains nothing that tensors have not.
        for course in sorted(self.courses() if self._is_judged else (), key=lambda each: _PLACES[each.key.resource]):
            grown, key = _grown(course.stretches, course.key), course.key
            if grown is None or (process := stat(key.pid)) is None or process.started != key.started:
                continue
            if QUANTITIES[key.resource].things or not known.explains((key.pid, bool(key.device)), grown.rate):
                found.append(grown)
        return found


_PLACES = {resource: place for place, resource in enumerate(QUANTITIES)}


def _joined(stretches: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the values of several watches as of one: seconds from the first one on, without the time in between.

    What a process has taken while nobody watched is left out: it may have been anything, and all at once. What it has
    given back is not, since that speaks against growth.
    """
    points: list[Point] = []
    begins, left_out = 0.0, 0
    for place, stretch in enumerate(stretches):
        if place:
            begins = points[-1].at
            left_out += max(0, stretch[0].amount - stretches[place - 1][-1].amount)
        # A clock may be set back.
        points += [Point(max(begins, begins + point.at - stretch[0].at), point.amount - left_out) for point in stretch]
    return points


def _floors(points: Sequence[Point], turns: int) -> Iterator[int]:
    """Yield the least value of each of so many equal parts of the time in which there is one."""
    width = points[-1].at / turns
    floors: dict[int, int] = {}
    for point in points:
        turn = min(int(point.at / width), turns - 1)
        floors[turn] = min(floors.get(turn, point.amount), point.amount)
    return (floors[turn] for turn in sorted(floors))


def _grown(stretches: Sequence[Sequence[Point]], key: HeldKey) -> GrownLevel | None:
    """Return by how much a series grows; None where it does not, or was read too seldom to say."""
    points, quantity = _joined(stretches), QUANTITIES[key.resource]
    seconds = points[-1].at
    turns = min(_MOST_TURNS, len(points) - 1, int(seconds / LEAST_S))
    if turns < FEWEST_TURNS:
        return None
    series = TurnSeries(quantity.least)
    for floor in _floors(points, turns):
        series.add(floor)
    rise = series.rise(quantity.least, quantity.in_all)
    if rise is None:
        return None
    more = round(rise.slope.rate * series.turns)
    watches = f" in {len(stretches)} watches" if len(stretches) > 1 else ""
    said = f"{quantity.more(more, key.device)} over {seconds:.0f} s{watches}, {quantity.rate(more / seconds)} a second"
    if quantity.things is not None and (kinds := counted(quantity.things(key.pid).values())):
        said += f": {most_of(kinds)} now"
    finding = risen(LevelKey(key.resource, key.device), more, said, "watch", suspects=("growth",))
    return GrownLevel(in_process(finding, describe_process(key.pid)), seconds)
