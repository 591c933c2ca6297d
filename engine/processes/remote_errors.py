"""Exceptions that go from one of the engine's processes to another: as text, and never as pickles."""

from __future__ import annotations

import builtins
import sys
import traceback

import msgspec
import torch

from lowtide.engine import errors
from lowtide.engine.errors import EngineError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


class RemoteError(msgspec.Struct, frozen=True):
    """An exception of another process.

    Attributes:
        module: of its type.
        name: of its type.
        message: its text.
        notes: its notes.
        traceback: as Python prints it.
        parts: of an exception group.
        cause: what it was raised from; None where it was not.
    """

    module: str
    name: str
    message: str
    notes: list[str]
    traceback: str
    parts: list[RemoteError]
    cause: RemoteError | None = None


def describe_error(error: BaseException) -> RemoteError:
    """An exception as a message has it."""
    group = isinstance(error, BaseExceptionGroup)
    return RemoteError(
        module=type(error).__module__,
        name=type(error).__qualname__,
        message=error.message if isinstance(error, BaseExceptionGroup) else str(error),
        notes=list(getattr(error, "__notes__", ())),
        # Those of a group's parts come with the parts.
        traceback="" if group else "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        parts=[describe_error(part) for part in error.exceptions] if isinstance(error, BaseExceptionGroup) else [],
        cause=None if error.__cause__ is None else describe_error(error.__cause__),
    )


def restore_error(remote: RemoteError, where: str) -> BaseException:
    """The exception with its type, its text and its notes, and a note that says where it was raised.

    A type that is neither the engine's nor Python's nor torch's comes as an `EngineError` that names it.

    Args:
        remote: from the message.
        where: in which process, such as `rank 1 of 2 (pid 4711)`.
    """
    if remote.parts:
        error: BaseException = BaseExceptionGroup(remote.message, [restore_error(part, where) for part in remote.parts])
    else:
        error = _restore_one(remote)
    notes = [*remote.notes, f"raised in {where}"]
    if remote.traceback:
        notes.append(f"its traceback there:\n{remote.traceback.rstrip()}")
    # What `add_note` fills; Python 3.10 has the attribute's readers (pytest, exceptiongroup), not the method.
    error.__notes__ = notes  # type: ignore[attr-defined]
    if remote.cause is not None:
        error.__cause__ = restore_error(remote.cause, where)
    return error


def _restore_one(remote: RemoteError) -> BaseException:
    kind = _known_type(remote.module, remote.name)
    if kind is None:
        return EngineError(f"{remote.module}.{remote.name}: {remote.message}")
    # Not its own constructor, which may want other arguments than a text.
    error = kind.__new__(kind, remote.message)
    error.args = (remote.message,)
    return error


def _known_type(module: str, name: str) -> type[BaseException] | None:
    if module == torch.OutOfMemoryError.__module__ and name == torch.OutOfMemoryError.__qualname__:
        return torch.OutOfMemoryError
    source = {errors.__name__: errors, builtins.__name__: builtins}.get(module)
    kind = getattr(source, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None
