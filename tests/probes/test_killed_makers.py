"""What killed processes leave in /dev/shm itself.

These tests have a file of their own so that `make test` does not run them beside those of the checker, which would
report the files that nobody has open as left by the processes that it watches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lowtide.probes.processes.shared_memory_files import SharedMemoryFile, read_shared_memory
from tests.probes.left_processes import holder
from tests.waiting import wait_until

MIB = 1 << 20
SHARES = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4 << 20)
memory.buf[: 3 << 20] = b"x" * (3 << 20)
print(memory.name, flush=True)
time.sleep(600)
"""


def found(name: str) -> SharedMemoryFile | None:
    return next((file for file in read_shared_memory().dead if Path(file.path).name == name), None)


def test_what_a_killed_maker_left_is_dead_and_its_command_removes_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHARES], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        assert found(name) is None
        # With Python's resource tracker, which would remove it: as `kill -9` of a job or a container does.
        os.killpg(maker.pid, signal.SIGKILL)
        maker.wait()
    wait_until(lambda: found(name) is not None)
    file = found(name)
    assert file is not None
    assert file.library == "Python's multiprocessing.shared_memory"
    # Pages that were never written take no memory.
    assert (file.bytes, file.length) == (3 * MIB, 4 * MIB)
    assert 0 <= file.age < 30
    subprocess.run(file.remove, shell=True, check=True)
    assert not Path("/dev/shm", name).exists()


def test_what_a_living_process_maps_is_not_dead() -> None:
    # It has closed the file: only its map shows that it uses it.
    with holder("psm_00c0ffee", MIB, left=True) as pid:
        assert found("psm_00c0ffee") is None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: found("psm_00c0ffee") is not None)
