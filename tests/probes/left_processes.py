"""Real processes for tests: one that is left by its parent, and its twin that is not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lowtide.probes.host.process_files import stat
from tests.waiting import HANG_S, wait_until

HOLD = """
import mmap, os, sys, time
name, size = sys.argv[1], int(sys.argv[2])
with open(f"/dev/shm/{name}", "wb+") as file:
    file.truncate(1 << 20)
    shared = mmap.mmap(file.fileno(), 1 << 20)
shared.write(b"x" * (1 << 20))
# Python keeps a descriptor for its map; NCCL and others keep none.
os.closerange(3, 64)
held = bytearray(b"x") * size
print(os.getpid(), flush=True)
time.sleep(600)
"""
"""Maps 1 MiB of a file in /dev/shm, holds so many bytes, and says when it does."""

TITLE = """
import ctypes
def take_title(text):
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))
    ctypes.CDLL(None).prctl(15, text, 0, 0, 0)
"""
"""Gives the process a title, as `setproctitle` does: over its arguments, and by PR_SET_NAME.

Not by that library: where it is installed, xdist's workers change their titles with each test.
"""

LEAVE = """
import subprocess, sys
holder = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
print(holder.stdout.readline(), flush=True)
"""
"""Starts another process, says its number, and ends."""


@contextlib.contextmanager
def holder(name: str, size: int, *, left: bool) -> Iterator[int]:
    """A process that holds memory and a file in /dev/shm; `left` by its parent, or a child of this process."""
    program = ["-c", LEAVE, HOLD] if left else ["-c", HOLD]
    pid = 0
    with subprocess.Popen(
        [sys.executable, *program, name, str(size)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            if left:
                process.wait(HANG_S)
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid or process.pid, signal.SIGKILL)
            process.kill()
            Path("/dev/shm", name).unlink(missing_ok=True)
            wait_until(lambda: getattr(stat(pid or process.pid), "state", "Z") == "Z")
