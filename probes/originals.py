"""Python's own functions as they were when lowtide was imported: what a test puts in their place judges nothing.

`from lowtide.probes.originals import gc, os, time` in place of `import gc, os, time`: the functions, classes and
constants of these stay the first ones.  All else of them is state of the program (`os.environ`, `sys.path`,
`gc.callbacks`), and is read where it is now.

Whoever replaces `os.open` sets a name of the module `os`, and nothing here looks it up there.  pyfakefs and freezegun
also go through the globals of all loaded modules, for each module and function that they stand in for: what is kept
here is no module, and its functions are in no module's globals.

What lowtide itself puts in a library's place passes for what was there (`StandIns`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys as sys_module
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from inspect import isclass, unwrap
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from lowtide.probes import native

if TYPE_CHECKING:
    import gc as gc
    import logging as logging
    import os as os
    import resource as resource
    import signal as signal
    import sys as sys
    import tempfile as tempfile
    import threading as threading
    import time as time
    import weakref as weakref


class Kept:
    """The functions, classes and constants of a module as they are now; all else as it is whenever it is asked for.

    Args:
        module: the module.
        parts: modules in it whose functions are kept, too.
    """

    def __init__(self, module: ModuleType, **parts: Kept) -> None:
        vars(self).update({name: value for name, value in vars(module).items() if _is_kept(name, value)})
        vars(self).update(parts)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_kept(name: str, value: object) -> bool:
    # `sys.excepthook` and its like are what the program has set last.
    return not name.endswith("hook") and (callable(value) or name.isupper())


_definition_of: Any = ctypes.pythonapi.PyModule_GetDef
_definition_of.argtypes = [ctypes.py_object]
_definition_of.restype = ctypes.c_void_p


def _get_referents(*items: Any) -> list[Any]:
    """Return what the collector is shown of some objects; of a module that is written in C its namespace alone.

    `gc.get_referents` gives out whatever a module's state shows the collector, and CPython 3.12's `_asyncio` shows it a
    list of dead objects that wait to be used again.  Each of them that is given out lives and dies once more, and then
    follows itself in that list: the next walk over the module, and the next garbage collection, never end
    (`Modules/_asynciomodule.c`, `fi_freelist`).  What a program keeps in such a module it keeps in its namespace.
    """
    if native.referents is not None:
        return native.referents(*items)
    return _first_referents(*map(_without_state, items))


def _without_state(item: Any) -> object:
    is_in_c = issubclass(type(item), ModuleType) and _definition_of(ctypes.py_object(item))
    return (_NAMESPACE.__get__(item),) if is_in_c else item


_NAMES = ("gc", "logging", "os", "resource", "signal", "sys", "tempfile", "threading", "time", "weakref")
_KEPT = {name: Kept(importlib.import_module(name)) for name in (*_NAMES, "builtins", "io")}

_first_referents: Callable[..., list[Any]] = _KEPT["gc"].get_referents
vars(_KEPT["gc"])["get_referents"] = functools.update_wrapper(_get_referents, _first_referents)

if not TYPE_CHECKING:
    globals().update({name: _KEPT[name] for name in _NAMES})


def keep(module: ModuleType) -> Kept:
    """Return a module's functions as they are now; what somebody puts in their place is told by `replaced`."""
    return _KEPT.setdefault(module.__name__, Kept(module))


def replace(name: str, function: Callable[..., Any]) -> None:
    """Put another function in the place of one of Python's, here and there: for a fork, in which no program runs.

    Args:
        name: such as `gc.collect`.
        function: the other one.
    """
    module, _, own = name.partition(".")
    vars(_KEPT[module])[own] = function
    setattr(_KEPT[module]._module, own, function)


def replaced() -> list[str]:
    """Return the functions, as `os.open`, in whose place somebody has put one that does not call itself a wrapper."""
    return [
        f"{name}.{function}"
        for name, kept in _KEPT.items()
        for function, original in vars(kept).items()
        if callable(original) and not isclass(original)
        if unwrap(vars(kept._module).get(function, str)) is not unwrap(original)
    ]


_MODULES = sys_module.modules
_NAMESPACE: Any = vars(ModuleType)["__dict__"]
_LOADED: dict[str, Callable[[], object]] = {}
"""Weak references: a program may drop a module of its own."""


def loaded(name: str) -> Any:
    """Return a module if it is loaded, else None; not what a test has put in its place in `sys.modules`.

    Args:
        name: the module's whole name.
    """
    module: object = _MODULES.get(name)
    known = _LOADED[name]() if name in _LOADED else None
    if module is known:
        return module
    if _was_imported(module, name):
        _LOADED[name] = weakref.ref(module)
        return module
    return module if known is None else known


_OF_TORCH: list[Kept] = []


def torch_with_cuda() -> Any:
    """Return torch with the functions of `torch.cuda` that there were when it was first asked for.

    Returns:
        What may be asked for all that the module has; None where `torch.cuda` is not imported, or torch only in part.
    """
    torch, cuda = loaded("torch"), loaded("torch.cuda")
    if not _OF_TORCH and None not in (torch, cuda) and not torch.__spec__._initializing:
        _OF_TORCH.append(Kept(torch, cuda=Kept(cuda)))
    return _OF_TORCH[0] if _OF_TORCH else None


def initialized_torch() -> Any:
    """Return torch if it is loaded and has initialised CUDA (or HIP), else None; initialises nothing.

    Its functions, those of `torch.cuda` included, are the first ones, whatever a test puts in their place.
    """
    torch = torch_with_cuda()
    # While torch runs what was queued for this moment, all is there but the flag.
    is_there = torch is not None and (
        torch.cuda.is_initialized() or hasattr(getattr(torch.cuda, "_tls", None), "is_initializing")
    )
    return torch if is_there else None


def in_main_thread() -> bool:
    """Return whether the main thread asks.

    Not by `threading.current_thread`: it makes an object for a thread that C has started, and keeps it (until 3.13 for
    good), which is the program's to do.
    """
    return bool(threading.get_ident() == threading.main_thread().ident)


def _was_imported(module: object, name: str) -> TypeGuard[ModuleType]:
    """Return whether an import made it: what a test makes up has no loader."""
    if not issubclass(type(module), ModuleType):
        return False
    # Not `vars`, which runs code of a class of the program's.
    spec = _NAMESPACE.__get__(module).get("__spec__")
    return type(spec) is ModuleSpec and spec.name == name and spec.loader is not None


_AT_A_TIME = 1 << 16


def temporary_folder() -> str:
    """Return the folder of temporary files, as the program has set it or found it."""
    # `tempfile.gettempdir` looks up what it calls.
    return tempfile.tempdir if type(tempfile.tempdir) is str else tempfile.gettempdir()


def contents(path: str) -> bytes:
    """Return all that is in a file, in a few microseconds: without the layers that Python puts around one.

    Args:
        path: where it is.

    Raises:
        OSError: it cannot be opened or read.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        # The kernel may hand over what it makes up in parts.
        while part := os.read(number, _AT_A_TIME):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(number)


def lines_of(path: str) -> list[str]:
    """Return the lines of a file, each without its end; for the errors see `contents`."""
    # `splitlines` ends one at a form feed, too.
    lines = contents(path).decode(errors="replace").split("\n")
    return lines if lines[-1] else lines[:-1]


class StandIns:
    """Functions of lowtide's in the places of a library's, each until `restore`.

    Each passes for what was there, by name, signature and documentation. A module's function is pickled as that
    module's: `multiprocessing` sends `os.kill` to another process by its name, where the original is found (which calls
    itself `posix.kill`; there nothing stands in for it).
    """

    def __init__(self) -> None:
        # By the identity of a place, which is in the value, too, and a name there.
        self._put: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def put(self, place: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Put another function in a place; legal twice, and nothing where there is no such function.

        Args:
            place: the module or class that has it; what a test has put in a class's place has none of its own.
            name: its name there.
            make: makes the other one of the original.
        """
        if (id(place), name) in self._put:
            return
        own = getattr(place, "__dict__", {}).get(name)
        original = getattr(place, name, None) if issubclass(type(place), type) else own
        if original is None:
            return
        ours = functools.update_wrapper(make(original), original)
        if type(place) is ModuleType:
            ours.__module__, ours.__qualname__ = place.__name__, name
        # A class may have it of another one.
        self._put[id(place), name] = place, own, ours
        setattr(place, name, ours)

    def of(self, place: Any) -> tuple[Callable[..., Any], ...]:
        """Return the originals of a module that are stood in for."""
        return tuple(original for there, original, _ in self._put.values() if there is place)

    def restore(self) -> None:
        """Put everything back; legal twice. What somebody else has replaced meanwhile stays as it is."""
        for (_, name), (place, original, ours) in reversed(self._put.items()):
            if vars(place).get(name) is not ours:
                continue
            if original is None:
                delattr(place, name)
            else:
                setattr(place, name, original)
        self._put.clear()
