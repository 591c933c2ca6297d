"""Modules written in C, whose own state must not be asked for what it refers to.

`gc.get_referents` gives out whatever a module's state shows the collector, and CPython 3.12's `_asyncio` shows it a
list of dead objects that wait to be used again.  Each of them that is given out lives and dies once more, and then
follows itself in that list: the next walk over the module, and the next garbage collection, never end
(`Modules/_asynciomodule.c`, `fi_freelist`).  What a program keeps in such a module it keeps in its namespace.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from lowtide.probes.objects.foreign import dict_of_module, mro_of

_definition_of: Any = ctypes.pythonapi.PyModule_GetDef
_definition_of.argtypes = [ctypes.py_object]
_definition_of.restype = ctypes.c_void_p


def is_kind_of_module(kind: type) -> bool:
    """Whether instances of a class are modules; runs none of its code."""
    return any(base is ModuleType for base in mro_of(kind))


def without_state(module: Any) -> object:
    """What to ask the collector in place of a module: itself, or for one that is written in C its namespace alone."""
    return (dict_of_module(module),) if _definition_of(ctypes.py_object(module)) else module
