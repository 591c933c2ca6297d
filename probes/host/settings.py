"""Process-wide settings by name, as text, in some tens of microseconds: the interpreter's, the libraries', torch's."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from lowtide.probes.host.interpreter_settings import (
    CollectorCallbacks,
    Environment,
    Filters,
    Finders,
    Hooks,
    ModuleSearchPath,
    Signals,
    Umask,
    interpreter_values,
    library_values,
)
from lowtide.probes.host.logging_settings import Loggers
from lowtide.probes.host.torch_settings import Modes, ModuleHooks, Replaceable, torch_values

_ENTRIES = (
    "os.environ[",
    "sys.path entry ",
    "sys.meta_path entry ",
    "sys.path_hooks entry ",
    "gc.callbacks entry ",
    "handler ",
    "level of ",
    "disabled of ",
    "propagate of ",
    "warnings filter ",
    "torch dispatch mode ",
    "torch function mode ",
    "torch hook ",
)


class SettingSource(Protocol):
    """Some settings that are read together."""

    def raw(self) -> object:
        """What changes if one of them does, in microseconds: numbers, strings and identities, safe to compare."""

    def texts(self) -> dict[str, str]:
        """Each of them, by name; read when `raw` has changed only."""


class SettingReader:
    """Reads settings again and again; while none has changed the answer is the same object.

    Reading changes nothing, initialises nothing and runs no code of the program: its objects are compared by
    identity. No object of the program is held.

    Args:
        warnings_filters: whether to read those.
        status: gives the kernel's /proc/self/status, where whoever reads settings has just read it anyway.
    """

    def __init__(self, *, warnings_filters: bool = True, status: Callable[[], bytes] | None = None) -> None:
        self._sources: tuple[SettingSource, ...] = (
            interpreter_values(),
            Hooks(),
            Environment(),
            ModuleSearchPath(),
            Finders(),
            CollectorCallbacks(),
            Signals(),
            Loggers(),
            *((Filters(),) if warnings_filters else ()),
            Modes(),
        )
        self._runners = len(self._sources)
        self._sources += (library_values(), torch_values(), ModuleHooks(), Replaceable(), Umask(status))
        self._raw: list[object] = [None] * len(self._sources)
        self._texts: list[dict[str, str]] = [{} for _ in self._sources]
        self._settings: Mapping[str, str] = MappingProxyType({})

    def read(self, *, of_libraries: bool = True) -> Mapping[str, str]:
        """The settings, by name.

        Args:
            of_libraries: whether to read torch's, other libraries' and the umask, too, which is most of the work; else
                these are taken over.
        """
        raw = [source.raw() for source in (self._sources if of_libraries else self._sources[: self._runners])]
        raw += self._raw[len(raw) :]
        if raw == self._raw:
            return self._settings
        for place, source in enumerate(self._sources):
            if raw[place] != self._raw[place]:
                self._texts[place] = source.texts()
        self._raw = raw
        settings: dict[str, str] = functools.reduce(operator.or_, self._texts)
        if settings != self._settings:
            self._settings = MappingProxyType(settings)
        return self._settings


def is_entry(name: str) -> bool:
    """Whether a setting is one of many of its kind, so that it may be added or removed.

    Of any other one that a reading does not have it is not known what it was: its library was not there yet.
    """
    return name.startswith(_ENTRIES)
