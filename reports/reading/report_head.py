"""Why a report cannot be read: another version's, or no report at all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import msgspec

from lowtide.reports.reading.json_files import UnreadableError, decode_json, plain

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
    """What is wrong with a report that cannot be decoded, and what to do; one line.

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
    """Does nothing if findings have parts as runs write them.

    Raises:
        UnreadableError: there are parts of parts of parts, deeper than anything that is made.
    """
    level = list(findings)
    for _ in range(_MOST_NESTED):
        level = [part for finding in level for part in finding.parts]
    if level:
        raise UnreadableError(f"it has findings with parts {_MOST_NESTED} deep")
