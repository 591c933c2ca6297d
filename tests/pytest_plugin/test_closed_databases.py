"""A database that a test closes is closed while the checker watches, and one that stays open is told."""

from __future__ import annotations

from tests.pytest_plugin.conftest import RunInner

PROGRAM = """
import os
import sqlite3

import pytest

KEPT = []


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    connection = sqlite3.connect(tmp_path_factory.mktemp("data") / "closed.db")
    connection.execute("create table numbers (number)")
    yield connection
    connection.close()
    opened = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [path for path in opened if os.path.exists(path) and "closed.db" in os.readlink(path)]


def test_kept(tmp_path):
    KEPT.append(sqlite3.connect(tmp_path / "kept.db"))
    KEPT[0].execute("create table numbers (number)")


def test_closed(database):
    database.execute("select * from numbers")
"""


def test_a_database_is_closed_as_it_is_without_the_checker(run_inner: RunInner) -> None:
    run = run_inner({"test_inner.py": PROGRAM})
    findings = {each.id.partition("::")[2]: each.findings for each in run.report.subjects if "::" in each.id}
    assert run.out.count(" error") == 0
    assert findings["test_closed"] == ()
    (finding,) = findings["test_kept"]
    assert (finding.resource, finding.holder) == ("file-descriptors", "test_inner.KEPT[0]")
