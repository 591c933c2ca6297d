"""One process that the engine starts: from its start to the moment at which nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lowtide.engine.dropped import WhenDropped
from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes.channel import Connection
from lowtide.engine.processes.interrupts import HeldInterrupt, interrupts_blocked

END_S = 10.0
"""Seconds that a process may take to end by itself once its connection is closed, before it is killed."""

# Not `-m`: the child finds modules where its parent finds them, also those of a path that was set at run time.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "from lowtide.engine.processes.child_main import main; main(sys.argv[2:])"
)


class ChildProcess:
    """A Python process that runs one function with a connection to this process, and ends with this process.

    It ends when this process has ended in whatever way (`kill -9` too), when the connection is closed, and when its
    object is collected or this interpreter exits.

    Args:
        entry: the function as `module:function`; it is called with the child's `Connection`.
        name: title of the process and name of its main thread, such as `lowtide::EngineCore`.
        env: variables of its environment besides this process's.
        arguments: further strings for the function, after the connection.

    Raises:
        EngineDeadError: it ended before it could be watched.
        ChannelError: this kernel cannot watch a process.
        OSError: it cannot be started.
    """

    def __init__(self, entry: str, name: str, env: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()):
        self.name = name
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = "\n".join(sys.path)
        own = (paths, str(theirs.fileno()), str(os.getpid()), entry, name, *arguments)
        with theirs:
            try:
                self._process = _start(own, theirs.fileno(), {**os.environ, **(env or {})})
            except BaseException:
                ours.close()
                raise
        try:
            self.connection = Connection(ours, self._process.pid, name)
        except BaseException:
            ours.close()
            _end(self._process, None, os.getpid(), 0.0)
            raise
        # What nobody ends must end with its owner, and at the interpreter's exit.
        self._dropped = WhenDropped(self, _end, self._process, self.connection, os.getpid(), END_S, at_exit=True)

    @property
    def pid(self) -> int:
        """Its process identifier."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def end(self, timeout_s: float = END_S) -> None:
        """Close the connection and wait until the process is gone; it is killed if it does not end by itself.

        Calling it again does nothing.

        Args:
            timeout_s: seconds that it may take to end by itself.
        """
        if self._dropped.cancel():
            _end(self._process, self.connection, os.getpid(), timeout_s)

    def death(self) -> EngineDeadError:
        """The error for a process that is gone, with how it ended; the process is reaped, and killed if it lives."""
        self.end(timeout_s=1.0)
        return EngineDeadError(f"{self.name} (pid {self.pid}) has ended: {describe_exit(self._process.returncode)}")


def _start(arguments: Sequence[str], descriptor: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = None
    try:
        # Blocked in this thread alone; another one may receive it for this one.
        with HeldInterrupt() as held, interrupts_blocked():
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                env=env,
            )
        held.deliver()
    except BaseException:
        if process is not None:
            _end(process, None, os.getpid(), 0.0)
        raise
    return process


def describe_exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "nobody knows how"
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: Connection | None, owner: int, timeout_s: float) -> None:
    if connection is not None:
        connection.close()
    if os.getpid() != owner:
        # A fork of the owner has a copy of all this, and the process is not its own to end.
        return
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
