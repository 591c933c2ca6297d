"""Reads the history as trends: one series on one kind of hardware, with a value for each run that judged it.

The runs at which a series changed its level are found by change-point detection (ruptures). All trends are shown as one
HTML page that needs nothing else: no network, no scripts, no fonts.
"""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from lowtide.leakcheck.gate.history import RESIDUES, RUNS, SERIES, SUBJECTS, VERDICTS, SeriesKey, reading
from lowtide.reports.escaping import one_line
from lowtide.reports.sizes import format_amount, format_bytes

_SHORTEST = 2
"""Runs that make a level: what one run alone shows is a spike, and the gate reports that itself."""

_SHARE = 0.02
"""Of a series' usual value, the change that is not worth a look."""

_SPIKE = 5.0
"""How many times the noise a single value must stand out to be a spike."""

_CERTAINTY = 6.0
"""Factor of the penalty sigma² · ln n for each further level; noise alone exceeds the BIC's, 2, too often."""

_SMALLEST_FINDING = 1 << 10

_SMALLEST_READING = 4 << 20
"""Bytes by which a level must change: a finding has passed its tolerance, a reading has the noise of a whole life."""

MOST_DRAWN = 500
"""Trends that are drawn."""

_WIDTH, _HEIGHT = 720, 120


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
    """Find the steps in a series, oldest first.

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
    """Replace each value of the series that stands out by more than `height` from both of its neighbours."""
    # At an end the two inner neighbours count: what one run alone shows there is no level yet.
    left = np.concatenate((signal[2:3], signal[:-1]))
    right = np.concatenate((signal[1:], signal[-3:-2]))
    out = ((signal - left) * (signal - right) > 0) & (np.minimum(abs(signal - left), abs(signal - right)) > height)
    return np.where(out, np.median(np.stack([left, signal, right]), axis=0), signal)


def _noise(signal: npt.NDArray[np.float64]) -> float:
    """Estimate the deviation of values around their level from the median absolute difference of neighbours."""
    return float(1.4826 * np.median(np.abs(np.diff(signal))) / math.sqrt(2))


def _large_enough(signal: npt.NDArray[np.float64], places: list[int], least: float) -> list[LevelChange]:
    """Return the changes that are left once the smallest one that is too small is taken out, again and again."""
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


@dataclass(frozen=True)
class Run:
    """One run: when, of which commit, where and with what."""

    id: int
    created: datetime.datetime
    commit: str
    hardware: str
    driver: str
    torch: str
    lowtide: str

    @property
    def title(self) -> str:
        """`run 12 (2026-01-31 02:17, commit 0123456789)`."""
        commit = f", commit {self.commit[:10]}" if self.commit else ""
        return f"run {self.id} ({self.created:%Y-%m-%d %H:%M}{commit})"


@dataclass(frozen=True)
class Trend:
    """One series over the runs on one kind of hardware.

    Attributes:
        subject: what was judged.
        series: what is followed of it.
        hardware: the cards, or `CPU`.
        runs: those that judged the subject, oldest first.
        values: one for each run; bytes, or a count where the series has no bytes.
        counted: whether the values are counts.
        changes: the runs at which the level changed.
    """

    subject: str
    series: SeriesKey
    hardware: str
    runs: Sequence[Run]
    values: Sequence[int]
    counted: bool
    changes: Sequence[LevelChange]

    @property
    def what(self) -> str:
        """`tensors/lru-cache since shutdown, 0123456789abcdef`, or `driver after shutdown` of a reading."""
        series = self.series
        on = f" on {series.device}" if series.device else ""
        if series.kind == "reading":
            return f"{series.resource}{on} after {series.stage}"
        return f"{series.resource}/{series.cause}{on} since {series.stage}, {series.fingerprint}"

    def amount(self, value: float) -> str:
        """Return a value as people read it."""
        return format_amount(round(value), self.series.resource) if self.counted else format_bytes(round(value))

    def sentences(self) -> list[str]:
        """Return the changes of its level, oldest first."""
        return [
            f"{self.subject}: {self.what}: {self.amount(change.before)} until "
            f"{self.runs[change.place - 1].title}, {self.amount(change.after)} since {self.runs[change.place].title}"
            for change in self.changes
        ]


def read_trends(engine: Engine, subjects: str = "*", last: int = 400) -> list[Trend]:
    """Read the trends of the last runs; those with the newest change of a level come first.

    Args:
        engine: the history's database.
        subjects: a pattern of the subjects' names, as of files.
        last: how many runs are read of each kind of hardware.

    Raises:
        HistoryError: the history cannot be read.
    """
    with reading(engine) as connection:
        runs = _runs(connection, last)
        names = {
            place: name
            for place, name in connection.execute(sa.select(SUBJECTS.c.id, SUBJECTS.c.name))
            if fnmatch(name, subjects)
        }
        judged = _judged(connection, runs, names)
        series = _series(connection, names)
        values = _values(connection, runs, series)
    trends = []
    for number, (place, key) in series.items():
        by_hardware: defaultdict[str, list[Run]] = defaultdict(list)
        for run in judged.get(place, ()):
            if key.kind == "finding" or run.id in values[number]:
                by_hardware[run.hardware].append(run)
        for hardware, some in by_hardware.items():
            trend = _trend(names[place], key, hardware, some, values[number])
            if trend is not None:
                trends.append(trend)
    return sorted(_one_of_each(trends), key=_urgency)


def _one_of_each(trends: Iterable[Trend]) -> Iterator[Trend]:
    """Yield the trends, those of one leak that several subjects have, as much of it in each run, as one."""
    found: dict[Hashable, list[Trend]] = {}
    for trend in trends:
        same = (trend.series, trend.hardware, tuple(trend.values), tuple(run.id for run in trend.runs))
        found.setdefault(same if trend.series.kind == "finding" else id(trend), []).append(trend)
    for trend, *others in found.values():
        yield replace(trend, subject=f"{trend.subject} and {len(others)} more") if others else trend


def _runs(connection: Connection, last: int) -> dict[int, Run]:
    """Return the last runs of each kind of hardware, oldest first."""
    columns = [RUNS.c[name] for name in ("id", "created", "commit", "hardware", "driver", "torch", "lowtide")]
    turn = sa.func.row_number().over(partition_by=RUNS.c.hardware, order_by=(RUNS.c.created.desc(), RUNS.c.id.desc()))
    numbered = sa.select(*columns, turn.label("turn")).subquery()
    chosen = sa.select(*list(numbered.c)[:-1]).where(numbered.c.turn <= last)
    ordered = chosen.order_by(numbered.c.created, numbered.c.id)
    return {row.id: Run(*row) for row in connection.execute(ordered)}


def _judged(connection: Connection, runs: Mapping[int, Run], names: Mapping[int, str]) -> dict[int, list[Run]]:
    """Return the runs that judged each subject, oldest first."""
    columns = (VERDICTS.c.run_id, VERDICTS.c.subject_id)
    chosen = sa.select(*columns).where(VERDICTS.c.outcome.in_(("clean", "leak")), VERDICTS.c.run_id >= _first(runs))
    found: defaultdict[int, set[int]] = defaultdict(set)
    for run, place in connection.execute(chosen):
        if run in runs and place in names:
            found[place].add(run)
    return {place: [run for number, run in runs.items() if number in some] for place, some in found.items()}


def _series(connection: Connection, names: Mapping[int, str]) -> dict[int, tuple[int, SeriesKey]]:
    columns = [SERIES.c[name] for name in SeriesKey._fields]
    rows = connection.execute(sa.select(SERIES.c.id, SERIES.c.subject_id, *columns))
    return {number: (place, SeriesKey(*key)) for number, place, *key in rows if place in names}


def _values(
    connection: Connection, runs: Mapping[int, Run], series: Mapping[int, object]
) -> defaultdict[int, dict[int, tuple[int, int]]]:
    """Return bytes and count of each series in each run."""
    columns = (RESIDUES.c.series_id, RESIDUES.c.run_id, RESIDUES.c.bytes, RESIDUES.c.count)
    found: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for number, run, size, count in connection.execute(sa.select(*columns).where(RESIDUES.c.run_id >= _first(runs))):
        if run in runs and number in series:
            found[number][run] = size, count
    return found


def _first(runs: Mapping[int, Run]) -> int:
    return min(runs, default=0)


def _trend(
    subject: str, key: SeriesKey, hardware: str, runs: Sequence[Run], values: Mapping[int, tuple[int, int]]
) -> Trend | None:
    """Return the trend of a series on some hardware; None if it has nothing there."""
    if not any(run.id in values for run in runs):
        return None
    # A finding that a run did not report is gone there, since the run judged its subject.
    pairs = [values.get(run.id, (0, 0)) for run in runs]
    counted = key.kind == "finding" and not any(size for size, _ in pairs)
    amounts = [count if counted else size for size, count in pairs]
    smallest = 1 if counted else _SMALLEST_FINDING if key.kind == "finding" else _SMALLEST_READING
    return Trend(subject, key, hardware, runs, amounts, counted, level_changes(amounts, smallest))


def _urgency(trend: Trend) -> tuple[bool, float, int, str]:
    newest = trend.runs[trend.changes[-1].place].created.timestamp() if trend.changes else 0.0
    return not trend.changes, -newest, -abs(trend.values[-1]), trend.subject


class Mark(NamedTuple):
    """A change of the level in a drawing."""

    x: float
    text: str


class Drawing(NamedTuple):
    """A trend as an image of 720 by 120 units.

    Attributes:
        trend: what it shows.
        steps: the path of its values, in the language of SVG.
        zero: the height of the line of zero.
        highest: the largest value, or zero.
        lowest: the smallest value, or zero.
        marks: where its level changed.
    """

    trend: Trend
    steps: str
    zero: float
    highest: str
    lowest: str
    marks: list[Mark]


def render_page(trends: Sequence[Trend]) -> str:
    """Render the page, with the changes of levels first, and a drawing of each trend."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.leakcheck.gate"),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("history.html.j2").render(
        sentences=[sentence for trend in trends for sentence in trend.sentences()],
        drawings=[draw(trend) for trend in trends[:MOST_DRAWN]],
        left_out=max(len(trends) - MOST_DRAWN, 0),
        runs=len({run.id for trend in trends for run in trend.runs}),
        width=_WIDTH,
        height=_HEIGHT,
    )


def draw(trend: Trend) -> Drawing:
    """Draw a trend as steps: a value holds until the next run."""
    values = trend.values
    lowest, highest = min(0, *values), max(0, *values)
    span = (highest - lowest) or 1
    wide = _WIDTH / len(values)

    def height(value: int) -> float:
        return round(_HEIGHT - (value - lowest) / span * _HEIGHT, 1)

    # What stays the same takes no room, however many runs there are.
    steps = [place for place in range(1, len(values)) if values[place] != values[place - 1]]
    parts = [f"H{place * wide:.1f}V{height(values[place])}" for place in steps]
    path = "".join([f"M0 {height(values[0])}", *parts, f"H{_WIDTH}"])
    marks = [
        Mark(round(change.place * wide, 1), sentence)
        for change, sentence in zip(trend.changes, trend.sentences(), strict=True)
    ]
    return Drawing(trend, path, height(0), trend.amount(highest), trend.amount(lowest), marks)
