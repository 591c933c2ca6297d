"""When processes have ended, to the hundredth of a second, however seldom somebody looks at them."""

from __future__ import annotations

import select

from lowtide.probes.originals import os, threading, time

_LOOKS_S = 1.0
"""Seconds in which the thread sees that nobody needs it any more."""


class ProcessEnds:
    """Notes when processes end, children of this one or not, by a thread that waits for them (`pidfd_open`)."""

    def __init__(self) -> None:
        self._ended: dict[int, float] = {}
        self._pids: dict[int, int] = {}
        self._waiting: select.epoll | None = None

    def follow(self, pid: int) -> None:
        """Note when this process ends; at once where it is gone already."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended[pid] = time.monotonic()
            return
        except OSError:  # no more descriptors, or a kernel that refuses
            return
        self._pids[handle] = pid
        if self._waiting is None:
            self._waiting = select.epoll()
            threading.Thread(target=self._wait, args=(self._waiting,), name="lowtide-ends", daemon=True).start()
        self._waiting.register(handle, select.EPOLLIN)

    def of(self, pid: int) -> float | None:
        """Return when a process has ended (`time.monotonic`, seconds); None where it is there, or was not followed."""
        return self._ended.get(pid)

    def close(self) -> None:
        """Wait for no more; what was noted stays. Legal twice."""
        self._waiting = None

    def _wait(self, waiting: select.epoll) -> None:
        with waiting:
            while self._waiting is waiting:
                for handle, _ in waiting.poll(_LOOKS_S):
                    self._ended[self._pids.pop(handle)] = time.monotonic()
                    os.close(handle)
        while self._pids:
            os.close(self._pids.popitem()[0])
