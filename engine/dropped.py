"""What is given back for an object that its owner has dropped without closing it."""

from __future__ import annotations

import atexit
import time
import weakref
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

GIVEN_BACK_S = 60.0
"""Seconds after which nobody waits any longer for memory to be given back; for 80 GiB it takes less than one."""


class WhenDropped:
    """Calls a function once an object is collected, unless `cancel` came first; the call has a thread of its own.

    Python drops what a signal handler raises while the callback of a weak reference runs: a Ctrl-C, a time limit. So
    the callback is a callable of C, in which no handler runs, and all it does is start a thread, in which none runs
    either. `weakref.finalize` calls Python code.

    Args:
        dropped: the object.
        give_back: what to call; it holds no reference to the object. What it raises is printed by Python.
        arguments: its arguments.
        at_exit: call it at the interpreter's exit for an object that is still there.
    """

    _waiting: ClassVar[dict[WhenDropped, bool]] = {}
    _given_back_by: ClassVar[dict[WhenDropped, int]] = {}

    def __init__(self, dropped: object, give_back: Callable[..., Any], *arguments: Any, at_exit: bool) -> None:
        self._give_back = partial(give_back, *arguments)
        self._at_exit = at_exit
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
