"""The processes that this one has started, seen from outside: who they are, what memory they hold, when they answer."""

from __future__ import annotations

import multiprocessing.process
import os as os_module
import secrets
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import count_cards
from lowtide.probes.host.counters import anonymous_bytes, child_processes
from lowtide.probes.host.process_files import MARK as MARK
from lowtide.probes.host.process_files import (
    REAPERS,
    PrivateMemory,
    ProcessStat,
    Rollup,
    all_pids,
    children_of,
    has_opened_a_card,
    lives,
    rollup,
    sizes,
    stat,
)
from lowtide.probes.host.process_files import name_of as name_of
from lowtide.probes.originals import StandIns, contents, in_main_thread, loaded, os, resource, sys, time

_TICKS = os.sysconf("SC_CLK_TCK")

_BLOCK = 160
"""Bytes of the pages behind one of Python's objects, at most: a fork copies them when it collects or looks at them."""

_MOST_LISTS = 4
"""How often all processes are listed at once while some of them end: on a busy host some always do."""

_PAGE = os.sysconf("SC_PAGE_SIZE")

_HARDLY_ANY = 1 << 20

_NOT_DRAWN = 0x0040000
"""ADDR_NO_RANDOMIZE of the kernel's include/uapi/linux/personality.h."""


class ProcessMemory(msgspec.Struct, frozen=True):
    """What one descendant holds, in bytes.

    Attributes:
        pid: its process identifier.
        name: how a person knows it: the title that it gave itself, its name in `multiprocessing`, or its command.
        private: memory that only it maps, swapped out or not; None where that may not be read.
        resident: what is in physical memory, shared or not.
        own: the part of `private` that is no copy of a page which its parent had when it forked, but for copies that
            are more than the parent's Python objects: these a fork copies by looking at them.
        cards: what the driver counts for it, by device as `cuda:0`; None where it has a context whose size is unknown.
        forked: whether it is a fork that runs no program of its own: what its parent had imported is not its own.
    """

    pid: int
    name: str
    private: int | None
    resident: int
    own: int
    cards: Mapping[str, int | None] = msgspec.field(default_factory=dict)
    forked: bool = False


class ProcessTree:
    """Knows this process's descendants, also those whose parent has ended.

    A descendant whose parent has ended is known by a mark in its environment, by having been seen in the tree before,
    by this process's program at the same addresses, or by its process group or session: a fork that runs no program of
    its own shows the environment from before the mark, and a program may have been started with an empty one.  Who has
    another tree's mark, or is a fork of a neighbour in the group (xdist's workers are in one), is not of this tree.
    Reading changes nothing; `start` sets one environment variable.

    Args:
        started: gives the numbers of the processes that this one has started, ended or not.
    """

    def __init__(self, started: Callable[[], Collection[int]] = tuple) -> None:
        self._started = started
        self._token = ""
        self._opened = 0
        self._seen: dict[int, int] = {}
        self._orphans: dict[int, int] = {}
        self._state: object = None

    def start(self) -> None:
        """Mark the processes that start from here on; legal twice."""
        if self._token:
            return
        self._token = secrets.token_hex(8)
        own = stat(os.getpid())
        # What is as old as this process is its neighbour in a pipeline.
        self._opened = own.started + _TICKS if own is not None else 0
        os.environ[MARK] = ":".join([*_marks(), self._token])

    def stop(self) -> None:
        """Mark no more; legal twice."""
        left = [mark for mark in _marks() if mark != self._token]
        self._token = ""
        if left:
            os.environ[MARK] = ":".join(left)
        else:
            os.environ.pop(MARK, None)

    def any_alive(self) -> bool:
        """Return whether there is any; next to free."""
        children = child_processes()
        return bool(children or self._look_for_orphans(children))

    def orphans(self, children: list[int] | None = None) -> list[int]:
        """Return the descendants whose parent has ended, and not those below them; sorted.

        All processes are gone through only where one of this process's children has started or ended since.

        Args:
            children: this process's own, where they have just been read.
        """
        return sorted(self._look_for_orphans(child_processes() if children is None else children))

    def lost_an_orphan(self) -> bool:
        """Return whether one of those that were there at the last look has ended since: it may have left others."""
        return any(not lives(pid, started) for pid, started in self._orphans.items())

    def _look_for_orphans(self, children: list[int]) -> dict[int, int]:
        for _ in range(_MOST_LISTS):
            state: tuple[object, ...] = (*_ended_children(), *children)
            if self._token and state != self._state:
                family = self._family()
                # A fork server's child, and any process's below ours, ends without us.
                state = (*state, *family.items())
                if state != self._state:
                    self._state = state
                    self._orphans |= {process.pid: process.started for process in self._find_orphans(family.keys())}
                    self._seen = {pid: self._seen[pid] for pid in self._seen if pid in self._orphans or pid in family}
            alive = {pid: started for pid, started in self._orphans.items() if lives(pid, started)}
            if len(alive) == len(self._orphans):
                break
            # One that has ended may have left others.
            self._orphans, self._state = alive, None
        return self._orphans

    def adopt(self, pids: Iterable[int]) -> None:
        """Count some processes as the tree's that nobody in it has started, as Ray's workers in a running cluster."""
        for pid in pids:
            process = stat(pid)
            if process is not None:
                self._orphans[pid] = process.started

    def descendants(self) -> list[int]:
        """Return all of them that are alive, orphans and what they have started included; sorted."""
        return sorted(self._family())

    def with_descendants(self, pids: Iterable[int]) -> set[int]:
        """Return those of some processes that are of the tree, and what they have started."""
        family = self._family()
        return set(self._from([pid for pid in pids if pid in family]))

    def _family(self) -> dict[int, int]:
        """Return all that are alive, each with what changes when a child of its own has ended."""
        return self._from([*child_processes(), *self._orphans])

    def _from(self, waiting: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        while waiting:
            pid = waiting.pop()
            process = stat(pid) if pid not in found else None
            if process is None or process.state == "Z":
                continue
            found[pid] = process.faults_of_ended
            self._seen[pid] = process.started
            waiting += children_of(pid)
        return found

    def _find_orphans(self, family: Collection[int]) -> list[ProcessStat]:
        own = stat(os.getpid())
        started = self._started()
        found = {}
        for process in _all_processes():
            if process.pid in family or process.pid == os.getpid() or own is None or process.started < own.started:
                continue
            was_seen = self._seen.get(process.pid) == process.started
            marks = _marks_of(process.pid)
            is_known = was_seen or self._token in marks or _is_fork_of(process, own)
            is_known = is_known or _is_in_a_session_of(process, started, marks)
            if is_known or self._is_left_in_group(process, own, marks, family):
                found[process.pid] = process
        return [process for process in found.values() if process.parent not in found]

    def _is_left_in_group(
        self, process: ProcessStat, own: ProcessStat, marks: Collection[str], family: Collection[int]
    ) -> bool:
        if process.group != own.group or process.started < self._opened:
            return False
        parent = stat(process.parent)
        if process.parent != 1 and (parent is None or parent.command not in REAPERS):
            return False
        if not process.image or process.image == own.image:
            return True
        neighbours = (other for other in _group_members(own.group) if other.pid not in {*family, process.pid})
        return not marks and not any(other.image == process.image for other in neighbours)


def _all_processes() -> list[ProcessStat]:
    """Return all living processes of this host.

    One that ends while they are listed may have started another one after that was passed: then they are listed again.
    """
    found: list[ProcessStat | None] = [None]
    for _ in range(_MOST_LISTS):
        found = list(map(stat, all_pids()))
        if None not in found:
            break
    return [process for process in found if process is not None and process.state != "Z"]


def _is_fork_of(process: ProcessStat, own: ProcessStat) -> bool:
    """Tell whether a process is a fork of this one, or of one of its forks, in whatever session it is.

    Of a process that is a fork itself the forks of its parent look the same, and where addresses are not drawn (under
    a debugger, `setarch -R`) those of every process of the same program.
    """
    is_same = process.is_fork and process.image and process.image == own.image
    return bool(is_same and not own.is_fork and _addresses_are_drawn())


def _addresses_are_drawn() -> bool:
    try:
        flags = int(contents("/proc/self/personality"), 16)
        return not flags & _NOT_DRAWN and contents("/proc/sys/kernel/randomize_va_space").strip() != b"0"
    except OSError:  # not this kernel: then nobody knows
        return False


def _is_in_a_session_of(process: ProcessStat, started: Collection[int], marks: Collection[str]) -> bool:
    """Return whether one of some processes led the session or the group of another one, and has ended."""
    leaders = {process.session, process.group} & set(started)
    return not marks and any(stat(leader) is None for leader in leaders)


def _marks_of(pid: int) -> list[str]:
    """Return the trees whose marks a process has; none of one that ended, or is another user's."""
    try:
        environment = contents(f"/proc/{pid}/environ")
    except OSError:
        return []
    prefix = f"{MARK}=".encode()
    marks = [entry[len(prefix) :] for entry in environment.split(b"\0") if entry.startswith(prefix)]
    return [token.decode(errors="replace") for mark in marks for token in mark.split(b":") if token]


def _group_members(group: int) -> Iterator[ProcessStat]:
    """Yield the living processes of a process group."""
    yield from (process for process in _all_processes() if process.group == group)


class TreeMemory:
    """Reads what the processes of a tree hold; remembers how much each of them has from its parent.

    Args:
        tree: whose processes.
    """

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._inherited: dict[int, int] = {}
        self._last: dict[int, _Memory] = {}
        self._private = PrivateMemory()
        self._cards: int | None = None
        self._last_anonymous = anonymous_bytes()

    def note(self, held: int | None = None) -> None:
        """Take down how much this process holds now: that much a process has from it that is forked next.

        Args:
            held: that many bytes, where they have just been read (`anonymous_bytes()`).
        """
        self._last_anonymous = anonymous_bytes() if held is None else held

    def read(self, ask: Callable[[], Driver] | None, *, floor: int) -> tuple[int, list[ProcessMemory]]:
        """Return this process's own memory, and that of its descendants of which any is large or has a context.

        Args:
            ask: gives whom to ask which of them have memory on a card; None if nobody is to be asked.
            floor: bytes; one of which less is in memory is not read in full.

        Returns:
            Bytes of this process, and the descendants, sorted by process identifier.
        """
        anonymous = anonymous_bytes()
        start, self._last_anonymous = min(self._last_anonymous, anonymous), anonymous
        family = self._tree.descendants()
        on_cards = self._on_cards(family, ask()) if family and ask is not None else {}
        own = stat(os.getpid())
        layouts = {} if own is None else {own.image: start}
        found = []
        for pid in family:
            resident, swapped = sizes(pid)
            process = stat(pid)
            if process is None or (resident + swapped < floor and pid not in on_cards):
                continue
            memory, forked = self._memory_of(process, resident + swapped), False
            if memory is None:
                private, own_bytes = None, resident + swapped
            else:
                private = memory.private
                forked = process.image in layouts
                copied = self._inherited.setdefault(pid, layouts.get(process.image, 0))
                # Of what is anonymous, pages may be shared with the parent; the rest of the private ones is its own.
                own_bytes = max(0, memory.anonymous - copied) + max(0, private - memory.anonymous)
                if forked:
                    own_bytes = _own_of_fork(process, memory, own_bytes)
                own_bytes = min(private, own_bytes)
                layouts.setdefault(process.image, memory.anonymous)
            name = name_of(pid)
            found.append(ProcessMemory(pid, name, private, resident, own_bytes, on_cards.get(pid, {}), forked))
        self._inherited = {pid: size for pid, size in self._inherited.items() if pid in family}
        self._last = {pid: memory for pid, memory in self._last.items() if pid in family}
        self._private.keep(family)
        return anonymous, found

    def _memory_of(self, process: ProcessStat, held: int) -> Rollup | None:
        """Return what its pages are; of a fork as last read, where it has touched and given back hardly any since."""
        if not process.is_fork:
            return self._private.read(process)
        # Those that it writes were its parent's before, and it gets no larger.
        now = _Memory(process, held)
        last = self._last.get(process.pid)
        if last is None or not now.is_nearly(last):
            last = self._last[process.pid] = replace(now, pages=rollup(process.pid))
        return last.pages

    def _on_cards(self, family: Sequence[int], driver: Driver) -> dict[int, dict[str, int | None]]:
        if self._cards is None:
            self._cards = count_cards(driver)
        found: dict[int, dict[str, int | None]] = {}
        for index in range(self._cards):
            listed = driver.processes(index)
            for pid in family:
                if pid in listed:
                    found.setdefault(pid, {})[f"cuda:{index}"] = listed[pid]
        # In a container the driver may know them by other numbers; who has opened the card is known all the same.
        if driver.name != "none" and self._cards and not has_opened_a_card(os.getpid()):
            for pid in family:
                if pid not in found and has_opened_a_card(pid):
                    found[pid] = {"a card": None}
        return found


class _Memory(msgspec.Struct, frozen=True):
    """What is known of a process's pages: what it has touched, and bytes that are in memory or swapped out."""

    process: ProcessStat
    held: int
    pages: Rollup | None = None

    def is_nearly(self, before: _Memory) -> bool:
        """Tell whether the process has touched and given back less than a mebibyte since."""
        if self.process.started != before.process.started or not self.process.faults:
            return False
        touched = (self.process.faults - before.process.faults) * _PAGE
        return touched < _HARDLY_ANY and abs(self.held - before.held) < _HARDLY_ANY


def _own_of_fork(process: ProcessStat, memory: Rollup, fresh: int) -> int:
    """Return what of a fork's memory is no copy that it took by looking at its parent's objects.

    What its parent has taken between the last look and the fork seems fresh.  The fork has not touched it, though, and
    the kernel counts what it touches: so no code needs to run at a fork to read what the parent held then.

    Args:
        process: the fork.
        memory: what it holds.
        fresh: bytes that it holds and that its parent did not have when it was last looked at.
    """
    looked_at = sys.getallocatedblocks() * _BLOCK
    if process.faults:
        touched = process.faults * _PAGE + memory.huge
        if touched < fresh:
            fresh = max(0, touched - looked_at)
    return max(fresh, memory.private - looked_at)


def _marks() -> list[str]:
    return [mark for mark in os.environ.get(MARK, "").split(":") if mark]


def _ended_children() -> tuple[float, ...]:
    """Return what moves whenever a child has ended that somebody waited for."""
    return tuple(resource.getrusage(resource.RUSAGE_CHILDREN))


_POOLS = (
    ("concurrent.futures.process", "ProcessPoolExecutor", ("shutdown",)),
    ("multiprocessing.pool", "Pool", ("close", "terminate")),
)
"""Classes that end processes in threads of their own, by their module, and their methods."""

_CONNECTIONS = ("multiprocessing.connection", "_ConnectionBase", ("recv", "recv_bytes"))
"""What a message from another process comes through: whoever answers is at work."""

_PAUSE = 0.005
"""Seconds in which one answer is enough: some engines answer ten thousand times a second."""


class ProcessEvents:
    """Calls listeners when the main thread has heard from a process, and before it ends one or waits for its end.

    The functions of Python's library that do so are stood in for from `start` to `stop`; no module is imported for it.

    Args:
        listeners: what to call, in this order; an error of theirs is lost.
    """

    def __init__(self, *listeners: Callable[[], object]) -> None:
        self._listeners = listeners
        self._stand_ins = StandIns()
        self._is_heard = False
        self._heard_at = 0.0
        self._process = os.getpid()

    def start(self) -> None:
        """Begin to listen; legal again, for what was imported meanwhile."""
        self._process = os.getpid()
        self._stand_in(self._heard_before, subprocess.Popen, "wait", "communicate", "send_signal")
        self._stand_in(self._heard_before, multiprocessing.process.BaseProcess, "join", "terminate", "kill")
        self._stand_in(self._heard_before, os_module, "kill", "killpg")
        for module, name, methods in _POOLS:
            self._stand_in(self._heard_before, getattr(loaded(module), name, None), *methods)
        module, name, methods = _CONNECTIONS
        self._stand_in(self._heard_after, getattr(loaded(module), name, None), *methods)

    def stop(self) -> None:
        """End it; legal twice. What somebody else has replaced meanwhile stays as it is."""
        self._stand_ins.restore()

    def _stand_in(self, make: Callable[[Any], Callable[..., Any]], place: Any, *names: str) -> None:
        for name in names:
            self._stand_ins.put(place, name, make)

    def _heard_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            self._hear()
            return original(*args, **kwargs)

        return ours

    def _heard_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if time.perf_counter() - self._heard_at >= _PAUSE:
                self._hear()
            return result

        return ours

    def _hear(self) -> None:
        # One of these calls another; what is read is the main thread's to read; and a fork has these functions, too.
        if self._is_heard or os.getpid() != self._process or not in_main_thread():
            return
        self._is_heard = True
        try:
            for listener in self._listeners:
                listener()
        except Exception:  # noqa: BLE001 - the program's call comes next, and nothing here may change that
            return
        finally:
            self._is_heard = False
            self._heard_at = time.perf_counter()
