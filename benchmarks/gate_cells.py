"""A whole gate: eight cells on the CPU, two at a time, and the size of its report.

Goal: under 180 s on two cores. The floor is the same commands, one after the other, without a gate.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

from lowtide.leakcheck.gate.matrix import cells_of, load_settings
from lowtide.reports.schema import read

EXAMPLES = Path(__file__).parents[1] / "examples"

SUBJECTS = [
    'name = "engine"\nengine = "tiny"',
    'name = "engine-seed"\nengine = "tiny"\nseed = 1',
    'name = "bug"\nengine = "tiny"\ncycles = 1\nargs = ["--defect", "bound-method-cache"]',
    'name = "lives"\nfuzz = "lowtide"\nexamples = 3\nseed = 0',
    *(f'name = "{name}"\npytest = "{EXAMPLES / name}"' for name in ("module_cache", "engine_fixture", "rl_loop")),
    f'name = "leaking"\npytest = "{EXAMPLES / "module_cache" / "leaking.py"}"',
]


def run(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=False, capture_output=True)
    return time.perf_counter() - started


def measure(workers: int, *, alone: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        head = f'[gate]\ndevices = ["cpu"]\ncpu-workers = {workers}\ncalibrate = false\n'
        text = head + "".join(f"[[gate.subject]]\n{subject}\n" for subject in SUBJECTS)
        (folder / "lowtide.toml").write_text(text)
        cells = cells_of(load_settings(None, folder)[0], 0)
        gate = run([sys.executable, "-m", "lowtide", "gate", "--report", "report"], folder)
        report = read(folder / "report")
        result: dict[str, Any] = {
            "cells": len(cells),
            "workers": workers,
            "gate_s": gate,
            "limit_s": 180,
            "outcomes": {subject.id: subject.outcome for subject in report.subjects},
            "report_bytes": {
                path.name: path.stat().st_size for path in (folder / "report").iterdir() if path.is_file()
            },
        }
        if alone:
            result["commands_s"] = {
                cell.name: run([*cell.command, f"{cell.report_option}={folder / 'alone' / cell.name}"], folder)
                for cell in cells
            }
            result["commands_one_after_the_other_s"] = sum(result["commands_s"].values())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gate-only", action="store_true", help="without the commands alone")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    machine.write("gate_cells", measure(args.workers, alone=not args.gate_only), args.out)


if __name__ == "__main__":
    main()
