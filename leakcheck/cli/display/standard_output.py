"""Standard output and error that do not change how a command ends, whatever reads it, and in whatever encoding."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

_SPELLED = {
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{MIDDLE DOT}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{MINUS SIGN}": "-",
    "\N{EM DASH}": "-",
    **dict(zip("▁▂▃▄▅▆▇█", "_.,-~=+#", strict=True)),
}
"""What lowtide prints and some encodings do not have, in ASCII."""

_CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class GuardedStream:
    """Standard output or error with its writes guarded; all else is the stream's.

    Attributes:
        problem: why it could not be written, in words; None where all was written, or nobody reads it any more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> _Bytes:
        """Where bytes are written; guarded likewise."""
        return _Bytes(self._stream.buffer, self)

    def write(self, text: str) -> int:
        """Write a text, or drop it where none can be written any more."""
        self.attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        self.attempt(self._stream.flush)

    def attempt(self, call: Callable[..., object], *arguments: object) -> None:
        """Make a call that writes. Where that is not possible, this is noted, and all that follows is dropped.

        It is no error for the caller: a life whose lines nobody can read still has a report, and a verdict.
        """
        try:
            call(*arguments)
        except OSError as error:
            if error.errno in _CANNOT_BE_WRITTEN:
                self.problem = f"the output cannot be written: {os.strerror(error.errno)}"
            elif not isinstance(error, BrokenPipeError):
                raise
            # What the stream still has is written when the process ends, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Bytes:
    def __init__(self, stream: BinaryIO, output: GuardedStream) -> None:
        self._stream = stream
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: bytes) -> int:
        self._output.attempt(self._stream.write, data)
        return len(data)

    def flush(self) -> None:
        self._output.attempt(self._stream.flush)


def guard_standard_output() -> GuardedStream:
    """From here on no write to standard output or error ends in a traceback, which has the exit code of a leak.

    What the encoding does not have is spelled in ASCII, letters by their numbers. Where the reader has gone away, as
    `head` does, the rest is dropped: the exit code is still the verdict's.
    """
    sys.stderr = cast(TextIO, _guarded(sys.stderr))
    guarded = _guarded(sys.stdout)
    sys.stdout = cast(TextIO, guarded)
    return guarded


def _guarded(stream: TextIO | GuardedStream | None) -> GuardedStream:
    if isinstance(stream, GuardedStream):
        return stream
    if stream is None:  # closed by who started this process, as daemons do
        stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed with the process
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        codecs.register_error("lowtide-ascii", _spell)
        stream.reconfigure(errors="lowtide-ascii")
    return GuardedStream(stream)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(each) or ascii(each)[1:-1] for each in missing), error.end
