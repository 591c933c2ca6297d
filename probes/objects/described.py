"""Names for the objects that a setting may be, without running their code; and whose code they are."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from lowtide.probes.objects.foreign import code_of, module_of_class, mro_of, type_name
from lowtide.probes.originals import loaded


def installed_in(entries: Iterable[str], here: Path) -> set[str]:
    """Return the places of the import path where packages were installed: not only those of this interpreter's scheme.

    A user's own, those that a virtual environment takes from the system, and folders of `pip install --target`, where
    what was installed is noted beside it.
    """
    folders = [Path(entry) for entry in entries if entry and Path(entry).resolve() != here.resolve()]
    names = ("site-packages", "dist-packages")
    return {str(folder) for folder in folders if folder.name in names or any(folder.glob("*.dist-info"))}


def _with_links(places: Iterable[str]) -> tuple[str, ...]:
    found = set(places)
    return tuple(f"{place}/" for place in {*found, *map(os.path.realpath, found)})


_SITE = _with_links({sysconfig.get_path(name) for name in ("purelib", "platlib")} | installed_in(sys.path, Path.cwd()))

_PLACES = ("<frozen ", *_SITE, *_with_links(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def is_library(file: str) -> bool:
    """Return whether code in this file belongs to Python, or to an installed package, and not to the program."""
    return file.startswith(_PLACES)


def is_of_site(file: str) -> bool:
    """Return whether code in `file` is an installed library's."""
    return file.startswith(_SITE)


def is_of_python(file: str) -> bool:
    """Return whether code in `file` is of Python's own library."""
    return is_library(file) and not is_of_site(file)


def program_modules() -> list[ModuleType]:
    """Return the modules that have a file and are no library's, and not of this checker."""
    found = [module for module, file in _files() if not is_library(file)]
    return [module for module in found if not f"{module.__name__}.".startswith("lowtide.")]


def site_modules() -> list[ModuleType]:
    """Return the modules of installed libraries that have a file."""
    return [module for module, file in _files() if is_of_site(file)]


def program_namespaces() -> frozenset[int]:
    """Identities of the dicts that hold the globals of all modules but libraries'."""
    files = {id(module): file for module, file in _files()}
    return frozenset(id(vars(module)) for module in _modules() if not is_library(files.get(id(module), "")))


def library_globals() -> frozenset[int]:
    """Identities of what the globals of the libraries' modules are bound to."""
    libraries = [module for module, file in _files() if is_library(file)]
    return frozenset(chain.from_iterable(map(id, list(vars(module).values())) for module in libraries))


def _files() -> list[tuple[ModuleType, str]]:
    files = [(module, vars(module).get("__file__")) for module in _modules()]
    return [(module, file) for module, file in files if type(file) is str]


def _modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]


LIBRARYS = "a library's "
"""What the text of an object begins with that an installed library made for itself."""

_TOOLS = ("_pytest", "pluggy", "xdist", "pytest_timeout", "pytest_cov", "coverage", "hypothesis", "lowtide")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")
"""Who runs tests and looks on while they run: what these set they take back themselves."""


def described(item: object) -> str:
    """Return `package.module.function at 0x7f…`: what it is and which one; a constant as code."""
    if item is None or type(item) in (int, bool, str):
        return constant_text(item)
    return (LIBRARYS if is_librarys(item) else "") + identified(item)


def constant_text(item: object) -> str:
    """Return a constant as code; in hexadecimal digits where the interpreter refuses to write so many decimal ones."""
    try:
        return repr(item)
    except ValueError:
        return hex(item) if type(item) is int else f"<{type_name(type(item))}>"


def identified(item: object) -> str:
    """Return the same, whoever made it."""
    return f"{name_of(item)} at {id(item):#x}"


def name_of(item: object) -> str:
    """Return what an object is: a function and a class by their names, a method with its object's class."""
    if type(item) is FunctionType or type(item) is BuiltinFunctionType:
        module, name = item.__module__, item.__qualname__
        return f"{module}.{name}" if type(module) is str else name
    if any(base is type for base in mro_of(type(item))):
        return type_name(item)  # type: ignore[arg-type]
    if type(item) is MethodType:
        function = getattr(item.__func__, "__name__", "") if type(item.__func__) is FunctionType else ""
        return f"{type_name(type(item.__self__))}.{function or 'method'}"
    if type(item) is functools.partial:
        return f"partial of {name_of(item.func)}"
    return type_name(type(item))


def is_librarys(item: object) -> bool:
    """Return whether it is a function of an installed library, or an object of a tool that runs tests.

    A method of a library's object is not: who set it made the object.
    """
    owner = owner_of_call(item)
    if type(owner) is FunctionType:
        return is_library(code_of(owner).co_filename)
    return is_tools(type(owner))


def owner_of_call(item: object) -> object:
    """Return the function that a call of partials comes to, or whose method that is; else the item itself."""
    while type(item) is functools.partial:
        item = item.func
    return item.__self__ if type(item) is MethodType else item


def is_tools(cls: type) -> bool:
    """Return whether a class is of a tool that runs tests, or of a debugger."""
    return is_of_tools(module_of_class(cls))


def is_of_tools(module: str) -> bool:
    """Tell whether a module is of a tool that runs tests, or of a debugger; the engine of this package is a program."""
    return module.partition(".")[0] in (*_TOOLS, *_DEBUGGERS) and not module.startswith("lowtide.engine.")


def is_text_of_tool(text: str) -> bool:
    """Return whether a text of `described` is that of a function or an object of a tool that runs tests."""
    return is_of_tools(text.removeprefix(LIBRARYS))


def is_installed_module(name: str) -> bool:
    """Return whether the package of a module is installed, and not the project's own."""
    module: Any = loaded(name.partition(".")[0])
    is_module = any(base is ModuleType for base in mro_of(type(module)))
    origin = getattr(vars(module).get("__spec__") if is_module else None, "origin", None)
    return type(origin) is str and (origin in ("built-in", "frozen") or is_library(origin))
