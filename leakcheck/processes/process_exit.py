"""The end of a process that has said what it found: what the checked program has left would let Python wait for ever.

Python joins threads and multiprocessing's processes that are no daemons, however long they run.
"""

from __future__ import annotations

import atexit
from typing import Any, NoReturn

from lowtide.probes.originals import loaded, os, sys, threading, time

LINGER_S = 5.0
"""Seconds that what Python waits for may take to end, as the guardian of a gate's cell gives it."""

_KILL_S = 1.0
_EXIT_S = 15.0
"""Seconds after which the process ends, whatever the functions do that it calls at its exit."""


def end(code: int) -> NoReturn:
    """End this process as `end_soon` says.

    Python by itself ends by SIGINT, with another exit code, where a Ctrl-C has gone through a library in C.
    """
    end_soon(code)
    if code == 130:
        _end_at_once(code)
    sys.exit(code)


def end_soon(code: int) -> None:
    """End this process: in the ordinary way, or after `LINGER_S` without what is waited for, with an exit code."""
    for seconds, end in ((LINGER_S, _end_without), (_EXIT_S, os._exit)):
        timer = threading.Timer(seconds, end, [code])
        timer.daemon = True
        timer.start()


def awaited() -> list[str]:
    """Return the threads and processes that Python waits for when it ends, in words; not an executor's."""
    executors: Any = loaded("concurrent.futures.thread")
    ended = getattr(executors, "_threads_queues", ())
    own = (threading.main_thread().ident, threading.get_ident())
    threads = [
        each for each in threading.enumerate() if not each.daemon and each.ident not in own and each not in ended
    ]
    processes = [f"process {each.pid} ({each.name})" for each in _children()]
    return [*(f"thread {each.name!r}" for each in threads), *processes]


def _children() -> list[Any]:
    multiprocessing: Any = loaded("multiprocessing")
    return [] if multiprocessing is None else [each for each in multiprocessing.active_children() if not each.daemon]


def _end_without(code: int) -> None:
    left, children = awaited(), _children()
    if left:
        sys.stderr.write(f"lowtide: ended without waiting for what was left: {', '.join(left)}\n")
        sys.stderr.flush()
    for child in children:
        child.terminate()
    # Where they were all that was waited for, the process ends in the ordinary way now.
    time.sleep(_KILL_S)
    for child in children:
        child.kill()
    _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
