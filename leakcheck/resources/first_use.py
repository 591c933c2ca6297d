"""First use of a library, or of a card: what that makes and keeps, once in the process, is no leak.

A thread, child process, socket or pipe counts as a library's where the library's code made it and the library's own
module state holds it, and as native code's where no Python code made it, as does a small file in /dev/shm. The first of
a library are excused and listed; if there are more of them later while those live, they are all reported.

Native code keeps its books in files of /dev/shm that live as long as the process.

What a library that was first used in a test has taken on a card may be its own or a leak: `excused_by_libraries` tells
the two apart, by how much of the library's code is newly in memory.

On an H200 the first use of a card takes some 700 MiB that nobody gives back (a context, a handle of the BLAS library,
buffers for a first graph), behind which a raw allocation of the first test would not be seen: so a card is used once
before a test does (`WarmUp`). Each later thread that uses the BLAS library takes a handle, an allocation of 64 MiB and
two small ones that torch does not count (measured with torch 2.11). torch keeps the handles of threads that have ended
in a pool and hands them to later threads (`ATen/cuda/CublasHandlePool.cpp`), so that as many stay as there were threads
at once (`BlasHandles`). Until torch has initialised a card, nothing on it can be judged, and that is said
(`CardsWithoutTorch`).
"""

from __future__ import annotations

import enum
import functools
import mmap
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import date
from types import FrameType, ModuleType
from typing import Any

import msgspec

from lowtide.leakcheck.suppressions.entries import shipped
from lowtide.probes.device.allocations import AllocationsError, cards_with_contexts, read_allocations
from lowtide.probes.device.torch_allocator import read_segments
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.heap.reach import module_namespaces, reach
from lowtide.probes.heap.roots import lists_of_threads
from lowtide.probes.heap.stand_ins import owned, semaphores
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Maker, Makers
from lowtide.probes.host.readings import mapped_shared_files, resident_code, shared_file_bytes
from lowtide.probes.memory.ranges import Range, common
from lowtide.probes.objects.described import (
    is_installed_module,
    is_library,
    library_globals,
    program_modules,
    site_modules,
)
from lowtide.probes.objects.foreign import attribute, module_of_class, thread_key
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import Census, all_instances
from lowtide.probes.originals import gc, in_main_thread, initialized_torch, loaded, os, threading, weakref
from lowtide.reports.schema import CardMemory, Finding, NotMeasured, OtherProcess
from lowtide.reports.sizes import first_of, format_amount

_MOST_BYTES = 1 << 20
"""The size up to which a file may be such books; what holds data is larger, and is reported at once."""

_SEMAPHORE = "sem."
"""How the C library calls the files of named semaphores, which it maps for Python's own."""


def native_files(names: Collection[str], tensors: Sequence[Range]) -> set[str]:
    """Return those of some files in /dev/shm that native code of this process maps, and nothing in Python.

    Args:
        names: of the files.
        tensors: where tensors' memory lies: a file with a tensor over it is one that the program shares.
    """
    mapped = mapped_shared_files() if names else {}
    found = {
        name: ranges
        for name, ranges in mapped.items()
        if name in names
        and not name.startswith(_SEMAPHORE)
        and 0 < shared_file_bytes(name) <= _MOST_BYTES
        and not common(ranges, tensors)
    }
    if not found:
        return set()
    # Python reports the length of a map of its own, but not its address.
    lengths = {_pages(_length(item)) for item in all_instances(mmap.mmap)}
    return {name for name, ranges in found.items() if lengths.isdisjoint(_pages(length) for _, length in ranges)}


def _length(item: mmap.mmap) -> int:
    try:
        return mmap.mmap.__len__(item)
    except ValueError:  # closed
        return 0


def _pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE)


JUDGED = {
    "threads": "threads",
    "processes": "processes",
    "file-descriptors": "file descriptors",
    "shared-memory": "files in /dev/shm",
}
"""The resources of which a library may keep some from its first use, with their units."""

NATIVE = "native code"

_ANY = 1 << 30
"""How many there may be of what is judged by something else."""

_NAMELESS = re.compile(r"(pipe|socket|anon_inode):")
"""Descriptors on files have a path, which says whose they are."""

_SHARED_MEMORY = "/dev/shm/"

_REGISTRIES = frozenset(
    {"threading", "subprocess", "asyncio", "logging", "weakref", "atexit", "signal", "socket", "concurrent"}
    | {"multiprocessing.process", "multiprocessing.util"}
)
"""Libraries and modules whose state holds what programs put there: what is found there is the program's."""

_MOST_OBJECTS = 500_000

_FEWEST_REPEATED = 12
"""Things of one owner from which turns that do the same may have made them one by one,"""

_PART_OF_HALF = 3
"""if such a part of them came in each half of the turns, at least."""

Items = Mapping[str, Mapping[str, int]]


class _Kept(msgspec.Struct):
    """What a library keeps of one resource: the names with their amounts, how many there may be, and in which test the
    first came.
    """

    names: dict[str, int]
    level: int
    since: str
    grown: bool = False


class Sorted(msgspec.Struct, frozen=True):
    """The new items of a judgement, with a library's own separated.

    Attributes:
        excused: per resource, those that are a library's first.
        earlier: per resource, by the name of one that a library has more of now, those that were excused before, with
            their amounts.
        since: per resource, with which test the earlier ones came, where there are any.
        listed: what to say of those that are excused.
    """

    excused: Mapping[str, Collection[str]] = msgspec.field(default_factory=dict)
    earlier: Mapping[str, Mapping[str, Mapping[str, int]]] = msgspec.field(default_factory=dict)
    since: Mapping[str, str] = msgspec.field(default_factory=dict)
    listed: tuple[NotMeasured, ...] = ()

    def addition(self, key: str, names: Collection[str]) -> str:
        """Return what to add to a finding about some items, where others that came earlier are among them."""
        if key not in self.since or not any(name in self.earlier[key] for name in names):
            return ""
        return f"; the first came with {self.since[key] or 'an earlier test'}, and were listed as once so far"

    def applied(self, key: str, items: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
        """Return a resource's new items without what is excused, and with what was excused before they became more.

        Args:
            key: the resource.
            items: those that are new.
            now: all that are there now.
        """
        earlier = self.earlier.get(key, {})
        more = {name: size for new in items if new in earlier for name, size in earlier[new].items() if name in now}
        if not more and not self.excused.get(key):
            return items
        left = {name: amount for name, amount in items.items() if name not in self.excused.get(key, ())}
        return {**left, **dict(sorted(more.items()))}


class NewItems(msgspec.Struct, frozen=True):
    """What is new in one judgement and nobody is known to own, and what was seen beside it.

    Attributes:
        items: per resource, these.
        tensors: where the tensors' memory lies that is not on a card.
        natively: what keeps objects of C++ that came with these items, each with whether it is excused.
        unheld: the threads among them to which no module leads.
        has_native_owner: tells whether the program has a new object that may own what native code has opened.
        midway: per resource, what there was in the middle of turns that do the same; empty where there are none.
    """

    items: Items
    tensors: Sequence[Range] = ()
    natively: Sequence[tuple[str, bool]] = ()
    unheld: Collection[str] = ()
    has_native_owner: Callable[[], bool] = lambda: False
    midway: Mapping[str, Collection[str]] = msgspec.field(default_factory=dict)

    def came_by_turns(self, key: str, names: Sequence[str]) -> bool:
        """Return whether some of one owner's came in both halves of turns that do the same: more than a first use."""
        early = sum(name in self.midway.get(key, ()) for name in names)
        return len(names) >= _FEWEST_REPEATED and min(early, len(names) - early) * _PART_OF_HALF >= len(names)


class LibraryItems:
    """What libraries have been excused for in this process.

    Args:
        makers: who made what.
    """

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self._kept: dict[tuple[str, str], _Kept] = {}

    def sort(self, new: NewItems, now: Counters, subject: str) -> Sorted:
        """Tell apart what of some new items is a library's first.

        Args:
            new: these.
            now: the counters now.
            subject: what is judged, as a later finding calls it.
        """
        asked = {key: names for key, names in new.items.items() if key in JUDGED and names}
        if not asked:
            return Sorted()
        owners = _Owners(self._makers, new)
        excused: dict[str, set[str]] = {}
        since: dict[str, str] = {}
        earlier: dict[str, dict[str, dict[str, int]]] = {}
        listed = []
        for key, names in asked.items():
            by_owner: dict[str, list[str]] = {}
            most: dict[str, int] = {}
            for name in names:
                owner, limit = owners.of(key, name)
                if owner:
                    by_owner.setdefault(owner, []).append(name)
                    most[owner] = limit
            for owner, own in by_owner.items():
                kept = self._kept.setdefault((key, owner), _Kept({}, 0, subject))
                alive = {name: size for name, size in kept.names.items() if name in now.items[key]}
                fresh = {name: names[name] for name in own if name not in alive}
                kept.level = max(kept.level, most[owner]) or len(own)
                has_more = fresh and len(alive) + len(fresh) > kept.level
                if kept.grown or has_more or new.came_by_turns(key, own):
                    kept.grown = True
                    if alive:
                        since[key] = kept.since
                    for name in own:
                        earlier.setdefault(key, {})[name] = {
                            other: size for other, size in alive.items() if other not in own
                        }
                    # They are reported, and are part of no later finding.
                    kept.names = {}
                else:
                    kept.names = {**alive, **fresh}
                    excused.setdefault(key, set()).update(own)
                    listed.append(_listed(key, owner, own))
        return Sorted(excused, earlier, since, tuple(listed))


def unheld_threads(names: Collection[str], walk: SharedWalk | None, born: Collection[int] | None) -> Collection[str]:
    """Return some threads if no module leads to any of them, as far as a walk that is made shows it; else none.

    Whatever is new and leads there is gone through, back to what is older: where that is nothing but the interpreter's
    list of threads and frames that run, no module's state has a part in it.

    Args:
        names: the threads', as the counters have them.
        walk: the walk; None if there is none.
        born: the identities of what was born since the threads were not there.
    """
    if not names or walk is None or not walk.is_made or not isinstance(born, Identities):
        return ()
    nodes = walk.graph().find([thread for thread in threading.enumerate() if thread_key(thread) in names])
    if len(nodes) < len(names) or min(nodes) < 0:
        return ()
    objects, older = walk.graph().objects, walk.graph().leading_to(nodes, born)[1].tolist()
    lists = set(map(id, lists_of_threads()))
    is_modules = any(type(objects[node]) is not FrameType and id(objects[node]) not in lists for node in older)
    return () if is_modules else names


def _listed(key: str, owner: str, names: Collection[str]) -> NotMeasured:
    return NotMeasured(
        what=f"{format_amount(len(names), JUDGED[key])} of {owner}: {first_of(sorted(names), 3)}",
        why="once so far: if there are more of them later, all of them are a leak",
    )


class _Owners:
    """Finds for one judgement whose new items are; walks a library's state, and the program's, once at most.

    Args:
        makers: who made what.
        new: these items.
    """

    def __init__(self, makers: Makers, new: NewItems) -> None:
        self._makers, self._new = makers, new
        self._native = native_files(new.items.get("shared-memory", ()), new.tensors)
        self._has_native_owner = functools.cache(new.has_native_owner)
        self._states: dict[str, _State] = {}
        self._program: _State | None = None

    def of(self, key: str, name: str) -> tuple[str, int]:
        """Return whose an item is, and how many of them there may be if that is known; empty if it is the program's."""
        file = _shared_file(key, name)
        if key == "shared-memory" and file.startswith(_SEMAPHORE):
            return self._of_semaphore(name)
        if file:
            is_native = file in self._native and not (key != "shared-memory" and self._of_program().has(key, name))
            return (f"{NATIVE} ({_stem(file)})" if is_native else "", 0)
        maker = self._maker(key, name)
        if maker is None:
            return self._of_native(key, name) if self._is_native(key, name) else ("", 0)
        is_unheld = key == "threads" and name in self._new.unheld
        if not maker.modules or (not is_unheld and self._of_program().has(key, name)):
            return "", 0
        packages = () if is_unheld else dict.fromkeys(module.partition(".")[0] for module in maker.modules)
        for package in packages:
            state = self._state(package)
            if state.has(key, name) or state.has_number_of(key, name):
                pool = _pool_of(name) if key == "threads" else state.pool_of_process(key, name)
                owner = next(module for module in maker.modules if module.partition(".")[0] == package)
                # What two libraries make by the code of a third are two first uses.
                outermost = maker.modules[-1].partition(".")[0]
                owner += f" for {outermost}" if outermost != package else ""
                if state.is_of_workers(key, name):
                    # The workers themselves say how many of those there may be.
                    return f"{owner} (an executor's workers)", _ANY
                return (owner, 0) if pool is None else (f"{owner} (an executor)", pool._max_workers)
        # What Python's code makes in a thread of a library's is that library's, too.
        return self.of("threads", maker.thread) if maker.thread and not maker.place else ("", 0)

    def _of_semaphore(self, name: str) -> tuple[str, int]:
        """Return whose a named semaphore is: the library's that has it.

        That is one in whose module or class it stands, as tqdm's lock, or whose state leads to it.
        """
        if self._of_program().has("shared-memory", name):
            return "", 0
        if keeper := self._keepers_of_semaphores.get(name):
            return keeper, 0
        for package in self._packages_with_semaphores:
            if (state := self._state(package)).has("shared-memory", name):
                is_of_workers = state.is_of_workers("shared-memory", name)
                return (f"{package} (an executor's workers)", _ANY) if is_of_workers else (package, 0)
        return "", 0

    @functools.cached_property
    def _packages_with_semaphores(self) -> list[str]:
        """Name those with a class of semaphores of their own, or that have started processes: pools have locks."""
        started = [self._makers.of_process(int(pid)) for pid in self._new.items.get("processes", ())]
        modules = [*map(module_of_class, semaphores()), *(name for maker in started if maker for name in maker.modules)]
        packages = dict.fromkeys(module.partition(".")[0] for module in modules)
        return [package for package in packages if package not in sys.stdlib_module_names]

    @functools.cached_property
    def _keepers_of_semaphores(self) -> dict[str, str]:
        kinds = tuple(semaphores())
        return {
            name: module.__name__.partition(".")[0]
            for module in site_modules()
            if (locks := [value for value in _values(module) if issubclass(type(value), kinds)])
            for resource, name, _ in owned(Census(locks))
            if resource == "shared-memory"
        }

    def _of_native(self, key: str, name: str) -> tuple[str, int]:
        """Return whose it is what native code has made: descriptors go with the objects of C++ that own them.

        Otherwise those of one kind are taken for one library's: nobody sees which one has opened them.
        """
        if key != "file-descriptors":
            return NATIVE, 0
        if not self._new.natively:
            kind = name.partition(" -> ")[2].removeprefix("anon_inode:").partition(":")[0].strip("[]")
            return ("", 0) if self._has_native_owner() else (f"{NATIVE} ({kind})", 0)
        names = [name for name, is_excused in self._new.natively if is_excused]
        return (f"{NATIVE} for {names[0]}", _ANY) if names else ("", 0)

    def _maker(self, key: str, name: str) -> Maker | None:
        if key == "threads":
            ident = name.rpartition("(")[2].rstrip(")")
            return self._makers.of_thread(int(ident)) if ident.isdigit() else None
        if key == "processes":
            return self._makers.of_process(int(name))
        number, _, target = name.partition(" -> ")
        return self._makers.of_descriptor(int(number)) if _NAMELESS.match(target) else Maker(())

    def _is_native(self, key: str, name: str) -> bool:
        """Return whether no Python code made it: none was seen to, and none can have unseen."""
        if key == "processes":
            # What Python code starts by other means than those that are noted is Python again, or the program's own.
            file = _executable(name)
            return is_library(file) and not os.path.basename(file).startswith("python")
        state = self._of_program()
        return key == "file-descriptors" and not state.calls(self._makers.originals) and not state.has(key, name)

    def _state(self, package: str) -> _State:
        if package not in self._states:
            self._states[package] = _State(_state_of(package))
        return self._states[package]

    def _of_program(self) -> _State:
        if self._program is None:
            self._program = _State(program_modules(), but=_globals_of_libraries)
        return self._program


class _State:
    """What the globals of some modules, and the attributes of their classes, lead to.

    Args:
        modules: the modules.
        but: gives the identities of those of some globals that are another's.
    """

    def __init__(
        self, modules: Iterable[ModuleType], but: Callable[[Sequence[object]], Collection[int]] = lambda values: ()
    ) -> None:
        values = [value for module in modules for value in _values(module)]
        others = but(values)
        values = [value for value in values if id(value) not in others]
        self._called = {id(value) for value in values}
        # What a module imports is another's, and so is what it has of a library's own globals. The functions by which
        # this checker stands in for a library's lead to all that it knows, which is nobody's state.
        objects, _ = reach(values, packages=("lowtide",), namespaces=module_namespaces(), max_objects=_MOST_OBJECTS)
        behind = gc.get_referents(*objects)
        census = Census([*objects, *behind])
        self._owned = {(resource, name) for resource, name, _ in owned(census)}
        self._integers = {value for value in _in_variables(objects, census) if type(value) is int}
        self._integers |= {value for value in values if type(value) is int}
        pools = census.instances_of(Executor)
        # Of another kind of pool nobody knows how many it may have.
        self._pools = [pool for pool in pools if type(attribute(pool, "_max_workers")) is int]

    def pool_of_process(self, key: str, name: str) -> Any:
        """Return the executor whose worker a child process is; None where it is none's."""
        pools = (pool for pool in self._pools if key == "processes" and name in _workers_of(pool))
        return next(pools, None)

    def is_of_workers(self, key: str, name: str) -> bool:
        """Return whether it is what an executor's worker processes have been given: their pipes, locks and queues."""
        return (
            key != "processes" and (key, name.partition(" ")[0] if key == "file-descriptors" else name) in self._given
        )

    @functools.cached_property
    def _given(self) -> set[tuple[str, str]]:
        workers = [worker for pool in self._pools for worker in _workers_of(pool).values()]
        objects, _ = (
            reach(workers, namespaces=module_namespaces(), max_objects=_MOST_OBJECTS) if workers else ([], False)
        )
        return {(resource, name) for resource, name, _ in owned(Census([*objects, *gc.get_referents(*objects)]))}

    def has(self, key: str, name: str) -> bool:
        """Return whether an item is held there."""
        return (key, name.partition(" ")[0] if key == "file-descriptors" else name) in self._owned

    def has_number_of(self, key: str, name: str) -> bool:
        """Return whether the bare number of a descriptor or a child process is held there."""
        return key != "threads" and int(name.partition(" ")[0]) in self._integers

    def calls(self, functions: Iterable[Callable[..., Any]]) -> bool:
        """Return whether one of these functions is among the globals."""
        return any(id(function) in self._called for function in functions)


def _workers_of(pool: Any) -> dict[str, Any]:
    """Return the worker processes that an executor has, by their numbers."""
    workers: Any = attribute(pool, "_processes")
    return {str(pid): worker for pid, worker in list(workers.items())} if type(workers) is dict else {}


def _values(module: ModuleType) -> list[object]:
    found: list[tuple[object, object]] = []
    for name, value in list(vars(module).items()):
        found.append((name, value))
        if issubclass(type(value), type) and type.__dict__["__module__"].__get__(value) == module.__name__:
            found += list(type.__dict__["__dict__"].__get__(value).items())
    return [value for name, value in found if name not in _OF_IMPORTS and not _is_constant(name, value)]


def _globals_of_libraries(values: Sequence[object]) -> set[int]:
    """Return the identities of those of some objects that a library has made of a class of its own as a global.

    And of its plain containers.  A program that imports such a one by its name does not own it.
    """
    plain = {id(value) for value in values if type(value) in _CONTAINERS}
    packages = {module.partition(".")[0] for module in map(module_of_class, map(type, values))}
    libraries = [package for package in packages if is_installed_module(package)]
    return {
        id(value)
        for package in libraries
        for module in _state_of(package)
        for value in list(vars(module).values())
        if module_of_class(type(value)).partition(".")[0] == package
    } | (plain and plain & library_globals())


_CONTAINERS = (dict, list, set)


_OF_IMPORTS = ("__spec__", "__loader__")
"""What has imported a module has them: a test runner's loader leads to all that it knows."""


def _is_constant(name: object, value: object) -> bool:
    """Return whether it is a number, or some, that does not change, as its name says, or that is Python's own.

    Python 3.13 keeps in each class the line where it begins.
    """
    if type(name) is not str or not (name.isupper() or name.startswith("__")):
        return False
    numbers: tuple[object, ...] = value if type(value) is tuple else (value,)
    return all(type(number) is int for number in numbers)


def _in_variables(objects: Sequence[object], census: Census) -> list[object]:
    """Return what some objects refer to, without what the members of enumerations, such as the signals, do."""
    members = census.instances_of(enum.Enum)
    constant = {id(item) for item in [*members, *gc.get_referents(*members)]}
    return gc.get_referents(*(item for item in objects if id(item) not in constant))


def _state_of(package: str) -> list[ModuleType]:
    if package in _REGISTRIES:
        return []
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package and name not in _REGISTRIES and issubclass(type(module), ModuleType)
    ]


def _shared_file(key: str, name: str) -> str:
    """Return the name of a file in /dev/shm, of the file itself or of a descriptor on it; empty for anything else."""
    if key == "shared-memory":
        return name
    target = name.partition(" -> ")[2] if key == "file-descriptors" else ""
    return target.removeprefix(_SHARED_MEMORY) if target.startswith(_SHARED_MEMORY) else ""


def _stem(file: str) -> str:
    """Return what all files of a library are called, without their numbers: two libraries' files are two first uses."""
    return re.split(r"[^a-zA-Z]*\d", file, maxsplit=1)[0]


def _executable(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:  # it ended meanwhile
        return ""


def _pool_of(name: str) -> ThreadPoolExecutor | None:
    """Return the executor that a thread works for, which starts no more of them than it may."""
    for thread in threading.enumerate():
        if thread_key(thread) == name:
            arguments: Any = attribute(thread, "_args")
            is_worker = type(arguments) is tuple and arguments and type(arguments[0]) is weakref.ref
            pool = arguments[0]() if is_worker else None
            return pool if type(pool) is ThreadPoolExecutor else None
    return None


VENDOR_LIBRARIES = (
    r"lib(cublas|cublasLt|cudnn\w*|cusolver\w*|cusparse\w*|cufft\w*|curand|cutensor|magma\w*|nccl|nvshmem\w*"
    r"|hipblas\w*|rocblas|hipsolver|rocsolver|hipsparse|rocsparse|hipfft|rocfft|MIOpen|rccl)(-\w+)?\.so[.\d]*"
)
"""Those that make a handle, with memory of its own on the card, when they are first used, and never give it back. NVRTC
and nvJitLink are none of them: they compile on the host, and what is loaded then is the program's."""

_WITH_DESCRIPTORS = r"lib(nccl|rccl|nvshmem\w*)\b.*"
"""Those of them that talk to other processes, and open sockets and pipes for it."""

_FIRST_USE_BYTES = 256 << 10
"""Code that must newly be in memory: the kernel brings in 64 KiB around every page that is touched."""

_TABLES_BYTES = 16 << 20
"""What a library may keep for a kind of what it prepares: cuFFT 6 MiB for lengths with a large prime (H200)."""

_OPENED = "file-descriptors"

_OF_A_THREAD_BYTES = 128 << 20
"""What libraries may keep for one more thread: a handle of cuBLAS 64 MiB, and two small allocations (H200)."""

_PREPARED = "has made plans here, and keeps tables of its own for each kind of them"

_SHOWN_LIBRARIES = 2


class FirstUse:
    """Keeps how much code of each library was in memory at the last look."""

    def __init__(self) -> None:
        self._resident: dict[str, int] = {}

    def adopt(self) -> None:
        """Take what is in memory now for used."""
        self._resident = _read()

    @property
    def any_loaded(self) -> bool:
        """Whether any of them was in use at the last look."""
        return any(self._resident.values())

    @property
    def of_blas(self) -> bool:
        """Whether a BLAS library was first used since the last `adopt`."""
        return any(re.match(r"lib(cu|roc|hip)blas", name) for name in self.libraries())

    def communicates(self) -> bool:
        """Return whether a library that talks to other processes or cards was first used since the last `adopt`."""
        return any(re.fullmatch(_WITH_DESCRIPTORS, name) for name in self.libraries())

    def libraries(self) -> list[str]:
        """Return those of which much more is in memory than at the last `adopt`, sorted."""
        return sorted(name for name, size in _read().items() if size - self._resident.get(name, 0) >= _FIRST_USE_BYTES)


def _read() -> dict[str, int]:
    try:
        return resident_code(VENDOR_LIBRARIES)
    except OSError:  # not this kernel: then nothing is excused
        return {}


def excused_by_libraries(
    findings: Sequence[Finding],
    before: Counters,
    now: Counters,
    first_use: FirstUse,
    any_graph_alive: Callable[[], bool] = lambda: False,
    things: Callable[[Finding], Collection[tuple[str, str]]] = lambda finding: (),
    prepared_by: Collection[str] = (),
) -> tuple[tuple[Finding, ...], tuple[NotMeasured, ...]]:
    """Tell apart what a library that was first used in a test may have taken for good.

    Args:
        findings: the test's.
        before: the counters at its baseline.
        now: the counters now.
        first_use: what was in use before.
        any_graph_alive: whether captured graphs are, for which the driver keeps memory, too; asked where it matters.
        things: gives what a finding is about: the metric's key and the name of each thing.
        prepared_by: libraries that have prepared something in the test, such as plans, which was given back.

    Returns:
        The findings, with the library as their holder where it is known to keep memory (these are suppressed by the
        shipped list); and what may be a library's or a leak, which cannot be distinguished.
    """
    may_be = [finding for finding in findings if _may_be_a_librarys(finding, things(finding))]
    # Loaded they are with a torch that was built for cards, used only where a card is.
    is_open = driver_is_open(now) or any(finding.resource == "driver" for finding in may_be)
    if not may_be or not is_open:
        return tuple(findings), ()
    libraries = first_use.libraries()
    holders = libraries
    graphs = False
    if driver_is_open(now) and not driver_is_open(before):
        of_memory = "the card's driver was first used here, and keeps descriptors and memory of its own"
        of_descriptors = of_memory
        holders = ["context", *libraries]
    elif libraries:
        graphs = any(finding.resource == "driver" for finding in may_be) and any_graph_alive()
        of_memory = _beside_graphs(libraries) if graphs else _used_first(libraries, "memory")
        talking = [name for name in libraries if re.fullmatch(_WITH_DESCRIPTORS, name)]
        of_descriptors = "libraries were first used here, and some keep descriptors of their own"
        if talking:
            of_descriptors = _used_first(talking, "descriptors")
    elif now.native_threads > before.native_threads and first_use.any_loaded:
        of_memory = "a native thread started here, and libraries keep memory of their own for each thread"
        of_descriptors = "a native thread started here, and may keep descriptors of its own"
        most = _OF_A_THREAD_BYTES * (now.native_threads - before.native_threads)
        # Python's threads open what the program has them open.
        opens = _native_threads(now) > _native_threads(before)
        may_be = [
            each
            for each in may_be
            if (each.resource == "driver" and (each.bytes or 0) <= most) or (opens and each.resource == _OPENED)
        ]
    elif prepared_by:
        may_be = [each for each in may_be if each.resource == "driver" and (each.bytes or 0) <= _TABLES_BYTES]
        of_memory = of_descriptors = f"{first_of(sorted(prepared_by), _SHOWN_LIBRARIES)} {_PREPARED}"
    else:
        return tuple(findings), ()
    known = {id(finding): None if graphs else _known(finding, holders) for finding in may_be}
    excused = tuple(
        NotMeasured(what=finding.message, why=of_descriptors if finding.resource == _OPENED else of_memory)
        for finding in may_be
        if known[id(finding)] is None
    )
    kept = (known.get(id(finding), finding) for finding in findings)
    return tuple(finding for finding in kept if finding is not None), excused


def _may_be_a_librarys(finding: Finding, things: Collection[tuple[str, str]]) -> bool:
    """Return whether a finding is about what libraries take when they are first used.

    A block of torch's allocator that is in no tensor may be a library's state, such as that of cuDNN's dropout.
    """
    if finding.resource == "tensors":
        return bool(things) and all(key.startswith("native ") for key, _ in things)
    if finding.resource == _OPENED:
        return all(may_be_a_drivers(name) for _, name in things)
    return finding.resource in ("driver", "pinned")


def _beside_graphs(libraries: Sequence[str]) -> str:
    used = f"{first_of(libraries, _SHOWN_LIBRARIES)} {'was' if len(libraries) == 1 else 'were'} first used here"
    return f"{used}, and CUDA graphs are alive: each of them keeps memory of its own"


def _used_first(libraries: Sequence[str], what: str) -> str:
    used = f"was first used here, and keeps {what} of its own"
    if len(libraries) > 1:
        used = f"were first used here, and keep {what} of their own"
    return f"{first_of(libraries, _SHOWN_LIBRARIES)} {used}"


def _known(finding: Finding, holders: Sequence[str]) -> Finding | None:
    """Return the finding as that of libraries, if the shipped list knows each of them; else None."""
    if not holders or finding.resource != "driver":
        return None
    findings = [
        msgspec.structs.replace(finding, cause="driver" if holder == "context" else "library-workspace", holder=holder)
        for holder in holders
    ]
    applied = shipped().apply(findings, date.today()).findings
    if any(item.suppressed_by is None for item in applied):
        return None
    return msgspec.structs.replace(applied[0], holder=", ".join(holders))


def _native_threads(counters: Counters) -> int:
    """Return how many threads are none of Python's."""
    return counters.native_threads - len(counters.items.get("threads", ()))


def driver_is_open(counters: Counters) -> bool:
    """Return whether the process has a descriptor of a card's driver."""
    return any(" -> /dev/nvidia" in name or "/dev/kfd" in name for name in counters.items["file-descriptors"])


def may_be_a_drivers(name: str) -> bool:
    """Return whether a descriptor, as the counters name it, is of a kind that drivers and libraries open."""
    return name.partition(" -> ")[2].partition(":")[0] in ("socket", "pipe", "anon_inode")


_PATIENCE = 20.0
"""Seconds to wait for the threads of a trial: a first BLAS call loads a library."""

_MOST_THREADS = 32
"""Handles that one trial may ask for: each takes 96 MiB of the card where it is not there yet."""

_SMALLEST = 1 << 20
"""Bytes of the part by which a handle is known: the others are of a size that anything may have."""


class Trial(msgspec.Struct, frozen=True):
    """What a trial has shown.

    Attributes:
        kept: those of the allocations that are idle handles, by name.
        taken: address and bytes of what the trial itself has taken anew, which stays as well.
    """

    kept: frozenset[str] = frozenset()
    taken: tuple[Range, ...] = ()


class BlasHandles:
    """Knows what a handle takes on each card, and finds by trial how many idle ones there are."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._idle: dict[int, int] = {}

    def learn(self, index: int, before: Sequence[Range], after: Sequence[Range]) -> None:
        """Note what the first BLAS call of this thread took.

        Args:
            index: of the card, as torch numbers it.
            before: the driver's allocations before the call.
            after: those after it.
        """
        self._sizes.setdefault(index, tuple(sorted((size for _, size in _new(index, before, after)), reverse=True)))

    def sizes(self, index: int) -> tuple[int, ...]:
        """Return the bytes of each part of a handle on a card; as on another one where there was one already."""
        return self._sizes.get(index) or next(iter(self._sizes.values()), ())

    def tried(self, index: int, items: Mapping[str, int]) -> Trial:
        """Return which of some new allocations are idle handles.

        So many threads at once use the library as there would be idle handles; only what they do not have to take anew
        was there. What they take anew stays, as idle handles.

        Args:
            index: of the card.
            items: the allocations, in bytes, by name.
        """
        sizes = self.sizes(index)
        if not sizes or sizes[0] < _SMALLEST:
            return Trial()
        candidates = sum(size == sizes[0] for size in items.values())
        wanted = self._idle.get(index, 0) + candidates
        if not candidates or wanted > _MOST_THREADS:
            return Trial()
        try:
            before = read_allocations(index) or ()
            has_worked = _use_at_once(index, wanted)
            new = _new(index, before, read_allocations(index) or ())
        except AllocationsError:  # then nothing is excused
            return Trial()
        if not has_worked:
            return Trial(taken=tuple(new))
        self._idle[index] = wanted
        taken = sum(size == sizes[0] for _, size in new)
        found: set[str] = set()
        for size, count in Counter(sizes).items():
            alike = [name for name, held in items.items() if held == size and name not in found]
            found.update(alike[: count * max(0, candidates - taken)])
        return Trial(frozenset(found), tuple(new))


def _new(index: int, before: Sequence[Range], after: Sequence[Range]) -> list[Range]:
    """Return each allocation that was not there before and is not torch's."""
    known = set(before)
    segments = [(address, size) for _, address, size, _ in read_segments(index) or ()]
    return [entry for entry in after if entry not in known and not common([entry], segments)]


def _use_at_once(index: int, count: int) -> bool:
    """Return whether so many threads, each with a handle, came to the end of a small matrix product."""
    meeting = threading.Barrier(count)
    done: list[bool] = []

    def work() -> None:
        try:
            multiply(index)
            meeting.wait(_PATIENCE)
            done.append(True)
        except (RuntimeError, threading.BrokenBarrierError):  # no memory for another handle, or another thread's error
            meeting.abort()

    threads = [threading.Thread(target=work, name="lowtide-blas", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    return len(done) == count


def multiply(index: int) -> None:
    """Multiply small matrices on a card: the first time in a thread takes a handle."""
    torch: Any = loaded("torch")
    with torch.no_grad():
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        torch.mm(ones, ones)
        torch.cuda.synchronize(index)


class WarmUp:
    """Warms the current card up, once per process, and others after their first use.

    A process that does not use a card must not get a context by being judged: a child that it forks could not use the
    card any more. So the card is warmed up in the moment in which torch initialises it, unless it is to be at once.

    Args:
        handles: learn what the first handle of the BLAS library took.
        around: called with what warms the card up; everything that appears meanwhile is the process's own.

    Attributes:
        is_done: whether it was tried.
        is_queued: whether torch does it when it initialises a card.
        problem: why it failed, until that is reported.
    """

    def __init__(self, handles: BlasHandles, around: Callable[[Callable[[], None]], None]) -> None:
        self._handles = handles
        self._around = around
        self._queued: Callable[[], None] | None = None
        self.is_done = self.is_queued = False
        self.problem = ""

    def queue(self) -> None:
        """Have it done as soon as torch initialises a card; legal again and again, before torch is there too."""
        torch: Any = loaded("torch")
        # While torch is being imported it has no such functions yet.
        if self.is_done or not hasattr(getattr(torch, "cuda", None), "_queued_calls"):
            return
        if initialized_torch() is not None:
            self.now()
        if self.is_done or self._queued is not None:
            return
        # Torch keeps the call for good, and must not keep this with it.
        this = weakref.ref(self)

        def warm_up() -> None:
            found = this()
            if found is not None:
                found.now()

        self._queued, self.is_queued = warm_up, True
        torch.cuda._lazy_call(warm_up)

    def now(self) -> None:
        """Do it; in another thread than the main one it is left for later."""
        if self.is_done or not in_main_thread():
            return
        self.is_done = True
        self._around(self._use_once)

    def use_too(self, index: int) -> None:
        """Do the same on a further card, which the program has used by now; torch is initialised."""
        torch: Any = loaded("torch")
        try:
            with torch.cuda.device(index):
                self._use(torch, index)
        except Exception as error:  # noqa: BLE001 - as below
            self.problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what a warm-up that failed leaves unknown; said once."""
        why, self.problem = self.problem, ""
        return (NotMeasured(what="what a card's first use takes", why=why),) if why else ()

    def close(self) -> None:
        """Take back what is queued; legal twice."""
        torch: Any = loaded("torch")
        if self._queued is not None and torch is not None:
            torch.cuda._queued_calls[:] = [entry for entry in torch.cuda._queued_calls if entry[0] is not self._queued]
        self._queued, self.is_queued = None, False

    def _use_once(self) -> None:
        torch: Any = loaded("torch")
        try:
            torch.cuda.init()
            index = torch.cuda.current_device()
            self._use(torch, index)
            torch.cuda.reset_peak_memory_stats(index)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program has not asked for it
            self.problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _use(self, torch: Any, index: int) -> None:
        # No mode of the program's sees what is done here. torch's own way to switch them off imports its compiler.
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            ones = torch.ones(64, device=f"cuda:{index}") + 1
            before = read_allocations(index) or ()
            multiply(index)
            self._handles.learn(index, before, read_allocations(index) or ())
            _capture_once(torch, ones)
        del ones
        # A test may count what torch has allocated; the handle and the context stay all the same.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _capture_once(torch: Any, ones: Any) -> None:
    """Capture and run a graph of one kernel, as `torch.cuda.graph` does it, without its collections."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        ones.add_(1)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()


_CARD = re.compile(r"\d+ -> /dev/(nvidia|dxg)")
"""Descriptors that CUDA's driver opens, for a context and for less than that."""

_ADVICE = "call torch.cuda.init() before the card is used, as in a session fixture, to have it judged"


class CardsWithoutTorch:
    """Tells whether the process has a context on a card that torch has not initialised.

    Attributes:
        without_driver: descriptors among which no driver's was found: nothing has to be asked while these are open.
    """

    def __init__(self) -> None:
        self.without_driver: Mapping[str, int] = {}

    def cards(self, now: Counters) -> list[int]:
        """Return the numbers of these cards; next to free where no driver is open.

        Args:
            now: the counters, by which it is known whether there is anything to ask.
        """
        if initialized_torch() is not None:
            return []
        descriptors = now.items.get("file-descriptors", {})
        if descriptors is self.without_driver:
            return []
        if not any(map(_CARD.match, descriptors)):
            self.without_driver = descriptors
            return []
        return cards_with_contexts()

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """Return what is not judged for it; a test of which that is said is not clean."""
        cards = [f"cuda:{index}" for index in self.cards(now)]
        if not cards:
            return ()
        process = OtherProcess(
            pid=os.getpid(),
            name="this process",
            host=None,
            cards=tuple(CardMemory(device=device, bytes=None) for device in cards),
        )
        what = f"memory on {', '.join(cards)} that was taken without torch"
        return (NotMeasured(what=what, why=_ADVICE, process=process),)
