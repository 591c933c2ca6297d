"""Who set an environment variable: a library, as many do for themselves when they are first used, or which line."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lowtide.probes.whose_code import is_of_python, is_of_site

_CURRENT_TEST = b"PYTEST_CURRENT_TEST"
"""In it pytest says three times per test what runs."""

_RUNNERS = ("/_pytest/", "/pluggy/")


class EnvironmentSetters:
    """Notes who sets each variable, from `start` to `stop`.

    `os.putenv`, which `os.environ` calls for each, is stood in for meanwhile.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int, str]] = {}
        self._by_libraries: set[str] = set()
        self._original: Callable[..., None] | None = None
        self._stand_in: Callable[..., None] | None = None

    def start(self) -> None:
        """Begin to note; legal twice."""
        if self._original is not None:
            return
        original: Callable[..., None] = os.putenv

        def putenv(name: Any, value: Any) -> None:
            original(name, value)
            if name != _CURRENT_TEST:
                self._note(os.fsdecode(name), sys._getframe(1))

        self._original, self._stand_in = original, putenv
        os.putenv = putenv

    def stop(self) -> None:
        """End it; legal twice."""
        if self._original is not None and os.putenv is self._stand_in:
            os.putenv = self._original
        self._original = None

    def is_librarys(self, setting: str) -> bool:
        """Whether code of an installed library set a variable last, by itself.

        Args:
            setting: as `os.environ['NAME']`.
        """
        return _variable(setting) in self._by_libraries

    def place_of(self, setting: str) -> str:
        """Where a variable was set last: `set in function, file.py:12`; empty where that is not known."""
        place = self._places.get(_variable(setting))
        return "" if place is None else f"set in {place[2]}, {Path(place[0]).name}:{place[1]}"

    def _note(self, variable: str, frame: FrameType | None) -> None:
        # Python's library and the test runner set what somebody else wants to have set.
        while frame is not None and (is_of_python(file := frame.f_code.co_filename) or _is_runner(file)):
            frame = frame.f_back
        self._by_libraries.discard(variable)
        self._places.pop(variable, None)
        if frame is None or is_of_site(frame.f_code.co_filename):
            self._by_libraries.add(variable)
        else:
            self._places[variable] = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _variable(setting: str) -> str:
    found = re.fullmatch(r"os\.environ\[(.+)\]", setting, re.DOTALL)
    return "" if found is None else str(ast.literal_eval(found[1]))


def _is_runner(file: str) -> bool:
    return any(part in file for part in _RUNNERS)
