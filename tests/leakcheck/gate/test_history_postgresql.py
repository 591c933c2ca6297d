"""The history in a real server of PostgreSQL, which the tests start in a folder of its own."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from lowtide.leakcheck.gate import watch_history
from lowtide.leakcheck.gate.history import (
    METADATA,
    RESIDUES,
    RUNS,
    SUBJECTS,
    HistoryError,
    add_report,
    open_database,
    read_trends,
)
from lowtide.leakcheck.gate.history_page import render_page
from lowtide.leakcheck.gate.watch_history import WatchHistory
from lowtide.leakcheck.processes.held_series import Point
from tests.leakcheck.gate.test_history import MIB, add_nights, night
from tests.leakcheck.gate.test_watch_history import own_key, read
from tests.reports.small_reports import HOSTILE, finding, subject
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

WRITERS, NIGHTS = 4, 25

WRITER = """
import sys
from lowtide.leakcheck.gate.history import open_database
from lowtide.leakcheck.gate.history import add_report
from tests.leakcheck.gate.test_history import night
from tests.reports.small_reports import finding, subject

writer, nights = int(sys.argv[2]), int(sys.argv[3])
engine = open_database(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(nights):
    subjects = [
        subject(finding(), finding(fingerprint=f"{writer:016x}"), name=f"life {turn}")
        for turn in (range(3) if writer % 2 else reversed(range(3)))
    ]
    add_report(engine, night(number * 100 + writer, *subjects), f"{writer}-{number}")
"""


def binaries() -> Path | None:
    """The folder of PostgreSQL's programs; Debian keeps them out of the path."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).parent if found else folders[-1].parent if folders else None


def server_user() -> str | None:
    """Who runs the server, which refuses to be run by root."""
    if os.geteuid() != 0:
        return getpass.getuser()
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server, without a database."""
    programs, user = binaries(), server_user()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    if user is None:
        pytest.skip("PostgreSQL refuses to be run by root, and there is no user postgres")
    as_user = {"user": user} if os.geteuid() == 0 else {}
    # Not in pytest's folder, which only this user may enter.
    folder = Path(tempfile.mkdtemp(prefix="lowtide-postgresql-"))
    shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
    control = [programs / "pg_ctl", "-D", data, "-w"]
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "lowtide", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            **as_user,  # type: ignore[call-overload]
        )
        subprocess.run(
            [*control, "-l", str(folder / "log"), "-o", options, "start"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            **as_user,  # type: ignore[call-overload]
        )
        try:
            yield f"postgresql://lowtide@127.0.0.1:{port}"
        finally:
            subprocess.run(
                [*control, "-m", "immediate", "stop"],
                check=True,
                capture_output=True,
                cwd=folder,
                **as_user,  # type: ignore[call-overload]
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database(server: str, request: pytest.FixtureRequest) -> str:
    """The address of an empty database of this test."""
    name = f"db_{abs(hash(request.node.name)):x}"
    engine = sa.create_engine(f"{server}/postgres".replace("://", "+psycopg://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


def test_it_is_stored_and_read_as_in_a_file(database: str) -> None:
    engine = open_database(database)
    add_nights(engine, 12, leaking_from=5)
    (trend,) = read_trends(engine)
    assert trend.values == [0] * 5 + [48 * MIB] * 7
    assert [change.place for change in trend.changes] == [5]
    assert "48.0 MiB since run 6" in render_page([trend])
    engine.dispose()


def test_what_a_watch_has_read_is_written_once_the_server_is_back(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_history, "RETRY_S", 0.01)
    told: list[str] = []
    watch = WatchHistory(database, "watch[1]", told.append)
    engine = sa.create_engine(database.replace("://", "+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE watched_levels RENAME TO away"))
    watch.add(read(1, 2))
    wait_until(lambda: told != [])
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE away RENAME TO watched_levels"))
    engine.dispose()
    watch.judged("clean", [])
    watch.close()
    again = WatchHistory(database, "watch[1]", pytest.fail)
    assert again.earlier([os.getpid()]) == {own_key(): [[Point(1e9, 1), Point(1e9 + 1, 2)]]}
    again.close()
    assert told[1:] == ["the history can be used again"]


def test_gates_that_write_at_once_lose_nothing(database: str) -> None:
    """Processes that begin together, on a database without tables, with the same subjects in opposite orders."""
    command = [sys.executable, "-c", WRITER, database]
    writers = [
        subprocess.Popen([*command, str(number), str(NIGHTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(WRITERS)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.communicate(timeout=HANG_S)[0] for writer in writers] == [""] * WRITERS
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    engine = open_database(database)
    with engine.connect() as connection:
        counts = [
            connection.scalar(sa.select(sa.func.count()).select_from(table)) for table in (RUNS, SUBJECTS, RESIDUES)
        ]
    assert counts == [WRITERS * NIGHTS, 3, WRITERS * NIGHTS * 3 * 2]
    engine.dispose()


@pytest.mark.no_leakcheck(reason="reading the tables fills a cache of SQLAlchemy's that keeps the dialect")
def test_the_tables_of_a_history_are_those_that_the_code_uses(database: str) -> None:
    engine = open_database(database)
    found = sa.MetaData()
    found.reflect(engine)
    engine.dispose()
    names = {table.name: set(table.columns.keys()) for table in METADATA.sorted_tables}
    assert {table.name: set(table.columns.keys()) for table in found.sorted_tables} == names


def test_a_report_is_added_whole_or_not_at_all(database: str) -> None:
    engine = open_database(database)
    with pytest.raises(HistoryError, match=r"cannot be used: "):
        add_report(engine, night(0, subject(finding(bytes=1 << 70))), "")
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(RUNS)) == 0
    engine.dispose()


def test_any_text_can_be_stored(database: str) -> None:
    text = HOSTILE.replace("\udc80", "\0")
    engine = open_database(database)
    add_report(engine, night(0, subject(finding(stage=text, device=text), name=text), card=text), text)
    assert [trend.values for trend in read_trends(engine)] == [[48 * MIB]]
    engine.dispose()


def test_a_database_that_is_not_there_is_one_line_without_the_password(server: str) -> None:
    with pytest.raises(HistoryError) as raised:
        open_database(server.replace("lowtide@", "lowtide:secret@") + "/absent")
    assert 'database "absent" does not exist' in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)
