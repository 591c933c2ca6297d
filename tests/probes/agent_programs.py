"""Programs that must not notice an agent: each prints what it sees, the same with it and without."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import zipapp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HANG_S = 120.0
"""Seconds after which a program is taken to hang."""


_NUMBERS = re.compile(r"pid[= ]\d+|0x[0-9a-f]+|Thread-\d+|\d{12,}")
"""Of processes, of objects, of threads: they differ from run to run."""


@dataclass(frozen=True)
class Program:
    """A program, and how it is started.

    Attributes:
        text: its code.
        flags: of Python.
        how: whether the code is given with `-c`, as a `file`, a `module` with `-m`, on `stdin`, or in a `zipapp`.
        needs: the library that it imports.
        quick: whether it is run with each change.
        variables: what its environment has besides.
    """

    text: str
    flags: tuple[str, ...] = ()
    how: str = "-c"
    needs: str = ""
    quick: bool = False
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a program printed, and how it ended; numbers of processes and addresses are left out."""

    output: str
    errors: str
    code: int | str


def run(program: Program, python: str, environment: Mapping[str, str], folder: Path) -> Outcome:
    """Run a program to its end.

    Args:
        program: the program.
        python: the interpreter.
        environment: all its variables.
        folder: an empty one, in which it runs.
    """
    command = [python, *program.flags, *_code(program, folder)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment, **dict(program.variables)},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(program.text if program.how == "stdin" else "", timeout=_HANG_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()
        return Outcome("", "", "it hangs")
    return Outcome(_NUMBERS.sub("#", output), _NUMBERS.sub("#", errors), process.returncode)


def _code(program: Program, folder: Path) -> Sequence[str]:
    if program.how == "-c":
        return "-c", program.text
    if program.how == "stdin":
        return ("-",)
    if program.how == "zipapp":
        source = folder / "source"
        source.mkdir()
        (source / "__main__.py").write_text(program.text)
        zipapp.create_archive(source, folder / "program.pyz")
        return ("program.pyz",)
    (folder / "program.py").write_text(program.text)
    return ("-m", "program") if program.how == "module" else ("program.py",)


def _read(path: Path) -> dict[str, Program]:
    """The programs of a file, by their names; see the file's head."""
    found = {}
    for part in path.read_text(encoding="utf-8").split("\n#: ")[1:]:
        head, _, text = part.partition("\n")
        name, *rest = head.split(" | ")
        hows = [each for each in rest if each in ("file", "module", "stdin", "zipapp")]
        found[name] = Program(
            text,
            flags=tuple(word for each in rest if each.startswith("-") for word in each.split()),
            how=hows[0] if hows else "-c",
            needs="".join(each.removeprefix("needs ") for each in rest if each.startswith("needs ")),
            quick="quick" in rest,
            variables=tuple((each.partition("=")[0], each.partition("=")[2]) for each in rest if each[0].isupper()),
        )
    return found


PROGRAMS = _read(Path(__file__).parents[1] / "data" / "agent_programs.txt")


def outcomes(python: str, environment: Mapping[str, str], folder: Path, names: Sequence[str]) -> dict[str, Outcome]:
    """Run some of the programs, each in a folder of its own.

    Args:
        python: the interpreter.
        environment: their variables.
        folder: in which theirs are made, of the same name each time.
        names: which of them.
    """
    found = {}
    for number, name in enumerate(names):
        own = folder / str(number)
        own.mkdir(parents=True)
        found[name] = run(PROGRAMS[name], python, environment, own)
    return found
