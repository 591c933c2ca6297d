"""Errors that come from a rank's process: of the same type, with the same text, and a note that says where."""

from __future__ import annotations

import sys

import pytest
import torch

from lowtide.engine.errors import CheckpointError, EngineError, EngineStateError, OutOfMemoryError
from lowtide.engine.processes import describe_error, restore_error

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup


class StrangeError(Exception):
    pass


def sent(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - it is what the test is about
        return restore_error(describe_error(raised), "rank 1 of 2 (pid 4711)")


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("no room for 3 bytes"),
        CheckpointError("model.safetensors is cut short"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("none"),
        KeyboardInterrupt(),
        EngineStateError("wake", "running", ("sleep",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_type_and_the_text_stay(error: BaseException) -> None:
    received = sent(error)
    assert type(received) is type(error)
    assert str(received) == str(error)


def test_notes_say_where_it_was_raised() -> None:
    error = CheckpointError("gone")
    error.__notes__ = ["while undoing it, the pool failed too"]
    own, where, traceback = sent(error).__notes__
    assert own == "while undoing it, the pool failed too"
    assert where == "raised in rank 1 of 2 (pid 4711)"
    assert "in sent" in traceback
    assert traceback.endswith("while undoing it, the pool failed too")


def test_a_type_that_nobody_knows_comes_as_an_engine_error_that_names_it() -> None:
    received = sent(StrangeError("odd"))
    assert type(received) is EngineError
    assert str(received).endswith("test_remote_errors.StrangeError: odd")


def test_a_module_s_other_names_are_no_errors() -> None:
    remote = describe_error(ValueError("x"))
    for name in ("print", "annotations", "nothing"):
        import msgspec

        received = restore_error(msgspec.structs.replace(remote, name=name), "rank 0")
        assert type(received) is EngineError


def test_a_group_keeps_its_parts() -> None:
    received = sent(ExceptionGroup("shutting down", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])]))
    assert isinstance(received, BaseExceptionGroup)
    assert received.message == "shutting down"
    first, inner = received.exceptions
    assert (type(first), str(first)) == (ValueError, "a")
    assert isinstance(inner, BaseExceptionGroup)
    assert type(inner.exceptions[0]) is KeyError
    assert "raised in rank 1 of 2 (pid 4711)" in first.__notes__
