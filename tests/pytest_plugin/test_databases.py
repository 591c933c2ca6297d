"""A database that a test closes is closed while the checker watches; one that it leaves open is told."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

PROGRAM = """
import os
import sqlite3
import tempfile

import pytest

KEPT = []
FOLDER = tempfile.TemporaryDirectory()


def opened(folder, name, *statements):
    path = os.path.join(folder, name)
    before = sqlite3.connect(path)
    before.execute("pragma journal_mode=wal" if "wal" in name else "pragma journal_mode=delete")
    before.execute("create table numbers (number)")
    before.commit()
    before.close()
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    return connection


OLD = opened(FOLDER.name, "wal.db")
PLAIN = opened(FOLDER.name, "plain.db")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    for connection in (OLD, PLAIN, *KEPT):
        connection.close()
    FOLDER.cleanup()


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    connection = opened(tmp_path_factory.mktemp("data"), "closed.db", "insert into numbers values (1)")
    yield connection
    connection.close()
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [path for path in paths if os.path.exists(path) and "closed.db" in os.readlink(path)]


@pytest.fixture(scope="module")
def in_transaction(tmp_path_factory):
    connection = opened(tmp_path_factory.mktemp("data"), "begun.db", "begin")
    yield connection
    connection.rollback()
    connection.close()


def test_kept(tmp_path):
    KEPT.append(opened(tmp_path, "kept.db"))
    KEPT[-1].execute("select * from numbers")


def test_kept_with_its_log(tmp_path):
    KEPT.append(opened(tmp_path, "kept-wal.db", "insert into numbers values (1)"))


def test_log_of_an_older_one():
    OLD.execute("insert into numbers values (1)")


def test_journal_in_a_transaction_of_a_fixture(in_transaction):
    in_transaction.execute("insert into numbers values (1)")


def test_journal_of_a_transaction_that_is_not_ended():
    PLAIN.execute("begin")
    PLAIN.execute("insert into numbers values (1)")


def test_it_is_ended():
    PLAIN.execute("rollback")


# The last one: its connection is closed while the caches are known that it has filled.
def test_closed(database):
    database.execute("select * from numbers")
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": PROGRAM})


@pytest.mark.parametrize(
    "name", ["test_closed", "test_log_of_an_older_one", "test_journal_in_a_transaction_of_a_fixture"]
)
def test_what_a_connection_that_was_there_before_opens_is_no_leak(run: InnerRun, name: str) -> None:
    assert run.out.count(" error") == 0
    assert next(each for each in run.report.subjects if each.id.endswith(f"::{name}")).findings == ()


@pytest.mark.parametrize(
    ("name", "count", "holder"),
    [
        ("test_kept", 1, "test_inner.KEPT[0]"),
        ("test_kept_with_its_log", 3, "test_inner.KEPT[1]"),
        ("test_journal_of_a_transaction_that_is_not_ended", 1, "test_inner.PLAIN"),
    ],
)
def test_what_a_test_opens_and_leaves_is_told(run: InnerRun, name: str, count: int, holder: str) -> None:
    (finding,) = next(each for each in run.report.subjects if each.id.endswith(f"::{name}")).findings
    assert (finding.resource, finding.count, finding.holder) == ("file-descriptors", count, holder)
