"""What ends in a teardown is read there; where nothing does, what the call has left is the call's all the same."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

CONFTEST = """
import os

import pytest

KEPT = []

def pytest_runtest_teardown(item):
    if "hook" in item.name:
        KEPT.append(open(os.devnull))
"""

INNER = """
import os, unittest

import pytest
from conftest import KEPT

def keep():
    KEPT.append(open(os.devnull))

@pytest.fixture
def ends_badly():
    yield
    keep()

def test_call(): keep()
def test_call_with_a_fixture_of_a_library(monkeypatch, tmp_path): keep()
def test_teardown_of_a_fixture(ends_badly): pass
def test_teardown_by_a_finalizer(request): request.addfinalizer(keep)
def test_teardown_by_a_hook(): pass

class Case(unittest.TestCase):
    def test_teardown_of_a_case(self): pass
    def tearDown(self): keep()

class TestScope:
    @classmethod
    def teardown_class(cls): keep()
    def test_teardown_of_the_class(self): pass

def test_clean(): pass
"""

PLAIN = """
import pytest
from lowtide.probes.host.counters import CounterReader

READ, PER_TEST = [], {}

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logfinish(nodeid):
    PER_TEST[nodeid.partition("::")[2]] = len(READ)
    READ.clear()

def pytest_configure():
    read = CounterReader.read_in_part
    CounterReader.read_in_part = lambda *args, **kwargs: READ.append(1) or read(*args, **kwargs)

def pytest_unconfigure():
    print("readings", [PER_TEST[f"test_plain[{number}]"] for number in range(2, 5)], PER_TEST["test_with_its_own"])
"""

PLAIN_TESTS = """
import pytest

@pytest.fixture
def own(): yield

@pytest.mark.parametrize("number", range(6))
def test_plain(number): pass
def test_with_its_own(own): pass
def test_last(): pass
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"conftest.py": CONFTEST, "test_inner.py": INNER})


@pytest.mark.parametrize(
    ("test", "stage"),
    [
        ("test_call", "call"),
        ("test_call_with_a_fixture_of_a_library", "call"),
        ("test_teardown_of_a_fixture", "teardown"),
        ("test_teardown_by_a_finalizer", "teardown"),
        ("test_teardown_by_a_hook", "teardown"),
        # unittest runs it with the test.
        ("Case::test_teardown_of_a_case", "call"),
        ("TestScope::test_teardown_of_the_class", "teardown"),
    ],
)
def test_a_descriptor_is_of_the_stage_that_left_it(run: InnerRun, test: str, stage: str) -> None:
    (found,) = run.subject(f"test_inner.py::{test}").findings
    assert (found.resource, found.stage) == ("file-descriptors", stage)


def test_the_clean_test_is_silent(run: InnerRun) -> None:
    assert run.subject("test_inner.py::test_clean").outcome == "clean"


def test_where_nothing_is_torn_down_nothing_is_read_before_the_verdict(run_inner: RunInner) -> None:
    run = run_inner({"readings.py": PLAIN, "test_inner.py": PLAIN_TESTS}, "-s", using=["readings"])
    # The baseline and the verdict; a fixture of the test's own adds the ends of its setup and of the call.
    assert "readings [2, 2, 2] 4" in run.out, run.out
