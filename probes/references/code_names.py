"""The names that code mentions: by one of these the program calls an attribute of an instance."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType, ModuleType

from lowtide.probes.objects.foreign import code_of, dict_of_module, is_a, module_of_class, mro_of, namespace_of


def names_in_class(cls: type) -> set[str]:
    """What the functions of a class and of its bases mention."""
    names: set[str] = set()
    for base in mro_of(cls):
        for value in namespace_of(base).values():
            if type(value) is FunctionType:
                add_names(code_of(value), names)
    return names


def names_in_module(cls: type) -> set[str]:
    """What the functions and classes of the class's module mention: often it is they that set what an instance has."""
    names: set[str] = set()
    module = sys.modules.get(module_of_class(cls))
    if module is None or not is_a(module, ModuleType):
        return names
    for value in list(dict_of_module(module).values()):
        if type(value) is FunctionType:
            add_names(code_of(value), names)
        elif is_a(value, type) and module_of_class(value) == module_of_class(cls):
            names |= names_in_class(value)
    return names


def add_names(code: CodeType, names: set[str]) -> None:
    """Adds what the code could call an attribute: the names that it uses, and strings it could give to `setattr`."""
    names.update(code.co_names)
    for constant in code.co_consts:
        if type(constant) is CodeType:
            add_names(constant, names)
        for text in constant if type(constant) is tuple or type(constant) is frozenset else (constant,):
            if type(text) is str and text.isidentifier():
                names.add(text)
