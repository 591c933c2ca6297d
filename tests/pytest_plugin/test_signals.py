"""Signals in a session with `--leakcheck`: a time limit, an alarm and Ctrl-C end what they end without it."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

# Each loop ends after a minute of the processor's time, so that a signal that is lost is a failure, and no hang.
SUITE = '''
import json
import os
import signal
import threading
import time

import pytest

TEXT = json.dumps([{"id": number, "pair": [number, number]} for number in range(20_000)])


def parse():
    """Spend nearly all time in C code that makes objects, and so in collections."""
    while time.process_time() < 60:
        json.loads(TEXT)


class Alarm(Exception):
    pass


def test_alarm():
    def handler(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.alarm(1)
        with pytest.raises(Alarm):
            parse()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(1, method="signal")
def test_limit():
    parse()


def test_interrupt():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    parse()


def test_later():
    pass
'''


@pytest.fixture(scope="module")
def suite(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_suite.py": SUITE}, using=["pytest_timeout"])


def test_an_alarm_arrives(suite: InnerRun) -> None:
    assert suite.counted("test_suite.py::test_alarm") == "passed"


def test_a_test_that_takes_too_long_fails(suite: InnerRun) -> None:
    assert suite.counted("test_suite.py::test_limit") == "failed"
    assert "Timeout" in suite.message("test_suite.py::test_limit")


def test_an_interrupt_ends_the_session(suite: InnerRun) -> None:
    assert suite.code == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in suite.out
    assert "test_suite.py::test_later" not in suite.phases


MOVING = """
import os
import threading
import time

import pytest

OPENED = []


def open_files():
    for _ in range(100):
        OPENED.append(open(os.devnull))
        time.sleep(0.03)


@pytest.mark.timeout(2, method="signal")
def test_that_is_judged_for_long():
    threading.Thread(target=open_files, daemon=True).start()


def test_later():
    pass
"""


def test_a_time_limit_that_passes_while_a_test_is_judged_ends_the_judging_alone(run_inner: RunInner) -> None:
    run = run_inner({"test_moving.py": MOVING}, using=["pytest_timeout"], settle=8)
    assert "lowtide could not judge this test: Failed: Timeout" in run.message(
        "test_moving.py::test_that_is_judged_for_long"
    )
    assert "test_moving.py::test_later" in run.phases
