"""Reading processes from outside: a tree of eight, the files of /dev/shm, and all of `lowtide ps`.

Each of the eight is a Python that has torch loaded, as an engine's processes have: the kernel takes longer for a
process with many maps. Goals: 150 ms for the tree, 500 ms for the command.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import machine

from lowtide.probes.host.process_files import descendants_of
from lowtide.probes.processes.outside_view import read_process, read_processes
from lowtide.probes.processes.shared_memory_files import read_shared_memory

PROCESSES = 8
LOADED = (
    "import sys, torch; held = torch.ones(32 << 20, dtype=torch.uint8); print('ready', flush=True); sys.stdin.read()"
)
TOP = """
import subprocess, sys
processes = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for _ in range(int(sys.argv[2]))
]
for process in processes:
    process.stdout.readline()
exec(sys.argv[1])
"""


def times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of each of some calls."""
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        took.append((time.perf_counter() - started) * 1000)
    return {"median_ms": round(statistics.median(took), 2), "most_ms": round(max(took), 2)}


def unused_file(read: Callable[[], Any]) -> None:
    """Call something while there is a file that nobody uses: with none there is nothing to look for."""
    path = Path("/dev/shm/lowtide-benchmark")
    path.write_bytes(b"x")
    try:
        read()
    finally:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    with ExitStack() as stack:
        command = [sys.executable, "-c", TOP, LOADED, str(PROCESSES - 1)]
        top = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert top.stdout is not None
        top.stdout.readline()
        family = {top.pid, *descendants_of(top.pid)}
        views = read_processes(family)
        assert len(views) == PROCESSES
        results = {
            "processes": len(views),
            "maps_of_one": len(Path(f"/proc/{top.pid}/maps").read_text().splitlines()),
            "private_bytes_of_one": views[0].private,
            "tree": times(lambda: read_processes(family), args.repeats),
            "one_after_the_other": times(lambda: [read_process(view.pid) for view in views], args.repeats),
            "shared_memory": times(lambda: unused_file(read_shared_memory), args.repeats),
            "lowtide_ps": times(
                lambda: subprocess.run([sys.executable, "-m", "lowtide", "ps"], check=False, capture_output=True), 5
            ),
            "goals_ms": {"tree": 150, "lowtide_ps": 500},
        }
        top.kill()
    machine.write("processes", results, args.out)


if __name__ == "__main__":
    main()
