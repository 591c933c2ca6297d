"""Takes things down to the end: every step of a teardown, the frames of an error, and what was dropped unclosed."""

from __future__ import annotations

import atexit
import sys
import time
import traceback
import weakref
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

GIVEN_BACK_S = 60.0
"""Seconds after which nobody waits any longer for memory to be given back; for 80 GiB it takes less than one."""


class WhenDropped:
    """Calls a function once an object is collected, unless `cancel` came first; the call has a thread of its own.

    Python drops what a signal handler raises while the callback of a weak reference runs: a Ctrl-C, a time limit. So
    the callback is a callable of C, in which no handler runs, and all it does is start a thread, in which none runs
    either. `weakref.finalize` calls Python code.
    """

    _waiting: ClassVar[dict[WhenDropped, bool]] = {}
    _given_back_by: ClassVar[dict[WhenDropped, int]] = {}

    def __init__(self, dropped: object, give_back: Callable[..., Any], *arguments: Any, at_exit: bool) -> None:
        self._give_back = partial(give_back, *arguments)
        self._at_exit = at_exit
        self._unclaimed = [True]
        self._unfinished = allocate_lock()
        self._unfinished.acquire()
        # `next` is called with the dead reference, which it takes for what to return at the end, that never comes.
        starts = partial(next, map(start_new_thread, repeat(self._run), repeat(())))
        self._watch: weakref.ref[object] | None = weakref.ref(dropped, starts)
        self._waiting[self] = at_exit

    def cancel(self) -> bool:
        """Call nothing any more; returns whether it would still have been called."""
        self._watch = None
        return self._waiting.pop(self, None) is not None

    def _run(self) -> None:
        try:
            self._unclaimed.pop()
        except IndexError:  # another thread does it, or has done it
            return
        self._given_back_by[self] = get_ident()
        try:
            if self.cancel():
                self._give_back()
        finally:
            del self._given_back_by[self]
            self._unfinished.release()

    @classmethod
    def wait(cls, timeout: float = GIVEN_BACK_S) -> None:
        """Wait until what was dropped so far is given back, at most `timeout` seconds; next to free where nothing was.

        Not for what outlives the process, as a child that takes its time to end, and not for what the calling thread
        itself is giving back.
        """
        end = time.monotonic() + timeout
        for dropped in {**cls._waiting, **cls._given_back_by}:
            watch = dropped._watch
            is_alive = watch is not None and watch() is not None
            if is_alive or dropped._at_exit or cls._given_back_by.get(dropped) == get_ident():
                continue
            if dropped in cls._waiting:
                # Its thread may have come to nothing: an audit hook that is written in Python (filelock has one) hears
                # of each thread that starts, and in it runs the handler of a signal, whose exception ends the start.
                start_new_thread(dropped._run, ())
            if dropped._unfinished.acquire(timeout=max(0, end - time.monotonic())):
                dropped._unfinished.release()

    @classmethod
    def run_at_exit(cls) -> None:
        """Call what is to be called at the interpreter's exit; from then on, no thread can be started."""
        for waiting, at_exit in list(cls._waiting.items()):
            if at_exit:
                waiting._run()
            else:
                waiting.cancel()


atexit.register(WhenDropped.run_at_exit)


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

    def finish(self) -> None:
        """Raise an `ExceptionGroup` of what was collected; a `BaseExceptionGroup` if one was no `Exception`."""
        if self._errors:
            errors, self._errors = self._errors, []
            raise BaseExceptionGroup(f"{self._what}: {', '.join(self._failed)} failed", errors)

    def finish_into(self, error: BaseException) -> None:
        """Attach what was collected to an error that is already on its way out, which stays the one to be raised."""
        errors, self._errors = self._errors, []
        for name, problem in zip(self._failed, errors, strict=True):
            add_notes(error, f"while undoing it, {name} failed too: {problem!r}")


def add_notes(error: BaseException, *notes: str) -> None:
    """Do as `add_note`: Python 3.10 has the readers of its attribute (pytest, exceptiongroup), not the method."""
    error.__notes__ = [*getattr(error, "__notes__", ()), *notes]  # type: ignore[attr-defined]


@contextmanager
def undone_by(undo: Callable[[Teardown], object]) -> Iterator[None]:
    """Run, on an error, the steps that undo what was done; the error notes which of them have failed."""
    try:
        yield
    except BaseException as error:
        teardown = Teardown("undoing it")
        undo(teardown)
        teardown.finish_into(error)
        raise


def release_frames(error: BaseException, handled: BaseException | None) -> None:
    """Forget the locals of the finished calls that `error` came through.

    Whoever keeps the exception keeps its traceback, and with it every tensor in the locals of those calls: memory
    would be back only when the exception is gone.  (trl#5681 and pytorch#27600 are leaks of this kind.)  What the
    caller had `handled` when it called the engine stays: those frames are its own.
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


@contextmanager
def rolled_back() -> Iterator[None]:
    """Let go, on an error, of the memory that the frames of the failed call hold, so that it is back at once."""
    handled = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        release_frames(error, handled)
        WhenDropped.wait()
        raise
