"""Asking objects and classes what they are and hold without running their code, or a metaclass's."""

from __future__ import annotations

import builtins
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ReferenceType

from lowtide.probes.originals import gc, os, threading

MISSING = object()
"""What `attribute` gives where there is none, or where finding it could run foreign code."""

TOOLS_OF_MONITORING = 6
"""Tools that `sys.monitoring` knows by their number; two more are the interpreter's own."""

LRU_CACHE: type = type(functools.lru_cache(maxsize=1)(len))
"""The type of what `functools.lru_cache` makes of a function."""

mro_of = type.__dict__["__mro__"].__get__
namespace_of = type.__dict__["__dict__"].__get__
flags_of = type.__dict__["__flags__"].__get__
code_of = FunctionType.__dict__["__code__"].__get__
cells_of = FunctionType.__dict__["__closure__"].__get__
dict_of_module: Callable[[object], Any] = ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]
qualname_of = type.__dict__["__qualname__"].__get__
_qualname_of_function: Callable[[object], str] = FunctionType.__dict__["__qualname__"].__get__
_function_of_partial: Callable[[object], object] = functools.partial.__dict__["func"].__get__
_module_of = type.__dict__["__module__"].__get__
_referent_of: Callable[[object], object] = ReferenceType.__call__  # type: ignore[assignment]
# As the interpreter has them, whatever an error's class makes of such a name.
traceback_of: Callable[[BaseException], TracebackType | None] = BaseException.__dict__["__traceback__"].__get__
_cause_of: Callable[[BaseException], BaseException | None] = BaseException.__dict__["__cause__"].__get__
_context_of: Callable[[BaseException], BaseException | None] = BaseException.__dict__["__context__"].__get__

_SHOWS_VALUES_PAST_DICTS = bool(sys.version_info >= (3, 13))

HOOK = "hook "
"""How `described` begins for the dict in which torch keeps hooks."""

# Types are looked up by their ids, or one by one, since a metaclass may define `__hash__` and `__eq__`.
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type)
# Modules whose classes hash by their own few values, and by nothing that the program made.
_HASHED_PLAINLY = frozenset({"datetime", "decimal", "enum", "fractions", "pathlib", "torch", "uuid"})
_DEFINITIONS = frozenset(
    map(id, (ModuleType, type, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property, LRU_CACHE))
)


def is_a(item: object, cls: type) -> bool:
    """Tell whether the object's real type derives from `cls`."""
    # Not `isinstance`, which asks the object, nor `issubclass`, which asks the class.
    kind = type(item)
    return kind is cls or any(base is cls for base in mro_of(kind))


def with_errors_behind(errors: Iterable[BaseException]) -> Iterator[BaseException]:
    """Yield some errors, those that they were raised from or after, and those in groups; each once."""
    waiting = list(errors)
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += [other for other in (_cause_of(error), _context_of(error)) if other is not None]
            waiting += _errors_in(error)


def _errors_in(error: BaseException) -> Sequence[BaseException]:
    """Return those in a group."""
    kind = getattr(builtins, "BaseExceptionGroup", None)
    if kind is not None:
        return kind.exceptions.__get__(error) if is_a(error, kind) else ()
    # Python 3.10, and the package that stands in there.
    found: Any = attribute(error, "_exceptions")
    return found if type(found) is tuple else ()


def namespace_of_class(cls: type) -> Any:
    """Return the dict itself; `__dict__` of a class is a proxy of it."""
    return gc.get_referents(namespace_of(cls))[0]


def module_of_class(cls: type) -> str:
    """Return the name of the module that a class says it is from, without asking its metaclass; empty if none."""
    module = _module_of(cls)
    return module if type(module) is str else ""


def instance_dict(item: object) -> dict[str, object] | None:
    """Return the `__dict__` of an instance, where the collector shows its values as the instance's own; else None.

    From Python 3.13 on that is so whether the dict was made or not, and before only where there is none.  Where there
    is none, this makes it, which takes some hundred bytes: so it is for the few objects that a finding is about.
    """
    if not _SHOWS_VALUES_PAST_DICTS:
        return None
    for base in mro_of(type(item)):
        getter = namespace_of(base).get("__dict__", MISSING)
        # What a class of the program defines by this name would run.
        if type(getter) is GetSetDescriptorType:
            found = getter.__get__(item)
            return found if type(found) is dict else None
    return None


def type_name(cls: type) -> str:
    """Return module and qualified name of a class, without asking its metaclass; `builtins.` is left out."""
    module = module_of_class(cls)
    name: str = qualname_of(cls)
    return name if module in ("", "builtins") else f"{module}.{name}"


def attribute(holder: object, name: str) -> object:
    """Return the attribute as `object` itself finds it, `MISSING` where finding it could run foreign code."""
    for base in mro_of(type(holder)):
        value = namespace_of(base).get(name, MISSING)
        if value is not MISSING:
            # A property or other descriptor would run; that of a function only binds.
            is_descriptor = any("__get__" in namespace_of(cls) for cls in mro_of(type(value)))
            if is_descriptor and type(value) is not FunctionType:
                return MISSING
            break
    try:
        return object.__getattribute__(holder, name)
    except AttributeError:
        return MISSING


def has_plain_hash(key: object) -> bool:
    """Return whether hashing an object, and comparing it with itself, runs the interpreter's or torch's code alone."""
    waiting = [key]
    # No recursion: a program may nest tuples deeper than Python's calls.
    while waiting:
        part = waiting.pop()
        if type(part) is tuple:
            waiting += part
        elif type(part) is ReferenceType and (referent := _referent_of(part)) is not None:
            waiting.append(referent)
        elif not _has_plain_hash(part):
            return False
    return True


def _has_plain_hash(key: object) -> bool:
    for base in mro_of(type(key)):
        found = namespace_of(base).get("__hash__", MISSING)
        if found is MISSING:
            continue
        if base is object or any(base is kind for kind in _ATOMS):
            return type(found) is WrapperDescriptorType
        return module_of_class(base).partition(".")[0] in _HASHED_PLAINLY
    return False


def described(item: Any) -> str:
    """Say what an object is: `method engine.Engine.close`, `functools.partial of function f`, `list`."""
    kind = type(item)
    if kind is MethodType:
        function = item.__func__
        name = _qualname_of_function(function) if type(function) is FunctionType else type_name(type(function))
        return f"method {type_name(type(item.__self__))}.{name.rpartition('.')[2]}"
    if kind is FunctionType:
        module = dict.get(item.__globals__, "__name__")
        return f"function {module}.{_qualname_of_function(item)}" if type(module) is str else "function"
    if kind is BuiltinFunctionType:
        return f"function {item.__qualname__}"
    if is_a(item, functools.partial):
        return f"functools.partial of {described(_function_of_partial(item))}"
    if kind is OrderedDict or kind is dict:
        values = list(dict.values(item))
        if values and all(type(key) is int for key in dict.keys(item)) and all(map(is_callable, values)):
            # As torch keeps hooks.
            return f"{HOOK}{described(values[0])}"
    return type_name(kind)


def is_callable(item: object) -> bool:
    """Return whether calling the object runs something: a function, or an instance whose class says what."""
    return any("__call__" in namespace_of(base) for base in mro_of(type(item)))


def is_definition(item: object) -> bool:
    """Return whether the object is a module, class, function or cache: part of the program, made to stay."""
    return any(id(base) in _DEFINITIONS for base in mro_of(type(item)))


def place_of_definition(item: object) -> tuple[str, str] | None:
    """Return the module and qualified name by which a class or function is found there; None where it is not: another
    function has made it.
    """
    if is_a(item, type):
        cls: Any = item
        module, whole = module_of_class(cls), type_name(cls)
        names = whole.removeprefix(f"{module}.") if module != "builtins" else whole
    elif type(item) is FunctionType and type(item.__module__) is str:
        module, names = item.__module__, item.__qualname__
    else:
        return None
    found: Any = sys.modules.get(module)
    if found is None or not is_a(found, ModuleType):
        return None
    for name in names.split("."):
        namespace = (
            dict_of_module(found) if is_a(found, ModuleType) else namespace_of(found) if is_a(found, type) else {}
        )
        found = namespace.get(name, MISSING)
    return (module, names) if found is item else None


_PLAIN = frozenset(map(id, (threading.Thread, threading.Timer, type(threading.main_thread()), threading._DummyThread)))


def living_threads() -> list[threading.Thread]:
    """Return the threads that Python knows and that have not ended.

    For a thread of C in which somebody asked for the current thread (logging does) Python makes an object, and keeps it
    past the thread's end (until 3.13).
    """
    return [each for each in threading.enumerate() if type(each) is not threading._DummyThread or _goes_on(each)]


def _goes_on(thread: threading.Thread) -> bool:
    try:
        os.stat(f"/proc/self/task/{thread.native_id}")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def thread_name(thread: threading.Thread) -> str:
    """Return the name; that of the class where the thread has none."""
    if id(type(thread)) in _PLAIN:
        return thread.name
    name = attribute(thread, "_name")
    return name if type(name) is str else type_name(type(thread))


def thread_ident(thread: threading.Thread) -> int:
    """Return the identifier; 0 where it does not run yet."""
    ident = thread.ident if id(type(thread)) in _PLAIN else attribute(thread, "_ident")
    return ident if type(ident) is int else 0


def thread_key(thread: threading.Thread) -> str:
    """Return `name (identifier)`, as the counters name it."""
    return f"{thread_name(thread)} ({thread_ident(thread) or None})"


def is_kind_of_module(kind: type) -> bool:
    """Return whether instances of a class are modules; run none of its code."""
    return any(base is ModuleType for base in mro_of(kind))
