"""The `lowtide` command: parsing and printing, nothing else."""

import signal
import threading
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """End without a traceback, with the exit code of an interrupt: a terminal's user need not see what is loaded."""
    raise SystemExit(130)


_is_plain = threading.get_ident() == threading.main_thread().ident and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _is_plain:
    signal.signal(signal.SIGINT, _leave)
try:
    from lowtide.leakcheck.cli.commands import app, main
finally:
    if _is_plain:
        signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["app", "main"]
