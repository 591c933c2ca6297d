"""Agents in the Python processes that this one starts: how they get there, and how they are asked.

A folder with a `sitecustomize` comes in front of `PYTHONPATH`, as OpenTelemetry's launcher does it, so an agent starts
with every Python that is started with this environment: by `subprocess`, by `multiprocessing`'s spawn and forkserver,
by Ray. A fork has its parent's. A process that is not asked has no thread for it: it is woken by a signal.

What is asked and answered are bytes; `lowtide.leakcheck.processes` says what they mean. Nothing is executed that comes
over a socket, and sockets are answered to this user's processes only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import shutil
import socket
import stat as modes
import sys
from collections.abc import Collection, Iterator
from itertools import repeat, starmap
from pathlib import Path
from typing import Any

from lowtide.probes.host.process_files import (
    AGENTS_SIGNAL,
    MARK,
    began_at,
    catches,
    environment,
    has_ended,
    is_running,
    parents_of,
    resting_threads,
    stat,
    waits_for_a_signal,
)
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.originals import contents, os, signal, tempfile, temporary_folder, time

BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
"""The folder in front of `PYTHONPATH`; it imports nothing but what Python starts with."""

ROOT = Path(__file__).absolute().parents[3]
"""The folder that has the package `lowtide`; not resolved, since its rooms are links in a checkout."""

ANSWER_S = 5.0
"""Seconds after which a process that has not taken a question is called unresponsive."""

FOLDER_PREFIX = "lowtide-agents-"
"""The first part of the name of a folder of sockets; the number of the process whose it is follows."""

_FORK = ".fork"
"""What follows the number of a fork of this process in the name of a folder that says that there was one."""

_RUN = "run"
"""The file that says on which host, and among which processes, a folder's number is that of a process."""

_NOWHERE = b"/dev/null/%d"
"""A path that nobody can make."""

_TICK_NS = 50_000_000
"""Nanoseconds within which two changes of a folder may have the same time."""

_AWAKENS_S = 0.002
"""Seconds between two looks at whether a process has woken up."""

_AGAIN_S = 0.1
"""Seconds after which a process is woken again, and twice as many each time."""

_GENTLY = 3
"""How often a process that computes is woken by way of a thread that rests, before its main thread is interrupted."""

_RESTS_S = 0.1
"""Seconds for which a process without such a thread may compute before it is interrupted."""

_BLOCKS_S = 0.5
"""Seconds for which a process may block the signal, as it does while its agent's thread starts."""

_ENDS_S = 0.5
"""Seconds within which a process that has closed its sockets has ended, if it does."""

_CLOCK_S = 1.0
"""Seconds by which the system's clock may have been set since a process began."""

_HEADER = 16
_MOST_BYTES = 256 << 20
"""Bytes of an answer, at most."""


class AgentError(RuntimeError):
    """A process did not answer; the message says why."""


class NoAgentError(AgentError):
    """A process has no agent: no Python, started without this environment, or before the agents."""


class Agents:
    """Puts agents into processes that start from here on, and asks them.

    Args:
        first: what each of them that has torch is asked as soon as it has, whose answer nobody gets; empty: nothing.

    Attributes:
        folder: that of the sockets, open to this user alone; None before `start` and after `stop`.
    """

    def __init__(self, first: bytes = b"") -> None:
        self._first = first
        self.folder: Path | None = None
        self._maker = 0
        self._before: dict[str, str | None] = {}
        self._began: dict[int, float] = {}
        self._images: set[bytes] = set()
        self._listed = 0
        # Those of them that have ended, or whose number another program has.
        self._gone: set[int] = set()

    def start(self) -> None:
        """Put an agent into each Python process that starts from here on; legal twice.

        Forks of this process answer if the main thread calls this, for which alone Python sets handlers of signals.
        """
        if self.folder is not None:
            return
        remove_folders_of_the_dead()
        # A short path: that of a Unix socket has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=_short_temporary_folder()))
        self._maker = os.getpid()
        (self.folder / _RUN).write_text(_where_numbers_hold(), encoding="utf-8")
        names = _agent()
        if self._first:
            (self.folder / names.FIRST).write_bytes(self._first)
        path = os.environ.get("PYTHONPATH")
        self._set("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), *([path] if path else [])]))
        self._set(names.SOCKETS, str(self.folder))
        self._set(names.ROOT, str(ROOT))
        self._answer_in_forks(self.folder)

    def _answer_in_forks(self, folder: Path) -> None:
        own = _agent().installed()
        if own is not None:
            own.folders.append(str(folder))
            _agent().stay_in_forks()
            _note_forks()
            _FORKS.append(_note_of_fork(folder))

    def _leave_forks(self, folder: Path) -> None:
        own = _agent().found()
        if own is not None and str(folder) in own.folders:
            own.folders.remove(str(folder))
            _FORKS.remove(_note_of_fork(folder))
            if not own.folders:
                with contextlib.suppress(ValueError):  # not the main thread; it does nothing any more all the same
                    signal.signal(AGENTS_SIGNAL, own.before)

    @classmethod
    def of_process(cls, pid: int) -> Agents | None:
        """Return what asks the agents that another run has put into a process and others, and puts none in itself.

        None where the process has none.
        """
        told = (environment(pid) or {}).get(_agent().SOCKETS, "")
        agents = cls()
        for folder in [told, *_folders()]:
            agents.folder = Path(folder) if folder and os.path.isdir(folder) else None
            agents.began()
            if agents.has_agent(pid):
                return agents
        return None

    def stop(self) -> None:
        """Give no more agents to new processes, and forget those that there are; legal twice."""
        folder, self.folder = self.folder, None
        if folder is None:
            return
        for name, before in self._before.items():
            # Whoever has changed it since has changed it for good.
            if name == "PYTHONPATH":
                _take_from_path(str(BOOTSTRAP))
            elif before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        if self._before.get("PYTHONPATH") is None and os.environ.get("PYTHONPATH") == "":
            del os.environ["PYTHONPATH"]
        self._before.clear()
        self._leave_forks(folder)
        if os.getpid() == self._maker:
            shutil.rmtree(folder, ignore_errors=True)
            # Once more: a fork of just now may have left its note meanwhile.
            shutil.rmtree(folder, ignore_errors=True)

    def has_agent(self, pid: int) -> bool:
        """Return whether a process has an agent, its own or that of the process that forked it; it may not answer."""
        if self.folder is None or has_ended(pid):
            return False
        image = _image(pid)
        try:
            # A program that has been executed since has no agent.
            return image in (b"", contents(f"{self.folder}/{pid}{_agent().MARKER}"))
        except OSError:
            self.began()
            return image in self._images or (_agent().found() is not None and image == _image(os.getpid()) != b"")

    def began(self) -> dict[int, float]:
        """Return each process that has had an agent, ended ones too, with the time at which the agent began to listen.

        In seconds since the epoch; next to free where no agent has begun since the last call.
        """
        if self.folder is None:
            return {}
        with contextlib.suppress(OSError):
            changed = os.stat(self.folder).st_mtime_ns
            if changed != self._listed:
                marks = list(self._marks())
                self._gone.clear()
                self._began = {pid: os.lstat(path).st_ctime for pid, path in marks}
                self._images = {contents(path) for _, path in marks if not path.endswith(_FORK)} - {b""}
                # Another may begin within the same tick of the clock.
                self._listed = changed if time.time_ns() - changed > _TICK_NS else 0
        return self._began

    def _marks(self) -> Iterator[tuple[int, str]]:
        """Yield the processes that say in the folder that they have an agent, forks of this one too, and where."""
        for file in () if self.folder is None else os.listdir(self.folder):
            number, dot, kind = file.partition(".")
            if dot + kind in (_agent().MARKER, _FORK) and number.isdecimal():
                yield int(number), f"{self.folder}/{file}"

    def ask(self, pid: int, question: bytes, limit: float = 60.0, patience: float | None = None) -> bytes:
        """Return what a process answers.

        Args:
            pid: the process.
            question: what `lowtide.leakcheck.processes.answers` understands.
            limit: seconds for the answer, once the process has taken the question.
            patience: seconds until it has; None for `ANSWER_S`.

        Raises:
            NoAgentError: the process has none.
            AgentError: it did not answer in time, or failed; the message says which.
        """
        if self.folder is None or has_ended(pid):
            raise NoAgentError(f"pid {pid} has ended")
        patience = ANSWER_S if patience is None else patience
        try:
            answer = self._asked(pid, question, limit, patience)
            if answer is None:
                answer = self._asked(pid, question, limit, patience)
        except OSError as error:
            _raise_if_ended(pid)
            raise AgentError(f"the agent of pid {pid} broke off: {error.strerror or error}") from error
        if answer is None:
            _raise_if_ended(pid)
            raise AgentError(f"the agent of pid {pid} broke off: it took no question")
        if answer[:1] != b"=":
            raise AgentError(f"the agent of pid {pid} failed: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def _asked(self, pid: int, question: bytes, limit: float, patience: float) -> bytes | None:
        """Return the answer; None where its thread, which waits only for a moment, ended as it was asked."""
        allowed, stuck = patience, "its main thread is in a call that handles no signal"
        try:
            with self._connected(pid, patience) as connection:
                stuck = "it is in a call that does not let others run"
                try:
                    connection.sendall(_agent().MAGIC + len(question).to_bytes(8, "big") + question)
                    answer = _message(connection, pid, patience)
                except ConnectionError:
                    return None
                if answer == _agent().ACCEPTED:
                    allowed, stuck = limit, ""
                    answer = _message(connection, pid, limit)
                return answer
        except TimeoutError as error:
            raise AgentError(f"pid {pid} did not answer within {allowed:g} s{_state(pid, stuck)}") from error

    def _connected(self, pid: int, patience: float) -> socket.socket:
        """Connect to a process, and wake it if it does not listen."""
        assert self.folder is not None
        path, until = f"{self.folder}/{pid}{_agent().SOCKET}", time.monotonic() + patience
        pause = _AGAIN_S
        again, woken = 0.0, 0
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(patience)
        try:
            while True:
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    connection.connect(path)
                    return connection
                if time.monotonic() > until:
                    raise TimeoutError
                if not again or (time.monotonic() > again and self._is_asleep(pid)):
                    self._wake(pid, gently=woken < _GENTLY)
                    again, pause, woken = time.monotonic() + pause, 2 * pause, woken + 1
                self._raise_if_broken(pid)
                time.sleep(_AWAKENS_S)
        except BaseException:
            connection.close()
            raise

    def _wake(self, pid: int, *, gently: bool) -> None:
        assert self.folder is not None
        until = time.monotonic() + _BLOCKS_S
        while not (has_handler := catches(pid, AGENTS_SIGNAL)):
            # A fork may have executed another program since somebody last looked.
            self._raise_without_agent(pid)
            if time.monotonic() > until:
                does = "blocks" if has_handler is None else "has taken back the handler of"
                raise AgentError(f"pid {pid} {does} signal {AGENTS_SIGNAL}, by which it is asked")
            time.sleep(_AWAKENS_S)
        self._raise_without_agent(pid)
        if waits_for_a_signal(pid):
            raise AgentError(f"pid {pid} waits for any signal, and would take the one by which it is asked for that")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.folder}/{pid}{_agent().ERROR}")
        os.close(os.open(f"{self.folder}/{pid}{_agent().ASK}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is noticed next
            _send_signal(pid, gently=gently)

    def _raise_without_agent(self, pid: int) -> None:
        if not self.has_agent(pid):
            raise NoAgentError(f"pid {pid} has no agent: no Python, or started without this process's environment")

    def _is_asleep(self, pid: int) -> bool:
        """Return whether a process has not noticed the signal: Python forgets those that come before a fork is done."""
        assert self.folder is not None
        return f"{pid}{_agent().ASK}" in os.listdir(self.folder)

    def _raise_if_broken(self, pid: int) -> None:
        assert self.folder is not None
        if has_ended(pid):
            raise NoAgentError(f"pid {pid} has ended")
        with contextlib.suppress(FileNotFoundError):
            error = contents(f"{self.folder}/{pid}{_agent().ERROR}").decode(errors="replace")
            raise AgentError(f"the agent of pid {pid} could not start: {error}")

    def environment(self) -> dict[str, str]:
        """Return the variables that put agents into processes without the environment, as Ray's `runtime_env`."""
        return agent_environment() if self.folder is not None else {}

    def elsewhere(self, family: Collection[int]) -> list[int]:
        """Return the processes that have an agent of this object's and are not of some family; sorted.

        Args:
            family: the processes that are known.
        """
        if self.folder is None:
            return []
        began = self.began().keys()
        # A later process may have the number of one that has ended; if it is ours, the folder has changed since.
        asked = [pid for pid in began - self._gone if pid not in family and pid != os.getpid()]
        ours = {pid for pid in asked if self._is_ours(pid)}
        self._gone.update(pid for pid in asked if pid not in ours)
        return sorted(ours)

    def _is_ours(self, pid: int) -> bool:
        process, variables = stat(pid), environment(pid) or {}
        return process is not None and process.state != "Z" and variables.get(_agent().SOCKETS) == str(self.folder)

    def _set(self, name: str, value: str) -> None:
        self._before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def agent_environment() -> dict[str, str]:
    """Return the variables that put agents into processes without the environment; empty where none are put.

    As in `ray.init(runtime_env={"env_vars": lowtide.agent_environment()})` for a cluster that was there before.
    """
    names = (_agent().SOCKETS, _agent().ROOT, "PYTHONPATH", MARK)
    return {name: os.environ[name] for name in names if name in os.environ} if names[0] in os.environ else {}


def _agent() -> Any:
    """Return the bootstrap's agent, as a module of this process."""
    name = "lowtide_agent"
    known = sys.modules.get(name)
    if known is not None:
        return known
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, BOOTSTRAP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_FORKS = [_NOWHERE]
"""What the number of a fork is put into for the name of its note; the last one counts."""


def _send_signal(pid: int, *, gently: bool) -> None:
    """Send a process the signal by which it is asked.

    Not every computation outlives a handler that interrupts it: vLLM's attention for CPUs keeps a configuration of the
    processor's matrix unit, which is gone after one, and ends with SIGILL at its next instruction. So while the main
    thread computes, another one takes the signal, one that waits in the kernel: Python runs the handler in the main
    thread all the same, between two of its own instructions.

    Args:
        pid: the process.
        gently: whether to spare a main thread that computes.

    Raises:
        ProcessLookupError: it has ended.
    """
    until = time.monotonic() + _RESTS_S
    while gently and is_running(pid):
        for thread in resting_threads(pid, AGENTS_SIGNAL):
            if _SEND_TO_THREAD is not None and _SEND_TO_THREAD(pid, thread, AGENTS_SIGNAL) == 0:
                return
        if time.monotonic() > until:
            break
        time.sleep(_AWAKENS_S)
    os.kill(pid, AGENTS_SIGNAL)


_SEND_TO_THREAD: Any = getattr(ctypes.CDLL(None), "tgkill", None)
"""Of glibc from 2.30 on."""


def _note_of_fork(folder: Path) -> bytes:
    return os.fsencode(f"{folder}/").replace(b"%", b"%%") + b"%d" + os.fsencode(_FORK)


_HOOKS: list[object] = []
"""The one hook at forks; empty before the first start."""


def _note_forks() -> None:
    """Let each fork of this process leave a note, so that it is known though it ends before anybody looks.

    Nobody can take a hook at forks back, and what the handler of a signal raises is lost in one.  So no Python code
    runs here: an iterator that C code goes on with calls `mkdir` of the C library, which raises nothing either.
    """
    if _HOOKS:
        return
    numbers = starmap(os.getpid, repeat(()))
    paths = map(operator.mod, map(_FORKS.__getitem__, repeat(-1)), numbers)
    notes = map(ctypes.PyDLL(None).mkdir, paths, repeat(0o700))
    _HOOKS.append(notes)
    os.register_at_fork(after_in_child=functools.partial(next, notes))


def _image(pid: int) -> bytes:
    """Return where a program's memory lies, which its forks have in common; empty where that may not be read."""
    try:
        image: bytes = _agent().image_of(contents(f"/proc/{pid}/stat"))
    except OSError:  # it ended
        return b""
    return b"" if image == b"0 0 0" else image


def _short_temporary_folder() -> str | None:
    folder = temporary_folder()
    return folder if len(os.fsencode(folder)) < 60 else "/tmp"


def processes_with_agents() -> set[int]:
    """Return the living processes of this user that put agents into those they start; not what they started."""
    return {pid for folder in _folders() if _has_made(pid := _owner(folder), folder)}


def _folders() -> list[str]:
    """Return those of this user's runs; another user may call a folder of his what he likes."""
    found = []
    with contextlib.suppress(OSError):
        place = _short_temporary_folder() or temporary_folder()
        for folder in (f"{place}/{name}" for name in os.listdir(place) if name.startswith(FOLDER_PREFIX)):
            facts = os.lstat(folder)
            if modes.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and _owner(folder):
                found.append(folder)
    return found


def _owner(folder: str) -> int:
    number = folder.rpartition("/")[2].removeprefix(FOLDER_PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _raise_if_ended(pid: int) -> None:
    """Wait a moment for the end of a process that has broken off: the kernel closes its sockets first.

    Raises:
        NoAgentError: it has ended.
    """
    until = time.monotonic() + _ENDS_S
    while time.monotonic() < until:
        if has_ended(pid):
            raise NoAgentError(f"pid {pid} has ended")
        time.sleep(_AWAKENS_S)


def _has_made(pid: int, folder: str) -> bool:
    """Return whether a living process made a folder, and has not just the number of one that was killed and left it."""
    process = stat(pid)
    try:
        return process is not None and began_at(process) <= os.lstat(folder).st_mtime + _CLOCK_S
    except OSError:
        return False


def remove_folders_of_the_dead() -> None:
    """Remove those that runs of this user have left which were killed."""
    here = _where_numbers_hold()
    for folder in _folders() if here else ():
        with contextlib.suppress(OSError):
            if contents(f"{folder}/{_RUN}").decode() == here and not _has_made(_owner(folder), folder):
                shutil.rmtree(folder, ignore_errors=True)


def _where_numbers_hold() -> str:
    """Return this host since its start, and the processes that are seen here: another container has the same numbers.

    Empty where that is not known.
    """
    try:
        host = contents("/proc/sys/kernel/random/boot_id").decode().strip()
        return f"{host} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _take_from_path(folder: str) -> None:
    path = os.environ.get("PYTHONPATH")
    if path is not None:
        entries = path.split(os.pathsep)
        if folder in entries:
            # Once: whoever watches this process may have put it there, too.
            entries.remove(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)


def _message(connection: socket.socket, pid: int, limit: float) -> bytes:
    until = time.monotonic() + limit
    header = _read(connection, _HEADER, until)
    length = int.from_bytes(header[8:], "big")
    if header[:8] != _agent().MAGIC or not 0 < length <= _MOST_BYTES:
        raise AgentError(f"the agent of pid {pid} is of another version of lowtide")
    return _read(connection, length, until)


def _read(connection: socket.socket, length: int, until: float) -> bytes:
    parts: list[bytes] = []
    while length:
        connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionResetError("it ended in the middle of an answer")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _state(pid: int, stuck: str) -> str:
    """Why a process does not answer, as the kernel says, or as is known where that says nothing."""
    process = stat(pid)
    states = {"T": "it is stopped", "t": "a debugger has stopped it", "D": "it waits in the kernel"}
    why = "" if process is None else states.get(process.state, stuck)
    return f": {why}" if why else ""


_IPC_OF_HOST, _PIDS_OF_HOST = 0xEFFFFFFF, 0xEFFFFFFC
"""The numbers of the namespaces in which a system starts: PROC_IPC_INIT_INO and PROC_PID_INIT_INO of Linux."""


class Neighbours:
    """Notices other programs that lowtide watches at the same time, and containers whose processes are not seen here.

    Of other programs of this user nothing is known: what they leave while they run beside a watched one is taken for
    that one's.

    Args:
        tree: whose processes are none.
    """

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._unseen = _unseen_containers()
        self.mark()

    def mark(self) -> None:
        """Forget those that have been there until now."""
        self._reason = self._unseen

    def look(self) -> str:
        """Why others may have left a file since `mark`; empty where nobody else is known.

        Called now and then: those that have ended by the next call are not noticed.
        """
        if not self._reason:
            others = processes_with_agents() - {os.getpid()} - set(self._tree.descendants())
            # Whoever runs this program, as a suite that is watched itself runs its tests, waits for it meanwhile.
            others -= set(parents_of(os.getpid())) if others else set()
            if others:
                watched = f"lowtide watches another program on this host (pid {min(others)})"
                self._reason = f"{watched}, which may have made it"
        return self._reason


def _unseen_containers() -> str:
    """Say whether /dev/shm is the host's while only some of its processes are seen, as with `--ipc=host`."""
    try:
        ipc, pids = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("ipc", "pid"))
    except OSError:
        return ""
    if ipc == _IPC_OF_HOST and pids != _PIDS_OF_HOST:
        return "this container shares /dev/shm with the host (--ipc=host), so another one may have made it"
    return ""
