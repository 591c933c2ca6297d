"""Taking down to the end: all steps run, all errors come out, and nothing stays in the frames of an error."""

from __future__ import annotations

import functools
import sys
import weakref

import pytest

from lowtide.engine.teardown import Teardown, release_frames

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
    assert teardown.complete
    assert not teardown.run("the second", lambda: fail(ValueError("two")))
    assert teardown.run("the third", lambda: done.append(3))
    assert (done, teardown.complete) == ([1, 3], False)
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
