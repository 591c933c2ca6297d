"""What is there to stay, and so is no leak: each entry with its reason, all of them in one list."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

import msgspec

from lowtide.leakcheck.resources import resource_of
from lowtide.probes.host.counters import child_processes
from lowtide.probes.host.process_files import command_line as _command_line
from lowtide.probes.host.process_files import has_ended, numbered_descriptors, stat
from lowtide.probes.objects.foreign import attribute, is_a, module_of_class, thread_ident, thread_key
from lowtide.probes.originals import gc, loaded, os, sys, threading, weakref
from lowtide.reports.schema import ResourceName

Names = Collection[str]


class Exemption(msgspec.Struct, frozen=True):
    """One thing that a process starts once and keeps.

    Attributes:
        resource: of which resource.
        what: its name for people.
        reason: why it stays.
        among: which of some items, by the names that they have in the counters, are it.
    """

    resource: ResourceName
    what: str
    reason: str
    among: Callable[[Names], Names]


def exempt(resource: str, names: Names) -> set[str]:
    """Return those items of `resource` that are there to stay.

    Args:
        resource: of the items.
        names: as the counters call them.

    This is asked at every poll while something is waited for: no entry looks at the whole heap, and what an entry
    reads, it reads once for all names.
    """
    left = set(names)
    for entry in EXEMPTIONS:
        if left and entry.resource == resource:
            left.difference_update(entry.among(left))
    kind = resource_of(resource)
    if left and kind is not None:
        left.difference_update(kind.staying(left))
    return set(names) - left


def _each(applies: Callable[[str], bool]) -> Callable[[Names], Names]:
    """Return those names for which a question about one name is answered with yes."""
    return lambda names: {name for name in names if applies(name)}


def _runs(*modules: str) -> Callable[[Names], Names]:
    return _each(lambda pid: any(module in _command_line(int(pid)) for module in modules))


def _serves_multiprocessing(pid: str) -> bool:
    """Return whether a process is one of the two; what the fork server has forked has its command line, too."""
    tracker = getattr(loaded("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(loaded("multiprocessing.forkserver"), "_forkserver", None)
    if int(pid) in (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)):
        # One that was forked just now may not have its command line yet.
        return True
    command = _command_line(int(pid))
    if "multiprocessing.forkserver" not in command:
        return _TRACKER.search(command) is not None
    process = stat(int(pid))
    # One that ended meanwhile is not reported.
    return process is None or "multiprocessing.forkserver" not in _command_line(process.parent)


_TRACKER = re.compile(r"from [\w.]+\bresource_tracker import main")
"""How multiprocessing starts its resource tracker, and how what is derived from it does (loky, multiprocess)."""


def _opens(pattern: str) -> Callable[[Names], Names]:
    return _each(lambda name: re.fullmatch(pattern, _target(name)) is not None)


def _target(name: str) -> str:
    return name.partition(" -> ")[2]


def _number(name: str) -> int:
    return int(name.partition(" ")[0])


_STREAMS = (0, 1, 2)

_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
"""Where libraries are installed."""


def _is_torchs_own(name: str) -> bool:
    held, _, cache = name.rpartition(" in ")
    return held.startswith("torch.") and cache.startswith("torch.")


def _given_to_those_that_stay(names: Names) -> Names:
    """Return the pipes that child processes which stay have open as well, and what they have as streams of their own.

    What they have inherited as standard streams may be anybody's.
    """
    left = {name for name in names if _target(name).startswith(("pipe:", "/"))}
    given: set[str] = set()
    inherited = numbered_descriptors(os.getpid()) if left else {}
    for pid in exempt("processes", set(map(str, child_processes()))) if left else ():
        for number, target in numbered_descriptors(int(pid)).items():
            is_stream = number in _STREAMS
            if target != inherited.get(number) if is_stream else target.startswith("pipe:"):
                given.add(target)
    return {name for name in left if _target(name) in given}


def _threads_of(*modules: str) -> Callable[[Names], Names]:
    """Return the threads that are of a class, or run a function, of one of these modules."""

    def is_one(thread: threading.Thread) -> bool:
        places = (module_of_class(type(thread)), _module_of(attribute(thread, "_target")))
        return any(place == module or place.startswith(f"{module}.") for place in places for module in modules)

    def among(names: Names) -> Names:
        return {name for name, thread in _threads_by_name().items() if name in names and is_one(thread)}

    return among


def _idle_in(module: str) -> Callable[[Names], Names]:
    """Return the worker threads whose loop is a function of this module, and that run nothing at the moment.

    While they do, there are two calls in the module. Whoever has wrapped a lock may be between the loop and the lock.
    """

    def is_idle(frame: FrameType | None) -> bool:
        calls = 0
        while frame is not None:
            calls += dict.get(frame.f_globals, "__name__") == module
            frame = frame.f_back
        return calls == 1

    def among(names: Names) -> Names:
        idle = {ident for ident, frame in sys._current_frames().items() if is_idle(frame)}
        return {name for name, thread in _threads_by_name().items() if name in names and thread_ident(thread) in idle}

    return among


def _module_of(target: Any) -> str:
    """Return the module of what a thread runs, without asking it where it is an object of the program's."""
    function = target.__func__ if type(target) is MethodType else target
    if type(function) is FunctionType or type(function) is BuiltinFunctionType:
        return str(function.__module__)
    return module_of_class(type(target))


def _threads_by_name() -> dict[str, threading.Thread]:
    return {thread_key(thread): thread for thread in threading.enumerate()}


def waiting_workers(names: Names) -> dict[str, object]:
    """Return the threads that wait for work in a pool of `concurrent.futures`, each with its pool."""
    waiting = _idle_in(ThreadPoolExecutor.__module__)(names)
    pools = {name: _pool_of(thread) for name, thread in _threads_by_name().items() if name in waiting}
    return {name: pool for name, pool in pools.items() if pool is not None}


def _pool_of(worker: threading.Thread) -> object | None:
    arguments = attribute(worker, "_args")
    reference = arguments[0] if type(arguments) is tuple and arguments else None
    pool = reference() if type(reference) is weakref.ref else None
    return pool if is_a(pool, ThreadPoolExecutor) else None


def _in_torchs_pools(names: Names) -> Names:
    """Return the threads of the executors that torch makes once, and keeps."""
    compiler: Any = loaded("torch._inductor.async_compile")
    functions: Any = loaded("torch.utils._functools")
    # Nothing is asked of the cache: that would start the pool.
    kept = gc.get_referents(getattr(getattr(compiler, "AsyncCompile", None), "pool", None))
    kept.append(getattr(functions, "_prefetch_executor", None))
    own = [thread for pool in kept if isinstance(pool, ThreadPoolExecutor) for thread in pool._threads]
    return set(map(thread_key, own)) & set(names)


def _free_arenas(names: Names) -> Names:
    """Return the descriptors of multiprocessing's empty arenas, which the next `Array` takes."""
    wrapper: Any = getattr(loaded("multiprocessing.heap"), "BufferWrapper", None)
    if wrapper is None:
        return set()
    heap = wrapper._heap
    free = [arena for arena in list(heap._arenas) if not heap._allocated_blocks.get(arena)]
    targets = {target for arena in free if (target := _target_of(arena.fd))}
    return {name for name in names if _target(name) in targets}


def _beside_older_databases(names: Names) -> Names:
    """Return the logs and indexes that belong to a file which is open and is none of these itself."""
    left = {name for name in names if _target(name).endswith(_BESIDE)}
    known = {*numbered_descriptors(os.getpid()).values()}.difference(map(_target, names)) if left else set()
    return {name for name in left if _target(name).rpartition("-")[0] in known}


_BESIDE = ("-wal", "-shm")
"""How the names of files end that SQLite has beside a database in WAL mode (sqlite.org/walformat.html)."""


def _is_empty_folder(name: str) -> bool:
    try:
        return not os.listdir(f"/dev/shm/{name}")
    except OSError:  # a file, or gone
        return False


def _target_of(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # closed
        return ""


EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption(
        "processes",
        "multiprocessing's resource tracker and fork server",
        "Python starts one of each per process, when shared memory, a semaphore or a start method first asks for it",
        _each(_serves_multiprocessing),
    ),
    Exemption(
        "processes",
        "Ray's idle workers",
        "Ray starts workers ahead of time and keeps them for the next task; they end with their node",
        _runs("ray::IDLE"),
    ),
    Exemption(
        "processes",
        "a child that has ended",
        "only its exit code is left, until somebody asks for it",
        _each(lambda pid: has_ended(int(pid))),
    ),
    Exemption(
        "processes",
        "torch.compile's compile workers",
        "torch starts one pool per process at the first compilation and ends it at exit",
        _runs("torch/_inductor/compile_worker"),
    ),
    Exemption(
        "processes",
        "torch's addr2line",
        "torch starts some to name the C++ frames of a recorded allocation, and keeps them",
        _runs("addr2line"),
    ),
    Exemption(
        "threads",
        "a thread that has ended",
        "it was listed while it ended",
        lambda names: set(names) - _threads_by_name().keys(),
    ),
    Exemption(
        "threads",
        "the threads of torch.compile's compile workers",
        "they serve the pool of compile workers, one per process",
        _threads_of("torch._inductor.compile_worker", "torch._inductor.async_compile"),
    ),
    Exemption(
        "threads",
        "the threads in which torch.compile compiles",
        "torch starts one pool per process at the first compilation and keeps it",
        _in_torchs_pools,
    ),
    Exemption(
        "threads",
        "tqdm's monitor",
        "one daemon thread per process, started by the first progress bar",
        _threads_of("tqdm._monitor"),
    ),
    Exemption(
        "threads",
        "trio's idle worker threads",
        "they wait ten seconds for the next call in a thread, and then end",
        _idle_in("trio._core._thread_cache"),
    ),
    Exemption(
        "threads",
        "the debugger's threads",
        "pydevd serves the development environment for the whole process",
        _threads_of("pydevd", "_pydevd_bundle", "debugpy"),
    ),
    Exemption(
        "threads",
        "pytest-timeout's timer",
        "it watches the very test that is judged",
        _threads_of("pytest_timeout"),
    ),
    Exemption(
        "file-descriptors",
        "the pipes to child processes that stay, and what these write to",
        "they live as long as those do: multiprocessing's tracker, torch's compile workers, and their like",
        _given_to_those_that_stay,
    ),
    Exemption(
        "file-descriptors",
        "the free memory of multiprocessing's heap",
        "what held a shared `Value`, `Array` or lock is kept for the next one",
        _free_arenas,
    ),
    Exemption(
        "file-descriptors",
        "the log of a database of SQLite's that was open before, and the index of that",
        "the first who reads or writes opens them, and they are closed with the database",
        _beside_older_databases,
    ),
    Exemption(
        "shared-memory",
        "an empty folder",
        "it holds no memory; joblib makes one for each call, and removes them when the process ends",
        _each(_is_empty_folder),
    ),
    Exemption(
        "lru-cache",
        "torch's own caches of torch's own objects",
        "they are built once: empty modules that the compiler uses, and the like",
        _each(_is_torchs_own),
    ),
    Exemption(
        "file-descriptors",
        "the standard streams",
        "a test runner that captures output points them elsewhere and back",
        _each(lambda name: _number(name) in _STREAMS),
    ),
    Exemption(
        "file-descriptors",
        "the card's driver",
        "CUDA and ROCm open their devices at the first call and keep them until the process ends",
        _opens(r"/dev/(nvidia.*|kfd|dri/.*|dxg)|/proc/driver/nvidia.*"),
    ),
    Exemption(
        "file-descriptors",
        "a library's own files",
        "fonts, tables and the like, which a library opens where it is installed when they are first asked for",
        _each(lambda name: _target(name).startswith(_LIBRARIES)),
    ),
    Exemption(
        "file-descriptors",
        "the kernel's random numbers",
        "libraries open them once and keep them",
        _opens(r"/dev/u?random"),
    ),
)
"""Checked in this order; asked only about what is new after a test."""
