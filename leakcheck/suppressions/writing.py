"""Writes entries for findings into a file of suppressions, with the reasons left to a person."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.leakcheck.suppressions.toml import (
    OWN_TABLE,
    SuppressionError,
    header,
    read_text,
    table_of,
    written_entries,
)
from lowtide.reports.finding_lines import suppression_entry
from lowtide.reports.schema import Finding


@dataclass(frozen=True)
class Added:
    """What was written into a file.

    Attributes:
        entries: the line of each new entry, and the finding that it is for.
        known: how many further findings had an entry in the file already.
    """

    entries: tuple[tuple[int, Finding], ...]
    known: int


def write_entries(findings: Iterable[Finding], table: Sequence[str] = OWN_TABLE) -> str:
    """TOML for a file of suppressions: an entry per fingerprint that is not suppressed yet.

    The reason is left to a person: until it is filled in, `load` refuses what is written here.

    Args:
        findings: of a report.
        table: the name of the tables that are entries: `OWN_TABLE`, or `PYPROJECT_TABLE` for a `pyproject.toml`.
    """
    return "\n".join(suppression_entry(finding, header(table)) for finding in _open(findings))


def append_entries(path: Path, findings: Iterable[Finding]) -> Added:
    """Write an entry at the end of a file for each finding that is not suppressed and has none in it yet.

    All that the file has stays as it is; it is made if there is none, and written as a whole or not at all.

    Raises:
        SuppressionError: the file cannot be used, or not be written; it is as it was.
    """
    text = _text_of(path)
    table = table_of(path)
    # As they are written: entries that wait for their reason are entries too.
    known = {str(entry.values.get("fingerprint", "")).lower() for entry in written_entries(text, str(path), table)}
    wanted = _open(findings)
    new = [finding for finding in wanted if finding.fingerprint.lower() not in known]
    if not new:
        return Added((), len(wanted))
    text += _addition(text, write_entries(new, table))
    try:
        written = written_entries(text, str(path), table)
    except SuppressionError as error:
        # Such as `suppressions = []`, or `tool` as a table on one line, to which nothing can be added.
        problem = f"{path}: no {header(table)} can follow what is there ({error})"
        raise SuppressionError(problem) from error
    _write_whole(path, text.encode())
    lines = [entry.line for entry in written[-len(new) :]]
    return Added(tuple(zip(lines, new, strict=True)), len(wanted) - len(new))


def _open(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding of each fingerprint that is not suppressed."""
    groups: dict[str, Finding] = {}
    for finding in findings:
        if finding.suppressed_by is None:
            groups.setdefault(finding.fingerprint, finding)
    return list(groups.values())


def _text_of(path: Path) -> str:
    """The file's text; none where there is no file yet."""
    if not path.exists():
        return ""
    # A device or a pipe would be replaced by a file.
    if not path.is_file():
        raise SuppressionError(f"{path}: is no file")
    return read_text(path)


def _addition(text: str, entries: str) -> str:
    """New entries as they stand behind `text`: after an empty line, with its line ends."""
    end = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text or text.endswith(2 * end) else "\n"
    if text and not text.endswith("\n"):
        gap += "\n"
    return (gap + entries).replace("\n", end)


def _write_whole(path: Path, data: bytes) -> None:
    # Where links lead: it is the file that changes, and not the link.
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        # Replacing a file asks for no right to write to it.
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, os.strerror(13))
        try:
            partial.write_bytes(data)
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise SuppressionError(f"{path}: cannot be written: {error.strerror}") from error
