"""A path from a root to an object: its steps, as text that keeps nothing alive, and single links that can be cut.

Some objects have names by which a program knows them wherever a path meets them (`landmarks`): a path to a test's
fixture may begin at any plugin and lead through the test runner's insides; what a person can use is the fixture's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import AsyncGeneratorType, BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Literal

import msgspec

from lowtide.probes.heap.roots import RootKind, is_library
from lowtide.probes.objects.foreign import MISSING, attribute, dict_of_module, is_a, module_of_class, mro_of, type_name
from lowtide.probes.originals import logging, weakref
from lowtide.probes.references.entries import Kind

Mark = Literal["innocent", "holding", "pending"]
Inspector = Callable[[RootKind, Sequence[object]], "Sequence[Mark | None]"]
"""Says of each object that a path leads to, from a root of that kind, whether it is meant to live (`innocent`), should
be gone (`holding`), or is work that has not ended (`pending`); None if that is unknown. It runs no foreign code."""


class PathStep(msgspec.Struct, frozen=True):
    """One edge of a path and the object it leads to.

    Attributes:
        type_name: the object's type, module and qualified name (`dict`, `torch.Tensor`, `helper.Engine`).
        edge: the edge, as code: `.model`, `['kv']`, `[3]`, `cell 'scale'`, `lru_cache key`.
        kind: what sort of edge it is.
        frozen: whether the object lies in the collector's permanent generation, hidden by `gc.freeze()`.
        definition: whether the object is a module, class, function or cache: part of the program, made to stay.
        mark: what the caller's inspector says of the object.
        landmark: the name by which the program knows the object wherever it is met, as that of a fixture; empty
            where it has none.
    """

    type_name: str
    edge: str
    kind: Kind
    frozen: bool = False
    definition: bool = False
    mark: Mark | None = None
    landmark: str = ""


class Path(msgspec.Struct, frozen=True):
    """How a root of the process holds an object; strings only, so that it keeps nothing alive.

    Attributes:
        root_kind: what sort of root.
        root_name: dotted name of the module or class, `function in file.py:line` of a frame, name of a thread, of a
            context variable, or of an object that the caller gave as a root.
        steps: the edges from the root to the object; none if it is itself a root.
        references: references followed, those that one step folds together counted one by one.
        thread: for a frame, the name of its thread if that is not the calling one, else empty.
    """

    root_kind: RootKind
    root_name: str
    steps: tuple[PathStep, ...]
    references: int
    thread: str = ""

    @property
    def root(self) -> str:
        """The root in words: `module 'helper'`, `frame of f in test_x.py:12`, `thread 'worker'`."""
        if self.root_kind == "frame":
            return f"frame of {self.root_name}"
        if self.root_kind == "context":
            return f"context variable '{self.root_name}'"
        return self.root_name if self.root_kind == "object" else f"{self.root_kind} '{self.root_name}'"

    def __str__(self) -> str:
        return " ".join([self.root, *(step.edge for step in self.steps)])


class Link(msgspec.Struct, frozen=True, eq=False):
    """One edge with the live objects that it starts from, so that it can be cut; drop it soon.

    Attributes:
        edge: its name, as code.
        kind: what sort of edge it is.
        owner: the object that has the attribute, the entry, the cell.
        carrier: the object in which the reference lies: the owner, or a part of it, such as the dict of its attributes.
        held: the identity of what it leads to.
    """

    edge: str
    kind: Kind
    owner: Any
    carrier: Any
    held: int


_GENERATORS = (GeneratorType, AsyncGeneratorType)

_SEEN = 3
"""Objects of a path, up to the one that is to be named, that a rule looks at."""


def landmarks(items: Sequence[object], edges: Sequence[str]) -> list[str]:
    """Return for each object of a path the name by which the program knows it, empty for one without.

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
    if item is logging.Logger.manager:
        # Every logger of everybody has it as an attribute.
        return "logging.Logger.manager"
    if is_a(item, logging.RootLogger):
        return "logging.getLogger()"
    return f"logging.getLogger({attribute(item, 'name')!r})" if is_named_logger(item) else ""


def is_named_logger(item: object) -> bool:
    """Return whether something is a logger that `logging` keeps by its name, for as long as the process lives."""
    name = attribute(item, "name") if is_a(item, logging.Logger) else None
    return type(name) is str and dict.get(logging.Logger.manager.loggerDict, name) is item


def _fixture_value(items: Sequence[object], edges: Sequence[str]) -> str:
    """Return what pytest keeps of a fixture: its value for a test, its value for its scope, its generator."""
    if len(items) > 2 and edges[-2] == ".funcargs" and _is_pytests(items[-3]):
        return f"fixture {edges[-1][1:-1]}"
    if len(items) > 2 and edges[-2:] == [".cached_result", "[0]"]:
        return _fixture(items[-3])
    return ""


def _fixture(definition: object) -> str:
    name = attribute(definition, "argname")
    return f"fixture {name!r}" if type(name) is str and _is_pytests(definition) else ""


def _of_test_runner(items: Sequence[object], edges: Sequence[str]) -> str:
    """Return a test's instance, a parameter of a test, a plugin; else the session or its configuration."""
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
    """Return the event loop that the program has set for this thread, and not closed."""
    is_set = edges[-2:] == ["._local", "._loop"] or edges[-2:] == [".__dict__", "['_loop']"]
    is_policys = len(items) > 2 and any(
        type_name(base) == "asyncio.events.BaseDefaultEventLoopPolicy" for base in mro_of(type(items[-3]))
    )
    return "asyncio.get_event_loop()" if is_set and is_policys else ""


def _finalizer(items: Sequence[object], edges: Sequence[str]) -> str:
    """Return a callback of `weakref.finalize` that waits for its object to die."""
    kind: Any = getattr(weakref.finalize, "_Info", None)
    if kind is None or type(items[-1]) is not kind:
        return ""
    info: Any = items[-1]
    # Slots, which only give what lies there.
    target, function = info.weakref(), info.func
    return f"weakref.finalize(<{type_name(type(target))}>, {_function(function)})"


def _function(function: object) -> str:
    """Return what a callback is called: `Engine.on`; `<partial>` for what has no name of its own."""
    while type(function) is MethodType:
        function = function.__func__
    if type(function) is FunctionType or type(function) is BuiltinFunctionType:
        return str(function.__qualname__)
    return f"<{type_name(type(function)).rpartition('.')[2]}>"


def _metric(items: Sequence[object], edges: Sequence[str]) -> str:
    """Return a metric of prometheus_client, which its registry has by itself and no code by a name."""
    bases = map(type_name, mro_of(type(items[-1])))
    name = attribute(items[-1], "_name") if "prometheus_client.metrics.MetricWrapperBase" in bases else None
    return f"metric {name!r}" if type(name) is str else ""


def _class_of_python(items: Sequence[object], edges: Sequence[str]) -> str:
    """Return a class of Python's own library: whoever has an instance of it has no part in what the class has."""
    item: Any = items[-1]
    if edges[-1] != ".__class__" or not is_a(item, type):
        return ""
    module, name = module_of_class(item), type_name(item).rpartition(".")[2]
    owner = sys.modules.get(module) if is_library(module) else None
    is_known = type(owner) is ModuleType and dict_of_module(owner).get(name) is item
    return f"{module}.{name}" if is_known else ""


_RULES = (_logger, _fixture_value, _of_test_runner, _finalizer, _event_loop, _metric, _class_of_python)


def module_expression(name: str) -> str:
    """Return a module of `sys.modules` as code: by its name where it can be imported by that, else by its entry."""
    parts = name.split(".")
    parents = (".".join(parts[:end]) for end in range(1, len(parts)))
    if all(map(str.isidentifier, parts)) and all(parent in sys.modules for parent in parents):
        return name
    return f"sys.modules[{name!r}]"
