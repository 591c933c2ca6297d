"""Process-wide settings by name, as text, in some tens of microseconds: the interpreter's, the libraries', torch's.

Those of `logging` are here: the levels, handlers and switches of its loggers.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from lowtide.probes.host.interpreter_settings import (
    CollectorCallbacks,
    Environment,
    Filters,
    Finders,
    Hooks,
    KernelStatus,
    LevelNames,
    ModuleSearchPath,
    Signals,
    Timers,
    interpreter_values,
    library_values,
)
from lowtide.probes.host.replaced import REPLACED, Replaced
from lowtide.probes.host.torch_settings import CardLimits, Modes, ModuleHooks, torch_values
from lowtide.probes.objects.described import is_installed_module, is_tools
from lowtide.probes.objects.foreign import module_of_class, mro_of, namespace_of
from lowtide.probes.originals import logging


class Loggers:
    """The levels and handlers of all loggers, and whether they are switched off or propagate.

    What an installed library's logger has when it is first seen is the library's own, as of a library that sets its
    logger up when it is first used.

    There may be a thousand loggers.  So none but the root and its next are looked at while nothing says that another
    one may have changed: `setLevel` and `disable` empty what each logger remembers, so also what this module's own
    logger does; and a handler that is new, or gone, is in the module's list of all of them.  What goes past both is
    seen with the next change: a handler that is kept and moved between loggers further down, an assignment to `level`,
    `disabled` or `propagate`.
    """

    def __init__(self) -> None:
        self._count = -1
        self._places: list[str] = []
        self._placeholders: list[object] = []
        self._loggers: list[tuple[str, logging.Logger]] = []
        self._next: list[logging.Logger] = []
        self._changes = 0
        self._known: set[str] | None = None
        self._seen: dict[str, tuple[list[int], bool, bool]] = {}
        self._levels_given: dict[str, int] = {}
        self._handlers_given: dict[str, frozenset[int]] = {}
        self._disabled_given: set[str] = set()
        self._kept_given: set[str] = set()

    def raw(self) -> object:
        """What says that a level or a handler may have changed."""
        known: dict[str, Any] = logging.root.manager.loggerDict
        if len(known) != self._count or any(map(operator.is_not, map(known.get, self._places), self._placeholders)):
            self._list(known)
        if not _own_logger._cache:
            self._changes += 1
            _own_logger.isEnabledFor(logging.DEBUG)
        try:
            handlers = tuple(map(id, itertools.chain.from_iterable(map(_HANDLERS, self._next))))
        except TypeError:  # something else stands where one had a list of them
            handlers = ()
        return (
            len(self._loggers),
            self._changes,
            logging.root.level,
            handlers,
            tuple(map(id, itertools.chain.from_iterable(map(_SWITCHES, self._next)))),
            tuple(map(id, _all_handlers())),
        )

    def texts(self) -> dict[str, str]:
        """Each level that is set, and each handler."""
        found = {}
        for name, logger in self._loggers:
            level, handlers = _LEVEL(logger), _HANDLERS(logger)
            identities = list(map(id, handlers)) if type(handlers) is list else []
            disabled, propagate = logger.disabled is True, logger.propagate is not False
            seen = (identities, disabled, propagate)
            if self._seen.setdefault(name, seen) != seen and id(logger) not in map(id, self._next):
                # What has changed once may change again with nothing to say so: it is looked at from now on.
                self._next.append(logger)
                self._changes += 1
            self._seen[name] = seen
            shown = "logging.root" if logger is logging.root else f"logging.getLogger({name!r})"
            if disabled and name not in self._disabled_given:
                found[f"disabled of {shown}"] = "True"
            if not propagate and name not in self._kept_given:
                found[f"propagate of {shown}"] = "False"
            if level and type(level) is int and level != self._levels_given.get(name):
                found[f"level of {shown}"] = str(level)
            for handler in handlers if type(handlers) is list else ():
                if id(handler) in self._handlers_given.get(name, ()) or is_tools(type(handler)):
                    continue
                if _is_of_same_library(type(handler), name):
                    continue
                if type(handler) is not logging.NullHandler:
                    found[f"handler {_handler_name(handler)} of {shown} at {id(handler):#x}"] = "there"
        return found

    def _list(self, known: Mapping[str, Any]) -> None:
        self._count = len(known)
        # A logger takes the place of what stands for it while only its children are there.
        waiting = {name: item for name, item in known.items() if type(item) is logging.PlaceHolder}
        self._places, self._placeholders = list(waiting), list(waiting.values())
        # One class of loggers may have properties of its own: nothing of it is to run.
        plain = {cls for cls in set(map(type, known.values())) if _is_plain(cls)}
        self._loggers = [("", logging.root), *((name, item) for name, item in known.items() if type(item) in plain)]
        kept = set(map(id, self._next))
        self._next = [logger for name, logger in self._loggers if "." not in name or id(logger) in kept]
        names = {name for name, _ in self._loggers}
        if self._known is not None:
            for name, logger in self._loggers:
                if name not in self._known and is_installed_module(name):
                    self._levels_given[name] = _LEVEL(logger)
                    self._handlers_given[name] = frozenset(map(id, _HANDLERS(logger)))
                    self._disabled_given.update([name] if logger.disabled is True else ())
                    self._kept_given.update([name] if logger.propagate is False else ())
        self._known = names


def _is_of_same_library(cls: type, logger: str) -> bool:
    """Whether a handler is of the library whose logger has it: torch takes its lazy one away when it is first used."""
    top = logger.partition(".")[0]
    return module_of_class(cls).partition(".")[0] == top and top != "logging" and is_installed_module(top)


_own_logger: Any = logging.getLogger("lowtide")


def _all_handlers() -> list[object]:
    return logging._handlerList  # type: ignore[attr-defined,no-any-return]


_LEVEL = operator.attrgetter("level")
_HANDLERS = operator.attrgetter("handlers")
_SWITCHES = operator.attrgetter("disabled", "propagate")


def _is_plain(cls: type) -> bool:
    bases = mro_of(cls)
    own = {name for base in bases if base is not object for name in namespace_of(base)}
    return logging.Logger in bases and not own & {
        "level",
        "handlers",
        "disabled",
        "propagate",
        "__getattribute__",
        "__getattr__",
    }


def _handler_name(handler: Any) -> str:
    cls = type(handler)
    file = vars(handler).get("baseFilename") if logging.FileHandler in mro_of(cls) else None
    return f"{cls.__module__}.{cls.__qualname__}" + (f"({file!r})" if type(file) is str else "")


_ENTRIES = (
    "os.environ[",
    "sys.path entry ",
    "sys.meta_path entry ",
    "sys.path_hooks entry ",
    "gc.callbacks entry ",
    "handler ",
    "level of ",
    "name of logging level ",
    "interval timer ",
    "disabled of ",
    "propagate of ",
    "warnings filter ",
    "torch dispatch mode ",
    "torch function mode ",
    "torch hook ",
    REPLACED,
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
            Timers(),
            Loggers(),
            LevelNames(),
            *((Filters(),) if warnings_filters else ()),
            Modes(),
        )
        self._runners = len(self._sources)
        self._sources += (
            library_values(),
            torch_values(),
            CardLimits(),
            ModuleHooks(),
            Replaced(),
            KernelStatus(status),
        )
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
