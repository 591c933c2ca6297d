"""Child processes, and those whose parent has ended; and groups of `torch.distributed`, which processes form.

A group is numbered through the life of a process, and ended only by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from typing import Any

from lowtide.leakcheck.resources.resource import (
    Bound,
    Change,
    Items,
    Name,
    Resource,
    Rule,
    name_of_path,
    without_numbers,
)
from lowtide.probes.heap.roots import is_library
from lowtide.probes.host.counters import child_processes
from lowtide.probes.host.process_files import began_at, program_name, rollup, stat
from lowtide.probes.objects.foreign import attribute, type_name
from lowtide.probes.originals import contents, loaded, os, threading, time, weakref
from lowtide.reports.sizes import format_bytes

_MADE_UP = re.compile(r"(\w*Process|\w*PoolWorker)-[\d:]+")

_MOST_CALLS = 3

_MOST_SHOWN = 80
"""Characters of a command line that are shown."""


class ChildProcesses(Resource):
    """The child processes, by their identifiers."""

    rule = Rule(
        "processes",
        "processes",
        "process",
        "child processes, and those whose parent has ended",
        test=Bound(settles=True),
        life=Bound(settles=True),
        unit="processes",
    )

    def identity(self, name: str) -> Name:
        """Return the name that multiprocessing has for it, or else its command line.

        Args:
            name: its process identifier, or that and a name, as lives have it.
        """
        pid, _, known = name.partition(" ")
        if known:
            return Name(without_numbers(known))
        child = _child_of_multiprocessing(pid)
        if child is not None:
            given = attribute(child, "_name")
            if type(given) is not str or _MADE_UP.fullmatch(given):
                return Name(type_name(type(child)), not is_library(type_name(type(child))))
            return Name(without_numbers(given))
        words = _command_line(pid)
        if not words or words == _command_line("self"):
            return Name("fork", is_given=False)
        program = re.sub(r"^python[\d.]*$", "python", os.path.basename(words[0]))
        arguments = [re.sub(r"/[^\s'\"]+", lambda found: name_of_path(found[0]).text, word) for word in words[1:]]
        return Name(" ".join([program, *map(without_numbers, arguments)]))

    def describe(self, name: str) -> str:
        """Return `4711 (engine-core: serving.Core)`, or its command line; what is no number is left as it is."""
        if not name.isdigit():
            return name
        text = _told(name)
        return f"{name} ({text})" if text else name

    def advice(self, names: Collection[str]) -> str:
        """Return what ends those of which no object stands for any, or those of them whose parent has ended."""
        pids = sorted(int(name) for name in names if name.isdigit())
        left = [pid for pid in pids if _is_left(str(pid))]
        if not left:
            calls = "; ".join(f"os.kill({pid}, signal.SIGTERM); os.waitpid({pid}, 0)" for pid in pids[:_MOST_CALLS])
            return f"have what starts it end it, and wait for it: {calls}" if calls else ""
        calls = "; ".join(f"os.kill({pid}, signal.SIGTERM)" for pid in left[:_MOST_CALLS])
        one = "its parent has ended: have what starts it write its number down, and end it with that"
        many = "their parents have ended: have what starts them write their numbers down, and end them with those"
        return f"{one if len(left) == 1 else many}: {calls}"


def _is_left(pid: str) -> bool:
    process = stat(int(pid))
    return process is not None and int(pid) not in child_processes()


def _told(pid: str) -> str:
    """Return what a process runs, and of one that was left since when, and what it holds; empty where nobody knows."""
    text, process = _program(pid), stat(int(pid))
    memory = rollup(int(pid)) if process is not None and _is_left(pid) else None
    if process is None or memory is None:
        return text
    begin = time.strftime("%H:%M:%S", time.localtime(began_at(process)))
    return f"{text}; its parent has ended; since {begin}, {format_bytes(memory.private)}"


def _program(pid: str) -> str:
    """Return what a process runs; empty where nobody knows any more."""
    child = _child_of_multiprocessing(pid)
    words = _command_line(pid)
    if child is not None:
        # What it was to run, `multiprocessing` forgets as it starts.
        own = type_name(type(child))
        return str(attribute(child, "_name")) + ("" if is_library(own) else f": {own}")
    if not words:
        return program_name(int(pid))
    if words == _command_line("self"):
        return f"a fork of {os.getpid()}"
    # A program given by `-c` has lines of its own.
    text = " ".join(shlex.join([os.path.basename(words[0]), *words[1:]]).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _child_of_multiprocessing(pid: str) -> Any:
    module: Any = loaded("multiprocessing.process")
    children = [] if module is None else list(module._children)
    return next((each for each in children if str(attribute(attribute(each, "_popen"), "pid")) == pid), None)


def _command_line(pid: str) -> list[str]:
    try:
        text = contents(f"/proc/{pid}/cmdline").decode(errors="replace")
    except OSError:  # it ended meanwhile
        return []
    return text.rstrip("\0").split("\0") if text else []


DESTROY_LIMIT = 10.0
"""Seconds to wait for a group to be destroyed: a peer that is gone may never answer."""

_WITHOUT_DESCRIPTION = ("", "default_pg", "undefined")


class ProcessGroups(Resource):
    """The process groups that torch knows, by torch's name."""

    rule = Rule(
        "process-groups",
        "process-groups",
        "process",
        "groups of `torch.distributed`; those of all lives are one finding",
        test=Bound(cause="not-restored"),
        life=Bound(cause="not-restored"),
        unit="process groups",
    )
    # A backend talks to itself and to others.
    opens = re.compile(r"\d+ -> ((pipe|socket|anon_inode):.*|/dev/null)")
    kept_in = ("torch.distributed.distributed_c10d", "_world.pg_names")

    def read(self) -> Items:
        """Return the names of the groups; nothing where `torch.distributed` was not imported."""
        return dict.fromkeys(map(str, _groups().values()), 1)

    def describe(self, name: str) -> str:
        """Return `0 (gloo, 1 rank)`; just the name of a group that is not there."""
        world: Any = _world()
        for group, known in _groups().items():
            if str(known) == name:
                backend, ranks = world.pg_map[group][0], len(world.pg_group_ranks[group])
                return f"{name} ({backend}, {ranks} rank{'s' if ranks != 1 else ''})"
        return name

    def identity(self, name: str) -> Name:
        """Return the backend and the description that somebody gave the group: torch's name is a number or a digest."""
        group = next((group for group, known in _groups().items() if str(known) == name), None)
        given = str(getattr(group, "group_desc", ""))
        backend = without_numbers(self.describe(name).partition(" ")[2])
        if given in _WITHOUT_DESCRIPTION:
            return Name(f"{backend} {given}", is_given=False)
        return Name(f"{backend} {without_numbers(given)}")

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what destroys the groups; of the default one, which takes all others with it, only that."""
        found = [(str(known), group) for group, known in _groups().items() if str(known) in set(names)]
        default = getattr(_world(), "default_pg", None)
        return [_destroying(*each) for each in [each for each in found if each[1] is default] or found]


def _world() -> Any:
    return getattr(loaded("torch.distributed.distributed_c10d"), "_world", None)


def _groups() -> dict[Any, Any]:
    world = _world()
    return {} if world is None else dict(world.pg_names)


def _destroying(name: str, group: Any) -> Change:
    distributed: Any = loaded("torch.distributed")
    is_default = group is getattr(_world(), "default_pg", None)
    own = f"torch.distributed.destroy_process_group(group) with group {name}, which new_group() returned"
    # Not held for longer than it is destroyed: the end of a group waits for its threads, and whoever lets go of it last
    # may wait for ever.  That is to be the thread with a limit, not the one that judges.
    living = weakref.ref(group)

    def destroy() -> None:
        left = living()
        if left is not None:
            distributed.destroy_process_group(left)

    return Change(
        "torch.distributed.destroy_process_group()" if is_default else own,
        "all process groups are destroyed" if is_default else f"process group {name} is destroyed",
        lambda: _within(DESTROY_LIMIT, destroy),
        is_code=is_default,
    )


def _within(limit: float, function: Callable[[], object]) -> None:
    """Run a function in a thread of its own, so that one that waits for a peer that is gone does not wait for ever.

    Raises:
        TimeoutError: it did not end in time, and goes on.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            failures.append(error)

    thread = threading.Thread(target=run, name="lowtide-remedy", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise TimeoutError(f"still running after {limit:.0f} s")
    if failures:
        raise failures[0]
