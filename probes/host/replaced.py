"""What somebody has put in the place of functions, classes and plain values of torch's and of Python's own modules.

What each was when its module was first seen is kept for as long as the process runs: that is what is to be put back,
whoever has replaced it, and however often.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from importlib.machinery import ExtensionFileLoader
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import msgspec

from lowtide.probes import native
from lowtide.probes.host.settings import REPLACED, is_loaded, is_of_library
from lowtide.probes.objects.described import (
    constant_text,
    identified,
    is_installed_module,
    is_of_tools,
    is_tools,
    name_of,
)
from lowtide.probes.objects.foreign import (
    LRU_CACHE,
    MISSING,
    dict_of_module,
    flags_of,
    is_a,
    module_of_class,
    mro_of,
    namespace_of,
    namespace_of_class,
    qualname_of,
    type_name,
)
from lowtide.probes.originals import contents, loaded, sys, weakref

IN_PLACE_OF = " in place of "
"""What stands in its text between what is there and what was there first."""

INHERITED = "what it inherits"
NOTHING = "nothing"
A_MODULE = "the module"
"""What was there first, where that has no text of its own."""

_FUNCTIONS = frozenset(
    {
        *(BuiltinFunctionType, ClassMethodDescriptorType, FunctionType, GetSetDescriptorType, LRU_CACHE),
        *(MethodDescriptorType, MethodType, WrapperDescriptorType, classmethod, functools.partial, property),
        staticmethod,
    }
)
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})

_MAY_BE_SET = 1 << 9
"""Of the flags of a class: the attributes of one that is made by C alone cannot be set."""

_READ_ELSEWHERE = frozenset(
    {
        *("sys.dont_write_bytecode", "logging.raiseExceptions", "logging._loggerClass", "logging._logRecordFactory"),
        *(
            "torch.multiprocessing._sharing_strategy",
            "torch.backends.opt_einsum.enabled",
            "torch.backends.opt_einsum.strategy",
        ),
        *(f"torch.__future__._{name}_module_params_on_conversion" for name in ("swap", "overwrite")),
    }
)
"""Attributes that are settings with names of their own."""

_WITHOUT_C = frozenset(
    {
        "time",
        "torch",
        "torch.accelerator",
        "torch.cuda",
        "torch._tensor",
        "torch.nn.functional",
        "torch.nn.modules.module",
    }
)
"""The modules that are read where what says that a dictionary has changed could not be compiled: that takes long."""


class _Space(msgspec.Struct):
    """A module or a class, with what its attributes were when it was first seen.

    Attributes:
        holder: the module or the class.
        attributes: its namespace.
        first: the functions, classes and plain values in it.
        names: all names that there were, of a class and of `builtins`, whose names every module sees.
    """

    holder: Any
    attributes: dict[str, Any]
    first: dict[str, Any] = {}
    names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        is_class = is_a(self.holder, type)
        name = "" if is_class else f"{self.holder.__name__}."
        self.first = {
            key: value
            for key, value in self.attributes.items()
            if (cls := type(value)) in _FUNCTIONS or (cls in _PLAIN and key[:2] != "__") or issubclass(cls, type)
            if is_class or not (key[:2] == "__" or key.endswith("hook") or name + key in _READ_ELSEWHERE)
        }
        if is_class or self.holder is builtins:
            self.names = frozenset(self.attributes)

    @property
    def path(self) -> str:
        """The expression by which a program has the module or class: the shortest."""
        if not is_a(self.holder, type):
            return str(self.holder.__name__)
        module, name = module_of_class(self.holder), str(qualname_of(self.holder))
        parts = module.split(".")
        for count in range(1, len(parts)):
            package = sys.modules.get(".".join(parts[:count]))
            if type(package) is ModuleType and vars(package).get(name) is self.holder:
                return f"{package.__name__}.{name}"
        return f"{module}.{name}"

    def take_own_for_first(self) -> bool:
        """Take for what was there first what a module has from a part of it, where another's function is there already.

        As a package's `__init__` has it, which an import may have replaced before anybody looked.  Returns whether it
        was so with any.
        """
        of_others = [
            name
            for name, value in self.first.items()
            if type(value) is FunctionType and not _is_own(str(value.__globals__.get("__name__")))
        ]
        if not of_others:
            return False
        prefix = f"{self.holder.__name__}."
        parts = [part for name, part in list(sys.modules.items()) if name.startswith(prefix)]
        for name in of_others:
            found = (dict_of_module(part).get(name) for part in parts if is_a(part, ModuleType))
            own = next((value for value in found if type(value) is FunctionType and _is_own(value.__module__)), None)
            self.first[name] = own or self.first[name]
        return True

    def differing(self) -> Iterator[tuple[str, Any, Any, bool]]:
        """Give the name of each attribute that is another object than at first, with what was there and what is.

        Of a class also those that it had inherited, and whether it had; of `builtins` also those that were added.
        """
        now = self.attributes
        # In C: a runner sets some attribute of `sys` before every test.
        others = map(operator.is_not, map(now.get, self.first, itertools.repeat(MISSING)), self.first.values())
        for name in list(itertools.compress(self.first, others)):
            yield name, self.first[name], now.get(name, MISSING), False
        for name in now.keys() - self.names if self.names else ():
            if self.holder is builtins:
                # What is shown last, and which warnings were given where no module's frame is in reach.
                if name not in ("_", "__warningregistry__") and not _is_of_libraries(now.get(name)):
                    yield name, MISSING, now.get(name, MISSING), False
                continue
            found = (namespace_of(base).get(name, MISSING) for base in mro_of(self.holder)[1:])
            first = next((value for value in found if value is not MISSING), MISSING)
            if type(first) in _FUNCTIONS and now.get(name, first) is not first:
                yield name, first, now[name], True


class FirstValues:
    """What attributes of torch's and of Python's own modules and classes were when each was first seen.

    Attributes:
        turn: how often modules have come or gone.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._spaces: list[_Space] = []
        self._stubs: dict[str, str] = {}
        self._dicts: tuple[dict[str, Any], ...] = (sys.modules,)
        self._marks = b""
        self._found: dict[int, dict[str, str]] = {}
        self._texts: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        # Whether there are modules whose import is not over.
        self._is_waiting = False
        self._modules: dict[str, Callable[[], Any]] = {}
        self._bound: set[int] = set()
        self._objects: dict[str, tuple[Any, str, Any]] = {}
        self._stored: dict[str, dict[str, bool]] = {}

    def read(self) -> dict[str, str]:
        """Return what is not as it was first, as settings; the same object while nothing has changed."""
        marks = _marks_of(self._dicts)
        if marks == self._marks and not self._is_waiting:
            return self._texts
        if marks[:_WIDTH] != self._marks[:_WIDTH] or self._is_waiting:
            self._see_modules()
            marks = _marks_of(self._dicts)
        # Of those that are new nothing differs from what was just read.
        for place in _differing(self._marks, marks[: len(self._marks)]):
            if place and (texts := self._differing(self._spaces[place - 1])) != self._found.get(place, {}):
                self._found[place] = texts
                self._texts = functools.reduce(operator.or_, self._found.values())
        self._marks = marks
        return self._texts

    def first_of(self, setting: str) -> Any:
        """Return what a replaced attribute was, or which module was there; `MISSING` if it is not known.

        Args:
            setting: as `torch.nn.Module.to`.
        """
        if setting in self._objects:
            return self._objects[setting][2]
        name = _of_modules(setting)
        return MISSING if name is None or self._modules.get(name, _NONE)() is None else self._modules[name]()

    def put_back(self, setting: str) -> None:
        """Put a replaced attribute, or a module, back as it was first."""
        name = _of_modules(setting)
        if name is not None:
            sys.modules[name] = self.first_of(setting)
            return
        holder, name, first = self._objects[setting]
        if first is MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, first)

    def _differing(self, space: _Space) -> dict[str, str]:
        found = {}
        for name, first, now, is_inherited in list(space.differing()):
            if _is_as_good(first, now):
                continue
            setting = f"{space.path}.{name}"
            if setting == _OF_A_COMPILER and now is False and _has_compiled():
                space.first[name] = now
                continue
            if name in space.first and not is_inherited and self._is_state(space, name):
                del space.first[name]
                continue
            self._objects[setting] = (space.holder, name, MISSING if is_inherited else first)
            found[f"{REPLACED}{setting}"] = f"{_text(now)}{IN_PLACE_OF}{INHERITED if is_inherited else _text(first)}"
        return found

    def _see_modules(self) -> None:
        """Take up the modules that are new, and what was put into `sys.modules` that is none."""
        self.turn += 1
        seen, modules = self._seen, dict(sys.modules)
        new = [(name, item) for name, item in modules.items() if seen.get(name) != id(item) and type(name) is str]
        for name in [name for name in self._stubs if id(modules.get(name, MISSING)) != seen[name]]:
            del self._stubs[name]
        dicts = []
        self._is_waiting = False
        # They make modules by hand that they share: Cython's do, for their types.
        is_from_c = any(_is_extension(item) for _, item in new)
        for name, item in new:
            if _is_stub(name, item):
                is_over = self._modules.get(name, _NONE)() is not None
                if is_from_c and not is_over and type(item) is ModuleType:
                    seen[name] = id(item)
                    continue
                self._stubs[name] = f"{name_of(item)}{IN_PLACE_OF}{A_MODULE if is_over else NOTHING}"
            elif is_a(item, ModuleType):
                if not is_loaded(item):
                    self._is_waiting = True
                    continue
                self._modules[name] = weakref.ref(item)
                dicts += self._bind(name, item) if _is_watched(name) else []
            seen[name] = id(item)
        for place, space in enumerate(self._spaces[len(self._dicts) - 1 :], len(self._dicts)):
            if not space.names and space.take_own_for_first():
                self._found[place] = self._differing(space)
        for name in seen.keys() - modules.keys():
            del seen[name]
        self._found[0] = {f"{REPLACED}sys.modules[{name!r}]": text for name, text in self._stubs.items()}
        self._texts = functools.reduce(operator.or_, self._found.values())
        self._dicts += tuple(dicts)

    def _bind(self, name: str, module: ModuleType) -> list[dict[str, Any]]:
        spaces = [] if id(vars(module)) in self._bound else [_Space(module, vars(module))]
        for item in list(vars(module).values()):
            cls = type(item)
            if cls is not type and not issubclass(cls, type):
                continue
            if id(item) in self._bound or not flags_of(item) & _MAY_BE_SET or not _is_own(module_of_class(item)):
                continue
            if _marks_of is not _slow_marks or module_of_class(item) == name:
                self._bound.add(id(item))
                spaces.append(_Space(item, namespace_of_class(item)))
        self._bound.add(id(vars(module)))
        self._spaces += spaces
        return [space.attributes for space in spaces]

    def _is_state(self, space: _Space, name: str) -> bool:
        """Return whether the code of the module itself sets an attribute, and not only a setter to what it is given.

        As a counter, a cache, or whether something was done already; of a class plain values only.
        """
        holder = space.holder
        if is_a(holder, type) and type(space.first[name]) not in _PLAIN:
            return False
        module = module_of_class(holder) if is_a(holder, type) else holder.__name__
        if module not in self._stored:
            file = getattr(sys.modules.get(module), "__file__", None)
            self._stored[module] = _stored_in(file) if type(file) is str else {}
        return self._stored[module].get(name, False)


_NONE: Callable[[], Any] = lambda: None  # noqa: E731


class Replaced:
    """The attributes of torch's and Python's modules and classes that are others than at first; stubs of modules."""

    def raw(self) -> object:
        """Return the texts, which are the same objects while nothing has changed."""
        return FIRST.read(), OPTIONS.read()

    def texts(self) -> dict[str, str]:
        """Return each with what is there, and what was."""
        return FIRST.read() | OPTIONS.read()


def _differing(before: bytes, now: bytes) -> Iterator[int]:
    """Give the places of the numbers that are others, or new: one among thousands is found by halves."""
    parts = [(0, len(now))]
    while parts:
        start, end = parts.pop()
        if before[start:end] == now[start:end]:
            continue
        if end - start == _WIDTH:
            yield start // _WIDTH
            continue
        middle = start + (end - start) // _WIDTH // 2 * _WIDTH
        parts += [(middle, end), (start, middle)]


_WIDTH = 8
"""Bytes of a mark."""


def _slow_marks(dicts: tuple[dict[str, Any], ...]) -> bytes:
    return b"".join(hash(tuple(map(id, found.values()))).to_bytes(_WIDTH, "little", signed=True) for found in dicts)


_marks_of = native.marks_of or _slow_marks


def _is_watched(name: str) -> bool:
    """Return whether the module of this name is torch's, or a public one of Python's."""
    if _marks_of is _slow_marks:
        return name in _WITHOUT_C
    return _is_own(name) and (name.partition(".")[0] == "torch" or not ("._" in name or name.startswith("_")))


def _is_own(module: str) -> bool:
    """Return whether a module is torch's or Python's."""
    top = module.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


_OF_A_COMPILER = "torch.distributions.Distribution._validate_args"
"""What `torch.compile` sets to False when it first compiles something (torch/_dynamo/eval_frame.py), and leaves so."""


def _has_compiled() -> bool:
    patcher = getattr(loaded("torch._dynamo.eval_frame"), "TorchPatcher", None)
    patch: Any = _underlying(namespace_of(patcher).get("patch")) if is_a(patcher, type) else None
    return is_a(patch, LRU_CACHE) and patch.cache_info().currsize > 0


def _is_stub(name: str, item: Any) -> bool:
    """Return whether an entry of `sys.modules` was made by no import, nor put there by the library itself."""
    cls = type(item)
    if item is None:
        return True
    module = module_of_class(cls)
    if is_installed_module(module) and module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    if not is_a(item, ModuleType):
        return True
    attributes = dict_of_module(item)
    spec = attributes.get("__spec__")
    return (
        getattr(spec, "loader", None) is None
        and getattr(spec, "submodule_search_locations", None) is None
        and not attributes.get("__file__")
        and attributes.get("__loader__") is None
    )


def _is_extension(item: Any) -> bool:
    """Return whether an import has made a module from a file of C."""
    spec = dict_of_module(item).get("__spec__") if is_a(item, ModuleType) else None
    return type(getattr(spec, "loader", None)) is ExtensionFileLoader


def _of_modules(setting: str) -> str | None:
    """Return the name of a module, of `sys.modules['name']`."""
    if not setting.startswith("sys.modules["):
        return None
    return str(ast.literal_eval(setting.removeprefix("sys.modules[").removesuffix("]")))


def _text(value: Any) -> str:
    if value is MISSING:
        return NOTHING
    if type(value) in _PLAIN:
        return constant_text(value) if type(value) is int else repr(value)
    return identified(_underlying(value))


def _underlying(value: Any) -> Any:
    """Return the function of a class method (also one asked of its class), a static method or a property."""
    if type(value) is property:
        return value.fget
    return value.__func__ if type(value) in (classmethod, staticmethod, MethodType) else value


def _is_of_libraries(value: Any) -> bool:
    """Return whether a value is an installed library's: one of Python's own types, as a number, is nobody's."""
    is_bare = (
        type(value) not in _FUNCTIONS and module_of_class(value if is_a(value, type) else type(value)) == "builtins"
    )
    return not is_bare and is_of_library(value)


def _is_as_good(first: Any, now: Any) -> bool:
    """Return whether what is there is as what was there first, or the library's own, made when it was first needed.

    Whoever puts back what `Class.method` gave puts back the bound method of a class method; and tools that run tests
    have their own reasons.
    """
    if now is MISSING or first is MISSING:
        return type(first) in _PLAIN
    if type(first) in _PLAIN and type(now) in _PLAIN:
        return type(first) is type(now) and bool(first == now or first != first)
    before, function = _underlying(first), _underlying(now)
    if type(function) is functools.partial:
        # As Inductor's overrides make of their own, when they are first needed.
        function = _underlying(function.func)
    if function is before or is_tools(type(function)):
        return True
    if is_a(function, type) and is_a(before, type):
        # As after `importlib.reload`.
        return type_name(function) == type_name(before) and _is_own(module_of_class(function))
    if type(function) is not FunctionType:
        # An object that the library fills in later, where there was nothing.
        return first is None and type(function) not in _FUNCTIONS
    # A decorator of a library's gives what it makes the name and the module of the program's function.
    modules = [module for module in (function.__globals__.get("__name__"), function.__module__) if type(module) is str]
    if modules and is_of_tools(modules[0]):
        return True
    return all(map(_is_own, modules)) and (
        first is None
        or "<locals>" in function.__qualname__
        or (type(before) is FunctionType and before.__qualname__ == function.__qualname__)
    )


_SETTER = re.compile(r"(^|_)(set|enable|disable|use)(_|$)")


def _stored_in(file: str) -> dict[str, bool]:
    """Return the names that functions of a file set in its module or its classes.

    With whether any of them sets one to something else than its own argument.
    """
    try:
        tree = ast.parse(contents(file))
    except (OSError, SyntaxError, ValueError):  # no source
        return {}
    found: dict[str, bool] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
            for name, value in _assigned(function):
                is_given = isinstance(value, ast.Name) and value.id in arguments and _SETTER.search(function.name)
                found[name] = found.get(name, False) or not is_given
    return found


def _assigned(function: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Give what a function sets beyond its own variables and those of an object that it calls `self`."""
    parts = list(ast.walk(function))
    shared = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
    for part in parts:
        targets: Iterable[ast.AST] = ()
        if isinstance(part, ast.Assign):
            targets = [target for each in part.targets for target in ast.walk(each)]
        elif isinstance(part, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            targets = [part.target]
        value = part.value if isinstance(part, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if isinstance(target, ast.Name) and target.id in shared:
                yield target.id, value
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                yield target.attr, value


_CONFIGS = (
    *("torch._dynamo.config", "torch._export.config", "torch._functorch.config", "torch._inductor.config"),
    *("torch.compiler.config", "torch.distributed.config", "torch.fx.config", "torch.fx.experimental._config"),
)
"""Modules of torch whose attributes are options (torch/utils/_config_module.py), and not in their namespace."""


class Options:
    """What the options of torch's compiler and the like were when each was first seen, and which are others now."""

    def __init__(self) -> None:
        self._turn = -1
        self._modules: list[Any] = []
        self._entries: list[tuple[str, Any]] = []
        self._read: Callable[[], list[Any]] = list
        self._values: list[Any] = []
        self._first: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def read(self) -> dict[str, str]:
        """Return those that are not as they were first, as settings; the same object while nothing has changed."""
        if self._turn != FIRST.turn:
            self._turn = FIRST.turn
            modules = list(map(loaded, _CONFIGS))
            if len(modules) != len(self._modules) or any(map(operator.is_not, modules, self._modules)):
                self._bind(modules)
        values = self._read()
        if any(map(operator.is_not, values, self._values)):
            texts = dict(self._texts)
            for (name, entry), value, before in zip(self._entries, values, self._values, strict=True):
                if value is not before:
                    now, first = _option(entry), self._first[name]
                    texts.pop(REPLACED + name, None)
                    texts |= {REPLACED + name: f"{now}{IN_PLACE_OF}{first}"} if now != first else {}
            self._values = values
            self._texts = texts if texts != self._texts else self._texts
        return self._texts

    def _bind(self, modules: list[Any]) -> None:
        self._modules = modules
        self._entries = [
            (f"{module.__name__}.{name}", entry)
            for module in modules
            if module is not None and is_loaded(module)
            for name, entry in dict_of_module(module).get("_config", {}).items()
            if getattr(entry, "alias", None) is None and hasattr(entry, "user_override")
        ]
        overrides = [entry.user_override for _, entry in self._entries]
        if all(type(override) is ContextVar for override in overrides):
            self._read = lambda: list(map(ContextVar.get, overrides))
        else:
            # Before torch 2.13.
            entries = [entry for _, entry in self._entries]
            self._read = lambda: [entry.user_override for entry in entries]
        self._values = self._read()
        for name, entry in self._entries:
            self._first.setdefault(name, _option(entry))


def _option(entry: Any) -> str:
    """Return what an option is, as code; of one that is no plain value, its class."""
    override = entry.user_override.get() if type(entry.user_override) is ContextVar else entry.user_override
    choices = (getattr(entry, "env_value_force", _UNSET), override, getattr(entry, "env_value_default", _UNSET))
    value = next((choice for choice in choices if type(choice) is not object), entry.default)
    return _code_of(value) if _is_plain(value) else name_of(value)


def _code_of(value: Any) -> str:
    """Return a plain value as code; of two sets that are equal the same, though they were filled in another order."""
    if type(value) is set:
        return f"{{{', '.join(sorted(map(_code_of, value)))}}}" if value else "set()"
    if type(value) is list:
        return f"[{', '.join(map(_code_of, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{_code_of(key)}: {_code_of(part)}' for key, part in value.items())}}}"
    return repr(value)


_UNSET = object()
"""As torch has it for what nobody has set."""


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return type(value) in _PLAIN


OPTIONS = Options()
FIRST = FirstValues()
"""Of the process: what a reading that comes late takes for the first is what somebody put there before."""


def split(text: str) -> tuple[str, str]:
    """Return what is there and what was there first, of the text of a replaced attribute."""
    now, _, first = text.partition(IN_PLACE_OF)
    return now, first
