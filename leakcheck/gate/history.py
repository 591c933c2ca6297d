"""The history of reports: their runs, how each subject was judged, and what was left, in a database.

It is a file of SQLite or a server of PostgreSQL, whose tables are made when it is first opened.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
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

_AT_ONCE = 500
"""Values of one query; SQLite takes no more than 999 in older versions."""


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
        named = (msgspec.structs.replace(subject, id=_text(subject.id)) for subject in report.subjects)
        subjects = {subject.id: subject for subject in tries_as_one(named, of_all=True)}
        places = _subject_places(connection, list(subjects))
        verdicts = [
            {"run_id": run, "subject_id": places[name], "outcome": subject.outcome}
            for name, subject in subjects.items()
        ]
        _insert(connection, VERDICTS, verdicts)
        _add_residues(connection, run, {places[name]: subject for name, subject in subjects.items()})
    return run


def residues(subject: Subject) -> Iterator[Residue]:
    """Yield what is followed of a subject: all its findings, and of a life what its last cycle left behind.

    A reading shows a drift while it is still within its tolerance.
    """
    for finding in subject.findings:
        for each in (finding, *finding.parts):
            key = SeriesKey("finding", each.resource, each.cause, each.device, each.stage, each.fingerprint)
            yield Residue(SeriesKey(*map(_text, key)), each.bytes, each.count)
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
            yield Residue(SeriesKey("reading", resource, "", "", _text(last[-1].name), ""), then - first, 0)


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
    texts = {name: _text(value) if isinstance(value, str) else value for name, value in row.items()}
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


def _subject_places(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of subjects, those of new ones too."""
    known = _known_subjects(connection, names)
    _insert(connection, SUBJECTS, [{"name": name} for name in names if name not in known])
    return known | _known_subjects(connection, [name for name in names if name not in known])


def _known_subjects(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in _parts(names):
        rows = connection.execute(sa.select(SUBJECTS.c.name, SUBJECTS.c.id).where(SUBJECTS.c.name.in_(some)))
        found.update((name, place) for name, place in rows)
    return found


def _add_residues(connection: Connection, run: int, subjects: dict[int, Subject]) -> None:
    sums: dict[tuple[int, SeriesKey], list[int]] = {}
    for place, subject in subjects.items():
        for residue in residues(subject):
            total = sums.setdefault((place, residue.series), [0, 0])
            total[0] += residue.size
            total[1] += residue.things
    known = _known_series(connection, list(subjects))
    new = [key for key in sums if key not in known]
    _insert(connection, SERIES, [{"subject_id": place, **key._asdict()} for place, key in new])
    if new:
        known = _known_series(connection, list(subjects))
    rows = [
        {"run_id": run, "series_id": known[key], "bytes": size, "count": count} for key, (size, count) in sums.items()
    ]
    _insert(connection, RESIDUES, rows)


def _known_series(connection: Connection, subjects: Sequence[int]) -> dict[tuple[int, SeriesKey], int]:
    columns = [SERIES.c[name] for name in SeriesKey._fields]
    found: dict[tuple[int, SeriesKey], int] = {}
    for some in _parts(subjects):
        chosen = sa.select(SERIES.c.id, SERIES.c.subject_id, *columns).where(SERIES.c.subject_id.in_(some))
        for number, place, *key in connection.execute(chosen):
            found[place, SeriesKey(*key)] = number
    return found


def _insert(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.insert(), rows)


def _text(text: str) -> str:
    # PostgreSQL refuses this one character, and no database takes half of a pair.
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


def _parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]
