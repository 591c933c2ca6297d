"""Whose code it is: that of Python and of installed packages, or the program's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import ModuleType

_INSTALLED = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}

_PLACES = ("<frozen ", *(f"{place}/" for place in {*_INSTALLED, *map(os.path.realpath, _INSTALLED)}))


def is_library(file: str) -> bool:
    """Whether code in this file belongs to Python, or to an installed package, and not to the program."""
    return file.startswith(_PLACES)


def program_modules() -> list[ModuleType]:
    """The modules that have a file and are no library's, and not of this checker."""
    return [module for module, file in _files() if not is_library(file) and not module.__name__.startswith("lowtide.")]


def library_globals() -> frozenset[int]:
    """Identities of what the globals of the libraries' modules are bound to."""
    libraries = [module for module, file in _files() if is_library(file)]
    return frozenset(id(value) for module in libraries for value in list(vars(module).values()))


def _files() -> list[tuple[ModuleType, str]]:
    loaded = [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]
    files = [(module, vars(module).get("__file__")) for module in loaded]
    return [(module, file) for module, file in files if type(file) is str]
