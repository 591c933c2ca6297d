"""`lowtide snapshot` on files of 2 GB: seconds and peak memory, where blocks are most of the file and where events are.

The goals: less than 60 s and 6 GB. The floor, measured beside it: reading the bytes of the same file, and one pass of
CPython's own unpickler over it, which keeps every object. That pass stays far below the goal for time and far above
the one for memory: it is measured on an eighth of the file, and its figures are multiplied by eight.

Two depths of stacks: 24 frames, as Python and C++ have together in a plain program, and 8, with three times as many
objects in the same bytes. Each measurement is of a process of its own; its peak is what the kernel counts for it.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from snapshot_files import Part, write_snapshot

SIZE, SHARE = 2_000_000_000, 8
DEPTHS = (24, 8)

READ = "import sys\nwith open(sys.argv[1], 'rb') as file:\n    while file.read(1 << 20): pass"
UNPICKLE = "import gc, pickle, sys\ngc.disable()\nwith open(sys.argv[1], 'rb') as file: pickle.load(file)"


def measure(*command: str) -> dict[str, float]:
    """Seconds, of them those of a processor, and peak bytes of a command that must succeed."""
    began = time.perf_counter()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, *command],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    took = time.perf_counter() - began
    assert status == 0, command
    return {
        "seconds": round(took, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def floor_of_unpickling(path: Path, part: Part, size: int, depth: int) -> dict[str, float]:
    """What CPython's unpickler takes for a file of this kind, from a smaller one."""
    write_snapshot(path, part, size // SHARE, depth)
    return {name: round(figure * SHARE, 1) for name, figure in measure("-c", UNPICKLE, str(path)).items()}


def measure_part(folder: Path, part: Part, size: int, depth: int) -> dict[str, Any]:
    path = folder / "snapshot.pickle"
    try:
        floor = floor_of_unpickling(path, part, size, depth)
        repeats = write_snapshot(path, part, size, depth)
        return {
            "file_bytes": path.stat().st_size,
            "frames_of_a_stack": depth,
            f"{'blocks' if part == 'segments' else 'events'}_beyond_the_small_one": repeats * 1000,
            "reading_the_bytes": measure("-c", READ, str(path)),
            "unpickling_as_objects": floor,
            "lowtide_snapshot": measure("-m", "lowtide", "snapshot", str(path)),
            "by_stage": measure("-m", "lowtide", "snapshot", "--by", "stage", str(path)),
        }
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of a file")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files are for a while"
    )
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = {
            f"{part}, {depth} frames": measure_part(Path(folder), part, args.size, depth)
            for part in get_args(Part)
            for depth in DEPTHS
        }
    # The peak of a child begins with what this process had when it started it: torch comes in only now.
    results["peak_bytes_of_this_process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import machine

    machine.write("snapshots-cpu", results, args.out)


if __name__ == "__main__":
    main()
