"""Taking down to the end: all steps run, all errors come out, frames keep nothing, and what was dropped comes back."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from lowtide.engine import processes, teardown
from lowtide.engine.processes import ChildProcess, Connection
from lowtide.engine.teardown import Teardown, WhenDropped, release_frames
from tests.sent_signals import Arrived, all_arrive_elsewhere, raising
from tests.waiting import HANG_S, wait_until

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup


class Tensor:
    """Stands for what takes memory."""


def fail(error: BaseException) -> None:
    raise error


def test_every_step_runs_and_each_says_whether_it_did() -> None:
    done: list[int] = []
    teardown = Teardown("shutting down")
    assert teardown.run("the first", lambda: done.append(1))
    assert not teardown.run("the second", lambda: fail(ValueError("two")))
    assert teardown.run("the third", lambda: done.append(3))
    assert done == [1, 3]
    with pytest.raises(ExceptionGroup, match="shutting down: the second failed") as caught:
        teardown.finish()
    assert [str(error) for error in caught.value.exceptions] == ["two"]


def test_errors_come_out_together_in_order_and_once() -> None:
    teardown = Teardown("shutting down")
    for number in (1, 2):
        teardown.run(f"step {number}", functools.partial(fail, ValueError(number)))
    with pytest.raises(ExceptionGroup, match="step 1, step 2 failed") as caught:
        teardown.finish()
    assert [error.args for error in caught.value.exceptions] == [(1,), (2,)]
    teardown.finish()


def test_a_ctrl_c_is_collected_too_and_comes_out() -> None:
    teardown = Teardown("shutting down")
    assert not teardown.run("a step", lambda: fail(KeyboardInterrupt()))
    with pytest.raises(BaseExceptionGroup) as caught:
        teardown.finish()
    assert not isinstance(caught.value, Exception)


def test_nothing_that_failed_is_nothing_to_raise() -> None:
    teardown = Teardown("shutting down")
    teardown.run("a step", lambda: None)
    teardown.finish()
    error = ValueError("on its way")
    teardown.finish_into(error)
    assert not hasattr(error, "__notes__")


def test_what_failed_while_something_is_undone_is_a_note_of_the_error_on_its_way() -> None:
    error = ValueError("on its way")
    error.__notes__ = ["said before"]
    teardown = Teardown("undoing")
    teardown.run("the first", lambda: fail(OSError("one")))
    teardown.run("the second", lambda: fail(KeyError("two")))
    teardown.finish_into(error)
    assert error.__notes__ == [
        "said before",
        "while undoing it, the first failed too: OSError('one')",
        "while undoing it, the second failed too: KeyError('two')",
    ]
    # They are told; nobody raises them again.
    teardown.finish()


def hold_and_fail(kept: list[weakref.ref[Tensor]], error: BaseException) -> None:
    tensor = Tensor()
    kept.append(weakref.ref(tensor))
    raise error


def caused(kept: list[weakref.ref[Tensor]]) -> None:
    try:
        hold_and_fail(kept, KeyError("cause"))
    except KeyError as error:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        raise ValueError("on its way") from error


def met(kept: list[weakref.ref[Tensor]]) -> None:
    try:
        hold_and_fail(kept, KeyError("context"))
    except KeyError:
        hold_and_fail(kept, ValueError("on its way"))


@pytest.mark.parametrize("function", [caused, met])
def test_an_error_that_is_kept_keeps_no_locals_of_the_calls_that_it_came_through(function: object) -> None:
    kept: list[weakref.ref[Tensor]] = []
    assert callable(function)
    try:
        function(kept)
    except ValueError as error:
        saved = error
        assert all(reference() is not None for reference in kept)
        release_frames(saved, None)
    assert len(kept) == 2
    assert [reference() for reference in kept] == [None, None]


def test_what_the_caller_was_handling_is_left_alone() -> None:
    kept: list[weakref.ref[Tensor]] = []
    try:
        hold_and_fail(kept, KeyError("the caller's"))
    except KeyError as handled:
        try:
            hold_and_fail(kept, ValueError("the engine's"))
        except ValueError as error:
            release_frames(error, handled)
            assert [reference() is not None for reference in kept] == [True, False]


def test_what_comes_beside_the_caller_s_error_is_forgotten_all_the_same() -> None:
    kept: list[weakref.ref[Tensor]] = []
    try:
        hold_and_fail(kept, KeyError("the caller's"))
    except KeyError as handled:
        try:
            caused(kept)
        except ValueError as error:
            # Looked at last of what it hangs on, as the context is, which here is the caller's.
            cause, error.__context__ = error.__cause__, handled
            assert cause is not None
            release_frames(error, handled)
    assert [reference() is not None for reference in kept] == [True, False, False]


def test_errors_that_are_each_other_s_context_do_not_go_round_for_ever() -> None:
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    release_frames(first, None)


class Owner:
    """Something that has what must be given back."""


def deaf(connection: Connection) -> None:
    """Stay when the connection is closed; the process's end is a kill."""
    del connection
    signal.sigwait({signal.SIGUSR1})


def dropped_owner() -> partial[object]:
    owners = [Owner()]
    WhenDropped(owners[0], int, at_exit=False)
    return partial(owners.clear)


def test_all_signals_arrive_that_come_before_an_owner_is_dropped() -> None:
    all_arrive_elsewhere(__name__, "dropped_owner")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_no_thread_could_be_started_for_is_given_back_by_the_next_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise Arrived

    given_back: list[int] = []
    owner = Owner()
    with monkeypatch.context() as patched:
        patched.setattr(teardown, "start_new_thread", fails)
        WhenDropped(owner, given_back.append, 1, at_exit=False)
    del owner
    assert given_back == []
    WhenDropped.wait(HANG_S)
    assert given_back == [1]


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
    monkeypatch.setattr(processes, "END_S", HANG_S)
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
    monkeypatch.setattr(processes, "END_S", 0.1)
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
