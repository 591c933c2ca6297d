"""Runs a program in a pseudo-terminal of a given width, and reads the tables of figures that it prints."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RULE = re.compile(r"─+")


def in_terminal(columns: int, arguments: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """The exit code of `python ARGUMENTS`, and the lines that a terminal of `columns` columns is sent."""
    code, sent = sent_to_terminal(columns, arguments, folder)
    return code, lines_of(sent)


def lines_of(sent: str) -> list[str]:
    """What a terminal is sent, without control codes; what is drawn over itself is a line for each drawing."""
    return re.split(r"\r?\n|\r", _CONTROL.sub("", sent))


def sent_to_terminal(columns: int, arguments: Sequence[str], folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code of `python ARGUMENTS`, and all that a terminal of `columns` columns is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**env, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
    )
    os.close(theirs)
    sent = b"".join(_read(ours))
    os.close(ours)
    code = process.wait()
    return code, sent.decode()


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            sent = os.read(terminal, 65536)
        except OSError:
            # The last process that had the terminal open is gone.
            return
        if not sent:
            return
        yield sent


def tables(lines: Sequence[str]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The title and the columns of each table; one that goes on below is one table, its columns side by side.

    A column that occurs twice, as `infer` in a ledger, is found as `infer`, `infer 2`, ….
    """
    title, found = "", dict[str, list[str]]()
    for turn, line in enumerate(lines):
        if not _RULE.fullmatch(line.strip()) or lines[turn - 1].split()[0] not in ("cycle", "line"):
            continue
        rows = list(_rows(lines[turn + 1 :]))
        above = lines[turn - 2]
        if "(MiB" in above:
            if title:
                yield title, found
            title, found = above, {}
        for name, cells in _columns(lines[turn - 1], rows):
            if name in found and found[name] == cells and name in ("cycle", "stage", "line"):
                continue
            same = sum(known.partition("  ")[0] == name for known in found)
            found[f"{name}  {same + 1}" if same else name] = cells
    if title:
        yield title, found


def _rows(lines: Sequence[str]) -> Iterator[str]:
    """The rows below a head: those between cycles and above a sum are parted by a line of blanks."""
    for line in lines:
        if line and not line.strip():
            continue
        if not re.match(r"(\s*\d+  \S|\S.*\s{2,}-?[\d—.]+\s*$)", line):
            return
        yield line


def _columns(head: str, rows: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each column by its name, with its cells: figures end where their head ends, labels begin where theirs begins."""
    names = [(found.group(), found.start(), found.end()) for found in re.finditer(r"\S+(?: \S+)*", head)]
    for turn, (name, start, end) in enumerate(names):
        if name in ("stage", "line"):
            # What is beside it is set to the right, and may begin before its head.
            yield name, [re.split(r"\s{2,}", row[start:])[0] for row in rows]
        else:
            before = 0 if turn == 0 else names[turn - 1][2]
            yield name, [re.split(r"\s{2,}", row[before:end])[-1].strip() for row in rows]
