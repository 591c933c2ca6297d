"""The TOML of suppressions: entries as they are written, and the line of each value, which parsers do not report.

New ones are written for findings, with the reasons left to a person.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lowtide.probes.objects.described import constant_text
from lowtide.reports.finding_lines import suppression_entry
from lowtide.reports.schema import Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

OWN_TABLE = ("suppressions",)
"""Where the entries are in a file of their own."""

PYPROJECT_TABLE = ("tool", "lowtide", "suppressions")
"""Where they are in a `pyproject.toml`."""

GATE_TABLE = "gate"
"""The table in the same file that configures `lowtide gate`."""

# What can hide the end of a line from a reader of TOML, and the end of a line itself.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?""""{0,2}' + r"|'''.*?''''{0,2}" + r'|"(?:\\.|[^"\\])*"' + r"|'[^']*'|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)


class SuppressionError(ValueError):
    """A file of suppressions that cannot be used; one line with the file, the line and what is allowed instead."""


class Written(msgspec.Struct, frozen=True):
    """An entry as it is written: its values, and the line of its header and of each key."""

    file: str
    line: int
    lines: Mapping[str, int]
    values: Mapping[str, Any]

    def error(self, message: str, key: str = "") -> SuppressionError:
        """Return what is wrong with the entry, or with the value of one key, and where that is."""
        return SuppressionError(f"{self.file}:{self.lines.get(key, self.line)}: {message}")

    def text(self, key: str) -> str | None:
        """Return the text of a key; None without it.

        Raises:
            SuppressionError: it is no text, or an empty one.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{key} must be text, and not empty; it is {constant_text(value)}", key)
        return value.strip()

    def required(self, key: str, what: str) -> str:
        """Return the text of a key that every entry has.

        Raises:
            SuppressionError: there is none.
        """
        text = self.text(key)
        if text is None:
            raise self.error(f"an entry needs a {key}: {what}")
        return text

    def one_of(self, key: str, allowed: Collection[str]) -> str | None:
        """Return the text of a key that has a few possible values; None without it.

        Raises:
            SuppressionError: it is none of them.
        """
        text = self.text(key)
        if text is not None and text not in allowed:
            raise self.error(f"unknown {key} {text!r}; allowed: {', '.join(allowed)}", key)
        return text


class _Statement(msgspec.Struct, frozen=True):
    """A table's header or a key with its value: where it is, and the full name of what it is about."""

    line: int
    name: tuple[str, ...]
    opens_entry: bool


def table_of(path: Path) -> tuple[str, ...]:
    """Return the name of the tables in which a file has its entries."""
    return PYPROJECT_TABLE if path.name == "pyproject.toml" else OWN_TABLE


def header(table: Sequence[str]) -> str:
    """Return the line above an entry: `[[suppressions]]`."""
    return f"[[{'.'.join(table)}]]"


def read_text(path: Path) -> str:
    """Read a file's text, with its line ends as they are.

    Raises:
        SuppressionError: it cannot be read, or is no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SuppressionError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SuppressionError(f"{path}:{line}: not TOML: a byte that is not UTF-8") from error


def parse_document(text: str, file: str) -> dict[str, Any]:
    """Return the values of a whole file.

    Raises:
        SuppressionError: it is not TOML.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        number = re.match(r"line (\d+)", place)
        line = int(number[1]) if number else text.rstrip("\n").count("\n") + 1
        raise SuppressionError(f"{file}:{line}: not TOML: {message}") from error
    except (ValueError, RecursionError) as error:
        raise SuppressionError(f"{file}: cannot be read: {refused(error)}") from error
    return document


def refused(error: ValueError | RecursionError) -> str:
    """Return why Python's reader of TOML refuses a document, as far as it is not for its syntax."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "a number in it has too many digits" if "digits" in str(error) else str(error)


def value_at(document: object, keys: Iterable[str]) -> object | None:
    """Return the value under some keys, one inside the other; None if there is none."""
    for key in keys:
        if not isinstance(document, dict) or key not in document:
            return None
        document = document[key]
    return document


def written_entries(text: str, file: str, table: tuple[str, ...]) -> list[Written]:
    """Return the entries of a file, whatever they say.

    Raises:
        SuppressionError: it is not TOML, or what is meant to be entries has another form.
    """
    document = parse_document(text, file)
    statements = list(_statements(text))
    if len(table) == 1:
        # The file is for nothing else but the gate, so another name is a slip, which would suppress nothing in silence.
        for statement in statements:
            if statement.name[0] not in (table[0], GATE_TABLE):
                problem = f"unknown key {statement.name[0]!r}; allowed: {header(table)}"
                raise SuppressionError(f"{file}:{statement.line}: {problem}")
    values = value_at(document, table)
    if values is None:
        return []
    about = [statement for statement in statements if statement.name[: len(table)] == table]
    lines: list[dict[str, int]] = []
    headers = []
    for statement in about:
        if statement.name == table and statement.opens_entry:
            headers.append(statement.line)
            lines.append({})
        elif lines and len(statement.name) > len(table):
            lines[-1].setdefault(statement.name[len(table)], statement.line)
    if not isinstance(values, list) or len(values) != len(headers):
        line = about[0].line if about else 1
        raise SuppressionError(f"{file}:{line}: each suppression is a table of its own, under {header(table)}")
    return [Written(file, line, keys, entry) for line, keys, entry in zip(headers, lines, values, strict=True)]


def _statements(text: str) -> Iterator[_Statement]:
    """Yield what a valid document consists of, with lines, which the parser does not report."""
    table: tuple[str, ...] = ()
    for line, source in _logical_lines(text):
        name: list[str] = []
        value: object = tomllib.loads(source)
        while isinstance(value, dict) and value:
            key = next(iter(value))
            name.append(key)
            value = value[key]
        if source.lstrip().startswith("["):
            table = tuple(name)
            yield _Statement(line, table, source.lstrip().startswith("[["))
        elif name:
            yield _Statement(line, (*table, *name), opens_entry=False)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, those that one array or one string spans as one."""
    text += "\n"
    depth, start, line = 0, 0, 1
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in ("[", "{"):
            depth += 1
        elif mark in ("]", "}"):
            depth -= 1
        elif mark == "\n" and depth == 0:
            yield line, text[start : token.end()]
            line += text.count("\n", start, token.end())
            start = token.end()


class Added(msgspec.Struct, frozen=True):
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
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise SuppressionError(f"{path}: cannot be written: {error.strerror}") from error
    lines = [entry.line for entry in written[-len(new) :]]
    return Added(tuple(zip(lines, new, strict=True)), len(wanted) - len(new))


def _open(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each fingerprint that is not suppressed."""
    groups: dict[str, Finding] = {}
    for finding in findings:
        if finding.suppressed_by is None:
            groups.setdefault(finding.fingerprint, finding)
    return list(groups.values())


def _text_of(path: Path) -> str:
    """Return the file's text; none where there is no file yet."""
    if not path.exists():
        return ""
    # A device or a pipe would be replaced by a file.
    if not path.is_file():
        raise SuppressionError(f"{path}: is no file")
    return read_text(path)


def _addition(text: str, entries: str) -> str:
    """Return new entries as they stand behind `text`: after an empty line, with its line ends."""
    end = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text or text.endswith(2 * end) else "\n"
    if text and not text.endswith("\n"):
        gap += "\n"
    return (gap + entries).replace("\n", end)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all; where links lead, it is the file that changes, and not the link."""
    target = Path(os.path.realpath(path))
    # Replacing a file asks for no right to write to it.
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, os.strerror(13))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
