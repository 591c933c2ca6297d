"""The Python objects that stand for threads, processes, descriptors and shared memory, which a system only numbers."""

from __future__ import annotations

import functools
import io
import itertools
import re
import select
import selectors
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.process import BaseProcess
from types import FunctionType, ModuleType
from typing import Any

from lowtide.probes.objects.foreign import (
    MISSING,
    attribute,
    code_of,
    flags_of,
    mro_of,
    namespace_of,
    thread_key,
    type_name,
)
from lowtide.probes.objects.listed import Census
from lowtide.probes.objects.opened_in_c import (
    SCANDIR,
    defined_in_libraries,
    files_of_database,
    number_of_scandir,
    numbers_of_mappings,
)
from lowtide.probes.originals import gc, loaded, os, sys, threading, weakref
from lowtide.probes.references.interpreter_holders import exit_entries

_NUMBER = re.compile(r"\d+")
_SHARED_MEMORY = "/dev/shm/"
_HAVE_GC = 1 << 14
"""`Py_TPFLAGS_HAVE_GC`."""


def stand_ins(census: Census, items: dict[str, list[str]]) -> dict[tuple[str, str], Any]:
    """Return for things that the counters name, by resource and name, the object that owns each; those that have one.

    Args:
        census: the objects to look among.
        items: the names by resource: `threads`, `processes`, `file-descriptors`, `shared-memory`.
    """
    numbers = {found.group(): name for name in items.get("file-descriptors", ()) if (found := _NUMBER.match(name))}
    pids = {name.partition(" ")[0]: name for name in items.get("processes", ())}
    known: dict[tuple[str, str], Any] = {}
    running = (("threads", thread_key(thread), thread) for thread in threading.enumerate())
    mapped: dict[str, Any] = {}
    for resource, name, item in (*running, *owned(census), *_closed_at_exit()):
        if resource == "shared-memory":
            mapped.setdefault(f"{_SHARED_MEMORY}{name}", item)
        if resource == "file-descriptors":
            name = numbers.get(name, "")
        if resource == "processes":
            name = pids.get(name, "")
        if name in items.get(resource, ()):
            known.setdefault((resource, name), item)
    paths = {name: path.removesuffix(" (deleted)") for name in numbers.values() if (path := name.partition(" -> ")[2])}
    known |= {("file-descriptors", name): mapped[path] for name, path in paths.items() if path in mapped}
    opened: dict[str, list[str]] = {}
    for name in map(numbers.__getitem__, sorted(numbers, key=int)):
        if name in paths and paths[name].startswith("/") and ("file-descriptors", name) not in known:
            opened.setdefault(paths[name], []).append(name)
    for path, item in _of_files(census) if opened else ():
        # The oldest object has opened the one with the lowest number.
        if opened.get(path):
            known["file-descriptors", opened[path].pop(0)] = item
    return known


def owned(census: Census) -> Iterator[tuple[str, str, Any]]:
    """Give resource, name and owner of each thing that some objects stand for; a descriptor's name is its number."""
    for thread in census.instances_of(threading.Thread):
        yield "threads", thread_key(thread), thread
    for kind in (BaseProcess, subprocess.Popen):
        for process in census.instances_of(kind):
            yield "processes", str(_pid(process)), process
            yield from (("file-descriptors", str(number), process) for number in _descriptors_of(process))
    memory: Any = loaded("multiprocessing.shared_memory")
    segments = census.instances_of(memory.SharedMemory) if memory is not None else []
    # One that is closed has none of the descriptors of another one of that name.
    for segment in sorted(segments, key=lambda segment: attribute(segment, "_mmap") is None):
        yield "shared-memory", str(attribute(segment, "_name")).lstrip("/"), segment
    kinds = semaphores()
    for lock in census.instances_of(*kinds) if kinds else ():
        # A type written in C, whose attribute is nothing but a pointer in its struct.
        inner: Any = attribute(lock, "_semlock")
        if type_name(type(inner)) == "_multiprocessing.SemLock":
            yield "shared-memory", f"sem.{str(inner.name).lstrip('/')}", lock
    for selector in census.instances_of(selectors.BaseSelector):
        # The collector does not track an epoll itself.
        epoll: Any = attribute(selector, "_selector")
        if type_name(type(epoll)) in ("select.epoll", "select.kqueue"):
            yield "file-descriptors", str(_number(type(epoll), epoll)), selector
    for file_kind in (socket.SocketType, io.FileIO, select.epoll):
        for file in census.instances_of(file_kind):
            yield "file-descriptors", str(_number(file_kind, file)), file
    maps: Any = loaded("mmap")
    mappings = census.instances_of(maps.mmap) if maps is not None else []
    for mapping, number in zip(mappings, numbers_of_mappings(mappings), strict=True):
        yield "file-descriptors", str(number), mapping
    for entries in census.instances_of(SCANDIR):
        yield "file-descriptors", str(number_of_scandir(entries)), entries
    yield from _to_be_closed(census)
    connection: Any = loaded("multiprocessing.connection")
    for end in census.instances_of(connection._ConnectionBase) if connection is not None else ():
        yield "file-descriptors", str(_plain(attribute(end, "_handle"))), end
    heap: Any = loaded("multiprocessing.heap")
    for arena in census.instances_of(heap.Arena) if heap is not None else ():
        yield "file-descriptors", str(_plain(attribute(arena, "fd"))), arena
    # Behind all others: a function that was called outlives its number, which somebody else may have by now.
    for function in census.instances_of(FunctionType):
        if {"os", "close"}.issubset(code_of(function).co_names) and len(numbers := _numbers_in(function)) == 1:
            yield "file-descriptors", str(numbers[0]), function


_POINTERS = frozenset({"_cffi_backend._CDataBase", "_ctypes._Pointer", "ctypes.c_void_p"})
"""What pointers of cffi's and ctypes' derive from."""


def of_libraries(
    census: Census, born: Collection[int], is_wanted: Callable[[type], bool], *, of_any_age: bool = True
) -> list[Any]:
    """Return the objects that C code of libraries defines and that may have come since a moment.

    What such code opens or allocates, it tells nobody: an object of its that came at the same time is what may have it.
    Of what the collector does not track nobody knows the age, but that what is new has come with what refers to it.

    Args:
        census: the objects to look among.
        born: the identities of what was born since.
        is_wanted: tells whether instances of a class are wanted.
        of_any_age: whether to return all that the collector does not track, behind the others; else only what something
            new refers to.
    """
    classes = {id(base): base for kind in census.types() for base in mro_of(kind)}
    kinds = [kind for kind in defined_in_libraries([*classes.values()]) if is_wanted(kind)]
    found = [item for item in (census.instances_of(*kinds) if kinds else ()) if id(item) in born]
    untracked = [kind for kind in kinds if not flags_of(kind) & _HAVE_GC]
    among = census if of_any_age else census.among(born)
    return found + (among.referred_to(*untracked) if untracked else [])


def with_handles(census: Census, born: Collection[int], is_wanted: Callable[[type], bool]) -> list[Any]:
    """Return the objects of Python code born since a moment that have a pointer of cffi's or ctypes' as an attribute.

    What C code has opened behind the pointer, only they can end: soundfile's files, portaudio's streams.

    Args:
        census: the objects to look among.
        born: the identities of what was born since.
        is_wanted: tells whether instances of a class are wanted.
    """
    among = census.among(born)
    kinds = [kind for kind in among.types() if is_wanted(kind)]
    return [item for item in (among.instances_of(*kinds) if kinds else ()) if _has_pointer(item)]


def _has_pointer(item: object) -> bool:
    held = gc.get_referents(item)
    # Attributes lie in a dict, or at the object itself.
    held += gc.get_referents(*(each for each in held if type(each) is dict))
    return any(type_name(base) in _POINTERS for value in held for base in mro_of(type(value)))


def having_numbers(census: Census, opened: Mapping[int, Collection[tuple[str, int]]]) -> dict[int, Any]:
    """Return the object that has each descriptor's number in an attribute, and a method that has opened it.

    Args:
        census: the objects to look among.
        opened: the functions that ran when each descriptor was opened, by its number: each by its file and first line.
    """
    methods = {id(kind): _methods_of(kind) for kind in census.types()}
    wanted = set(itertools.chain.from_iterable(opened.values()))
    kinds = [kind for kind in census.types() if not methods[id(kind)].isdisjoint(wanted)]
    found: dict[int, Any] = {}
    for item in census.instances_of(*kinds) if kinds else ():
        held = gc.get_referents(item)
        # Attributes lie in a dict, and two numbers often in a tuple.
        held += gc.get_referents(*(each for each in held if type(each) in (dict, tuple, list)))
        numbers = {each for each in held if type(each) is int}
        for number, functions in opened.items():
            if number in numbers and not methods[id(type(item))].isdisjoint(functions):
                found.setdefault(number, item)
    return found


def _methods_of(kind: type) -> set[tuple[str, int]]:
    values = [value for base in mro_of(kind) for value in namespace_of(base).values()]
    functions = [value.__func__ if type(value) in (classmethod, staticmethod) else value for value in values]
    codes = [code_of(function) for function in functions if type(function) is FunctionType]
    return {(code.co_filename, code.co_firstlineno) for code in codes}


def _to_be_closed(census: Census) -> Iterator[tuple[str, str, Any]]:
    """Give, as `owned`, what will hand a number to `os.close`: nothing else says whose the descriptor is."""
    kind: Any = functools.partial
    for call in census.instances_of(kind):
        if kind.func.__get__(call) is os.close:
            yield "file-descriptors", _first(kind.args.__get__(call)), call
    finalizers: Any = weakref.finalize
    for waiting in census.instances_of(finalizers._Info):
        if waiting.func is os.close:
            yield "file-descriptors", _first(waiting.args), waiting


def _numbers_in(function: FunctionType) -> list[int]:
    """Return the whole numbers in the closure of a function."""
    return [each for each in gc.get_referents(*(function.__closure__ or ())) if type(each) is int]


def _closed_at_exit() -> Iterator[tuple[str, str, Any]]:
    """Give the same of what `atexit` has, which C alone refers to: the arguments."""
    for function, *rest in filter(None, exit_entries()):
        if function is os.close:
            yield "file-descriptors", _first(rest[0]), rest[0]


def _first(arguments: object) -> str:
    return str(_plain(arguments[0]) if type(arguments) is tuple and arguments else -1)


def semaphores() -> list[type]:
    """Return the classes of named semaphores: multiprocessing's, and those derived from it (loky, multiprocess)."""
    modules = [module for name, module in list(sys.modules.items()) if name.endswith(".synchronize")]
    found: list[Any] = [attribute(module, "SemLock") for module in modules if issubclass(type(module), ModuleType)]
    return [kind for kind in found if issubclass(type(kind), type)]


def _of_files(census: Census) -> Iterator[tuple[str, Any]]:
    """Give the path of each file that a database has opened without saying under which number, and the database."""
    sqlite: Any = loaded("sqlite3")
    for database in census.instances_of(sqlite.Connection) if sqlite is not None else ():
        for path in files_of_database(database):
            yield from ((f"{path}{end}", database) for end in ("", *_BESIDE_A_DATABASE))


_BESIDE_A_DATABASE = ("-wal", "-shm", "-journal")
"""How the names of files end that SQLite opens beside that of a database (sqlite.org/tempfiles.html)."""


def files_beside(census: Census) -> set[str]:
    """Return the paths of files that some databases have beside their own for as long as they need them."""
    return {path for path, _ in _of_files(census) if path.endswith(_BESIDE_A_DATABASE)}


def _pid(process: Any) -> int:
    own = _plain(attribute(process, "pid"))
    return own if own >= 0 else _plain(attribute(attribute(process, "_popen"), "pid"))


def _descriptors_of(process: Any) -> list[int]:
    """Return the descriptors by which multiprocessing learns of a process's end: its sentinel, and those it closes."""
    popen: Any = attribute(process, "_popen")
    if popen is MISSING or popen is None:
        return []
    closed: Any = attribute(attribute(popen, "finalizer"), "_args")
    found = [attribute(popen, "sentinel")]
    if type(closed) is tuple or type(closed) is list:
        found += closed
    return [number for number in map(_plain, found) if number >= 0]


def _plain(value: object) -> int:
    return value if type(value) is int else -1


def _number(kind: Any, file: Any) -> int:
    try:
        return int(kind.fileno(file))
    except (ValueError, OSError):  # closed
        return -1
