"""The Python stack from which memory was allocated, and the program's own function in it."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from lowtide.probes.originals import loaded

_STANDARD_LIBRARIES = frozenset({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)")
_INSTALLED_FRAMEWORK = re.compile(r"/(?:site|dist)-packages/(?:torch|functorch|numpy)/")
"""Where the files of Python and of torch are on other machines, too."""

_TYPED_IN = re.compile(r"<(?:stdin|string|console|i?python-input-|command-|doctest |torch_package_)")
"""The program itself, which has no file: of prompts, notebooks, `python -c` and `torch.package`."""

_GENERATED = re.compile(r"__\w+__")
"""What a dataclass or a named tuple has in `<string>`."""

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
    """Return the name of the innermost function that is not a library's or Python's own, without what it is defined in.

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


def telling_frames(stack: Sequence[StackFrame]) -> list[int]:
    """Return which frames of a stack are not torch's, numpy's or Python's, the innermost first; all if none is.

    A library that is built on these counts as the program: vLLM is installed as torch is, and where in vLLM memory was
    allocated says more than that a script has called it. The files may be those of another machine.
    """
    folders = _library_folders()
    telling = [
        turn
        for turn, frame in enumerate(stack)
        if frame.function not in _COMPREHENSIONS and not _is_framework(frame, folders)
    ]
    return telling or list(range(len(stack)))


def _is_framework(frame: StackFrame, folders: tuple[str, ...]) -> bool:
    file = frame.file
    if file.startswith("<"):
        return not _TYPED_IN.match(file) or (file == "<string>" and bool(_GENERATED.fullmatch(frame.function)))
    if _is_compiled(file):
        return True
    if _INSTALLED_FRAMEWORK.search(file) or _STANDARD_LIBRARY.search(file):
        return True
    return file.startswith(folders) and not _is_installed(file)


def _library_folders() -> tuple[str, ...]:
    """Return where Python's own modules are, where inductor writes its code, and torch and numpy, installed or not."""
    folders: set[str | None] = set(_STANDARD_LIBRARIES)
    folders.add(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    for name in ("torch", "numpy"):
        file = getattr(loaded(name), "__file__", None)
        folders.add(str(PurePath(file).parent) if file else None)
    return tuple(folder.rstrip(os.sep) + os.sep for folder in folders if folder)


def _is_library(file: str, folders: tuple[str, ...]) -> bool:
    if file.startswith("<") or file.startswith(folders):
        return True
    return _is_installed(file) or _is_compiled(file)


def _is_compiled(file: str) -> bool:
    # Inductor's folder has the user's name behind it; a file of torch.fx has a hash there, and is none.
    return any(part.startswith(("torchinductor_", "fx_generated_")) for part in PurePath(file).parts)


def _is_installed(file: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in PurePath(file).parts)
