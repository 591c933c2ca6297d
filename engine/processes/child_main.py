"""The main program of a process that the engine starts: it runs one function, and ends when its parent ends."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes.channel import Connection, watch_process

PARENT_ENDED = 3
"""Exit code of a process whose parent ended first."""


def main(arguments: Sequence[str]) -> None:
    """Run a function until it returns.

    Args:
        arguments: the socket's descriptor, the parent's process identifier, the function as `module:function`, the
            name of this process, and further arguments of the function.
    """
    descriptor, parent, entry, name, *others = arguments
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
        run(connection, *others)
    finally:
        connection.close()


def on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Say what Ctrl-C does in this process, also one that has come since its start; until then it is blocked.

    Args:
        handler: as `signal.signal` takes it.
    """
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with(parent: int) -> None:
    """End this process at once when its parent has ended, whatever its main thread does meanwhile.

    Args:
        parent: process identifier of the parent.

    Raises:
        EngineDeadError: the parent has ended already.
    """
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
