"""What is given back for an object that its owner has dropped without closing it."""

from __future__ import annotations

import atexit
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, ClassVar


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

    def __init__(self, dropped: object, give_back: Callable[..., Any], *arguments: Any, at_exit: bool) -> None:
        self._give_back = partial(give_back, *arguments)
        # `next` is called with the dead reference, which it takes for what to return at the end, that never comes.
        starts = partial(next, map(start_new_thread, repeat(self._run), repeat(())))
        self._watch = weakref.ref(dropped, starts)
        self._waiting[self] = at_exit

    def cancel(self) -> bool:
        """Call nothing any more; returns whether it would still have been called."""
        return self._waiting.pop(self, None) is not None

    def _run(self) -> None:
        if self.cancel():
            self._give_back()

    @classmethod
    def run_at_exit(cls) -> None:
        """Call what is to be called at the interpreter's exit."""
        for waiting, at_exit in list(cls._waiting.items()):
            if at_exit:
                waiting._run()


atexit.register(WhenDropped.run_at_exit)
