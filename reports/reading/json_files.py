"""Reads JSON into types; whatever the file is, the outcome is the data or one line that says what is wrong."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

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
    """Return the bytes of a file.

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
        # Before msgspec 0.23 that is an error of Python's.
        if "UTF-8" in str(error):
            raise UnreadableError("it is no UTF-8 text") from error
        raise UnreadableError(plain(str(error))) from error
    except UnicodeDecodeError as error:
        raise UnreadableError("it is no UTF-8 text") from error
    except RecursionError as error:
        raise UnreadableError("it is nested too deeply") from error


def plain(text: str) -> str:
    """Return a text of unknown origin as part of a line: nothing in it acts on a terminal, and it has an end."""
    return one_line(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


_SCHEMA = re.compile(r"lowtide-report/(\d{1,9})")


_MOST_NESTED = 8
"""Parts of parts of a finding: runs write one level, and what goes through them may call itself for each."""


class _HasParts(Protocol):
    @property
    def parts(self) -> Iterable[_HasParts]: ...


class _Head(msgspec.Struct):
    """The two fields of a report that every version has; others are passed over."""

    schema: str
    version: str = ""


def why_unreadable(data: bytes, error: UnreadableError, own: str) -> str:
    """Return what is wrong with a report that cannot be decoded, and what to do; one line.

    Args:
        data: the file.
        error: what decoding it said.
        own: the schema that this version reads, as `lowtide-report/1`.
    """
    try:
        head = decode_json(data, _Head)
    except UnreadableError:
        return f"is not a {own} report: {error}: write it again, or restore it from where it was copied"
    written, read = _SCHEMA.fullmatch(head.schema), _SCHEMA.fullmatch(own)
    if written is None or read is None:
        return f"is not a {own} report: its schema is {plain(repr(head.schema))}: name the folder of a report"
    by = f" by lowtide {plain(head.version)}" if head.version else ""
    if int(written[1]) > int(read[1]):
        return f"was written{by} as {written[0]}, which is newer than {own}: update lowtide to read it"
    if int(written[1]) < int(read[1]):
        return f"was written{by} as {written[0]}, which is older than {own}: run lowtide again, or read it with that"
    return f"is not a {own} report: {error}: it was written{by}; read it with that version, or write it again"


def refuse_deep_parts(findings: Iterable[_HasParts]) -> None:
    """Do nothing if findings have parts as runs write them.

    Raises:
        UnreadableError: there are parts of parts of parts, deeper than anything that is made.
    """
    level = list(findings)
    for _ in range(_MOST_NESTED):
        level = [part for finding in level for part in finding.parts]
    if level:
        raise UnreadableError(f"it has findings with parts {_MOST_NESTED} deep")
