"""One process as it shows from outside, Python or not; a whole tree of them; and who holds memory on this host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import psutil

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import CardHolders, read_card_holders
from lowtide.probes.host.process_files import (
    MARK,
    REAPERS,
    ProcessStat,
    Rollup,
    all_pids,
    command_line,
    count_descriptors,
    environment,
    name_of,
    open_files,
    rollup,
    runs_python,
    sizes,
    stat,
    thread_names,
)
from lowtide.probes.processes.mapped_files import PATIENCE_S, mapped_below, read_side_by_side
from lowtide.probes.processes.roles import Role, read_role
from lowtide.probes.processes.shared_memory_files import SharedMemoryReading, read_shared_memory

SHARED_MEMORY = "/dev/shm"

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "zombie",
    "I": "idle",
}

ByCard = Mapping[str, int | None]

_NO_CARDS: ByCard = MappingProxyType({})
_NOBODY: Mapping[int, ByCard] = MappingProxyType({})


class ProcessView(msgspec.Struct, frozen=True):
    """One process from outside.

    Attributes:
        pid: its process identifier.
        parent: that of its parent.
        created: when it began, in seconds since 1970.
        name: how a person knows it: its own title (`VLLM::EngineCore`), its module, or its command.
        command: what it was started with, the words apart by blanks; its title where it has set one.
        user: whose it is.
        status: `running`, `sleeping`, `stopped`, `zombie`, …
        role: its part in an engine, and its rank.
        is_orphan: whether the process that started it has ended, so that nobody waits for it.
        resident: bytes in physical memory, shared or not; everybody may read this.
        cards: bytes by device as `cuda:0`; None where the driver lists it without its memory.
        memory: bytes by kind; None where they may not be read.
        descriptors: how many it has open; None where that may not be read.
        shared_memory: bytes that it maps of each file in /dev/shm, by name; None where that may not be read.
        not_measured: why something is None, by its field.
    """

    pid: int
    parent: int
    created: float
    name: str
    command: str
    user: str
    status: str
    role: Role
    is_orphan: bool
    resident: int
    cards: ByCard = _NO_CARDS
    memory: Rollup | None = None
    descriptors: int | None = None
    shared_memory: Mapping[str, int] | None = None
    not_measured: Mapping[str, str] = msgspec.field(default_factory=lambda: MappingProxyType({}))

    @property
    def private(self) -> int:
        """What comes back on the host when it ends, in bytes; what is resident, where that may not be read."""
        return self.resident if self.memory is None else self.memory.private


def read_process(pid: int, cards: ByCard = _NO_CARDS) -> ProcessView | None:
    """Return one process; None where it has ended, or ends while it is read.

    Args:
        pid: its process identifier.
        cards: what the driver counts for it.
    """
    begun = stat(pid)
    if begun is None:
        return None
    try:
        view = _zombie(begun) if begun.state == "Z" else _read(begun, cards)
    except (OSError, psutil.Error):  # it ended in the middle
        return None
    after = stat(pid)
    if after is None or after.started != begun.started:
        return None
    return _zombie(after) if after.state == "Z" and view.status != "zombie" else view


def read_role_of(pid: int, variables: Mapping[str, str] = MappingProxyType({})) -> Role:
    """Return the part that a process plays; that of an unknown one where it has ended.

    Args:
        pid: its process identifier.
        variables: of its environment as it says itself; what it was started with is read here.
    """
    process = stat(pid)
    if process is None:
        return Role()
    return _role(process, name_of(pid), command_line(pid).strip(), {**(environment(pid) or {}), **variables})


def is_left_by_an_engine(pid: int) -> bool:
    """Return whether a process is the orphan of an engine, or of a program that lowtide has watched."""
    process = stat(pid)
    if process is None or process.state == "Z":
        return False
    variables = environment(pid) or {}
    role = _role(process, name_of(pid), command_line(pid).strip(), variables)
    return bool(role.engine or MARK in variables) and is_orphan(process, role)


def read_processes(
    pids: Iterable[int], cards: Mapping[int, ByCard] = _NOBODY, *, patience: float = PATIENCE_S
) -> tuple[ProcessView, ...]:
    """Several processes, each read in a thread of its own; sorted by their beginning.

    Args:
        pids: their process identifiers.
        cards: what the driver counts for each, by process identifier.
        patience: seconds after which one that cannot be read is reported with what is known without it.
    """
    wanted = sorted(set(pids))
    found = read_side_by_side(lambda pid: read_process(pid, cards.get(pid, _NO_CARDS)), wanted, patience)
    for pid in wanted:
        if pid not in found:
            found[pid] = _unanswered(pid, cards.get(pid, _NO_CARDS), patience)
    return tuple(sorted((view for view in found.values() if view is not None), key=lambda view: view.created))


def by_process(cards: Iterable[CardHolders]) -> dict[int, ByCard]:
    """Return what the driver counts for each process that it lists, by device."""
    found: dict[int, dict[str, int | None]] = {}
    for card in cards:
        for pid, size in card.processes.items():
            found.setdefault(pid, {})[card.device] = size
    return {pid: MappingProxyType(by_card) for pid, by_card in found.items()}


def _read(process: ProcessStat, cards: ByCard) -> ProcessView:
    pid = process.pid
    variables, kinds, descriptors = environment(pid), rollup(pid), count_descriptors(pid)
    mapped = mapped_below(pid, SHARED_MEMORY)
    name, command = name_of(pid), command_line(pid).strip()
    role = _role(process, name, command, variables or {})
    not_read = {"memory": kinds, "descriptors": descriptors, "shared_memory": mapped, "environment": variables}
    return _view(
        process,
        name=name,
        command=command,
        role=role,
        cards=cards,
        memory=kinds,
        descriptors=descriptors,
        shared_memory=None if mapped is None else MappingProxyType(mapped),
        not_measured={
            what: f"{_user(pid)}'s process {pid} may not be read by user {_own_user()}"
            for what, value in not_read.items()
            if value is None
        },
    )


def _role(process: ProcessStat, name: str, command: str, variables: Mapping[str, str]) -> Role:
    title = name if "::" in name else process.command
    return read_role(title, command=command, threads=thread_names(process.pid), environment=variables)


def _zombie(process: ProcessStat) -> ProcessView:
    why = "it has ended and holds no memory; its parent has not waited for it"
    return _view(process, not_measured=dict.fromkeys(("memory", "descriptors", "shared_memory"), why))


def _unanswered(pid: int, cards: ByCard, patience: float) -> ProcessView | None:
    process = stat(pid)
    if process is None:
        return None
    why = f"the kernel did not let it be read for {patience:g} s"
    names = ("memory", "descriptors", "shared_memory", "role")
    try:
        return _view(process, cards=cards, not_measured=dict.fromkeys(names, why))
    except (OSError, psutil.Error):  # it ended after all
        return None


def _view(
    process: ProcessStat, *, name: str = "", command: str = "", role: Role | None = None, **facts: Any
) -> ProcessView:
    """Return what everybody may know of a process, with further facts."""
    role = role or read_role(process.command)
    return ProcessView(
        pid=process.pid,
        parent=process.parent,
        created=psutil.Process(process.pid).create_time(),
        name=name or process.command,
        command=command,
        user=_user(process.pid),
        status=_STATES.get(process.state, process.state),
        role=role,
        is_orphan=is_orphan(process, role),
        resident=sizes(process.pid)[0],
        **facts,
    )


def _user(pid: int) -> str:
    return str(psutil.Process(pid).username())


def _own_user() -> str:
    return str(psutil.Process().username())


def is_orphan(process: ProcessStat, role: Role | None = None) -> bool:
    """Return whether the process that started another one has ended.

    The kernel then gives it the first process, or a session's, as its parent, which is also the parent of what an init
    system has started itself.  So the leader of its group or session must have ended, or it must be of a kind that
    another process of its engine starts, always.  One that was started in a session of its own and is of no known kind
    passes for a service.

    Args:
        process: the process.
        role: its part in an engine, if that is known.
    """
    parent = stat(process.parent) if process.parent else None
    if parent is None or not (parent.pid == 1 or parent.command in REAPERS):
        return False
    leaders = {process.group, process.session} - {process.pid, 0}
    if any(_is_gone(leader, process) for leader in leaders):
        return True
    # A container's first process may be the engine itself: then it is the parent of its children.
    return role is not None and role.is_child and not runs_python(parent)


def _is_gone(leader: int, process: ProcessStat) -> bool:
    found = stat(leader)
    # A leader is older than who is in its group: a younger one has its number by chance.
    return found is None or found.state == "Z" or found.started > process.started


_CARD_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
_CARD_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")


class Holders(msgspec.Struct, frozen=True):
    """Who holds what.

    Attributes:
        driver: which driver was asked: `nvml`, `amdsmi` or `none`.
        driver_note: why no card was found; empty if one was.
        cards: what the driver says of each card.
        processes: those that the driver lists and that are seen here, engines and orphans of them; sorted by beginning.
        unseen: what the driver counts for processes that are not seen here, by process identifier: they are in another
            container, or have ended.
        files: what is in /dev/shm.
    """

    driver: str
    driver_note: str
    cards: tuple[CardHolders, ...]
    processes: tuple[ProcessView, ...]
    unseen: Mapping[int, ByCard]
    files: SharedMemoryReading


def read_holders(driver: Driver) -> Holders:
    """Read all cards, their processes, engines and orphans of them without a card, and the files of the dead.

    Args:
        driver: reports who holds what on cards.
    """
    cards = read_card_holders(driver)
    listed = by_process(cards)
    here = {pid for pid in listed if _is_here(pid)} | _engines()
    processes = read_processes({*here, *_left_processes()}, listed)
    seen = {view.pid for view in processes}
    return Holders(
        driver=driver.name,
        driver_note="" if cards else driver.read(0).note,
        cards=cards,
        # A number of another container's may be that of a process here.
        processes=tuple(view for view in processes if view.pid in here or view.is_orphan),
        unseen={pid: by_card for pid, by_card in listed.items() if pid not in here or pid not in seen},
        files=read_shared_memory(),
    )


def _is_here(pid: int) -> bool:
    """Return whether a number of the driver's is that of a process here, and not of another container's."""
    if stat(pid) is None:
        return False
    if count_descriptors(pid) is None or not any(device.exists() for device in _CARD_DEVICES):
        return True
    return any(file.startswith(_CARD_FILES) for file in open_files(pid))


def _engines() -> set[int]:
    """Return the processes of engines, by their titles and threads, and those that have started these."""
    found: set[int] = set()
    for process in _all():
        role = read_role(process.command)
        if not role.engine and runs_python(process):
            role = read_role(process.command, threads=thread_names(process.pid))
        if role.engine:
            parent = stat(process.parent)
            is_started = role.is_child and parent is not None and runs_python(parent)
            found |= {process.pid, process.parent} if is_started else {process.pid}
    return found


def _all() -> Iterator[ProcessStat]:
    return (process for process in map(stat, all_pids()) if process is not None)


def _left_processes() -> list[int]:
    """Orphans of engines, and of programs that lowtide has watched."""
    left = read_side_by_side(is_left_by_an_engine, _children_of_init(), PATIENCE_S)
    return [pid for pid, is_left in left.items() if is_left]


def _children_of_init() -> Iterator[int]:
    """Yield processes that the system has started, and orphans."""
    for process in _all():
        parent = stat(process.parent)
        if parent is not None and (parent.pid == 1 or parent.command in REAPERS):
            yield process.pid
