"""A process that the engine starts, from both of its ends: who starts it, and its main program; and Ctrl-C in both."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes.channel import Answer, Connection, restore_error, watch_process
from lowtide.engine.teardown import WhenDropped

END_S = 10.0
"""Seconds that a process may take to end by itself once its connection is closed, before it is killed."""

# Not `-m`: the child finds modules where its parent finds them, also those of a path that was set at run time.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "from lowtide.engine.processes.child import main; main(sys.argv[2:])"
)


class ChildProcess:
    """A Python process that runs one function with a connection to this process, and ends with this process.

    It ends when this process has ended in whatever way (`kill -9` too), when the connection is closed, and when its
    object is collected or this interpreter exits.

    Args:
        entry: the function as `module:function`; it is called with the child's `Connection`.
        name: title of the process and name of its main thread, such as `lowtide::EngineCore`.
        label: what messages call it; its identifier is added.
        env: variables of its environment besides this process's.

    Attributes:
        answer: the last that was heard from it.
    """

    def __init__(self, entry: str, name: str, label: str = "", env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.answer = Answer()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own = ("\n".join(sys.path), str(theirs.fileno()), str(os.getpid()), entry, name)
        with theirs:
            try:
                self._process = _start(own, theirs.fileno(), {**os.environ, **(env or {})})
            except BaseException:
                ours.close()
                raise
        self.label = f"{label or name} (pid {self.pid})"
        try:
            self.connection = Connection(ours, self.pid, name)
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

    def error(self) -> BaseException:
        """Return what its last order has failed with."""
        assert self.answer.error is not None
        return restore_error(self.answer.error, self.label)

    def end(self, timeout_s: float = END_S) -> None:
        """Close the connection and wait until the process is gone; it is killed if that takes longer than `timeout_s`.

        Calling it again does nothing.
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


PARENT_ENDED = 3
"""Exit code of a process whose parent ended first."""


def main(arguments: Sequence[str]) -> None:
    """Run a function until it returns; the arguments are those that `ChildProcess` gives, but for the first."""
    descriptor, parent, entry, name = arguments
    set_process_name(name)
    try:
        end_with(int(parent))
        connection = Connection(socket.socket(fileno=int(descriptor)), int(parent), "the engine's client")
    except EngineDeadError:
        os._exit(PARENT_ENDED)
    module, _, function = entry.partition(":")
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    # SIGINT is blocked until the function has said what it does here: one that comes earlier is not lost to it.
    try:
        run(connection)
    finally:
        connection.close()


def on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Say what Ctrl-C does in this process, also one that has come since its start; until then it is blocked."""
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with(parent: int) -> None:
    """End this process at once when its parent has ended, whatever its main thread does; errors as `Connection`."""
    pidfd = watch_process(parent, "the parent")
    if os.getppid() != parent:
        raise EngineDeadError(f"the parent (pid {parent}) has ended")

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll():
            pass
        parent_has_ended()

    threading.Thread(target=watch, name="lowtide-parent-watch", daemon=True).start()


def parent_has_ended() -> None:
    """End this process at once."""
    # Not `sys.exit`: nobody is left to whom a teardown would report, and the kernel takes all memory back.
    os._exit(PARENT_ENDED)


def set_process_name(name: str) -> None:
    """Name the process as tools show it: its title where `setproctitle` is installed, and its main thread."""
    threading.main_thread().name = name
    try:
        from setproctitle import setproctitle
    except ImportError:
        # The kernel's own name of the main thread, which `ps` and `top` show, needs no package.
        with open("/proc/self/comm", "w") as comm:  # noqa: PTH123 - no new line may be appended
            comm.write(_shortened(name))
    else:
        setproctitle(name)


def _shortened(name: str) -> str:
    """A name as the kernel keeps it (TASK_COMM_LEN), with what tells it from its peers: `lowtide::Wo_TP0`."""
    head, separator, tail = name.rpartition("_")
    return f"{head[: 15 - len(separator) - len(tail)]}{separator}{tail}"[:15]


SLICE_S = 0.2
"""Seconds of one wait: a signal that the kernel gave to another thread of the process does not break it off."""

_Result = TypeVar("_Result")


class HeldInterrupt:
    """Holds SIGINT back while it is entered, but for `waiting`; elsewhere than in the main thread it does nothing.

    A `KeyboardInterrupt` between sending an order and taking its answer in would leave neither side knowing what the
    other does.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._lets_through = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> HeldInterrupt:
        """Hold interrupts back from now on."""
        handler = signal.getsignal(signal.SIGINT)
        # One that is ignored, or handled below Python, raises nothing.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let them through again."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def waiting(self, wait: Callable[[float], _Result], deadline: float | None = None) -> _Result:
        """Call `wait` until it returns something; an interrupt breaks it off, also one that was held back before.

        Args:
            wait: waits until a time of `time.monotonic`; changes nothing, so that it can be called again.
            deadline: when to give up and return the nothing that `wait` returns; None is never.
        """
        self._lets_through = True
        try:
            if self._has_come:
                self._on_signal(signal.SIGINT, None)
            while True:
                end = time.monotonic() + SLICE_S
                end = end if deadline is None else min(end, deadline)
                result = wait(end)
                if result or end == deadline:
                    return result
        finally:
            self._lets_through = False

    def deliver(self) -> None:
        """Call the program's handler, which may raise, for an interrupt that no `waiting` has raised."""
        if self._has_come and self._handler is not None:
            self._has_come = False
            self._handler(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._has_come = not self._lets_through
        if self._lets_through and self._handler is not None:
            # Before the handler raises: it may do so on the way out of `waiting`.
            self._lets_through = False
            self._handler(number, frame)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread: a process that is started meanwhile has it blocked until it unblocks it itself.

    Else an interrupt would end a new process with a traceback of its imports.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
