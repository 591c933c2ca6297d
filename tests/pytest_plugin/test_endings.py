"""The first line says what ends a thing: what the program keeps of it, or where it keeps nothing, the thing itself."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

CASES = """
import asyncio, multiprocessing, os, signal, subprocess, sys, time, warnings
import numpy as np
import pytest

# Python 3.12 and later warn of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEPT = {}


class Client:
    def __init__(self):
        self.loop = asyncio.new_event_loop()


def test_client():
    KEPT["client"] = Client()


def test_client_whose_loop_is_closed():
    KEPT["closed"] = Client()
    KEPT["closed"].loop.close()


def test_manager():
    KEPT["manager"] = multiprocessing.get_context("spawn").Manager()


def test_manager_that_is_shut_down():
    with multiprocessing.get_context("spawn").Manager() as manager:
        assert manager.list([1])[0] == 1


def test_array_over_a_file(tmp_path):
    KEPT["array"] = np.memmap(tmp_path / "rows", mode="w+", shape=(1000,), dtype=np.int8)[10:20]


def test_array_over_a_file_that_is_dropped(tmp_path):
    np.memmap(tmp_path / "rows", mode="w+", shape=(1000,), dtype=np.int8)[10:20]


def test_dropped_program():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_program_that_has_ended():
    KEPT["program"] = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    KEPT["program"].wait()


def test_program_whose_pipe_is_closed():
    KEPT["closed program"] = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    KEPT["closed program"].communicate()


def fork(seconds):
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    return child


def test_fork():
    KEPT["fork"] = str(fork(60))


def test_fork_that_is_waited_for():
    os.waitpid(fork(0), 0)


def test_terminal():
    KEPT["terminal"] = " ".join(map(str, os.openpty()))


def test_terminal_that_is_closed():
    for number in os.openpty():
        os.close(number)


def fails_to_read(path):
    connection = open(path)
    raise RuntimeError("no header")


def test_error_that_is_kept(tmp_path):
    (tmp_path / "rows").touch()
    try:
        fails_to_read(tmp_path / "rows")
    except RuntimeError as error:
        KEPT["error"] = error


def test_error_that_is_kept_without_its_traceback(tmp_path):
    (tmp_path / "rows").touch()
    try:
        fails_to_read(tmp_path / "rows")
    except RuntimeError as error:
        KEPT["said"] = error.with_traceback(None)


def test_ends_what_others_left():
    KEPT["client"].loop.close()
    KEPT["manager"].shutdown()
    for child in (int(KEPT["fork"]), *(each.pid for each in subprocess._active)):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for number in KEPT["terminal"].split():
        os.close(int(number))
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": CASES})


ADVICE = {
    "test_client": "call test_inner.KEPT['client'].loop.close() in teardown",
    "test_manager": "call test_inner.KEPT['manager'].shutdown() in teardown",
    "test_error_that_is_kept": (
        "set test_inner.KEPT['error'].__traceback__ to None: it keeps the local variables of its functions"
    ),
    "test_array_over_a_file": "let go of test_inner.KEPT['array'] in teardown",
    "test_dropped_program": "call terminate() of the subprocess.Popen in teardown",
    "test_program_that_has_ended": "call test_inner.KEPT['program'].stdout.close() in teardown",
    "test_fork": "have what starts it end it, and wait for it: os.kill({0}, signal.SIGTERM); os.waitpid({0}, 0)",
    "test_terminal": "call os.close() with each descriptor in teardown",
}


@pytest.mark.parametrize("test", ADVICE)
def test_the_first_line_says_what_ends_it(run: InnerRun, test: str) -> None:
    (finding,) = run.subject(f"test_inner.py::{test}").findings
    first = finding.message.partition("since call: ")[2].partition(" ")[0]
    assert finding.advice == ADVICE[test].format(first)
    assert f"; {finding.advice}" in run.out


@pytest.mark.parametrize(
    ("test", "place"), [("test_fork", "started in fork,"), ("test_terminal", "made in test_terminal,")]
)
def test_where_a_fork_or_a_terminal_was_made_is_said(run: InnerRun, test: str, place: str) -> None:
    (finding,) = run.subject(f"test_inner.py::{test}").findings
    assert f"; {place} test_inner.py:" in finding.message


@pytest.mark.parametrize(
    "test",
    [
        "test_client_whose_loop_is_closed",
        "test_manager_that_is_shut_down",
        "test_array_over_a_file_that_is_dropped",
        "test_program_whose_pipe_is_closed",
        "test_fork_that_is_waited_for",
        "test_terminal_that_is_closed",
        "test_error_that_is_kept_without_its_traceback",
    ],
)
def test_what_is_ended_is_no_leak(run: InnerRun, test: str) -> None:
    assert run.is_clean(f"test_inner.py::{test}")
