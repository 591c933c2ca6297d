"""Finds the method by which the instances of a class are ended, by the names that classes give it."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lowtide.probes.objects.foreign import code_of, dict_of_module, is_a, mro_of, namespace_of

_NAMES = ("shutdown", "terminate", "close", "stop", "cancel")
_COROUTINES = 0x80 | 0x200
"""The flags of a coroutine's and of an asynchronous generator's code."""

_VARIABLE_ARGUMENTS = 0x04


def class_named(name: str) -> type | None:
    """The class of a type's name, as `package.module.Class`; None where its module does not have it under that."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, rest = module.rpartition(".")[0], "", f"{module.rpartition('.')[2]}.{rest}"
    item: Any = sys.modules.get(module)
    for part in rest.split("."):
        # Under the name of a function in which a class was made there may be anything by now.
        if is_a(item, ModuleType):
            item = dict_of_module(item).get(part)
        else:
            item = namespace_of(item).get(part) if is_a(item, type) else None
    return item if is_a(item, type) else None


def ending_of(cls: type | None) -> str:
    """The call that ends an instance of a class, as `stop()`, `await close()`; empty where it has none."""
    if cls is None:
        return ""
    names: dict[str, object] = {}
    for base in mro_of(cls):
        for name, value in namespace_of(base).items():
            names.setdefault(name, value)
    # What has a descriptor of its own is closed; `shutdown` of a socket takes an argument and ends no descriptor.
    endings = ("close", *_NAMES) if "fileno" in names else _NAMES
    name = next((ending for ending in endings if names.get(ending) is not None), "")
    return f"{_call(name, names[name])}" if name else ""


def on(code: str, ending: str) -> str:
    """The call of an ending on an object that is given as code."""
    return f"await {code}.{ending.removeprefix('await ')}" if ending.startswith("await ") else f"{code}.{ending}"


def _call(name: str, function: object) -> str:
    if type(function) is not FunctionType:
        return f"{name}()"
    code: CodeType = code_of(function)
    needed = code.co_argcount - len(function.__defaults__ or ())
    arguments = "…" if needed > 1 and not code.co_flags & _VARIABLE_ARGUMENTS else ""
    return f"{'await ' if code.co_flags & _COROUTINES else ''}{name}({arguments})"
