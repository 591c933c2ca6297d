"""What can be read in a fraction of a millisecond, before and after every test: counts and names."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from lowtide.probes import native
from lowtide.probes.device.allocations import STEP_BYTES, AllocationsError, pooled_bytes, read_allocations
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.host.process_files import AGENTS_SIGNAL, children_of
from lowtide.probes.host.replaced import Replaced
from lowtide.probes.host.settings import (
    HANDLER_OF,
    CollectorCallbacks,
    Environment,
    Filters,
    Finders,
    KernelStatus,
    Loggers,
    ModuleSearchPath,
    Reducers,
    Signals,
    Subinterpreters,
    Timers,
    interpreter_values,
    library_values,
    process_values,
)
from lowtide.probes.host.torch_settings import CardLimits, Modes, ModuleHooks, torch_values
from lowtide.probes.memory.ranges import merge, total
from lowtide.probes.objects.foreign import living_threads, thread_key
from lowtide.probes.objects.listed import FrozenCount
from lowtide.probes.originals import contents, initialized_torch, loaded, os, threading, time
from lowtide.probes.stages import announced_pools

Items = Mapping[str, int]

_NOTHING: Items = MappingProxyType({})


class Counters(msgspec.Struct, frozen=True):
    """The process at one moment, as far as it costs next to nothing to say.

    Attributes:
        items: per resource, what is there by name, with bytes or 1 each.
        amounts: per resource (and device, as `reserved cuda:0`), bytes or a count; None if it cannot be read. Host
            memory is without what malloc keeps free (`CounterReader.kept_free`).
        settings: process-wide settings by name, as text; what replaced an object has another text.
        native_threads: all threads of the process, Python's included.
        unmeasured: why a driver's amount is None, by its key.
        own: all of the process's own memory (`own_bytes`), in bytes.
    """

    items: Mapping[str, Items]
    amounts: Mapping[str, int | None]
    settings: Mapping[str, str]
    native_threads: int = 0
    unmeasured: Mapping[str, str] = msgspec.field(default_factory=dict)
    own: int = 0

    @property
    def devices(self) -> list[str]:
        """Return the cards on which the process has a context, as `cuda:0`."""
        return [key.partition(" ")[2] for key in self.amounts if key.startswith("reserved ")]


class SettingSource(Protocol):
    """Some settings that are read together."""

    def raw(self) -> object:
        """Return what changes if one of them does, in microseconds: numbers, texts and identities, safe to compare."""

    def texts(self) -> dict[str, str]:
        """Return each of them, by name; read when `raw` has changed only."""


class SettingReader:
    """Reads settings again and again; while none has changed the answer is the same object.

    Reading changes nothing, initialises nothing and runs no code of the program: its objects are compared by
    identity. No object of the program is held.

    Args:
        warnings_filters: whether to read those.
        status: gives the kernel's /proc/self/status, where whoever reads settings has just read it anyway.
    """

    def __init__(self, *, warnings_filters: bool = True, status: Callable[[], bytes] | None = None) -> None:
        self._sources: tuple[SettingSource, ...] = (
            interpreter_values(),
            Environment(),
            ModuleSearchPath(),
            Finders(),
            CollectorCallbacks(),
            Signals(),
            Timers(),
            Loggers(),
            *((Filters(),) if warnings_filters else ()),
            Modes(),
        )
        self._runners = len(self._sources)
        self._sources += (
            process_values(),
            Reducers(),
            Subinterpreters(),
            library_values(),
            torch_values(),
            CardLimits(),
            ModuleHooks(),
            Replaced(),
            KernelStatus(status),
        )
        self._raw: list[object] = [None] * len(self._sources)
        self._texts: list[dict[str, str]] = [{} for _ in self._sources]
        self._settings: Mapping[str, str] = MappingProxyType({})

    def read(self, *, of_libraries: bool = True) -> Mapping[str, str]:
        """Return the settings, by name.

        Args:
            of_libraries: whether to read what no runner sets, too, which is most of the work: torch's, other
                libraries', the process's limits and umask; else these are taken over.
        """
        raw = [source.raw() for source in (self._sources if of_libraries else self._sources[: self._runners])]
        raw += self._raw[len(raw) :]
        if raw == self._raw:
            return self._settings
        for place, source in enumerate(self._sources):
            if raw[place] != self._raw[place]:
                self._texts[place] = source.texts()
        self._raw = raw
        settings: dict[str, str] = functools.reduce(operator.or_, self._texts)
        if settings != self._settings:
            self._settings = MappingProxyType(settings)
        return self._settings


_MUCH_KEPT = 8 << 20
"""Bytes: less than that, taken of what malloc keeps free, is no leak. To ask takes a tenth of a millisecond."""

_TICK_NS = 50_000_000
"""Nanoseconds in which a folder may change again and say the same time."""


class Folder:
    """The names in a folder, listed only where it has changed since they were listed last.

    Args:
        path: gives the folder's, which the program may change.
    """

    def __init__(self, path: Callable[[], str]) -> None:
        self._path = path
        self._sign: tuple[object, ...] = ()
        self._names: Mapping[str, int] = {}

    def names(self) -> Mapping[str, int]:
        """Return each name with a 1; the same object while nothing has changed.

        Raises:
            OSError: it cannot be listed.
        """
        path = self._path()
        facts = os.stat(path)
        # Not the time of its contents, which a program may set.
        sign = (path, facts.st_dev, facts.st_ino, facts.st_ctime_ns)
        if sign != self._sign:
            is_settled = abs(time.time_ns() - facts.st_ctime_ns) > _TICK_NS
            self._names, self._sign = dict.fromkeys(os.listdir(path), 1), sign if is_settled else ()
        return self._names


class CounterReader:
    """Reads counters again and again; what has not changed since the last reading is the same object as there.

    Reading changes nothing and initialises nothing.

    Args:
        driver: gives whom to ask for the driver's figures, once torch has initialised a card; None leaves them out.
        card: whether to read cards at all.
        orphans: which processes belong to this one besides its children: those whose parent has ended.
        temporary_files: those that processes have left which belonged to this one and have ended.
        warnings_filters: whether to read those.
        free_at_tops: reads what malloc would keep free of a heap that has just been trimmed; bytes.

    Attributes:
        kept_free: bytes that malloc has kept free since the heap was trimmed last: no host memory.
    """

    def __init__(
        self,
        driver: Callable[[], Driver] | None,
        *,
        card: bool = True,
        orphans: Callable[[list[int]], Sequence[int]] = lambda children: (),
        temporary_files: Callable[[], Items] = lambda: _NOTHING,
        warnings_filters: bool = True,
        resources: Callable[[], Mapping[str, Items]] = dict,
        free_at_tops: Callable[[], int] = lambda: 0,
    ) -> None:
        self.kept_free = 0
        self._free_at_tops = free_at_tops
        self._resources = resources
        self._driver = driver
        self._orphans = orphans
        self._temporary_files = temporary_files
        self._card = card
        # By card: the figures when the driver's allocations were listed last, their bytes, and why these are not known.
        self._listed: dict[int, tuple[object, tuple[int | None, str]]] = {}
        self._frozen = FrozenCount()
        self._descriptors: Items = _NOTHING
        self._there: dict[int, object] = {}
        self._open = b""
        self._files: dict[int, object] = {}
        self._shared_memory = Folder(lambda: "/dev/shm")
        self._status = b""
        self._settings = SettingReader(warnings_filters=warnings_filters, status=lambda: self._status)

    def note_trimmed(self) -> None:
        """Note that the heap has been trimmed: what is free yet is no host memory, as long as nobody takes it."""
        self.kept_free = self._free_at_tops()

    def read(self, last: Counters | None = None) -> Counters:
        """Return all of them; or, in half of the time, only what may have changed since `last`.

        Then the cards' amounts are taken over.
        """
        return self.read_in_part(last, settings="all")

    def read_in_part(
        self, last: Counters | None = None, *, settings: Literal["all", "no library's", "none"]
    ) -> Counters:
        """Read as `read` does, with some of the settings only.

        Args:
            last: an earlier reading.
            settings: which of these to read, too; the others are taken over, from `last` or the last reading.
        """
        children = child_processes()
        items: dict[str, Items] = {
            "threads": _threads(),
            "processes": {str(pid): 1 for pid in (*children, *self._orphans(children))},
            "file-descriptors": self._read_descriptors(),
            "shared-memory": self._read_shared_memory(),
            "temporary-files": self._temporary_files(),
            **self._resources(),
        }
        self._status = read_status()
        own = own_bytes(self._status)
        if self.kept_free >= _MUCH_KEPT:
            # Who takes some of it again has memory, of which the kernel counts no more for that.
            self.kept_free = min(self.kept_free, self._free_at_tops())
        amounts: dict[str, int | None] = {
            "gc-frozen": self._frozen.read(),
            "host-memory": own - self.kept_free,
        }
        mapped: dict[str, int] = {}
        pinned = 0
        for pool in announced_pools():
            if pool.kind == "arena":
                mapped[pool.device] = mapped.get(pool.device, 0) + pool.mapped
                parts = {f"{pool.tag} at {address:#x}": length for address, length in pool.ranges}
                items[f"arena {pool.device}"] = {**items.get(f"arena {pool.device}", {}), **parts}
            elif pool.kind == "pinned":
                pinned += pool.mapped
        amounts["pinned"] = pinned
        unmeasured: dict[str, str] = {}
        if last is not None:
            amounts |= {key: amount for key, amount in last.amounts.items() if "cuda:" in key}
            unmeasured |= last.unmeasured
        torch = initialized_torch() if self._card and last is None else None
        if torch is not None:
            for index in range(torch.cuda.device_count()):
                if has_context(torch, index):
                    amounts |= self._read_card(torch, index, mapped.get(f"cuda:{index}", 0), unmeasured)
        of_libraries = settings == "all"
        values = last.settings if last and settings == "none" else self._settings.read(of_libraries=of_libraries)
        return Counters(items, amounts, values, _figure(self._status, b"Threads:"), unmeasured, own)

    def _read_descriptors(self) -> Items:
        """Return `number -> target` of each open descriptor; a target is read only where a number has another file."""
        # First of all: what is opened or closed from here on makes it another one.
        is_open = _files_open(self._open)
        if is_open == self._open:
            return self._descriptors
        there = _files_of(map(int, os.listdir(_DESCRIPTORS)))
        self._open = is_open
        if there != self._there:
            self._there = there
            of_agent = agents_descriptors()
            files = {number: file for number, file in there.items() if number not in of_agent}
            if files != self._files:
                named = ((number, _target(number)) for number in files)
                self._descriptors = {f"{number} -> {target}": 1 for number, target in named if target}
                self._files = files
        return self._descriptors

    def _read_shared_memory(self) -> Items:
        try:
            return self._shared_memory.names()
        except OSError:
            return _NOTHING

    def _read_card(self, torch: Any, index: int, mapped: int, unmeasured: dict[str, str]) -> dict[str, int | None]:
        device = f"cuda:{index}"
        driver = f"driver {device}"
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            allocated = stats["allocated_bytes"]["all"]["current"]
            reserved = stats["reserved_bytes"]["all"]["current"]
        except (RuntimeError, KeyError):  # an allocator without counters
            allocated = reserved = None
        amounts: dict[str, int | None] = {f"allocated {device}": allocated, f"reserved {device}": reserved}
        if self._driver is not None:
            idle = pooled_bytes(index)
            if idle is not None:
                amounts[f"memory-pool {device}"] = idle
            # Each time: that as much is free on the card as before says nothing where other processes use it, too.
            reading = self._driver().read(index)
            held, note = reading.process_bytes, ""
            if held is None:
                # As in a container, whose processes NVML knows by other numbers, or not at all. What was allocated can
                # be listed all the same; what the driver has for itself is not in it, now or later. That takes half a
                # second once kernels have run, so it is done where a figure has changed since the last time.
                sign = (reading.card_used, reserved, self._driver().processes(index))
                if index not in self._listed or self._listed[index][0] != sign:
                    self._listed[index] = sign, _listed_bytes(index)
                held, note = self._listed[index][1]
            amounts[driver] = None if held is None or reserved is None else held - reserved - mapped
            if held is None:
                unmeasured[driver] = note or reading.note
            elif reserved is None:
                unmeasured[driver] = "torch's allocator does not say what it has reserved"
        return amounts


def _listed_bytes(index: int) -> tuple[int | None, str]:
    """Return the bytes of the driver's allocations on a card; None where it does not list them, with the reason.

    In steps of the driver's, as NVML counts: what is in one with others moves none of the figures that say when it is
    time to list them anew, and would be blamed on whoever moves these.
    """
    try:
        listed = read_allocations(index)
    except AllocationsError as error:
        return None, str(error)
    if listed is None:
        return None, ""
    starts = [(address // STEP_BYTES * STEP_BYTES, address + size) for address, size in listed]
    return total(merge((start, -(-(end - start) // STEP_BYTES) * STEP_BYTES) for start, end in starts)), ""


def read_status() -> bytes:
    """Return the kernel's /proc/self/status."""
    return contents("/proc/self/status")


def anonymous_bytes() -> int:
    """Memory of the process's own, in bytes; see `own_bytes`."""
    return own_bytes(read_status())


def own_bytes(status: bytes) -> int:
    """Return of /proc/self/status what is neither code nor a file's: heap, stacks, anonymous maps, also swapped out.

    `mmap.mmap(-1, …)` and what a card's driver pins are shared memory to the kernel (`/dev/zero (deleted)`), as are the
    files of /dev/shm that are mapped here.
    """
    return sum(bytes_in_status(status, name) for name in (b"RssAnon:", b"RssShmem:", b"VmSwap:"))


def bytes_in_status(status: bytes, name: bytes) -> int:
    """Return the bytes that a line of /proc/self/status says; 0 where this kernel does not have it."""
    return _figure(status, name) * 1024


def _figure(status: bytes, name: bytes) -> int:
    """Return a line's figure; 0 where this kernel does not have it (one without swap)."""
    _, found, rest = status.partition(b"\n" + name)
    return int(rest.split(maxsplit=1)[0]) if found else 0


def child_processes() -> list[int]:
    """Return the process identifiers of the children that Python's threads have started.

    (The kernel lists a child with the thread that started it, or once that has ended with another one.)
    """
    found: list[int] = []
    any_listed = False
    server = _fork_server()
    if not server and _is_childless():
        return []
    if server:
        # What it forks for this process, `multiprocessing` takes for this process's children.
        with contextlib.suppress(OSError):
            found += map(int, contents(f"/proc/{server}/task/{server}/children").split())
    for thread in {os.getpid(), *(thread.native_id for thread in threading.enumerate())}:
        try:
            found += map(int, contents(f"/proc/self/task/{thread}/children").split())
            any_listed = True
        except OSError:  # the thread ended, or the kernel was built without this file
            continue
    return sorted(found if any_listed else children_of(os.getpid()))


_EVERY_KIND = 0x40000000
"""`__WALL`: children of any thread, whatever signal they end with."""


def _is_childless() -> bool:
    """Return whether the kernel says that there is nothing to wait for, in a microsecond, without waiting."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _EVERY_KIND)
    except ChildProcessError:
        return True
    except OSError:  # a kernel before 4.7
        return False
    return False


def _fork_server() -> int | None:
    module: Any = loaded("multiprocessing.forkserver")
    return getattr(getattr(module, "_forkserver", None), "_forkserver_pid", None)


def agents_descriptors() -> frozenset[int]:
    """Return the numbers of the sockets on which an agent of lowtide's answers in this process."""
    agent: Any = getattr(HANDLER_OF(AGENTS_SIGNAL), "__self__", None)
    return agent.descriptors if type(agent).__module__ == "lowtide_agent" else frozenset()


_PERMISSIONS = 12
"""The bits of a file's mode below those that say of what kind it is."""

_DESCRIPTORS = "/proc/self/fd"
"""The folder of the open descriptors."""


def _files_of(numbers: Iterable[int]) -> dict[int, object]:
    """Return what some descriptors are open on, by their numbers; without those that are closed, as a listing's own."""
    found: dict[int, object] = {}
    for number in numbers:
        try:
            # Mode, inode and device.
            facts = os.fstat(number)[:3]
        except OSError:
            continue
        # To the kernel all anonymous ones (epoll, eventfd), which are of no kind of file by their mode, are one file:
        # only their name distinguishes them.
        found[number] = facts if facts[0] >> _PERMISSIONS else (facts, _target(number))
    return found


def _slow_files_open(_: bytes) -> bytes:
    return repr(_files_of(map(int, os.listdir(_DESCRIPTORS)))).encode()


_files_open = native.files_open or _slow_files_open


def _target(number: int) -> str:
    try:
        return os.readlink(f"{_DESCRIPTORS}/{number}")
    except OSError:  # closed meanwhile
        return ""


def _threads() -> Items:
    return dict.fromkeys(map(thread_key, living_threads()), 1)
