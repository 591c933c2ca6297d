"""Who set or deleted an environment variable: which line, or a library, as many do for themselves at first use.

And what settings were before earlier tests changed them: to put one back is no change that stays.
"""

from __future__ import annotations

import ast
import collections
import os as os_module
import re
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from lowtide.leakcheck.settings.changed_settings import ABSENT, SettingChange
from lowtide.probes.objects.passing_for import passing_for
from lowtide.probes.objects.whose_code import is_of_python, is_of_site
from lowtide.probes.originals import os, sys


class SettingHistory:
    """The values that each setting had before it was changed and left so, oldest first."""

    def __init__(self) -> None:
        self._earlier: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}

    def note(self, name: str, before: str, now: str) -> None:
        """A test, or a fixture, is over and left a setting changed."""
        self._left[name] = now
        earlier = self._earlier.setdefault(name, [])
        if now in earlier:
            del earlier[earlier.index(now) :]
        else:
            earlier.append(before)

    def begin(self, settings: Mapping[str, str]) -> None:
        """A test begins with these: what was put back by whomever is as it was, and may be left changed again."""
        for name, earlier in self._earlier.items():
            if settings.get(name) in earlier:
                del earlier[earlier.index(settings[name]) :]

    def is_earlier(self, name: str, value: str) -> bool:
        """Whether a setting had this value before somebody changed it and left it so."""
        return value in self._earlier.get(name, ())

    def news(self, changes: Sequence[SettingChange]) -> list[SettingChange]:
        """Those of some changes that neither put back what somebody had left, nor put another of its kind in its place.

        As a test that configures `logging` as the one before did: each has a handler of its own then, and there is one.
        """
        put_back = [change for change in changes if self.is_earlier(change.name, change.now)]
        given_up = collections.Counter(change.setting for change in put_back if change.now == ABSENT)
        found = []
        for change in changes:
            if change in put_back or (self._left.get(change.name) == change.before and change.is_of_same_kind):
                continue
            if change.before == ABSENT and given_up[change.setting]:
                given_up[change.setting] -= 1
                continue
            found.append(change)
        return found


_CURRENT_TEST = b"PYTEST_CURRENT_TEST"
"""In it pytest says three times per test what runs."""

_RUNNERS = ("/_pytest/", "/pluggy/")


class EnvironmentSetters:
    """Notes who sets or deletes each variable, from `start` to `stop`.

    `os.putenv` and `os.unsetenv`, which `os.environ` calls for each, are stood in for meanwhile.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int, str, str]] = {}
        self._by_libraries: set[str] = set()
        self._replaced: list[tuple[str, Callable[..., None], Callable[..., None]]] = []

    def start(self) -> None:
        """Begin to note; legal twice."""
        if self._replaced:
            return
        put: Callable[..., None] = vars(os_module)["putenv"]
        unset: Callable[..., None] = vars(os_module)["unsetenv"]

        @passing_for(put, os_module, "putenv")
        def putenv(name: Any, value: Any) -> None:
            put(name, value)
            if name != _CURRENT_TEST:
                self._note(os.fsdecode(name), "set", sys._getframe(1))

        @passing_for(unset, os_module, "unsetenv")
        def unsetenv(name: Any) -> None:
            unset(name)
            if name != _CURRENT_TEST:
                self._note(os.fsdecode(name), "deleted", sys._getframe(1))

        self._replaced = [("putenv", put, putenv), ("unsetenv", unset, unsetenv)]
        os_module.putenv, os_module.unsetenv = putenv, unsetenv

    def stop(self) -> None:
        """End it; legal twice."""
        for name, original, stand_in in self._replaced:
            if getattr(os_module, name) is stand_in:
                setattr(os_module, name, original)
        self._replaced.clear()

    def is_librarys(self, setting: str) -> bool:
        """Whether code of an installed library set or deleted a variable last, by itself.

        Args:
            setting: as `os.environ['NAME']`.
        """
        return _variable(setting) in self._by_libraries

    def place_of(self, setting: str) -> str:
        """Where a variable was set or deleted last: `set in function, file.py:12`; empty where that is not known."""
        place = self._places.get(_variable(setting))
        return "" if place is None else f"{place[3]} in {place[2]}, {os.path.basename(place[0])}:{place[1]}"

    def _note(self, variable: str, what: str, frame: FrameType | None) -> None:
        # Python's library and the test runner set what somebody else wants to have set.
        while frame is not None and (is_of_python(file := frame.f_code.co_filename) or _is_runner(file)):
            frame = frame.f_back
        self._by_libraries.discard(variable)
        self._places.pop(variable, None)
        if frame is None or is_of_site(frame.f_code.co_filename):
            self._by_libraries.add(variable)
        else:
            self._places[variable] = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, what)


def _variable(setting: str) -> str:
    found = re.fullmatch(r"os\.environ\[(.+)\]", setting, re.DOTALL)
    return "" if found is None else str(ast.literal_eval(found[1]))


def _is_runner(file: str) -> bool:
    return any(part in file for part in _RUNNERS)
