"""Agents in the Python processes that this one starts: how they get there, and how they are asked.

A folder with a `sitecustomize` comes in front of `PYTHONPATH`, as OpenTelemetry's launcher does it, so an agent starts
with every Python that is started with this environment: by `subprocess`, by `multiprocessing`'s spawn and forkserver,
by Ray. A fork of this process starts its own by `os.register_at_fork`.

What is asked and answered are bytes; `lowtide.leakcheck.processes` says what they mean. Nothing is executed that comes
over a socket, and sockets are answered to this user's processes only.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lowtide.probes.host.process_files import MARK, began_at, environment, stat
from lowtide.probes.originals import contents, os, tempfile, temporary_folder, time, weakref

BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
"""The folder in front of `PYTHONPATH`; it imports nothing but what Python starts with."""

_ROOT = Path(__file__).absolute().parents[3]
"""The folder that has the package `lowtide`; not resolved, since its rooms are links in a checkout."""

ANSWER_S = 5.0
"""Seconds after which a process that has not taken a question is called unresponsive."""

FOLDER_PREFIX = "lowtide-agents-"
"""The first part of the name of a folder of sockets; the number of the process whose it is follows."""

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

    Attributes:
        folder: that of the sockets, open to this user alone; None before `start` and after `stop`.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._before: dict[str, str | None] = {}
        self._is_registered = False
        self._began: dict[int, float] = {}
        self._listed = 0

    def start(self) -> None:
        """Put an agent into each Python process that starts from here on; legal twice."""
        if self.folder is not None:
            return
        # A short path: that of a Unix socket has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=_short_temporary_folder()))
        names = _agent()
        path = os.environ.get("PYTHONPATH")
        self._set("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), *([path] if path else [])]))
        self._set(names.SOCKETS, str(self.folder))
        self._set(names.ROOT, str(_ROOT))
        if not self._is_registered:
            self._is_registered = True
            # Nobody can take it back: it does nothing once nobody has this object any more.
            start_in_fork = weakref.WeakMethod(self._start_in_fork)
            os.register_at_fork(after_in_child=lambda: _call(start_in_fork()))

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
        shutil.rmtree(folder, ignore_errors=True)

    def has_agent(self, pid: int) -> bool:
        """Whether a process has an agent; it may not answer all the same."""
        return self.folder is not None and f"{pid}.sock" in os.listdir(self.folder) and stat(pid) is not None

    def began(self) -> dict[int, float]:
        """Each process that has had an agent, ended ones too, with the time at which the agent began to listen.

        In seconds since the epoch; next to free where no agent has begun since the last call.
        """
        if self.folder is None:
            return {}
        with contextlib.suppress(OSError):
            changed = os.stat(self.folder).st_mtime_ns
            if changed != self._listed:
                found = {}
                for file in os.listdir(self.folder):
                    name, end, _ = file.partition(".sock")
                    if end and name.isdecimal():
                        found[int(name)] = os.lstat(f"{self.folder}/{file}").st_ctime
                self._began, self._listed = found, changed
        return self._began

    def ask(self, pid: int, question: bytes, limit: float = 60.0, patience: float | None = None) -> bytes:
        """What a process answers.

        Args:
            pid: the process.
            question: what `lowtide.leakcheck.processes.answers` understands.
            limit: seconds for the answer, once the process has taken the question.
            patience: seconds until it has; None for `ANSWER_S`.

        Raises:
            NoAgentError: the process has none.
            AgentError: it did not answer in time, or failed; the message says which.
        """
        if self.folder is None or stat(pid) is None:
            raise NoAgentError(f"pid {pid} has ended")
        allowed = patience = ANSWER_S if patience is None else patience
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(patience)
                connection.connect(str(self.folder / f"{pid}.sock"))
                connection.sendall(_agent().MAGIC + len(question).to_bytes(8, "big") + question)
                answer = _message(connection, pid, patience)
                if answer == _agent().ACCEPTED:
                    allowed = limit
                    answer = _message(connection, pid, limit)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoAgentError(self._why_none(pid)) from error
        except TimeoutError as error:
            raise AgentError(f"pid {pid} did not answer within {allowed:g} s{_state(pid)}") from error
        except OSError as error:
            raise AgentError(f"the agent of pid {pid} broke off: {error.strerror or error}") from error
        if answer[:1] != b"=":
            raise AgentError(f"the agent of pid {pid} failed: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def environment(self) -> dict[str, str]:
        """The variables that put agents into processes which do not inherit the environment, as Ray's `runtime_env`."""
        return agent_environment() if self.folder is not None else {}

    def elsewhere(self, family: Collection[int]) -> list[int]:
        """The processes that have an agent of this object's and are not of some family; sorted.

        Args:
            family: the processes that are known.
        """
        if self.folder is None:
            return []
        with contextlib.suppress(OSError):
            names = (file.partition(".sock") for file in os.listdir(self.folder))
            pids = [int(name) for name, end, _ in names if end and name.isdecimal()]
            # A later process may have the number of one that has ended.
            return sorted(pid for pid in pids if pid not in family and pid != os.getpid() and self._is_ours(pid))
        return []

    def _is_ours(self, pid: int) -> bool:
        process, variables = stat(pid), environment(pid) or {}
        return process is not None and process.state != "Z" and variables.get(_agent().SOCKETS) == str(self.folder)

    def _why_none(self, pid: int) -> str:
        with contextlib.suppress(OSError):
            if self.folder is not None:
                error = contents(f"{self.folder}/{pid}.error").decode(errors="replace")
                return f"the agent of pid {pid} could not start: {error}"
        return f"pid {pid} has no agent: no Python, or started without this process's environment"

    def _set(self, name: str, value: str) -> None:
        self._before.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def _start_in_fork(self) -> None:
        if self.folder is not None:
            _agent().start()


def agent_environment() -> dict[str, str]:
    """The variables that put agents into processes which do not inherit the environment; empty where none are put.

    As in `ray.init(runtime_env={"env_vars": lowtide.agent_environment()})` for a cluster that was there before.
    """
    names = (_agent().SOCKETS, _agent().ROOT, "PYTHONPATH", MARK)
    return {name: os.environ[name] for name in names if name in os.environ} if names[0] in os.environ else {}


def _agent() -> Any:
    """The bootstrap's agent, as a module of this process."""
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


def _short_temporary_folder() -> str | None:
    folder = temporary_folder()
    return folder if len(os.fsencode(folder)) < 60 else "/tmp"


def processes_with_agents() -> set[int]:
    """The living processes of this host that put agents into those they start: themselves, not what they started."""
    with contextlib.suppress(OSError):
        place = _short_temporary_folder() or temporary_folder()
        folders = [name for name in os.listdir(place) if name.startswith(FOLDER_PREFIX)]
        owners = {name: name.removeprefix(FOLDER_PREFIX).partition("-")[0] for name in folders}
        return {int(pid) for name, pid in owners.items() if pid.isdecimal() and _has_made(int(pid), f"{place}/{name}")}
    return set()


def _has_made(pid: int, folder: str) -> bool:
    """Whether a living process made a folder, and has not just the number of one that was killed and left it."""
    process = stat(pid)
    try:
        return process is not None and began_at(process) <= os.lstat(folder).st_mtime + _CLOCK_S
    except OSError:
        return False


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


def _state(pid: int) -> str:
    process = stat(pid)
    states = {"T": ": it is stopped", "t": ": a debugger has stopped it", "D": ": it waits in the kernel"}
    return "" if process is None else states.get(process.state, ": it is in a call that does not let others run")


def _call(method: Any) -> None:
    if method is not None:
        method()
