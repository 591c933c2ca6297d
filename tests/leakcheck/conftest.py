"""Other runs of lowtide on this machine: none, or one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

NEIGHBOUR = """
import os, time
from lowtide.probes.processes.agents import Agents
agents = Agents()
agents.start()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_neighbours(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for temporary files in which no other run is to be found: the suite's own workers are some.

    Tests with it leave files in /dev/shm, too, which is the same for all of them: one at a time.
    """
    # Made when it is first asked for, and not in the folder below.
    tmp_path_factory.getbasetemp()
    lock = Path(tempfile.gettempdir(), "lowtide-test.lock")
    with lock.open("w") as turn, tempfile.TemporaryDirectory(prefix="lowtide-test-") as folder:
        fcntl.flock(turn, fcntl.LOCK_EX)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def neighbour(no_neighbours: None) -> Iterator[int]:
    """The number of a process that lowtide watches, and that is not of this one's tree."""
    command = ["setsid", "--fork", sys.executable, "-c", NEIGHBOUR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        yield pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
