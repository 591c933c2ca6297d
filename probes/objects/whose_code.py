"""Whose code it is: that of Python and of installed packages, or the program's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import ModuleType


def installed_in(entries: Iterable[str], here: Path) -> set[str]:
    """The places of the import path where packages were installed: not only those of this interpreter's scheme.

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
    """Whether code in this file belongs to Python, or to an installed package, and not to the program."""
    return file.startswith(_PLACES)


def is_of_site(file: str) -> bool:
    """Whether code in `file` is an installed library's."""
    return file.startswith(_SITE)


def is_of_python(file: str) -> bool:
    """Whether code in `file` is of Python's own library."""
    return is_library(file) and not is_of_site(file)


def program_modules() -> list[ModuleType]:
    """The modules that have a file and are no library's, and not of this checker."""
    return [module for module, file in _files() if not is_library(file) and not module.__name__.startswith("lowtide.")]


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
