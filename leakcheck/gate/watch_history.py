"""What `lowtide watch` has read, in the history's database: to be gone on with, and to be shown.

Its tables are beside those of the reports, and are made when a watch first writes into a history.
"""

from __future__ import annotations

import datetime
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import cast

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, DateTime, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Connection, Engine

from lowtide.leakcheck.gate.history import METADATA, HistoryError, open_database, reading, storable, writing
from lowtide.leakcheck.gate.history_page import PastWatch
from lowtide.leakcheck.processes.held_series import HeldCourse, HeldKey, HeldReading, Point
from lowtide.probes.host.process_files import stat
from lowtide.probes.originals import contents, os
from lowtide.reports.schema import ResourceName
from lowtide.reports.sizes import format_amount

TABLES = MetaData(naming_convention=METADATA.naming_convention)

WATCHES = Table(
    "watches",
    TABLES,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    # In UTC; SQLite keeps no zone.
    Column("began", DateTime, nullable=False),
    # Empty until it has come to its end; what was killed never does.
    Column("outcome", String(16), nullable=False),
    Column("findings", Text, nullable=False),
)

PROCESSES = Table(
    "watched_processes",
    TABLES,
    Column("id", Integer, primary_key=True),
    # Within which pids are unique: the boot of a machine, and the namespace.
    Column("place", String(64), nullable=False),
    Column("pid", BigInteger, nullable=False),
    # In ticks since boot.
    Column("started", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Index("ix_watched_processes_place", "place", "pid", "started", unique=True),
)

LEVELS = Table(
    "watched_levels",
    TABLES,
    # In the order in which they were read, whatever the clock says.
    Column("id", Integer, primary_key=True),
    Column("watch_id", ForeignKey("watches.id"), nullable=False),
    Column("process_id", ForeignKey("watched_processes.id"), nullable=False),
    Column("resource", String(32), nullable=False),
    Column("device", String(64), nullable=False),
    # In seconds since 1970.
    Column("at", Float(53), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Index("ix_watched_levels_process_id", "process_id"),
    Index("ix_watched_levels_watch_id", "watch_id"),
)

RETRY_S = 5.0
"""Seconds until what could not be written is tried again."""

_END_S = 10.0
"""Seconds that the last readings have to be written once the watch has ended."""


class WatchHistory:
    """Writes what one watch reads, in a thread of its own: whatever becomes of the database, the watch goes on.

    Raises:
        HistoryError: the database cannot be opened.
    """

    def __init__(self, address: str, name: str, tell: Callable[[str], object]) -> None:
        self._tell, self._place = tell, _place()
        self._engine = open_database(address)
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        with writing(self._engine) as connection:
            TABLES.create_all(connection)
            row = {"name": storable(name), "began": now, "outcome": "", "findings": ""}
            inserted = connection.execute(WATCHES.insert().values(row)).inserted_primary_key
        assert inserted is not None
        self._watch = int(inserted[0])
        self._unwritten: list[HeldReading] = []
        self._end: tuple[str, str] | None = None
        self._is_over = False
        self._fails = False
        self._changed = threading.Condition()
        # Not waited for where the database does not answer, however long.
        self._thread = threading.Thread(target=self._write, name="lowtide-history", daemon=True)
        self._thread.start()

    def earlier(self, pids: Collection[int]) -> dict[HeldKey, list[list[Point]]]:
        """Return what earlier watches have read of processes that are there still, each watch's by itself.

        Raises:
            HistoryError: it cannot be read.
        """
        processes = [(pid, found.started) for pid in pids if (found := stat(pid)) is not None]
        with reading(self._engine) as connection:
            known = self._known(connection)
            numbers = [known[process] for process in processes if process in known]
            series = _series(connection, PROCESSES.c.id.in_(numbers))
        return {key: list(by_watch.values()) for (_, key), by_watch in series.items()}

    def add(self, readings: Sequence[HeldReading]) -> None:
        """Take readings, to be written soon."""
        with self._changed:
            self._unwritten += readings
            self._changed.notify()

    def judged(self, outcome: str, findings: Iterable[str]) -> None:
        """Take how the watch has ended."""
        self._end = storable(outcome), storable("\n".join(findings))

    def close(self) -> None:
        """Write what is not written yet, and say what could not be."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(_END_S)
        if self._unwritten:
            self._tell(f"{format_amount(len(self._unwritten), 'readings')} could not be written into the history")
        if not self._thread.is_alive():
            self._engine.dispose()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._is_over, None)
                readings, is_over = list(self._unwritten), self._is_over
            try:
                self._write_once(readings, self._end if is_over else None)
            except HistoryError as error:
                if not self._fails:
                    self._tell(f"{error}; what is read is kept, and written once that is possible")
                self._fails = True
                if is_over:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, RETRY_S)
                continue
            if self._fails:
                self._tell("the history can be used again")
            self._fails = False
            with self._changed:
                del self._unwritten[: len(readings)]
                if is_over and not self._unwritten:
                    return

    def _write_once(self, readings: Sequence[HeldReading], end: tuple[str, str] | None) -> None:
        with writing(self._engine) as connection:
            if readings:
                numbers = self._processes(connection, {each.key[:2]: each.process for each in readings})
                rows = [
                    {
                        "watch_id": self._watch,
                        "process_id": numbers[key[:2]],
                        "resource": key.resource,
                        "device": key.device,
                        "at": point.at,
                        "amount": point.amount,
                    }
                    for key, _, point in readings
                ]
                connection.execute(LEVELS.insert(), rows)
            if end is not None:
                ended = WATCHES.update().where(WATCHES.c.id == self._watch)
                connection.execute(ended.values(outcome=end[0], findings=end[1]))
        # A connection that is kept would write on into a file that somebody has put another one in place of.
        self._engine.dispose()

    def _processes(self, connection: Connection, named: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], int]:
        """Return the numbers of processes, those of new ones too."""
        known = self._known(connection)
        new = [
            {"place": self._place, "pid": pid, "started": started, "name": storable(name)}
            for (pid, started), name in named.items()
            if (pid, started) not in known
        ]
        if new:
            connection.execute(PROCESSES.insert(), new)
            known = self._known(connection)
        return known

    def _known(self, connection: Connection) -> dict[tuple[int, int], int]:
        columns = (PROCESSES.c.pid, PROCESSES.c.started, PROCESSES.c.id)
        rows = connection.execute(sa.select(*columns).where(PROCESSES.c.place == self._place))
        return {(pid, started): number for pid, started, number in rows}


def _place() -> str:
    """Return within what pids are unique: this boot of the machine, and the namespace of processes."""
    boot = contents("/proc/sys/kernel/random/boot_id").decode().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _series(
    connection: Connection, condition: sa.ColumnElement[bool]
) -> dict[tuple[str, HeldKey], dict[int, list[Point]]]:
    """Return series with the names of their processes, and in each what each watch has read."""
    of_process = [PROCESSES.c[name] for name in ("name", "pid", "started")]
    of_level = [LEVELS.c[name] for name in ("resource", "device", "watch_id", "at", "amount")]
    chosen = sa.select(*of_process, *of_level).join_from(LEVELS, PROCESSES).where(condition).order_by(LEVELS.c.id)
    found: defaultdict[tuple[str, HeldKey], dict[int, list[Point]]] = defaultdict(dict)
    for name, pid, started, resource, device, watch, at, amount in connection.execute(chosen):
        key = HeldKey(pid, started, cast(ResourceName, resource), device)
        found[name, key].setdefault(watch, []).append(Point(at, amount))
    return found


MOST_WATCHES = 10
"""Watches that are shown."""


def read_watches(engine: Engine, names: str = "*") -> list[PastWatch]:
    """Return the last watches, the newest one first; what several have read of a process is shown with the newest.

    Args:
        engine: the history's database.
        names: a pattern of their names, as of files.

    Raises:
        HistoryError: the history cannot be read.
    """
    with reading(engine) as connection:
        if not sa.inspect(connection).has_table(WATCHES.name):
            return []
        rows = connection.execute(sa.select(WATCHES).order_by(WATCHES.c.id.desc())).all()
        found: list[PastWatch] = []
        shown: set[HeldKey] = set()
        for row in [row for row in rows if fnmatch(row.name, names)][:MOST_WATCHES]:
            of_watch = sa.select(LEVELS.c.process_id).where(LEVELS.c.watch_id == row.id)
            series = _series(connection, PROCESSES.c.id.in_(of_watch))
            courses = [
                HeldCourse(name, key, list(by_watch.values()))
                for (name, key), by_watch in series.items()
                if key not in shown
            ]
            shown.update(course.key for course in courses)
            messages = row.findings.splitlines()
            found.append(PastWatch(row.name, row.began, row.outcome, messages, courses))
    return found
