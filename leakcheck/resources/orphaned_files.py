"""What nobody uses any more and was left: in /dev/shm, and among temporary files.

Of this process it is the files of Unix sockets that were bound and closed again, which only `os.unlink` removes; else
what processes that have ended left, which cannot remove it any more.

Of a process that this one kills, what it has open is looked at before.  One that ends by itself (that crashes, that the
kernel kills for want of memory) is known by its start, or its agent; what was made while it lived and nobody has open
is its own.
Nothing says who made such a file: where others may have, as another run of lowtide on this host, it is nobody's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os as os_module
import re
import signal
import stat
import tempfile as tempfile_module
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any

from lowtide.leakcheck.resources.processes import ChildProcesses
from lowtide.probes.host.counters import Folder
from lowtide.probes.host.makers import Maker, Makers
from lowtide.probes.host.process_files import (
    all_pids,
    began_at,
    bound_sockets,
    has_ended,
    numbered_descriptors,
    numbers_in,
    own_sockets,
)
from lowtide.probes.host.process_files import stat as process_stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.originals import StandIns, loaded, os, temporary_folder, time, weakref
from lowtide.probes.processes.agents import Neighbours


class OwnSegments:
    """Notes the names that `multiprocessing.shared_memory` makes, from `start` to `stop`.

    It calls `_posixshmem.shm_open` for it, which is stood in for meanwhile.

    Args:
        made: called with each name, by the code that makes it.

    Attributes:
        names: as /dev/shm lists them.
    """

    def __init__(self, made: Callable[[str], object] = str) -> None:
        self.names: set[str] = set()
        self._made = made
        self._stand_ins = StandIns()

    def start(self) -> None:
        """Begin to note; legal twice."""
        with contextlib.suppress(ImportError):  # not this platform
            self._stand_ins.put(importlib.import_module("_posixshmem"), "shm_open", self._noting)

    def stop(self) -> None:
        """End it; legal twice."""
        self._stand_ins.restore()

    def _noting(self, original: Callable[..., int]) -> Callable[..., int]:
        names, made = self.names, self._made

        def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
            opened = original(path, flags, mode=mode)
            if flags & os.O_CREAT:
                name = path.lstrip("/")
                names.add(name)
                # Whatever goes wrong here, the program has its segment.
                with contextlib.suppress(Exception):
                    made(name)
            return opened

        return shm_open


_ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_CLOCK_S = 0.05

_PAUSE_S = 0.05
"""Seconds in which it is enough to see once where this process listens: some engines' processes answer all the time."""

_BASE_OF_PYTEST = "pytest-of-"
"""The folder in which pytest keeps `tmp_path` of its last three runs, on purpose."""

_TMP_PATH = re.compile(r"/test_\w*\d/")
"""What pytest calls `tmp_path`, wherever `--basetemp` is."""


class OrphanedFiles:
    """Looks at a process of the tree when this one is about to kill it: afterwards nobody knows what it had.

    From `start` to `stop` it stands in for `os.kill` and `os.killpg`, which `subprocess`, `multiprocessing` and
    `asyncio` call, and for the names that `tempfile` makes up: what this process made is for itself to remove.

    Args:
        tree: whose processes.
        segments: receives the names in /dev/shm that a killed process had.
        makers: knows the files to which this process has bound sockets.
        began: gives the processes of the tree that have had an agent, with the time at which it began, in seconds.
        alone: whether no other process of the same program runs beside this one and makes what nobody has open. Of
            other programs that lowtide watches meanwhile, and of unseen containers, it is noticed here.
    """

    def __init__(
        self,
        tree: ProcessTree,
        segments: OwnSegments,
        makers: Makers,
        began: Callable[[], Mapping[int, float]] = dict,
        *,
        alone: bool = True,
    ) -> None:
        self._began = began
        self._alone = alone
        self._tree = tree
        self._segments = segments
        self._makers = makers
        self._stand_ins = StandIns()
        self._process = 0
        self._names: _MadeUpNames | None = None
        self._files_there, self._segments_there = Folder(temporary_folder), Folder(lambda: "/dev/shm")
        self._before: Set[str] = frozenset()
        self._segments_before: Set[str] = frozenset()
        self._lifetimes: dict[int, tuple[float, float]] = {}
        self._ended_before: set[int] = set()
        self._files: set[str] = set()
        self._open_to_nobody: set[str] = set()
        self._seen: set[str] = set()
        # Whether each was left, as far as was known when it was first seen; the same path may be bound again.
        self._dead_sockets: dict[str, tuple[Maker, bool]] = {}
        # By path, the process of the tree that has bound a socket there for longer than one test.
        self._bound_by: dict[str, int] = {}
        self._next_note = 0.0
        self._neighbours = Neighbours(tree)

    def start(self) -> None:
        """Begin to look; legal twice."""
        if self._names is not None:
            return
        self._process = os.getpid()
        self._names = _MadeUpNames(vars(tempfile_module)["_get_candidate_names"]())
        vars(tempfile_module)["_name_sequence"] = self._names
        for name, pids_of in (("kill", self._pids_of_one), ("killpg", self._pids_of_group)):
            self._stand_ins.put(os_module, name, functools.partial(self._looking_first, pids_of))

    def stop(self) -> None:
        """End it; legal twice."""
        self._stand_ins.restore()
        if self._names is not None:
            vars(tempfile_module)["_name_sequence"] = self._names.original
        self._names = None

    def mark(self) -> None:
        """Take what is there now for left before."""
        self._ended_before.update(self._ended_since())
        if self._names is not None:
            self._names.mark()
        self._lifetimes.clear()
        self._files.clear()
        self._open_to_nobody.clear()
        self._seen.clear()
        self._neighbours.mark()
        with contextlib.suppress(OSError):
            self._segments_before = self._segments_there.names().keys()
            self._makers.forget_made("shared-memory", self._segments_before)
        with contextlib.suppress(OSError):
            self._before = self._files_there.names().keys()

    def look(self) -> None:
        """Note what is there now and nobody knows of afterwards: what processes of the tree have in /dev/shm.

        One of them may end by itself.
        """
        for pid in self._tree.descendants():
            self._seen |= self._note_segments(pid)
        self.note_ended()

    def note_ended(self) -> None:
        """Note which processes have ended, and who else is there; not again within a moment."""
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + _PAUSE_S
            # The sooner it is seen, the less passes for made in its life.
            self._note_ended()
            # Later on they may have ended, and their files be there.
            self._neighbours.look()

    def temporary_files(self) -> dict[str, int]:
        """Return what was left among the temporary files, if it is new.

        Files of sockets that this process has bound, and what ended processes had open, listened on or numbered.
        """
        sockets = self._sockets_left_here() | self._sockets_of_the_dead()
        self._note_ended()
        folder = temporary_folder()
        if self._lifetimes:
            with contextlib.suppress(OSError):
                fresh = set(os.listdir(folder)) - self._before
                self._files |= {name for name in fresh if self._lifetimes.keys() & numbers_in(name)}
                if self._is_alone():
                    sockets |= self._abandoned_sockets(fresh)
        own = () if self._names is None else self._names.made
        left = {f"{folder}/{name}" for name in self._files if not any(part in name for part in own)}
        return {path: 1 for path in sorted(left | sockets) if _facts_of(path) is not None}

    def sockets_of(self, pids: Collection[int]) -> set[str]:
        """Return the temporary files to which some processes, and those below them, have bound sockets.

        They are looked at from here on: whichever is there when its process has ended, was left.
        """
        folder = f"{temporary_folder()}/"
        found = {}
        for pid in self._tree.with_descendants(pids):
            for path in filter(self._is_temporary, own_sockets(pid, folder)):
                found[path] = pid
                self._note_maker("temporary-files", path, pid)
        self._bound_by |= found
        return set(found)

    def _sockets_of_the_dead(self) -> set[str]:
        """Return the files of those sockets whose process has ended, if nobody has bound one there again."""
        dead = {path for path, pid in self._bound_by.items() if has_ended(pid)}
        for path in [path for path in dead if _facts_of(path) is None]:
            del self._bound_by[path]
        dead &= self._bound_by.keys()
        return dead - _living_sockets() if dead else set()

    def _sockets_left_here(self) -> set[str]:
        """Return the temporary files of sockets that this process has bound, and that nobody has any more."""
        closed = self._makers.closed_sockets()
        if not closed:
            return set()
        unknown = {}
        for path, maker in closed.items():
            entry = _facts_of(path)
            if entry is None or not stat.S_ISSOCK(entry.st_mode):
                self._makers.forget_file(path)
                self._dead_sockets.pop(path, None)
            elif path not in self._dead_sockets or self._dead_sockets[path][0] is not maker:
                unknown[path] = maker
        living = _living_sockets() if unknown else set()
        for path, maker in unknown.items():
            if not living & {path, maker.identity[1]}:
                self._dead_sockets[path] = maker, self._is_temporary(path)
        known = {path: self._dead_sockets.get(path, (None, False)) for path in closed}
        return {path for path, (maker, is_left) in known.items() if is_left and maker is closed[path]}

    def _is_temporary(self, path: str) -> bool:
        """Return whether a path lies among the temporary files, and in no folder that somebody will remove as a whole.

        That is pytest's, what a finalizer removes (of `tempfile.TemporaryDirectory`, of `multiprocessing`), and what
        this process has made before the test, which goes when its maker is done.
        """
        folder = f"{temporary_folder()}/"
        inside, _, file = path.removeprefix(folder).partition("/")
        if not path.startswith(folder) or inside.startswith(_BASE_OF_PYTEST) or _TMP_PATH.search(path):
            return False
        if not file:
            return True
        is_older = self._names is not None and any(part in inside for part in self._names.made_before)
        removed = (each for each in _folders_of_finalizers() if each.startswith(folder))
        return not is_older and not any(path.startswith(f"{each}/") for each in removed)

    def shared_memory(self, names: Collection[str]) -> set[str]:
        """Return those of some names in /dev/shm that are new, and that ended processes left, or orphans hold.

        What a process was seen to have, or had open when it was killed, is known by name, and so is what has an ended
        one's number.  What was made while such a one lived and nobody has open is taken for its own, too: nobody else
        will remove it.
        """
        if not names:
            return set()
        self._note_ended()
        fresh = set(names) - self._segments_before
        # A fixture's process may have made it in an earlier test.
        older = {name for name in set(names) - fresh if self._lifetimes.keys() & numbers_in(name)}
        ended = {name for name in older if self._was_made_in_a_life(f"/dev/shm/{name}")}
        return ended | self._left_of(fresh) if fresh else ended

    def _left_of(self, fresh: set[str]) -> set[str]:
        left = fresh & mapped_shared_memory(self._tree.with_descendants(self._tree.orphans()))
        if fresh & self._seen:
            left |= _unused(fresh & self._seen)
        if not self._lifetimes:
            return left
        left |= {name for name in fresh if self._lifetimes.keys() & numbers_in(name)}
        unknown = {name for name in fresh - left if self._was_made_in_a_life(f"/dev/shm/{name}")}
        unknown -= self._open_to_nobody
        if unknown and self._is_alone():
            self._open_to_nobody |= _unused(unknown)
        return left | (self._open_to_nobody & fresh)

    def _is_alone(self) -> bool:
        """Return whether nobody else, since `mark`, may have made what nobody has open."""
        return self._alone and not self._neighbours.look()

    def _note_ended(self) -> None:
        """Note those that have ended since `mark` without having been killed from here."""
        now = time.time()
        for pid, began in self._ended_since().items():
            self._lifetimes.setdefault(pid, (began, now))

    def _ended_since(self) -> dict[int, float]:
        """Return when those began that were seen to start, or had an agent, and have ended since `mark`."""
        known = {**self._makers.began, **self._began()}
        return {pid: began for pid, began in known.items() if pid not in self._ended_before and has_ended(pid)}

    def _abandoned_sockets(self, names: Collection[str]) -> set[str]:
        """Return the paths of sockets that ended processes may have made, among some temporary files and in them."""
        folder = temporary_folder()
        paths = {f"{folder}/{name}" for name in names if not name.startswith(_BASE_OF_PYTEST)}
        inside = {os.path.join(place, file) for path in paths for place, _, files in os.walk(path) for file in files}
        sockets = {path for path in paths | inside if self._was_made_in_a_life(path, stat.S_ISSOCK)}
        return sockets - _living_sockets() - self._makers.bound_files() if sockets else set()

    def _was_made_in_a_life(self, path: str, is_of_kind: Callable[[int], bool] = lambda mode: True) -> bool:
        entry = _facts_of(path)
        if entry is None or entry.st_uid != os.geteuid() or not is_of_kind(entry.st_mode):
            return False
        made = entry.st_ctime
        # The kernel counts both in steps of some milliseconds.
        return any(began - _CLOCK_S <= made <= ended + _CLOCK_S for began, ended in self._lifetimes.values())

    def _looking_first(
        self, pids_of: Callable[[int], Iterable[int]], original: Callable[[int, int], None]
    ) -> Callable[[int, int], None]:
        def kill(pid: int, signal_number: int, /) -> None:
            if signal_number in _ENDING and os.getpid() == self._process:
                # Whatever goes wrong here, the program's own call goes through.
                with contextlib.suppress(Exception):
                    self._look_at(pids_of(pid))
            original(pid, signal_number)

        return kill

    def _pids_of_one(self, pid: int) -> Iterable[int]:
        return [pid] if pid > 0 else self._pids_of_group(-pid or os.getpgrp())

    def _pids_of_group(self, group: int) -> Iterable[int]:
        return [pid for pid in self._tree.descendants() if os.getpgid(pid) == group]

    def _look_at(self, pids: Iterable[int]) -> None:
        victims = self._tree.with_descendants(pids)
        if not victims:
            return
        now = time.time()
        for pid in victims:
            process = process_stat(pid)
            if process is not None:
                self._lifetimes.setdefault(pid, (began_at(process), now))
        for pid in victims:
            self._segments.names |= self._note_segments(pid)
        folder = f"{temporary_folder()}/"
        mine = _opened(os.getpid(), folder)
        for pid in victims:
            paths = (_opened(pid, folder) | own_sockets(pid, folder)) - mine
            names = {path.removeprefix(folder).partition("/")[0] for path in paths}
            for path in paths:
                self._note_maker("temporary-files", path, pid)
            self._files |= {name for name in names - self._before if not name.startswith(_BASE_OF_PYTEST)}

    def _note_segments(self, pid: int) -> set[str]:
        """Note that a process made what it alone was seen to have in /dev/shm; return all that it has."""
        names = mapped_shared_memory([pid])
        for name in names - self._segments_before:
            self._note_maker("shared-memory", name, pid)
        return names

    def _note_maker(self, key: str, name: str, pid: int) -> None:
        """Note that a process has something that this one did not make, unless another one was seen to have it."""
        if self._makers.place_of(key, name):
            return
        started = self._makers.place_of("processes", str(pid))
        place = f"process {ChildProcesses().describe(str(pid))}"
        self._makers.note_made(key, name, f"{place}, started in {started}" if started else place)


class _MadeUpNames:
    """Hands on the random part of each name that `tempfile` makes up, and keeps it.

    Args:
        original: makes them up.
    """

    def __init__(self, original: Iterator[str]) -> None:
        self.original = original
        # In their order.
        self.made: dict[str, None] = {}
        self._marked = 0

    @property
    def made_before(self) -> Iterator[str]:
        """Those that were made before `mark`."""
        return itertools.islice(self.made, self._marked)

    def mark(self) -> None:
        """Take what was made until now for made before."""
        self._marked = len(self.made)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        name = next(self.original)
        self.made[name] = None
        return name


def _facts_of(path: str) -> os.stat_result | None:
    """Return what the kernel says of a file, not of what a link leads to; None where it is gone."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def _folders_of_finalizers() -> Iterator[str]:
    """Return the paths with which finalizers will be called, if nothing else calls them before this process ends."""
    finalizers = [info.args for info in list(vars(weakref.finalize)["_registry"].values())]
    of_multiprocessing: Any = loaded("multiprocessing.util")
    finalizers += [each._args for each in list(getattr(of_multiprocessing, "_finalizer_registry", {}).values())]
    yield from (argument for arguments in finalizers for argument in arguments or () if type(argument) is str)


def _living_sockets() -> set[str | int]:
    """Return the paths to which Unix sockets of living processes are bound, and these sockets' inodes."""
    return {each for bound in bound_sockets() for each in bound}


def _unused(names: set[str]) -> set[str]:
    """Return those of some names in /dev/shm that no living process has open, and that have the number of none."""
    living = set(all_pids())
    return {name for name in names if not living & numbers_in(name)} - mapped_shared_memory(living)


def _opened(pid: int, folder: str) -> set[str]:
    """Return the paths in a folder that a process has open, besides its standard streams."""
    return {path for number, path in numbered_descriptors(pid).items() if number > 2 and path.startswith(folder)}
