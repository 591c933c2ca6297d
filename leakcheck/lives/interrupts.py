"""A Ctrl-C that gets lost: Python drops what is raised in a finalizer, and an engine may catch anything."""

from __future__ import annotations

from types import FrameType

from lowtide.probes.originals import signal, threading


class Interrupts:
    """While it is entered, remembers that there was a Ctrl-C, which is raised as ever.

    Only in the main thread, and only where nobody else has taken the signal over; else it hears nothing.
    """

    def __init__(self) -> None:
        self.heard = False
        self._is_installed = False

    def __enter__(self) -> Interrupts:
        self.heard = False
        if threading.current_thread() is threading.main_thread():
            self._is_installed = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_installed:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def raise_if_heard(self) -> None:
        """Raises again what nobody may have seen.

        Raises:
            KeyboardInterrupt: there was one since this was entered.
        """
        if self.heard:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        signal.default_int_handler(number, frame)
