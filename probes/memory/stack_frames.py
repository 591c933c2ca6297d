"""The Python stack from which memory was allocated, and the program's own function in it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Frames of their own before Python 3.12, and none since."""


class StackFrame(NamedTuple):
    """One call on the way to an allocation.

    Attributes:
        file: path of the source file, as the code object has it.
        line: line that was being run.
        function: its name; with the names around it (`Class.f`, `outer.<locals>.f`) if the recorder knew them.
    """

    file: str
    line: int
    function: str


def allocating_function(stack: Iterable[StackFrame]) -> str:
    """The name of the innermost function that is not a library's or Python's own, without what it is defined in.

    It is the same on every machine and in every version of Python, and so can be part of a fingerprint. Empty if there
    is no such function.

    Args:
        stack: the innermost frame first.
    """
    folders = _library_folders()
    for frame in stack:
        name = frame.function.rpartition(".")[2]
        if name not in _COMPREHENSIONS and not _is_library(frame.file, folders):
            return name
    return ""


def _library_folders() -> tuple[str, ...]:
    """Where Python's own modules are, where inductor writes its code, and torch and numpy, installed or not."""
    folders: set[str | None] = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders.add(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    for name in ("torch", "numpy"):
        file = getattr(sys.modules.get(name), "__file__", None)
        folders.add(str(Path(file).parent) if file else None)
    return tuple(folder.rstrip(os.sep) + os.sep for folder in folders if folder)


def _is_library(file: str, folders: tuple[str, ...]) -> bool:
    if file.startswith("<") or file.startswith(folders):
        return True
    parts = Path(file).parts
    # Inductor's folder has the user's name behind it.
    return any(part in ("site-packages", "dist-packages") or part.startswith("torchinductor_") for part in parts)
