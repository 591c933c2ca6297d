"""Reads a snapshot in a process of its own, so that no file can hang or crash the one that asks for it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, SnapshotError, read_snapshot

_LEAST_SECONDS = 10
_BYTES_PER_SECOND = 4 << 20
"""A tenth of what one busy core reads."""


def read_apart(path: Path) -> AllocatorSnapshot:
    """What `read_snapshot` returns, with an end to the processor time that a file may take.

    A tuple that has itself twice, sixty times over, is a key whose hash takes years, and one that is nested a million
    times overflows the C stack: CPython bounds neither, and nothing in the same process can.

    Raises:
        SnapshotError: as `read_snapshot` does; or the reader took too long, or crashed.
    """
    # Not "spawn", which takes as long as the start of the command does.
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    reader = context.Process(target=_read, args=(path, answer), daemon=True)
    reader.start()
    answer.close()
    try:
        read: AllocatorSnapshot | SnapshotError = answers.recv()
    except EOFError:
        reader.join()
        problem = _why_it_ended(reader.exitcode or 0)
        raise SnapshotError(f"{path}: {problem}: refused") from None
    finally:
        answers.close()
        reader.kill()
        reader.join()
        # Its pipes, which an error's traceback would keep until the next full collection.
        reader.close()
    if isinstance(read, SnapshotError):
        raise read
    return read


def _read(path: Path, answer: Connection) -> None:
    # Ctrl-C is for the one that asks, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    _, most_core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most_core))
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = _LEAST_SECONDS + _size(path) // _BYTES_PER_SECOND
    if most_seconds != resource.RLIM_INFINITY:
        seconds = min(seconds, most_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most_seconds))
    try:
        answer.send(read_snapshot(path))
    except SnapshotError as error:
        # Without its causes, which may have parts of the file.
        answer.send(SnapshotError(str(error)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _why_it_ended(exit_code: int) -> str:
    if exit_code == -signal.SIGXCPU:
        return "it takes more time than plain data of its size needs"
    ended = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"Python cannot read it, the process that tried ended with {ended}"
