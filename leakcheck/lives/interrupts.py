"""A Ctrl-C that gets lost: Python drops what is raised in a finalizer, and an engine may catch anything."""

from __future__ import annotations

from types import FrameType
from typing import Any

from lowtide.probes.originals import in_main_thread, signal


class Interrupts:
    """While it is entered, remembers that there was a Ctrl-C, which is raised as ever.

    Only in the main thread, and only where nobody but another one of these has taken the signal over, whose Ctrl-C is
    this one's, too; else it hears nothing.
    """

    def __init__(self) -> None:
        self.heard = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self.heard = False
        if in_main_thread():
            before = signal.getsignal(signal.SIGINT)
            outer = getattr(before, "__self__", None)
            if before is signal.default_int_handler or isinstance(outer, Interrupts):
                self.heard = isinstance(outer, Interrupts) and outer.heard
                self._before = before
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def raise_if_heard(self) -> None:
        """Raise again what nobody may have seen.

        Raises:
            KeyboardInterrupt: there was one since this was entered.
        """
        if self.heard:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        self._before(number, frame)
