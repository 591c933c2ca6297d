"""Ctrl-C while a process talks to another: held back where it would tear a message, raised where it cannot."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class HeldInterrupt:
    """Holds SIGINT back while it is entered, but for `waiting`; elsewhere than in the main thread it does nothing.

    A `KeyboardInterrupt` between sending an order and taking its answer in would leave neither side knowing what the
    other does.

    Attributes:
        has_come: whether one has come for which there was no wait any more; nobody has raised it.
    """

    def __init__(self) -> None:
        self.has_come = False
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

    def waiting(self, wait: Callable[[], _Result]) -> _Result:
        """What `wait` returns; an interrupt breaks it off, also one that was held back before.

        Args:
            wait: changes nothing, so that it can be called again.

        Raises:
            KeyboardInterrupt: or whatever else the program's handler of SIGINT raises.
        """
        self._lets_through = True
        try:
            if self.has_come:
                self._on_signal(signal.SIGINT, None)
            return wait()
        finally:
            self._lets_through = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.has_come = not self._lets_through
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
