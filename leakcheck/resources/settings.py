"""Process-wide settings: which changed, from what to what, who changed them, and a sentence about it without secrets.

A change that puts back what a setting was before an earlier test changed it is none that stays (`SettingHistory`).
"""

from __future__ import annotations

import ast
import os as os_module
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from lowtide.probes.host.replaced import A_MODULE, INHERITED, NOTHING, REPLACED, split
from lowtide.probes.host.settings import is_entry
from lowtide.probes.objects.described import LIBRARYS, is_text_of_tool
from lowtide.probes.objects.passing_for import passing_for
from lowtide.probes.objects.whose_code import is_of_python, is_of_site
from lowtide.probes.originals import os, sys
from lowtide.reports.sizes import first_of

ABSENT = ""
"""The text of what is not there."""

_MOST = 80
"""Characters of a value that are shown."""

_BEFORE = 20
"""Characters of a long value that are shown before the place where it was changed."""

_MANY_DISABLED = 5
"""Loggers that nobody disables one by one."""

_SHOWN_LOGGERS = 3

_IDENTITY = re.compile(r"(?: at |^)0x[0-9a-f]+")
_SECRET = re.compile(r"TOKEN|KEY|PASS|PWD|SECRET|CREDENTIAL|AUTH|COOKIE|SIGNATURE|PRIVATE|DSN|SALT", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")
_VARIABLE = re.compile(r"os\.environ\[(.+)\]", re.DOTALL)
_FOLDERS = ("PWD", "OLDPWD")

_MATMUL = ("torch.get_float32_matmul_precision()", "torch.backends.cuda.matmul.allow_tf32")
_TOLD_WITH: Mapping[str, tuple[str, ...]] = {
    "torch.backends.cuda.matmul.fp32_precision": _MATMUL,
    "torch.backends.mkldnn.matmul.fp32_precision": _MATMUL,
    "torch.backends.cudnn.conv.fp32_precision": ("torch.backends.cudnn.allow_tf32",),
    "torch.backends.cudnn.rnn.fp32_precision": ("torch.backends.cudnn.allow_tf32",),
    "torch.is_grad_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch.autograd.forward_ad._is_fwd_grad_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch._C._is_multithreading_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch.is_deterministic_algorithms_warn_only_enabled()": ("torch.are_deterministic_algorithms_enabled()",),
    "torch.is_anomaly_check_nan_enabled()": ("torch.is_anomaly_enabled()",),
    f"{REPLACED}torch.Storage": ("torch.get_default_dtype()",),
    **{f"{REPLACED}time.{name}": ("time.tzname",) for name in ("altzone", "daylight", "timezone")},
}
"""What changes, and is put back, with another setting."""


_OF_A_COMPILER = {"sys.getrecursionlimit()": "2000"}
"""What `torch.compile` sets with the first thing that it compiles (torch/_inductor/compile_fx.py), and leaves so."""


@dataclass(frozen=True)
class SettingChange:
    """One setting that is not what it was.

    Attributes:
        name: as the probe names it.
        before: what it was, as text; `ABSENT` if it was not there.
        now: what it is.
        beside: how many of its kind there were before, of an object that was added.
    """

    name: str
    before: str
    now: str
    beside: int = 0

    @property
    def setting(self) -> str:
        """The name, the same in every run."""
        return _IDENTITY.sub("", self.name.removeprefix(REPLACED))

    @property
    def is_replaced(self) -> bool:
        """Whether it is an attribute of a module or a class, or a module, in whose place another one is now."""
        return self.name.startswith(REPLACED)

    @property
    def first(self) -> str:
        """What was there before the first change of it, as far as that is known."""
        return split(self.now)[1] if self.is_replaced else self.before

    @property
    def is_of_same_kind(self) -> bool:
        """Whether an object was put in the place of another one that has the same name."""
        is_object = _IDENTITY.search(self.before) is not None
        return is_object and _IDENTITY.sub("", self.before) == _IDENTITY.sub("", self.now)

    def is_undone_by(self, text: str) -> bool:
        """Return whether a setting with this text is as it was: before this change, or before all."""
        return text == self.before or (self.is_replaced and text == ABSENT)

    def followed_in(self, settings: Mapping[str, str]) -> SettingChange:
        """Return the same of the last object of its kind, where that has taken the place of the one that was added."""
        same = _of_kind(self.name, settings) if self.before == ABSENT and self.name not in settings else []
        return replace(self, name=same[-1]) if len(same) > self.beside else self


def changes_between(
    before: Mapping[str, str], now: Mapping[str, str], names: Iterable[str] | None = None
) -> list[SettingChange]:
    """Return what changed, sorted by name, but for what changes with something else.

    Nor does it count that an installed library's own function was set somewhere, as at the library's first use, or that
    a tool that runs tests took its own away, as a time limit does when a test fails.

    Args:
        before: the settings as they should be.
        now: as they are.
        names: those to look at; None for all.
    """
    found = []
    for name in now.keys() | before.keys() if names is None else names:
        then, is_now = before.get(name, ABSENT), now.get(name, ABSENT)
        if _OF_A_COMPILER.get(name) == is_now:
            continue
        # What is as it was first, whoever had changed it, needs nothing; nor does a timer that has ended.
        if name.startswith((REPLACED, "interval timer ")) and is_now == ABSENT:
            continue
        if then == is_now or LIBRARYS in name or is_now.startswith(LIBRARYS) or is_text_of_tool(then):
            continue
        # Of what its library had not been there for at one of the moments, nothing is known.
        if is_entry(name) or (name in before and name in now):
            found.append(SettingChange(name, then, is_now, len(_of_kind(name, before)) if then == ABSENT else 0))
    changed = {change.name for change in found}
    implied = {name for name in changed if changed & set(_TOLD_WITH.get(name, ()))}
    return sorted((change for change in found if change.name not in implied), key=lambda change: change.name)


def _of_kind(name: str, settings: Mapping[str, str]) -> list[str]:
    """Return the names of the objects of the kind of one, where there may be several."""
    kind, _, identity = name.rpartition(" at ")
    return [other for other in settings if other.startswith(f"{kind} at 0x")] if _IDENTITY.fullmatch(identity) else []


def describe_change(change: SettingChange) -> str:
    """Say `torch.get_num_threads() was 4, is 1`; no secret, and no more of a value than one reads."""
    if change.is_replaced:
        return _replacement(change)
    was, now = _both_shown(change)
    if change.name.startswith(("disabled of ", "propagate of ")):
        usual = str(change.name.startswith("propagate of "))
        return f"{change.setting} was {was or usual}, is {now or usual}"
    if change.name.startswith(("level of ", "os.environ[", "name of logging level ")):
        return f"{change.setting} was {was or 'not set'}, is {now or 'not set any more'}"
    if change.name.startswith("interval timer "):
        return f"{change.setting} is {now}"
    if is_entry(change.name):
        return f"{change.setting} was {'added' if change.before == ABSENT else 'removed'}"
    if change.is_of_same_kind:
        return f"{change.name} was replaced by another {now}"
    return f"{change.name} was {was}, is {now}"


def sentences(changes: Sequence[SettingChange], places: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what each setting is called, with a sentence on it; one on loggers that are disabled, if these are many.

    And one on an object that was added to several and another one of its kind that was removed.

    Args:
        changes: what has changed.
        places: where a setting was set last, by its name; empty where that is not known.
    """
    disabled = disabled_loggers(changes)
    found = []
    if disabled:
        shown = first_of([change.setting.removeprefix("disabled of ") for change in disabled], _SHOWN_LOGGERS)
        found.append(
            (
                f"disabled of {len(disabled)} loggers",
                f"disabled of {len(disabled)} loggers was False, is True ({shown})",
            )
        )
    removed = Counter(change.setting for change in changes if change.now == ABSENT and _is_one_of_several(change))
    added = Counter(change.setting for change in changes if change.before == ABSENT and _is_one_of_several(change))
    both = removed & added
    for change in changes:
        if change in disabled:
            continue
        if both[change.setting] and change.before == ABSENT:
            both[change.setting] -= 1
            found.append((change.setting, f"{change.setting} was replaced by another one"))
        elif removed[change.setting] and change.now == ABSENT and added[change.setting]:
            added[change.setting] -= 1
        else:
            place = places.get(change.name)
            found.append((change.setting, describe_change(change) + (f" ({place})" if place else "")))
    return found


def _is_one_of_several(change: SettingChange) -> bool:
    return not change.is_replaced and change.name != change.setting


def disabled_loggers(changes: Sequence[SettingChange]) -> list[SettingChange]:
    """Return the changes by which loggers were disabled, as `logging.config` does by default, if these are many."""
    found = [change for change in changes if change.name.startswith("disabled of ") and change.now == "True"]
    return found if len(found) >= _MANY_DISABLED else []


def _replacement(change: SettingChange) -> str:
    """Say `torch.empty was replaced by test.zeros`; of a plain value what it was and is."""
    first = change.first
    (was, _), (now, _) = split(change.before), split(change.now)
    if now == NOTHING:
        return f"{change.setting} was removed"
    if first == NOTHING:
        return f"{change.setting} was added: {_shortened(now)}"
    if _IDENTITY.search(first) or _IDENTITY.search(now) or first in (INHERITED, A_MODULE):
        return f"{change.setting} was replaced by {_shortened(now)}"
    return f"{change.setting} was {_shortened(was or first)}, is {_shortened(now)}"


def _shortened(text: str) -> str:
    text = _IDENTITY.sub("", text)
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"


def is_secret(name: str, text: str) -> bool:
    """Return whether a setting is an environment variable whose value may be a secret, by its name or its look."""
    variable = _VARIABLE.fullmatch(name)
    if variable is None:
        return False
    named: str = ast.literal_eval(variable[1])
    return (_SECRET.search(named) is not None and named not in _FOLDERS) or _LOGIN.search(text) is not None


def _both_shown(change: SettingChange) -> tuple[str, str]:
    """Return what it was and what it is; of two long texts what is around the place where they begin to differ."""
    was, now = (_text(change, text) for text in (change.before, change.now))
    pairs = enumerate(zip(was, now, strict=False))
    alike = next((place for place, (old, new) in pairs if old != new), min(len(was), len(now)))
    start = alike - _BEFORE if max(len(was), len(now)) > _MOST and alike > _MOST // 2 else 0
    shown = (f"…{text[start:]}" if start and text else text for text in (was, now))
    was, now = map(_shortened, shown)
    return was, now


def _text(change: SettingChange, text: str) -> str:
    if text and (is_secret(change.name, change.before) or is_secret(change.name, change.now)):
        return "another value" if text == change.now and change.before else "a value that is not shown"
    return _IDENTITY.sub("", text.removeprefix(LIBRARYS))


class SettingHistory:
    """The values that each setting had before it was changed and left so, oldest first."""

    def __init__(self) -> None:
        self._earlier: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}

    def note(self, name: str, before: str, now: str) -> None:
        """Note that a test, or a fixture, is over and left a setting changed."""
        self._left[name] = now
        earlier = self._earlier.setdefault(name, [])
        if now in earlier:
            del earlier[earlier.index(now) :]
        else:
            earlier.append(before)

    def begin(self, settings: Mapping[str, str]) -> None:
        """Begin a test: what was put back by whomever is as it was, and may be left changed again."""
        for name, earlier in self._earlier.items():
            if settings.get(name) in earlier:
                del earlier[earlier.index(settings[name]) :]

    def is_earlier(self, name: str, value: str) -> bool:
        """Return whether a setting had this value before somebody changed it and left it so."""
        return value in self._earlier.get(name, ())

    def news(self, changes: Sequence[SettingChange]) -> list[SettingChange]:
        """Return the changes that neither put back what somebody had left, nor put its like in its place.

        As a test that configures `logging` as the one before did: each has a handler of its own then, and there is one.
        """
        put_back = [change for change in changes if self.is_earlier(change.name, change.now)]
        given_up = Counter(change.setting for change in put_back if change.now == ABSENT)
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
        """Return whether code of an installed library set or deleted a variable last, by itself.

        Args:
            setting: as `os.environ['NAME']`.
        """
        return _variable(setting) in self._by_libraries

    def place_of(self, setting: str) -> str:
        """Return where a variable was set or deleted last: `set in function, file.py:12`; empty where unknown."""
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
