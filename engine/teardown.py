"""Takes things down to the end: a step that raises never skips the later ones, and all errors come out together."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lowtide.engine.dropped import WhenDropped

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


class Teardown:
    """Runs teardown steps one after the other and collects what they raise.

    `KeyboardInterrupt` and the like are collected too: a Ctrl-C in the middle of a shutdown must not keep the rest of
    the memory.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._errors: list[BaseException] = []
        self._failed: list[str] = []

    def run(self, name: str, step: Callable[[], object]) -> bool:
        """Run one step; `name` says in the error what was being taken down.  Returns whether it did not raise."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - collected, raised by `finish`
            self._errors.append(error)
            self._failed.append(name)
            return False
        return True

    @property
    def complete(self) -> bool:
        """Whether no step has raised so far."""
        return not self._failed

    def finish(self) -> None:
        """Raise what was collected.

        Raises:
            ExceptionGroup: the errors of all failed steps, in order; a `BaseExceptionGroup` if one was not an
                `Exception`.
        """
        if self._errors:
            errors, self._errors = self._errors, []
            raise BaseExceptionGroup(f"{self._what}: {', '.join(self._failed)} failed", errors)

    def finish_into(self, error: BaseException) -> None:
        """Attach what was collected to an error that is already on its way out, which stays the one to be raised."""
        errors, self._errors = self._errors, []
        for name, problem in zip(self._failed, errors, strict=True):
            note = f"while undoing it, {name} failed too: {problem!r}"
            # What `add_note` fills; Python 3.10 has the attribute's readers (pytest, exceptiongroup), not the method.
            error.__notes__ = [  # type: ignore[attr-defined]
                *getattr(error, "__notes__", ()),
                note,
            ]


def release_frames(error: BaseException, handled: BaseException | None) -> None:
    """Forget the locals of the finished calls that `error` came through.

    Whoever keeps the exception keeps its traceback, and with it every tensor in the locals of those calls: memory
    would be back only when the exception is gone.  (trl#5681 and pytorch#27600 are leaks of this kind.)

    Args:
        error: on its way out of the engine.
        handled: what the caller was handling when it called the engine; the frames of that are the caller's own.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or current is handled or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]


def rolled_back() -> AbstractContextManager[None]:
    """On an error, let go of the memory that the frames of the failed call hold, so that it is back at once."""
    return _release_on_error(sys.exc_info()[1])


@contextmanager
def _release_on_error(handled: BaseException | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        release_frames(error, handled)
        WhenDropped.wait()
        raise
