"""What the processes of a tree leave on the host when they have ended: files, sockets, System V memory, card memory.

Nobody can ask a process that has ended, so the tree is looked at while it runs: which processes there were, what they
mapped and on which sockets they listened.  What was made meanwhile, belongs to this user and is used by no living
process is taken for the tree's, too: nobody else will remove it.  Where others may have made it, it is undecided.
"""

from __future__ import annotations

import ctypes
import re
import stat as modes
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.host.process_files import (
    all_pids,
    bound_sockets,
    has_opened_a_card,
    lives,
    name_of,
    numbered_descriptors,
    numbers_in,
    own_sockets,
    stat,
)
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.originals import os, time
from lowtide.probes.processes.agents import FOLDER_PREFIX, Neighbours
from lowtide.probes.processes.outside_view import ByCard, by_process
from lowtide.probes.processes.shared_memory_files import FOLDER as SHARED_MEMORY
from lowtide.probes.processes.shared_memory_files import (
    SharedMemoryFile,
    SharedMemoryReading,
    Undecided,
    read_shared_memory,
)

DEEP_S = 1.0
"""Seconds between two looks at what the processes map and where they listen."""

_CLOSING_S = 0.1
"""Seconds after which a file that somebody has closed to remove it is gone."""

_CLOCK_S = 0.05
"""The kernel counts the times of files and of processes in steps of some milliseconds."""

_STANDARD = 2
"""The last of a process's standard streams, which somebody else has given it."""

MADE_UP = re.compile(
    r"(^tmp|(?<=[._-])(?=[a-z0-9_]{0,7}\d)(?=[a-z0-9_]{0,7}[a-z]))[a-z0-9_]{8}(?![a-z0-9])|^tmp\.\w{10}$"
)
"""Names by `tempfile` of Python, of which most have a digit, and by `mktemp`."""

_DEPTH = 3
_MOST_ENTRIES = 4096


class SystemVObject(msgspec.Struct, frozen=True):
    """Shared memory, semaphores or a message queue of System V, which outlive their makers.

    Attributes:
        kind: `shm`, `sem` or `msg`.
        number: its identifier, as `ipcrm` takes it.
        bytes: of shared memory and of the messages in a queue; 0 for semaphores.
        attached: how many processes have it; 0 where the kernel does not say.
        changed: when it was made or its settings were changed, in whole seconds since 1970.
        pids: of the processes that the kernel names: who made shared memory, who has used the others last; none for
            what nobody has used.
    """

    kind: str
    number: int
    bytes: int
    attached: int
    changed: int
    pids: frozenset[int]


class TreeTraces:
    """Follows a tree from outside.

    Args:
        tree: whose processes.
        driver: reports what they hold on cards.
        agents: the folder with the sockets of agents, which has one for each Python process that there was; or None.
        folder: of temporary files.
        shared: the folder of shared memory.
    """

    def __init__(
        self,
        tree: ProcessTree,
        driver: Driver,
        *,
        agents: Path | None = None,
        folder: str | None = None,
        shared: Path = SHARED_MEMORY,
    ) -> None:
        self._tree = tree
        self._neighbours = Neighbours(tree)
        self._driver = driver
        self._agents = agents
        self._folder = Path(folder or tempfile.gettempdir())
        self._shared_folder = shared
        self._began = 0.0
        self._next_deep = 0.0
        self._started: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._shared: set[str] = set()
        # By path, who was seen to listen on it.
        self._sockets: dict[str, int] = {}
        # By path among the temporary files, who was seen to have it open.
        self._opened: dict[str, int] = {}
        self._with_card: set[int] = set()
        self._listed: set[int] = set()
        self._shared_before: frozenset[str] = frozenset()
        self._files_before: frozenset[str] = frozenset()
        self._system_v_before: frozenset[tuple[str, int]] = frozenset()
        self._roots: set[int] = set()

    def start(self) -> None:
        """Take what is there now for left before."""
        self._began = time.time() - _CLOCK_S
        self._shared_before = frozenset(_names_in(self._shared_folder))
        self._files_before = frozenset(_names_in(self._folder))
        self._system_v_before = frozenset((each.kind, each.number) for each in _system_v())

    def look(self) -> None:
        """Note which processes there are, and now and then what they use."""
        family = self._tree.descendants()
        fresh = [pid for pid in family if pid not in self._started]
        for pid in family:
            process = stat(pid)
            if process is not None:
                self._started[pid] = process.started
                self._names[pid] = name_of(pid)
        if fresh or time.monotonic() >= self._next_deep:
            self._next_deep = time.monotonic() + DEEP_S
            self._look_deep(family)

    def _look_deep(self, family: list[int]) -> None:
        # Later on they may have ended, and their files be there.
        self._neighbours.look()
        self._shared |= mapped_shared_memory(family)
        for pid in family:
            for path in own_sockets(pid):
                self._sockets.setdefault(path, pid)
            for path in self._open_in(pid):
                self._opened.setdefault(path, pid)
        self._with_card |= {pid for pid in family if has_opened_a_card(pid)}
        if self._with_card:
            listed = by_process(read_card_holders(self._driver))
            self._listed |= listed.keys() & self._started.keys()

    @property
    def pids(self) -> frozenset[int]:
        """The processes that there have been, as far as they were seen or had an agent."""
        named = () if self._agents is None else _names_in(self._agents)
        with_agent = {int(name.partition(".")[0]) for name in named if name.partition(".")[0].isdecimal()}
        return frozenset(self._started.keys() | with_agent | self._roots)

    def name(self, pid: int) -> str:
        """Return how a person knew a process; empty if it was not seen while it lived."""
        return self._names.get(pid, "")

    def listener(self, path: str) -> int | None:
        """Return the process that was seen to have a socket at a path; None where none was."""
        return self._sockets.get(path)

    def opener(self, path: str) -> int | None:
        """Return the process that was seen to have a file open at a path, or below it; None where none was."""
        return next(
            (pid for each, pid in self._opened.items() if Path(path) in (Path(each), *Path(each).parents)), None
        )

    def _open_in(self, pid: int) -> set[str]:
        """Return the temporary files that a process has open, besides its standard streams."""
        of = numbered_descriptors(pid).items()
        return {path for number, path in of if number > _STANDARD and path.startswith(f"{self._folder}/")}

    def on_cards(self) -> dict[int, ByCard]:
        """Return what the driver counts for processes of the tree that have ended."""
        if not self._with_card:
            return {}
        listed = by_process(read_card_holders(self._driver))
        return gone_on_cards(listed, self._started)

    def of_living(self, pid: int) -> ByCard:
        """Return what the driver counts for one process of the tree; empty where none has used a card."""
        return by_process(read_card_holders(self._driver)).get(pid, {}) if self._with_card else {}

    @property
    def cards_not_measured(self) -> str:
        """Why it is unknown what ended processes hold on cards; empty where it is known, or none has used one."""
        ended = {pid for pid in self._with_card if not self._lives(pid)}
        if not ended or self._with_card & self._listed:
            return ""
        pid = min(ended)
        return f"pid {pid} has used a card, and the driver lists no process of that number: {self._why_unlisted()}"

    def _why_unlisted(self) -> str:
        note = self._driver.read(0).note
        return note or "it counts in another container's numbers, or the process used no memory there"

    def shared_memory(self) -> tuple[tuple[SharedMemoryFile, ...], tuple[Undecided, ...], str]:
        """Return what the tree has left in /dev/shm; entries of which that cannot be seen; why none can be read."""
        reading: SharedMemoryReading = read_shared_memory(self._shared_folder)
        dead = [file for file in reading.dead if self._may_be_ours(file)]
        if dead:
            # Another program may just have closed one, and be about to remove it.
            time.sleep(_CLOSING_S)
            still = {file.path for file in read_shared_memory(self._shared_folder).dead}
            dead = [file for file in dead if file.path in still]
        undecided = [each for each in reading.undecided if self._may_be_ours(each.file)]
        why = self._neighbours.look() if dead else ""
        if why:
            ended = self._ended()
            ours = [file for file in dead if Path(file.path).name in self._shared or ended & numbers_in(file.path)]
            undecided += [Undecided(file, why) for file in dead if file not in ours]
            dead = ours
        return tuple(dead), tuple(undecided), reading.not_measured

    def _may_be_ours(self, file: SharedMemoryFile) -> bool:
        name = Path(file.path).name
        return name not in self._shared_before and (name in self._shared or self._was_made_since(Path(file.path)))

    def files(self) -> tuple[list[Path], list[tuple[Path, str]]]:
        """Sockets on which nobody listens any more, and temporary files with the number of an ended process; sorted.

        And those that were seen open in a process, by names that were made up. Then those that others may have made,
        with the reason.
        """
        bound, ended = {path for _, path in bound_sockets()}, self._ended()
        fresh = (self._folder / name for name in set(_names_in(self._folder)) - self._files_before)
        found = {path for path in fresh if ended & numbers_in(path.name) and self._was_made_since(path)}
        sockets = {path for path in self._new_sockets() if str(path) not in bound}
        found |= {path for path in sockets if str(path) in self._sockets} | self._left_open()
        unknown = sorted(sockets - found)
        why = self._neighbours.look() if unknown else ""
        return (sorted(found), [(path, why) for path in unknown]) if why else (sorted(found | sockets), [])

    def _left_open(self) -> set[Path]:
        """Return what processes of the tree had open, by names that `tempfile` makes up, and nobody has any more.

        A folder of such a name is one thing. Other names somebody has chosen, perhaps for what is to stay.
        """
        places = {(self._folder / Path(path).relative_to(self._folder).parts[0]): path for path in self._opened}
        fresh = {place for place in places if place.name not in self._files_before and MADE_UP.search(place.name)}
        left = {place for place in fresh if self._was_made_since(place)}
        if not left:
            return left
        living = {Path(path) for pid in all_pids() for path in self._open_in(pid)}
        return {place for place in left if not any(place in (path, *path.parents) for path in living)}

    def _ended(self) -> set[int]:
        return {pid for pid in self.pids if not self._lives(pid)}

    def note_root(self, pid: int) -> None:
        """Note a process of the tree that may end before it is looked at."""
        self._roots.add(pid)

    def system_v(self) -> tuple[list[SystemVObject], list[tuple[SystemVObject, str]], list[tuple[SystemVObject, str]]]:
        """Return new objects of System V that no process has attached, of this user.

        Returns:
            Those that processes of the tree have made or used; those of which nobody knows the maker, with the reason;
            those of an ended process that was not seen, with the reason: most likely another program's.
        """
        ours, unknown, unseen = [], [], []
        pids = self.pids
        for each in _system_v():
            is_old = (each.kind, each.number) in self._system_v_before or each.changed < int(self._began)
            if is_old or each.attached:
                continue
            if any(pid in pids and self._is_same(pid) for pid in each.pids):
                ours.append(each)
            elif not each.pids and each.kind != "shm":
                unknown.append((each, "no process has used it, and the kernel does not name its maker"))
            elif each.pids and all(stat(pid) is None for pid in each.pids):
                why = f"it is of pid {min(each.pids)}, which had ended before it was seen among the command's processes"
                unseen.append((each, why))
        return ours, unknown, unseen

    def _is_same(self, pid: int) -> bool:
        """Return whether no other process has a number of the tree's now."""
        now = stat(pid)
        return now is None or self._started.get(pid, now.started) == now.started

    def _lives(self, pid: int) -> bool:
        return lives(pid, self._started[pid]) if pid in self._started else stat(pid) is not None

    def _new_sockets(self) -> Iterator[Path]:
        seen = {Path(path) for path in self._sockets}
        new = (self._folder / name for name in set(_names_in(self._folder)) - self._files_before)
        for path in sorted(seen | set(_sockets_below(new))):
            if _is_socket(path) and self._was_made_since(path):
                yield path

    def _was_made_since(self, path: Path) -> bool:
        try:
            facts = path.lstat()
        except OSError:  # it is gone by now
            return False
        return facts.st_uid == os.geteuid() and facts.st_ctime >= self._began


def gone_on_cards(listed: dict[int, ByCard], started: dict[int, int]) -> dict[int, ByCard]:
    """Return what the driver counts for processes that have ended.

    Args:
        listed: what it counts, by process identifier.
        started: when those processes began that are asked about, in ticks since boot, by process identifier.
    """
    return {
        pid: by_card
        for pid, by_card in listed.items()
        if pid in started
        and not lives(pid, started[pid])
        and any(size is None or size > 0 for size in by_card.values())
    }


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:  # it is not there, or not readable
        return []


def _is_socket(path: Path) -> bool:
    try:
        return modes.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _sockets_below(paths: Iterator[Path]) -> Iterator[Path]:
    """Yield the sockets among some paths and in the folders below, which may be large: only so deep, so many."""
    waiting, looked = [(path, 0) for path in paths], 0
    while waiting and looked < _MOST_ENTRIES:
        path, depth = waiting.pop()
        looked += 1
        # Those of agents go with whoever watches, or are nobody's to report once that one has been killed.
        if path.name.startswith(FOLDER_PREFIX):
            continue
        if _is_socket(path):
            yield path
        elif depth < _DEPTH and path.is_dir() and not path.is_symlink():
            waiting += [(path / name, depth + 1) for name in _names_in(path)]


def sockets_of_agents(pid: int) -> set[str]:
    """Return what descriptors of an agent's sockets lead to, in a process's own numbers, questions' connections too."""
    return {f"socket:[{inode}]" for inode, path in bound_sockets(pid) if f"/{FOLDER_PREFIX}" in path}


def _system_v() -> list[SystemVObject]:
    """Return this user's shared memory, semaphores and queues (proc_sysvipc(5)); empty on a kernel without them."""
    found = []
    for kind, identifier, size in (("shm", "shmid", "size"), ("sem", "semid", ""), ("msg", "msqid", "cbytes")):
        try:
            head, *lines = Path("/proc/sysvipc", kind).read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            fields = dict(zip(head.split(), map(int, line.split()), strict=False))
            if fields["uid"] != os.geteuid():
                continue
            number = fields[identifier]
            pids = [fields.get(name, 0) for name in ("cpid", "lspid", "lrpid")]
            pids += _last_users(number, fields["nsems"]) if kind == "sem" else []
            attached, changed = fields.get("nattch", 0), fields["ctime"]
            used_by = frozenset(filter(None, pids))
            found.append(SystemVObject(kind, number, fields.get(size, 0), attached, changed, used_by))
    return found


_GETPID = 11
"""Of `semctl`: the process that has last changed a semaphore (`<linux/sem.h>`)."""


def _last_users(semaphores: int, count: int) -> list[int]:
    """Return the processes that have last changed the semaphores of a set; those that may not be asked are left out."""
    semctl = ctypes.CDLL(None).semctl
    return [pid for pid in (semctl(semaphores, turn, _GETPID) for turn in range(count)) if pid > 0]
