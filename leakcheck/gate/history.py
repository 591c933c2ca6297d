"""The history of reports in a database: their runs, how each subject was judged, what was left; and the trends in it.

It is a file of SQLite or a server of PostgreSQL, whose tables are made when it is first opened.

A trend is one series on one kind of hardware, with a value for each run that judged it. The runs at which it changed
its level are found by change-point detection (ruptures).
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url

from lowtide.reports.outcomes import tries_as_one
from lowtide.reports.schema import Report, Subject, encode
from lowtide.reports.sizes import format_amount, format_bytes

METADATA = MetaData(
    # Without names a later migration could not change a constraint.
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    # The hash of the report, so that a job that is repeated adds nothing.
    Column("key", String(64), nullable=False, unique=True),
    # In UTC; SQLite keeps no zone.
    Column("created", DateTime, nullable=False),
    Column("commit", String(64), nullable=False),
    Column("hardware", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("platform", Text, nullable=False),
    Column("python", Text, nullable=False),
    Column("torch", Text, nullable=False),
    Column("lowtide", Text, nullable=False),
    Column("command", Text, nullable=False),
    Index("ix_runs_created", "created"),
)
"""One row per report."""

SUBJECTS = Table(
    "subjects",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), primary_key=True),
    Column("outcome", String(16), nullable=False),
)
"""How a run judged a subject: where it did, a finding that it does not have is none."""

SERIES = Table(
    "series",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), nullable=False),
    # `finding` or `reading`.
    Column("kind", String(16), nullable=False),
    Column("resource", String(32), nullable=False),
    Column("cause", String(32), nullable=False),
    Column("device", String(64), nullable=False),
    Column("stage", Text, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    UniqueConstraint("subject_id", "kind", "resource", "cause", "device", "stage", "fingerprint"),
)
"""What is followed from run to run: one finding by its fingerprint, or one metric of a life."""

RESIDUES = Table(
    "residues",
    METADATA,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("series_id", ForeignKey("series.id"), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Index("ix_residues_series_id", "series_id"),
)
"""What was left of a series in a run."""

# Named as Alembic's own, which may then bring a history up to date once there are tables of another kind.
VERSION = Table("alembic_version", METADATA, Column("version_num", String(32), primary_key=True))
"""Of which kind the tables are: one row."""

NEWEST = "0001"
"""The only kind of tables that there is."""

_LOCK = 0x6C6F7774
"""Of PostgreSQL's advisory locks, the one that writers of a history take."""

_PATIENCE_S = 60
"""How long a writer waits for another one, in seconds."""

NO_CARD = "CPU"
"""The hardware of a machine without cards."""


def open_database(address: str) -> Engine:
    """Open the database at an address, with today's tables.

    Args:
        address: a URL (`postgresql://HOST/NAME`, `sqlite:///FILE`), or the path of a file of SQLite.

    Raises:
        HistoryError: it cannot be opened, or is newer than this lowtide.
    """
    engine = _engine(_url(address))
    try:
        with writing(engine) as connection:
            _make_tables(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction in which no other writer of the history is at work.

    Writers take turns, for milliseconds each; otherwise two that add the same new subject at once would end in a
    conflict or in a deadlock.

    Raises:
        HistoryError: the database refused what was done, or another writer took too long.
    """
    with _errors_translated(engine), engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_PATIENCE_S}s'"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction that sees one state of the history.

    Raises:
        HistoryError: the database refused what was done.
    """
    level = "REPEATABLE READ" if engine.dialect.name == "postgresql" else "SERIALIZABLE"
    with _errors_translated(engine), engine.connect().execution_options(isolation_level=level) as connection:
        yield connection


def _url(address: str) -> URL:
    if "://" not in address:
        return URL.create("sqlite", database=address)
    try:
        url = make_url(address)
    except sa.exc.ArgumentError as error:
        raise HistoryError("the history's address cannot be read: use postgresql://HOST/NAME, or a file") from error
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _engine(url: URL) -> Engine:
    name = url.get_backend_name()
    if name not in ("sqlite", "postgresql"):
        raise HistoryError(f"a history in {name} is not supported: use postgresql://HOST/NAME, or a file")
    try:
        if name == "postgresql":
            return sa.create_engine(url)
        engine = sa.create_engine(url, connect_args={"timeout": _PATIENCE_S})
    except sa.exc.NoSuchModuleError as error:
        raise HistoryError(f"{url.drivername} is no driver that there is: use postgresql://HOST/NAME") from error
    except ModuleNotFoundError as error:
        raise HistoryError(f'{error.name} is not installed: pip install "lowtide[postgresql]"') from error
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # Python's module would otherwise begin transactions by itself, and never before a CREATE or a SELECT.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # At once for writing: a transaction that begins with reading fails if another one has written meanwhile.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _make_tables(connection: Connection) -> None:
    """Make the tables of a new history.

    Raises:
        HistoryError: the history is newer than this lowtide.
    """
    if not sa.inspect(connection).has_table(VERSION.name):
        METADATA.create_all(connection)
        connection.execute(VERSION.insert().values(version_num=NEWEST))
    elif connection.scalars(sa.select(VERSION.c.version_num)).all() != [NEWEST]:
        raise HistoryError("the history was written by a newer lowtide: install that version to use it")


@contextmanager
def _errors_translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or type(error).__name__
        where = engine.url.render_as_string(hide_password=True)
        raise HistoryError(f"the history {where} cannot be used: {said}") from error


class HistoryError(ValueError):
    """A history that cannot be read or written; the message says what to do."""


class SeriesKey(NamedTuple):
    """What a series is about; the columns of its table."""

    kind: str
    resource: str
    cause: str
    device: str
    stage: str
    fingerprint: str


class Residue(NamedTuple):
    """What was left of one series: its bytes, and how many things."""

    series: SeriesKey
    size: int
    things: int


def add_report(engine: Engine, report: Report, commit: str) -> int | None:
    """Add a report to the history, all of it or nothing.

    Args:
        engine: the history's database.
        report: what to add.
        commit: which state of the source it judged; "" if that is not known.

    Returns:
        The number of its run; None if the history has that very report already.

    Raises:
        HistoryError: it cannot be written.
    """
    key = hashlib.sha256(encode(report)).hexdigest()
    with writing(engine) as connection:
        if connection.execute(sa.select(RUNS.c.id).where(RUNS.c.key == key)).first() is not None:
            return None
        run = _add_run(connection, report, commit, key)
        # The same name twice, as of a test that is repeated, is one subject: what is worst counts.
        named = (msgspec.structs.replace(subject, id=storable(subject.id)) for subject in report.subjects)
        subjects = {subject.id: subject for subject in tries_as_one(named, of_all=True)}
        known = _numbered(connection, SUBJECTS, [(name,) for name in subjects])
        placed = {known[(name,)]: subject for name, subject in subjects.items()}
        verdicts = [
            {"run_id": run, "subject_id": place, "outcome": subject.outcome} for place, subject in placed.items()
        ]
        _insert(connection, VERDICTS, verdicts)
        _add_residues(connection, run, placed)
    return run


def residues(subject: Subject) -> Iterator[Residue]:
    """Yield what is followed of a subject: all its findings, and of a life what its last cycle left behind.

    A reading shows a drift while it is still within its tolerance.
    """
    for finding in subject.findings:
        for each in (finding, *finding.parts):
            key = SeriesKey("finding", each.resource, each.cause, each.device, each.stage, each.fingerprint)
            yield Residue(SeriesKey(*map(storable, key)), each.bytes, each.count)
    # A test has one stage, and its findings say all.
    if len(subject.stages) < 2:
        return
    last = [stage for stage in subject.stages if stage.cycle == subject.stages[-1].cycle]
    before, after = last[0].before, last[-1].after
    for resource, first, then in (
        ("tensors", before.tensors, after.tensors),
        ("reserved", before.reserved, after.reserved),
        ("driver", before.driver, after.driver),
        ("host-memory", before.rss, after.rss),
    ):
        if first is not None and then is not None:
            yield Residue(SeriesKey("reading", resource, "", "", storable(last[-1].name), ""), then - first, 0)


def _add_run(connection: Connection, report: Report, commit: str, key: str) -> int:
    machine = report.machine
    row = {
        "key": key,
        "created": _created(report),
        "commit": commit[:64],
        "hardware": ", ".join(machine.devices) or NO_CARD,
        "driver": machine.driver,
        "platform": machine.platform,
        "python": machine.python,
        "torch": machine.torch,
        "lowtide": report.version,
        "command": report.command,
    }
    texts = {name: storable(value) if isinstance(value, str) else value for name, value in row.items()}
    inserted = connection.execute(RUNS.insert().values(texts)).inserted_primary_key
    assert inserted is not None
    return int(inserted[0])


def _created(report: Report) -> datetime.datetime:
    try:
        created = datetime.datetime.fromisoformat(report.created)
    except ValueError as error:
        raise HistoryError(f"the report was created at {report.created!r}, which is no time") from error
    if created.tzinfo is None:
        return created
    return created.astimezone(datetime.timezone.utc).replace(tzinfo=None)


def _numbers(connection: Connection, table: Table) -> dict[tuple[Any, ...], int]:
    """Return the numbers of all rows of a table, by their other columns."""
    return {tuple(row): number for number, *row in connection.execute(sa.select(table))}


def _numbered(connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], int]:
    """Return the same with some rows, which are added where they are new."""
    known = _numbers(connection, table)
    names = table.c.keys()[1:]
    _insert(connection, table, [dict(zip(names, row, strict=True)) for row in rows if row not in known])
    return _numbers(connection, table)


def _add_residues(connection: Connection, run: int, subjects: dict[int, Subject]) -> None:
    sums: dict[tuple[Any, ...], list[int]] = {}
    for place, subject in subjects.items():
        for residue in residues(subject):
            total = sums.setdefault((place, *residue.series), [0, 0])
            total[0] += residue.size
            total[1] += residue.things
    known = _numbered(connection, SERIES, sums)
    rows = [
        {"run_id": run, "series_id": known[key], "bytes": size, "count": count} for key, (size, count) in sums.items()
    ]
    _insert(connection, RESIDUES, rows)


def _insert(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.insert(), rows)


def storable(text: str) -> str:
    """Return a text as any database takes it."""
    # PostgreSQL refuses this one character, and no database takes half of a pair.
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


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


class Run(msgspec.Struct, frozen=True):
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


class Trend(msgspec.Struct, frozen=True):
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
        names = {place: name for (name,), place in _numbers(connection, SUBJECTS).items() if fnmatch(name, subjects)}
        series = _numbers(connection, SERIES)
        judged = _judged(connection, runs)
        values = _values(connection, runs)
    trends = []
    for (place, *about), number in series.items():
        if place not in names:
            continue
        key = SeriesKey(*about)
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


def _judged(connection: Connection, runs: Mapping[int, Run]) -> dict[int, list[Run]]:
    """Return the runs that judged each subject, oldest first."""
    columns = (VERDICTS.c.run_id, VERDICTS.c.subject_id)
    since = VERDICTS.c.run_id >= min(runs, default=0)
    rows = connection.execute(sa.select(*columns).where(VERDICTS.c.outcome.in_(("clean", "leak")), since))
    found: defaultdict[int, set[int]] = defaultdict(set)
    for run, place in rows:
        found[place].add(run)
    return {place: [run for number, run in runs.items() if number in some] for place, some in found.items()}


def _values(connection: Connection, runs: Mapping[int, Run]) -> defaultdict[int, dict[int, tuple[int, int]]]:
    """Return bytes and count of each series in each run."""
    columns = (RESIDUES.c.series_id, RESIDUES.c.run_id, RESIDUES.c.bytes, RESIDUES.c.count)
    since = RESIDUES.c.run_id >= min(runs, default=0)
    found: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for number, run, size, count in connection.execute(sa.select(*columns).where(since)):
        found[number][run] = size, count
    return found


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
