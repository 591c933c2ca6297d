"""Ctrl-C while a process talks to another: held back where it would tear a message, raised where it cannot."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

SLICE_S = 0.2
"""Seconds of one wait: a signal that the kernel gave to another thread of the process does not break it off."""

_Result = TypeVar("_Result")


class HeldInterrupt:
    """Holds SIGINT back while it is entered, but for `waiting`; elsewhere than in the main thread it does nothing.

    A `KeyboardInterrupt` between sending an order and taking its answer in would leave neither side knowing what the
    other does.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._lets_through = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> HeldInterrupt:
        """Hold interrupts back from now on."""
        handler = signal.getsignal(signal.SIGINT)
        # One that is ignored, or handled below Python, raises nothing.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let them through again."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def waiting(self, wait: Callable[[float], _Result], deadline: float | None = None) -> _Result:
        """Call `wait` until it returns something; an interrupt breaks it off, also one that was held back before.

        Args:
            wait: waits until a time of `time.monotonic`; changes nothing, so that it can be called again.
            deadline: when to give up and return the nothing that `wait` returns; None is never.

        Raises:
            KeyboardInterrupt: or whatever else the program's handler of SIGINT raises.
        """
        self._lets_through = True
        try:
            if self._has_come:
                self._on_signal(signal.SIGINT, None)
            while True:
                end = time.monotonic() + SLICE_S
                end = end if deadline is None else min(end, deadline)
                result = wait(end)
                if result or end == deadline:
                    return result
        finally:
            self._lets_through = False

    def deliver(self) -> None:
        """Call the program's handler for an interrupt that was held back and that no `waiting` has raised.

        Raises:
            KeyboardInterrupt: or whatever else the handler raises.
        """
        if self._has_come and self._handler is not None:
            self._has_come = False
            self._handler(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._has_come = not self._lets_through
        if self._lets_through and self._handler is not None:
            # Before the handler raises: it may do so on the way out of `waiting`.
            self._lets_through = False
            self._handler(number, frame)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread: a process that is started meanwhile has it blocked until it unblocks it itself.

    Else an interrupt would end a new process with a traceback of its imports.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
