"""When somebody listens, the main thread's dealings with processes are heard; the program's calls work as before."""

from __future__ import annotations

import _thread
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.host.process_tree import ProcessEvents
from tests.waiting import wait_until

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def heard() -> Iterator[list[str]]:
    calls: list[str] = []
    events = ProcessEvents(lambda: calls.append("heard"))
    events.start()
    events.start()
    yield calls
    events.stop()
    events.stop()


def test_a_wait_is_heard(heard: list[str]) -> None:
    child = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    assert heard == []
    child.communicate()
    assert child.returncode == 0
    assert "heard" in heard


def test_a_thread_that_c_has_started_gets_no_object_of_python(heard: list[str]) -> None:
    child = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    done: list[bool] = []

    def ends() -> None:
        child.terminate()
        done.append(threading.get_ident() in threading._active)  # type: ignore[attr-defined]

    _thread.start_new_thread(ends, ())
    wait_until(lambda: done)
    child.communicate()
    assert done == [False]


def test_a_signal_is_heard_however_it_is_sent(heard: list[str]) -> None:
    for end in (lambda child: child.terminate(), lambda child: os.kill(child.pid, signal.SIGKILL)):
        heard.clear()
        with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as child:
            end(child)
            assert "heard" in heard
        assert child.returncode < 0


def test_an_answer_is_heard_and_so_is_a_join(heard: list[str]) -> None:
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=theirs.send, args=("ready",))
    process.start()
    assert (mine.recv(), heard) == ("ready", ["heard"])
    process.join()
    assert (heard, process.exitcode) == (["heard"] * 2, 0)


def test_of_many_answers_in_a_row_few_are_heard(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("lowtide.probes.host.process_tree.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    mine, theirs = get_context("fork").Pipe()
    for now in (100.0, 100.001, 100.002, 100.006):
        clock[0] = now
        theirs.send("answer")
        mine.recv()
    assert heard == ["heard"] * 2


def test_another_thread_is_not_heard(heard: list[str]) -> None:
    child = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    thread = threading.Thread(target=child.communicate)
    thread.start()
    thread.join()
    assert heard == []


def _answer(heard: list[str], pipe: Any) -> None:
    os.kill(pipe.recv(), 0)
    pipe.send(len(heard))


def test_a_fork_s_own_dealings_are_not_heard(heard: list[str]) -> None:
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_answer, args=(heard, theirs))
    process.start()
    mine.send(os.getpid())
    assert mine.recv() == 0
    process.join()


def test_an_error_in_the_listener_is_no_error_of_the_program() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    events = ProcessEvents(fails)
    events.start()
    try:
        assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
    finally:
        events.stop()


def test_everything_is_put_back_but_what_somebody_else_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (subprocess.Popen.wait, os.killpg, multiprocessing.connection._ConnectionBase.recv)  # type: ignore[attr-defined]
    events = ProcessEvents(lambda: None)
    events.start()

    def other(pid: int, number: int) -> None: ...

    monkeypatch.setattr(os, "kill", other)
    events.stop()
    after = (subprocess.Popen.wait, os.killpg, multiprocessing.connection._ConnectionBase.recv)  # type: ignore[attr-defined]
    assert after == before
    assert os.kill is other
    monkeypatch.undo()
    os.kill = vars(os.kill)["__wrapped__"]
