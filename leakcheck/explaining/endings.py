"""Tells a call that may end something from one whose code has nothing to do with it, without calling it.

An engine's `close()` that forgets its tokenizer was called, and would be advised once more. What the call can reach is
read from its code: the attributes of its object that it loads, what these lead to, and the names that it sets.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
from collections.abc import Collection
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.library_objects import is_installed
from lowtide.probes.heap.reach import reach
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import (
    MISSING,
    attribute,
    code_of,
    dict_of_module,
    instance_dict,
    is_a,
    module_of_class,
    mro_of,
    namespace_of,
)

_MOST_OBJECTS = 20_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ON_ITSELF = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")

_ANY_OF_ITS_KIND = frozenset(
    {"active_children", "all_tasks", "children", "closerange", "get_objects", "kill", "killpg"}
)
"""Names of functions that end, or find, what nothing of the object leads to."""

_SPEAKING = frozenset(
    {"_asyncio", "_io", "_multiprocessing", "_queue", "_socket", "_weakref", "asyncio", "concurrent", "ctypes"}
    | {"multiprocessing", "queue", "select", "selectors", "socket", "threading", "weakref"}
)
"""Libraries by whose objects another thread or process, to which they do not lead, is told to end."""


class _Touched(msgspec.Struct):
    """What the code of a method, and of the methods that this calls, touches; at whatever is global only if it may."""

    may_be_global: bool = False
    values: list[Any] = msgspec.field(default_factory=list)
    numbers: set[int] = msgspec.field(default_factory=set)
    names: set[str] = msgspec.field(default_factory=set)


class _CannotTellError(Exception):
    """The code hands its object on, or calls what nothing is known of."""


def leaves_alone(owner: object, call: str, things: Collection[object], needs: str = "") -> bool:
    """Return whether a call of an object of the program's surely ends none of some things; False where nobody can tell.

    Args:
        owner: the object.
        call: the call, such as `close()` or `await stop()`.
        things: objects; a number is a descriptor's.
        needs: a name without which no code ends them, such as `unlink` for shared memory.
    """
    cls = type(owner)
    if is_installed(module_of_class(cls)):
        return False
    touched = _Touched()
    try:
        _follow(owner, _name_of(call), touched, set())
    except _CannotTellError:
        return False
    if needs and needs not in touched.names:
        return True
    numbers = {thing for thing in things if type(thing) is int}
    if touched.numbers & numbers or (numbers and touched.values):
        # Which of the objects that it loads has the number of a descriptor is not looked for.
        return False
    # The way back to the owner leads to all that it has.
    passed = {id(owner), id(instance_dict(owner))}
    reached, is_cut = reach(touched.values, namespaces=passed, max_objects=_MOST_OBJECTS)
    wanted = {id(thing) for thing in things if type(thing) is not int}
    return not is_cut and not any(id(item) in wanted or _speaks(item) for item in reached)


def leaves_running(owner: object, call: str, thread: object, function: object) -> bool:
    """Return whether a call of an object surely does not end a thread that runs a method of it; False as above.

    A thread may be told to end by whatever of its object the method looks at: a flag, an event, a queue.
    """
    if type(function) is not MethodType:
        return False
    read, ended = _Touched(may_be_global=True), _Touched()
    with contextlib.suppress(_CannotTellError):
        _follow(owner, function.__func__.__name__, read, set())
        _follow(owner, _name_of(call), ended, set())
        # Methods, and what classes have, are no telling.
        own = read.names - {name for base in mro_of(type(owner)) for name in namespace_of(base)}
        looked_at = {name: value for name in own if (value := attribute(owner, name)) is not MISSING}
        is_idle = leaves_alone(owner, call, [thread, *looked_at.values()])
        return is_idle and not looked_at.keys() & ended.names
    return False


def attributes_with(owner: object, numbers: Collection[int]) -> list[str]:
    """Return the attributes of an object that are one of some numbers, as far as a method of its class names them."""
    functions = [each for base in mro_of(type(owner)) for each in namespace_of(base).values()]
    names = dict.fromkeys(name for each in functions if type(each) is FunctionType for name in code_of(each).co_names)
    values = {name: attribute(owner, name) for name in names}
    return [name for name, value in values.items() if type(value) is int and value in numbers]


def _name_of(call: str) -> str:
    return call.removeprefix("await ").partition("(")[0]


def _speaks(item: object) -> bool:
    module = module_of_class(type(item))
    return module.partition(".")[0] in _SPEAKING and module != "multiprocessing.shared_memory"


def _follow(owner: object, name: str, touched: _Touched, read: set[str]) -> None:
    """Note what a method of an object touches, and that of each base, which it may go on to."""
    functions = [namespace_of(base)[name] for base in mro_of(type(owner)) if name in namespace_of(base)]
    method = attribute(owner, name)
    if not functions or type(method) is not MethodType or method.__func__ is not functions[0]:
        raise _CannotTellError
    if name in read:
        return
    read.add(name)
    for function in functions:
        if type(function) is not FunctionType:
            raise _CannotTellError
        code: CodeType = code_of(function)
        if not code.co_argcount or code.co_varnames[0] in code.co_cellvars:
            raise _CannotTellError
        _read(owner, code, function.__globals__, touched, read)


def _read(owner: object, code: CodeType, names: dict[str, Any], touched: _Touched, read: set[str]) -> None:
    """Note what some code touches, and that of the functions in it, which do not have its object."""
    touched.names.update(code.co_names)
    if not touched.may_be_global and _ANY_OF_ITS_KIND.intersection(code.co_names):
        raise _CannotTellError
    itself = code.co_varnames[0] if code.co_varnames else ""
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    for step, following in itertools.pairwise(steps):
        loaded = _loaded(step)
        if owner is not None and itself in loaded:
            if itself in loaded[:-1] or following.opname not in _ON_ITSELF:
                raise _CannotTellError
            if following.opname.startswith("LOAD_"):
                _load(owner, following.argval, touched, read)
        elif not touched.may_be_global and _hands_on(step, names):
            raise _CannotTellError
    if owner is not None and "super" in code.co_names:
        for name in code.co_names:
            if any(type(namespace_of(base).get(name)) is FunctionType for base in mro_of(type(owner))):
                _follow(owner, name, touched, read)
    for inner in code.co_consts:
        if type(inner) is CodeType:
            _read(None, inner, names, touched, read)


def _hands_on(step: dis.Instruction, names: dict[str, Any]) -> bool:
    """Return whether an instruction loads what is neither Python's nor torch's: nobody knows what that leads to."""
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return not _is_harmless(names, step.argval)
    if step.opname == "IMPORT_NAME":
        return not is_library(step.argval)
    return step.opname == "LOAD_DEREF" and step.argval != "__class__"


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """Return the variables that an instruction loads, two at once since Python 3.12."""
    if not step.opname.startswith("LOAD_FAST"):
        return ()
    return step.argval if type(step.argval) is tuple else (step.argval,)


def _load(owner: object, name: str, touched: _Touched, read: set[str]) -> None:
    value = attribute(owner, name)
    if type(value) in _PLAIN:
        touched.numbers.update([value] if type(value) is int else [])
    elif value is MISSING or any(name in namespace_of(base) for base in mro_of(type(owner))):
        _follow(owner, name, touched, read)
    else:
        touched.values.append(value)


def _is_harmless(names: dict[str, Any], name: str) -> bool:
    """Return whether a global name is Python's or torch's, which by themselves have nothing of the program's."""
    value = names.get(name, MISSING)
    if value is MISSING or type(value) in _PLAIN:
        return True
    if is_a(value, ModuleType):
        of: object = dict_of_module(value).get("__name__")
    elif is_a(value, type):
        of = module_of_class(value)
    else:
        of = attribute(value, "__module__") if type(value) in (FunctionType, BuiltinFunctionType) else None
    return type(of) is str and is_library(of)
