"""What is dropped without its shutdown: it is given back, by a thread that nobody waits for, and no signal is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from lowtide.engine.processes import child as child_module
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.child import ChildProcess
from lowtide.engine.teardown import WhenDropped
from tests.sent_signals import ROUNDS, Arrived, arrivals, raising
from tests.waiting import HANG_S, wait_until


class Owner:
    """Something that has what must be given back."""


def deaf(connection: Connection) -> None:
    """Stay when the connection is closed; the process's end is a kill."""
    del connection
    signal.sigwait({signal.SIGUSR1})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM], ids=lambda each: each.name)
def test_all_signals_arrive_that_come_before_an_owner_is_dropped(number: int) -> None:
    given_back: list[int] = []

    def dropped() -> partial[object]:
        owners = [Owner()]
        WhenDropped(owners[0], given_back.append, 1, at_exit=False)
        return partial(owners.clear)

    assert arrivals(number, dropped) == ROUNDS
    wait_until(lambda: len(given_back) == ROUNDS)


def test_a_thread_of_its_own_gives_back() -> None:
    threads: list[int] = []
    owner = Owner()
    dropped = WhenDropped(owner, lambda: threads.append(threading.get_ident()), at_exit=True)
    del owner
    wait_until(lambda: threads)
    assert threads != [threading.get_ident()]
    assert not dropped.cancel()


def test_what_was_closed_is_not_given_back_again() -> None:
    given_back: list[int] = []
    owner = Owner()
    dropped = WhenDropped(owner, given_back.append, 1, at_exit=True)
    assert dropped.cancel()
    assert not dropped.cancel()
    del owner
    other = Owner()
    WhenDropped(other, given_back.append, 2, at_exit=True)
    del other
    wait_until(lambda: given_back)
    assert given_back == [2]


@pytest.mark.nightly
@pytest.mark.parametrize(("at_exit", "printed"), [(True, "given back\n"), (False, "")])
def test_at_the_exit_only_what_outlives_the_process_is_given_back(at_exit: bool, printed: str) -> None:
    program = (
        "from lowtide.engine.teardown import WhenDropped\n"
        "class Owner: pass\n"
        f"owner = Owner(); WhenDropped(owner, print, 'given back', at_exit={at_exit})\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, printed, "")


def start(entry: Callable[[Connection], None]) -> ChildProcess:
    return ChildProcess(f"{__name__}:{entry.__name__}", "lowtide::deaf")


def test_the_program_does_not_wait_for_a_dropped_process_that_ends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "END_S", HANG_S)
    child = start(deaf)
    pid = child.pid
    with raising(signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        del child
        with pytest.raises(Arrived):
            signal.sigtimedwait({signal.SIGUSR2}, HANG_S)
    os.kill(pid, signal.SIGKILL)
    # Reaped by the thread that waits for it.
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_dropped_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "END_S", 0.1)
    child = start(deaf)
    pid = child.pid
    del child
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(("at_exit", "is_waited_for"), [(False, True), (True, False)])
def test_what_the_process_takes_with_it_is_waited_for_and_what_outlives_it_is_not(
    at_exit: bool, is_waited_for: bool
) -> None:
    goes_on, done = threading.Event(), threading.Event()

    def give_back() -> None:
        goes_on.wait(HANG_S)
        done.set()

    WhenDropped.wait()
    owner = Owner()
    WhenDropped(owner, give_back, at_exit=at_exit)
    del owner
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    WhenDropped.wait()
    assert done.is_set() == is_waited_for
    timer.join()
    assert done.wait(HANG_S)


def test_nobody_waits_longer_than_asked_for() -> None:
    goes_on = threading.Event()
    owner = Owner()
    WhenDropped(owner, goes_on.wait, HANG_S, at_exit=False)
    del owner
    WhenDropped.wait(0.05)
    assert not goes_on.is_set()
    goes_on.set()
    WhenDropped.wait()


def test_who_gives_back_does_not_wait_for_itself() -> None:
    waited = threading.Event()

    def give_back() -> None:
        WhenDropped.wait()
        waited.set()

    owner = Owner()
    WhenDropped(owner, give_back, at_exit=False)
    del owner
    assert waited.wait(HANG_S)
