"""Reads JSON into types; whatever the file is, the outcome is the data or one line that says what is wrong."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from lowtide.reports.escaping import one_line

MOST_BYTES = 512 << 20
"""Of one file. A report of a soak test, with some KiB for each of ten thousand stages, has a tenth of it; and what is
decoded takes some times as much memory as its file."""

_LONGEST = 200
"""Characters of what is said about a file, which may quote it."""

T = TypeVar("T")


class UnreadableError(ValueError):
    """A file that cannot be read as what it should be; the message says why, in one line, and does not name it."""


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        UnreadableError: there is none, it cannot be read, is no regular file (a pipe may never end), or is larger.
    """
    try:
        # Before it is opened: to open a pipe waits for whoever writes into it.
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("is no regular file: name what lowtide has written")
        with path.open("rb") as file:
            # The size that a file reports may be that of a moment ago, and some report none.
            data = b"" if found.st_size > most else file.read(most + 1)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    if max(found.st_size, len(data)) > most:
        raise UnreadableError(f"is larger than {most >> 20} MiB: it is not read")
    return data


def decode_json(data: bytes, kind: type[T]) -> T:
    """JSON as a type.

    Raises:
        UnreadableError: it is no JSON, is cut off, is nested too deeply, or is not of this type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UnreadableError(plain(str(error))) from error
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise UnreadableError(f"it is cut off after {len(data)} bytes") from error
        raise UnreadableError(plain(str(error))) from error
    except UnicodeDecodeError as error:
        raise UnreadableError("it is no UTF-8 text") from error
    except RecursionError as error:
        raise UnreadableError("it is nested too deeply") from error


def plain(text: str) -> str:
    """Return a text of unknown origin as part of a line: nothing in it acts on a terminal, and it has an end."""
    return one_line(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
