"""What a watch has read, in the history: written whatever becomes of the database, gone on with, and shown."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from lowtide.leakcheck.gate import watch_history
from lowtide.leakcheck.gate.history import open_database
from lowtide.leakcheck.gate.history_page import render_page
from lowtide.leakcheck.gate.watch_history import WatchHistory, read_watches
from lowtide.leakcheck.processes.held_series import HeldKey, HeldReading, Point
from lowtide.probes.host.process_files import stat
from tests.reports.small_reports import HOSTILE
from tests.waiting import wait_until

MIB = 1 << 20


def own_key() -> HeldKey:
    process = stat(os.getpid())
    assert process is not None
    return HeldKey(process.pid, process.started, "host-memory", "")


def read(*amounts: int, since: float = 1e9, name: str = "pid 1 (server)") -> list[HeldReading]:
    return [HeldReading(own_key(), name, Point(since + place, amount)) for place, amount in enumerate(amounts)]


def rows(file: Path) -> int:
    connection = sqlite3.connect(file)
    (count,) = connection.execute("SELECT count(*) FROM watched_levels").fetchone()
    connection.close()
    return int(count)


def test_a_watch_goes_on_with_what_earlier_ones_have_read_of_the_same_processes(tmp_path: Path) -> None:
    address = str(tmp_path / "history.sqlite")
    for since in (1e9, 2e9):
        watch = WatchHistory(address, "watch[1]", pytest.fail)
        watch.add(read(1, 2, since=since))
        later = HeldKey(os.getpid(), own_key().started + 1, "threads", "")
        watch.add([HeldReading(later, "another", Point(since, 3))])
        watch.close()
    again = WatchHistory(address, "watch[1]", pytest.fail)
    assert again.earlier([os.getpid(), 1]) == {
        own_key(): [[Point(since, 1), Point(since + 1, 2)] for since in (1e9, 2e9)]
    }
    again.close()


def test_a_database_that_is_gone_for_a_while_costs_no_reading_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_history, "RETRY_S", 0.01)
    folder, away, told = tmp_path / "here", tmp_path / "away", []
    folder.mkdir()
    watch = WatchHistory(str(folder / "history.sqlite"), "watch[1]", told.append)
    watch.add(read(1))
    wait_until(lambda: rows(folder / "history.sqlite") == 1)
    folder.rename(away)
    watch.add(read(2))
    wait_until(lambda: told != [])
    watch.add(read(3, 4))
    # It is tried again some times meanwhile.
    time.sleep(20 * watch_history.RETRY_S)
    away.rename(folder)
    watch.close()
    assert rows(folder / "history.sqlite") == 4
    first, second = told
    assert first.endswith("unable to open database file; what is read is kept, and written once that is possible")
    assert second == "the history can be used again"


def test_a_watch_does_not_wait_for_a_database_that_is_locked(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    watch = WatchHistory(str(file), "watch[1]", pytest.fail)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for _ in range(100):
        watch.add(read(1))
    assert other.execute("SELECT count(*) FROM watched_levels").fetchone() == (0,)
    other.execute("COMMIT")
    other.close()
    watch.close()
    assert rows(file) == 100


def test_what_could_not_be_written_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_history, "RETRY_S", 0.01)
    told: list[str] = []
    folder = tmp_path / "here"
    folder.mkdir()
    watch = WatchHistory(str(folder / "history.sqlite"), "watch[1]", told.append)
    folder.rename(tmp_path / "away")
    watch.add(read(1, 2))
    watch.close()
    assert told[-1] == "2 readings could not be written into the history"


def test_the_last_watches_are_shown_with_their_verdict_and_each_process_once(tmp_path: Path) -> None:
    address = str(tmp_path / "history.sqlite")
    killed = WatchHistory(address, "watch[killed]", pytest.fail)
    killed.add(read(1 * MIB, 3 * MIB))
    killed.close()
    ended = WatchHistory(address, HOSTILE, pytest.fail)
    ended.add(read(3 * MIB, 4 * MIB, since=1e9 + 100))
    ended.judged("leak", ["it grows", "and that too"])
    ended.close()
    engine = open_database(address)
    last, before = read_watches(engine)
    assert (last.said, before.said) == (["leak", "it grows", "and that too"], ["no verdict yet"])
    (course,) = last.courses
    assert ([len(stretch) for stretch in course.stretches], before.courses) == ([2, 2], [])
    page = render_page(watches=[last, before])
    assert "pid 1 (server): host-memory" in page
    assert "last 4.0 MiB, 4 readings in 2 watches" in page
    assert '<path d="M0.0 120.0H7.1V40.0H7.1M712.9 40.0H720.0V0.0H720.0"/>' in page
    assert '<li class="change">it grows</li>' in page
    assert ("<b>" in page, "refresh" in page) == (False, False)
    assert read_watches(engine, "watch*") != []
    assert read_watches(engine, "other*") == []
    engine.dispose()


def test_a_history_without_watches_has_none(tmp_path: Path) -> None:
    engine = open_database(str(tmp_path / "history.sqlite"))
    assert read_watches(engine) == []
    engine.dispose()
