"""Reads of several processes at the same time, of which one that does not return holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lowtide.probes.originals import threading, time

PATIENCE_S = 5.0
"""Seconds after which a process that the kernel keeps from being read is reported as such."""

_MOST_THREADS = 8

Answer = TypeVar("Answer")


def read_side_by_side(read: Callable[[int], Answer], pids: Iterable[int], patience: float) -> dict[int, Answer]:
    """What was read of each process within the time; one that is missing did not let itself be read.

    The kernel lets nobody read the memory maps of a process while it changes them, and a driver may keep it there for
    ever: then its thread stays, as a daemon, and the others' answers count.

    Args:
        read: reads one process by its identifier.
        pids: the processes.
        patience: seconds for all of them.
    """
    waiting = sorted(set(pids), reverse=True)
    found: dict[int, Answer] = {}
    deadline = time.monotonic() + patience

    def work() -> None:
        while waiting and time.monotonic() < deadline:
            try:
                pid = waiting.pop()
            except IndexError:  # another thread has taken the last
                return
            found[pid] = read(pid)

    threads = [
        threading.Thread(target=work, daemon=True, name=f"lowtide-reader-{number}")
        for number in range(min(len(waiting), _MOST_THREADS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)
