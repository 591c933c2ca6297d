"""When processes have ended, to the hundredth of a second, however seldom somebody looks at them."""

from __future__ import annotations

import select

from lowtide.probes.originals import os, threading, time, weakref


class ProcessEnds:
    """Notes when processes end, children of this one or not, by a thread that waits for them (`pidfd_open`)."""

    def __init__(self) -> None:
        self._ended: dict[int, float] = {}
        self._pids: dict[int, int] = {}
        self._waiting: select.epoll | None = None
        self._thread: threading.Thread | None = None
        # Closes the end of the pipe by which the thread sees that nobody needs it any more.
        self._let_go: weakref.finalize[[int], ProcessEnds] | None = None

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
            self._waiting = self._begin()
        self._waiting.register(handle, select.EPOLLIN)

    def of(self, pid: int) -> float | None:
        """Return when a process has ended (`time.monotonic`, seconds); None where it is there, or was not followed."""
        return self._ended.get(pid)

    def close(self) -> None:
        """Wait for no more; what was noted stays. Legal twice."""
        if self._let_go is not None and self._thread is not None:
            self._let_go()
            self._thread.join()

    def _begin(self) -> select.epoll:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        waiting = select.epoll()
        waiting.register(reading, select.EPOLLHUP)
        self._let_go = weakref.finalize(self, os.close, writing)
        # It must not keep this, which nobody may close.
        of_thread = waiting, reading, self._pids, self._ended
        self._thread = threading.Thread(target=_wait, args=of_thread, name="lowtide-ends", daemon=True)
        self._thread.start()
        return waiting


def _wait(waiting: select.epoll, until: int, pids: dict[int, int], ended: dict[int, float]) -> None:
    """Note the ends of processes, by their handles, until the other end of a pipe is closed."""
    is_over = False
    while not is_over:
        for handle, _ in waiting.poll():
            if handle == until:
                is_over = True
            else:
                ended[pids.pop(handle)] = time.monotonic()
                os.close(handle)
    waiting.close()
    for handle in (until, *pids):
        os.close(handle)
    pids.clear()
