"""The trends of 100,000 residues: how long `lowtide history --page` takes, by part, in a file of SQLite.

python benchmarks/history.py [--report DIR]
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from machine import write
from sqlalchemy.engine import Engine

from lowtide.leakcheck.gate.history import (
    RESIDUES,
    RUNS,
    SERIES,
    SUBJECTS,
    VERDICTS,
    open_database,
    read_trends,
    writing,
)
from lowtide.leakcheck.gate.history_page import render_page

RUNS_OF_EACH, SUBJECTS_OF_EACH, SERIES_OF_EACH = 1000, 25, 4
"""1000 runs x 25 subjects x 4 series: 100,000 rows."""

REPEATS = 7


def fill(engine: Engine, draw: random.Random) -> None:
    """Of each subject two series stay at 0, one has noise and a third of those a step, one has a step without noise."""
    begin = datetime.datetime(2023, 1, 1)
    with writing(engine) as connection:
        runs = [
            {
                "key": f"{number:064x}",
                "created": begin + datetime.timedelta(days=number),
                "commit": f"{draw.getrandbits(160):040x}",
                **dict.fromkeys(("driver", "platform", "python", "torch", "lowtide", "command"), "1.0"),
                "hardware": "NVIDIA H200",
            }
            for number in range(RUNS_OF_EACH)
        ]
        connection.execute(RUNS.insert(), runs)
        connection.execute(SUBJECTS.insert(), [{"name": f"engine-cuda/{turn}"} for turn in range(SUBJECTS_OF_EACH)])
        verdicts = [
            {"run_id": run, "subject_id": subject, "outcome": "leak"}
            for run in range(1, RUNS_OF_EACH + 1)
            for subject in range(1, SUBJECTS_OF_EACH + 1)
        ]
        connection.execute(VERDICTS.insert(), verdicts)
        residues = []
        for number in range(SUBJECTS_OF_EACH * SERIES_OF_EACH):
            turn = number % SERIES_OF_EACH
            series = {
                "subject_id": number // SERIES_OF_EACH + 1,
                "kind": "reading" if turn < 3 else "finding",
                "resource": ("tensors", "reserved", "driver", "tensors")[turn],
                "cause": "",
                "device": "",
                "stage": "shutdown",
                "fingerprint": f"{number:016x}" if turn == 3 else "",
            }
            connection.execute(SERIES.insert(), [series])
            step = draw.randrange(RUNS_OF_EACH)
            for run in range(RUNS_OF_EACH):
                noise = draw.gauss(0, 2 << 20) if turn == 2 else 0
                level = (64 << 20) if run >= step and (turn == 3 or (turn == 2 and number % 3 == 0)) else 0
                residues.append({"run_id": run + 1, "series_id": number + 1, "bytes": round(level + noise), "count": 1})
        connection.execute(RESIDUES.insert(), residues)
        rows = connection.scalar(sa.select(sa.func.count()).select_from(RESIDUES))
        assert rows == 100_000


def median_of(action: Callable[[], object]) -> float:
    """Seconds, the median of some repetitions."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken), 3)


def measure(folder: Path) -> dict[str, Any]:
    file = folder / "history.sqlite"
    engine = open_database(str(file))
    fill(engine, random.Random(0))
    trends = read_trends(engine, last=RUNS_OF_EACH)
    page = folder / "page.html"
    command = [sys.executable, "-m", "lowtide", "history", "--database", str(file), "--page", str(page)]
    command += ["--last", str(RUNS_OF_EACH)]
    return {
        "rows": 100_000,
        "trends": len(trends),
        "level_changes": sum(len(trend.changes) for trend in trends),
        "page_bytes": len(render_page(trends).encode()),
        "database_bytes": file.stat().st_size,
        "read_trends_s": median_of(lambda: read_trends(engine, last=RUNS_OF_EACH)),
        "render_page_s": median_of(lambda: render_page(trends)),
        "page_of_all_s": median_of(lambda: render_page(read_trends(engine, last=RUNS_OF_EACH))),
        "page_of_last_400_runs_s": median_of(lambda: render_page(read_trends(engine))),
        "imports_s": median_of(lambda: subprocess.run([sys.executable, "-c", IMPORTS], check=True)),
        "whole_command_s": median_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)),
    }


IMPORTS = "import sqlalchemy, jinja2, rich.console, ruptures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write("history", measure(Path(folder)), arguments.report)


if __name__ == "__main__":
    main()
