"""Writes a report into the history: its run, how each subject was judged, and what was left."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from lowtide.leakcheck.history.database import writing
from lowtide.leakcheck.history.errors import HistoryError
from lowtide.leakcheck.history.tables import RESIDUES, RUNS, SERIES, SUBJECTS, VERDICTS
from lowtide.reports.schema import Report, Subject, encode

NO_CARD = "CPU"
"""The hardware of a machine without cards."""

_AT_ONCE = 500
"""Values of one query; SQLite takes no more than 999 in older versions."""


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
        subjects: dict[str, list[Subject]] = {}
        for subject in report.subjects:
            subjects.setdefault(_text(subject.id), []).append(subject)
        places = _subject_places(connection, list(subjects))
        verdicts = [
            {"run_id": run, "subject_id": places[name], "outcome": _worst(same)} for name, same in subjects.items()
        ]
        _insert(connection, VERDICTS, verdicts)
        _add_residues(connection, run, {places[name]: same for name, same in subjects.items()})
    return run


def residues(subject: Subject) -> Iterator[Residue]:
    """What is followed of a subject: its findings, known ones too, and of a life what its last cycle left behind.

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
    """The numbers of subjects, those of new ones too."""
    known = _known_subjects(connection, names)
    _insert(connection, SUBJECTS, [{"name": name} for name in names if name not in known])
    return known | _known_subjects(connection, [name for name in names if name not in known])


def _known_subjects(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in _parts(names):
        rows = connection.execute(sa.select(SUBJECTS.c.name, SUBJECTS.c.id).where(SUBJECTS.c.name.in_(some)))
        found.update((name, place) for name, place in rows)
    return found


def _add_residues(connection: Connection, run: int, subjects: dict[int, list[Subject]]) -> None:
    sums: dict[tuple[int, SeriesKey], list[int]] = {}
    for place, same in subjects.items():
        for residue in (each for subject in same for each in residues(subject)):
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


def _worst(subjects: Iterable[Subject]) -> str:
    outcomes = {subject.outcome for subject in subjects}
    order = ("leak", "error", "unsupported", "clean", "skipped")
    return next(outcome for outcome in order if outcome in outcomes)


def _text(text: str) -> str:
    # PostgreSQL refuses this one character, and no database takes half of a pair.
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


def _parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]
