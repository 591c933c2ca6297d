"""Threads that start others all the time: whoever left the first one is named, and no later test."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

BEATING = """
import os
import subprocess
import threading
import time

import pytest


def beat(period):
    timer = threading.Timer(period, beat, [period])
    timer.daemon = True
    timer.start()


def in_a_loop(work):
    def loop():
        while True:
            work()

    threading.Thread(target=loop, daemon=True).start()


def start_thread():
    thread = threading.Thread(target=time.sleep, args=(0.05,), daemon=True)
    thread.start()
    thread.join()


def fork():
    pid = os.fork()
    if not pid:
        time.sleep(0.05)
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def beating():
    stop = []

    def again():
        if not stop:
            threading.Timer(0.05, again).start()

    again()
    yield
    stop.append(True)


@pytest.fixture(scope="module")
def left_beating():
    beat(0.05)


def test_leaves_a_timer(): beat(0.05)
def test_after_the_timer(): time.sleep(0.2)
def test_leaves_another_timer(): beat(0.02)
def test_leaves_short_threads(): in_a_loop(start_thread)
def test_after_short_threads(): time.sleep(0.2)
def test_leaves_forks(): in_a_loop(fork)
def test_after_forks(): time.sleep(0.2)
def test_leaves_commands(): in_a_loop(lambda: subprocess.run(["sleep", "0.05"], capture_output=True))
def test_after_commands(): time.sleep(0.2)
def test_leaves_a_thread_of_its_own(): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
def test_uses_a_beating_fixture(beating): time.sleep(0.2)
def test_uses_one_that_goes_on(beating, left_beating): time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    # A warning where a program with threads is forked, since Python 3.12.
    return run_inner({"test_inner.py": BEATING}, "-W", "ignore::DeprecationWarning", settle=0.2)


def test_who_leaves_one_is_named_and_nobody_else(run: InnerRun) -> None:
    left = [test for test in run.phases if "test_leaves" in test]
    assert (len(left), run.blamed) == (6, [*left, "module fixture 'left_beating' (test_inner.py)"])
    for test in left:
        # The processes that one starts are of the same cause.
        found = [each for finding in run.subject(test).findings for each in (finding, *finding.parts)]
        assert {each.stage for each in found if each.resource == "threads"} & {"call", "teardown"}
