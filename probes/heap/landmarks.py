"""Names of objects by which a program knows them wherever a path meets them: loggers, pytest's fixtures, callbacks.

A path to a test's fixture may begin at any plugin and lead through the test runner's insides; what a person can use is
the fixture's name.  Nothing here runs foreign code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import AsyncGeneratorType, BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

from lowtide.probes.objects.foreign import MISSING, attribute, is_a, module_of_class, mro_of, type_name
from lowtide.probes.originals import logging, weakref

_GENERATORS = (GeneratorType, AsyncGeneratorType)

_SEEN = 3
"""Objects of a path, up to the one that is to be named, that a rule looks at."""


def landmarks(items: Sequence[object], edges: Sequence[str]) -> list[str]:
    """For each object of a path the name by which the program knows it, empty for one without.

    Args:
        items: the objects, from the first behind the root on.
        edges: what leads to each of them, as code.
    """
    found = []
    # Of a long path each rule sees the end only; the last entry of a list of finalizers may be further back.
    finalizers = -1
    for turn in range(len(items)):
        if edges[turn] == "._finalizers":
            finalizers = turn
        first = max(0, turn + 1 - _SEEN)
        seen = items[first : turn + 1], edges[first : turn + 1]
        name = next((name for rule in _RULES if (name := rule(*seen))), "")
        if not name and finalizers > 0 and any(type(items[turn]) is kind for kind in _GENERATORS):
            name = _fixture(items[finalizers - 1])
        found.append(name)
    return found


def _logger(items: Sequence[object], edges: Sequence[str]) -> str:
    item = items[-1]
    if is_a(item, logging.RootLogger):
        return "logging.getLogger()"
    if not is_a(item, logging.Logger):
        return ""
    name = attribute(item, "name")
    known = dict.get(logging.Logger.manager.loggerDict, name) if type(name) is str else None
    return f"logging.getLogger({name!r})" if known is item else ""


def _fixture_value(items: Sequence[object], edges: Sequence[str]) -> str:
    """What pytest keeps of a fixture: its value for a test, its value for its scope, its generator."""
    if len(items) > 2 and edges[-2] == ".funcargs" and _is_pytests(items[-3]):
        return f"fixture {edges[-1][1:-1]}"
    if len(items) > 2 and edges[-2:] == [".cached_result", "[0]"]:
        return _fixture(items[-3])
    return ""


def _fixture(definition: object) -> str:
    name = attribute(definition, "argname")
    return f"fixture {name!r}" if type(name) is str and _is_pytests(definition) else ""


def _of_test_runner(items: Sequence[object], edges: Sequence[str]) -> str:
    """A test's instance, a parameter of a test, a plugin; else the session or its configuration."""
    item, edge = items[-1], edges[-1]
    owner = items[-2] if len(items) > 1 else MISSING
    if edge in ("._instance", ".obj.__self__") and _is_pytests(owner):
        return f"self of {type_name(type(item))}"
    if len(items) > 2 and edges[-2] == ".params" and _is_pytests(items[-3]):
        return f"test parameter {edge[1:-1]}"
    if len(items) > 2 and edges[-2] == "._name2plugin":
        return f"pytest plugin {edge[1:-1]}"
    return _SESSION.get(type_name(type(item)), "")


_SESSION = {"_pytest.main.Session": "pytest's session", "_pytest.config.Config": "pytest's config"}


def _is_pytests(item: object) -> bool:
    return any(module_of_class(base).partition(".")[0] == "_pytest" for base in mro_of(type(item)))


def _event_loop(items: Sequence[object], edges: Sequence[str]) -> str:
    """The event loop that the program has set for this thread, and not closed."""
    is_set = edges[-2:] == ["._local", "._loop"] or edges[-2:] == [".__dict__", "['_loop']"]
    is_policys = len(items) > 2 and any(
        type_name(base) == "asyncio.events.BaseDefaultEventLoopPolicy" for base in mro_of(type(items[-3]))
    )
    return "asyncio.get_event_loop()" if is_set and is_policys else ""


def _finalizer(items: Sequence[object], edges: Sequence[str]) -> str:
    """A callback of `weakref.finalize` that waits for its object to die."""
    kind: Any = getattr(weakref.finalize, "_Info", None)
    if kind is None or type(items[-1]) is not kind:
        return ""
    info: Any = items[-1]
    # Slots, which only give what lies there.
    target, function = info.weakref(), info.func
    return f"weakref.finalize(<{type_name(type(target))}>, {_function(function)})"


def _function(function: object) -> str:
    """What a callback is called: `Engine.on`; `<partial>` for what has no name of its own."""
    while type(function) is MethodType:
        function = function.__func__
    if type(function) is FunctionType or type(function) is BuiltinFunctionType:
        return str(function.__qualname__)
    return f"<{type_name(type(function)).rpartition('.')[2]}>"


_RULES = (_logger, _fixture_value, _of_test_runner, _finalizer, _event_loop)


def module_expression(name: str) -> str:
    """A module of `sys.modules` as code: by its name where it can be imported by that, else by its entry."""
    parts = name.split(".")
    parents = (".".join(parts[:end]) for end in range(1, len(parts)))
    if all(map(str.isidentifier, parts)) and all(parent in sys.modules for parent in parents):
        return name
    return f"sys.modules[{name!r}]"
