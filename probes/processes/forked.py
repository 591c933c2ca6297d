"""Work on the heap of a process that goes on, done in a fork of it.

Who goes through a heap has a reference to each object in it meanwhile, and the process's threads see that: a buffer
that nobody else should hold cannot be resized. The fork has the heap as it was, and no other thread.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import select
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import gc, loaded, os, replace, signal, sys, time, weakref

LIMIT_S = 55.0
"""Seconds for the work; whoever asks an agent waits a little longer."""

_NICE = 5

_PR_SET_PDEATHSIG = 1
"""Of the kernel's include/uapi/linux/prctl.h."""

# Before there is a fork, in which nothing is to be loaded.
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)

_LENGTH = 8
"""Bytes of an answer's length, which comes first."""


class ForkError(RuntimeError):
    """Work in a fork that has come to no end; the message says why."""


def in_a_fork(work: Callable[[], bytes], limit: float = LIMIT_S) -> bytes:
    """Return what work gives that is done in a fork of this process.

    Nothing of the program's runs there, garbage is not collected, and what it changes is not seen here.

    Args:
        work: what is done: it may read the heap, and must use no card.
        limit: seconds for it.

    Raises:
        ForkError: it failed, or took too long, or there could be no fork.
    """
    reading, writing = os.pipe()
    process = os.getpid()
    frames, threads = sys._current_frames(), dict(getattr(loaded("threading"), "_active", ()))
    marks = _marks_of_locals()
    try:
        child = os.fork()
    except (OSError, RuntimeError) as error:
        os.close(writing)
        os.close(reading)
        raise ForkError(f"the process cannot be forked: {error}") from error
    if not child:
        _end_with(process)
        _work(work, writing, frames, threads)
    # The frames of other threads, and all that is in them.
    del frames, threads, marks
    os.close(writing)
    try:
        said = _said(reading, child, limit)
    finally:
        os.close(reading)
        _reap(child)
    if said[:1] != b"=":
        raise ForkError(said[1:].decode(errors="replace") or "a fork of the process ended without an answer")
    return said[1:]


def _marks_of_locals() -> list[Any]:
    """Return what marks each thread in each `threading.local`.

    Where that goes, as with all other threads in a fork, what the thread has there goes, too.
    """
    tables = [table for each in all_instances(_thread._local) for table in gc.get_referents(each)]
    references = [key for table in tables if type(table) is dict for key in list(table)]
    return [reference() for reference in references if type(reference) is weakref.ref]


def _said(reading: int, child: int, limit: float) -> bytes:
    until = time.monotonic() + limit
    said = b""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    # Not until the pipe is closed: a fork that the program makes meanwhile has its other end, too.
    while len(said) < _LENGTH or len(said) < _LENGTH + int.from_bytes(said[:_LENGTH], "little"):
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            os.kill(child, signal.SIGKILL)
            raise ForkError(f"a fork of the process did not answer within {limit:g} s, and was ended")
        part = os.read(reading, 1 << 20)
        if not part:
            return b""
        said += part
    return said[_LENGTH:]


def _reap(child: int) -> None:
    with contextlib.suppress(OSError):  # the program lets nobody wait, or has done so itself
        os.waitpid(child, 0)


def _work(
    work: Callable[[], bytes], writing: int, frames: Mapping[int, FrameType], threads: Mapping[int, Any]
) -> NoReturn:
    """Do the work in the fork, and end."""
    try:
        try:
            _go_first()
            pass_for_the_process(frames, threads)
            said = b"=" + work()
        except BaseException as error:  # noqa: BLE001 - there is nobody else to say it to
            said = f"!{type(error).__name__}: {error} ({_place_of(error)})".encode(errors="replace")
        view = memoryview(len(said).to_bytes(_LENGTH, "little") + said)
        while view:
            view = view[os.write(writing, view) :]
    finally:
        os._exit(0)


def _end_with(process: int) -> None:
    """End once the process does, whatever ends it: nobody else knows of the fork, nor waits for what it says."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != process:
        os._exit(0)


def _place_of(error: BaseException) -> str:
    """Return where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"


def _go_first() -> None:
    """Be what the kernel ends first where memory is short, and not the process."""
    with contextlib.suppress(OSError):
        number = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(number, b"1000")
        os.close(number)


def pass_for_the_process(frames: Mapping[int, FrameType], threads: Mapping[int, Any]) -> None:
    """Let a fork see the threads that its parent has, and collect nothing: that would run what garbage does at its end.

    Args:
        frames: the innermost frame of each thread.
        threads: Python's object of each.
    """
    gc.disable()
    os.nice(_NICE)
    replace("gc.collect", lambda *_, **__: 0)
    replace("sys._current_frames", lambda: dict(frames))
    threading = loaded("threading")
    if threading is not None:
        threading._active.update(threads)
