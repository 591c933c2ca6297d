"""Hands cells to a Ray cluster: each is a task with a card of its own, and comes back with its report and its log.

Ray runs a task again elsewhere if its node or worker is lost. The nodes need lowtide, and the project at the same path.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.leakcheck.gate.cells import LOG, CellResult, not_run, result_of, run_in_folder
from lowtide.leakcheck.gate.matrix import Cell, GateError

RETRIES = 3
"""How often a cell is run again whose worker or node was lost."""

_POLL_S = 0.5
_MOST_BYTES = 64 << 20


@dataclass
class RayCluster:
    """A cluster that runs cells; a context that connects and disconnects.

    Attributes:
        address: as `ray.init` takes it: `auto`, `ray://HOST:10001`, or `local` for one on this machine.
        folder: the working folder of the cells, on every node.
        cards: how many cards the cluster has; known once it is connected.
    """

    address: str
    folder: Path
    cards: int = 0
    _ray: Any = None
    _task: Any = field(default=None, repr=False)

    def __enter__(self) -> RayCluster:
        """Connect.

        Raises:
            GateError: Ray is not installed, or nobody answers at the address.
        """
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise GateError("--ray needs Ray: install lowtide[ray]") from error
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises errors of many types, of grpc's and its own
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise GateError(f"--ray {self.address} cannot be reached: {first}") from error
        self._ray = ray
        self.cards = int(ray.cluster_resources().get("GPU", 0))
        self._task = ray.remote(max_retries=RETRIES, retry_exceptions=False)(_run_on_node)
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect, which ends the tasks that still run."""
        self._ray.shutdown()

    def run(self, cell: Cell, folder: Path, stopped: Callable[[], bool]) -> CellResult:
        """Run a cell on some node, and fetch what it wrote.

        Args:
            cell: what to run.
            folder: for its report and its log, on this machine.
            stopped: whether the gate stops; asked while it runs.
        """
        ray = self._ray
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        task = self._task.options(num_cpus=1, num_gpus=int(cell.on_card), name=cell.name)
        waiting = [task.remote(cell, str(self.folder))]
        while True:
            done, _ = ray.wait(waiting, timeout=_POLL_S)
            if done:
                break
            if stopped():
                ray.cancel(waiting[0], force=True)
                return not_run(cell, "error", "ended with the gate")
        try:
            ended, files, node = ray.get(done[0])
        except (ray.exceptions.RayError, OSError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            return not_run(cell, "error", f"lost by the cluster after {RETRIES} more tries: {first}")
        files[LOG] = f"(on {node})\n".encode() + files.get(LOG, b"")
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return result_of(cell, folder, ended)


def _run_on_node(cell: Cell, folder: str) -> tuple[dict[str, Any], dict[str, bytes], str]:
    """Run the cell in a worker of Ray's; return how it ended, its files by name, and where it ran.

    Ray has chosen the card, and shows the worker no other one.
    """
    if not Path(folder).is_dir():
        text = f"{folder} is not on this node: the nodes need the project at the same path\n"
        return {"code": 2, "timed_out": False, "seconds": 0.0, "left": []}, {LOG: text.encode()}, socket.gethostname()
    # The node's own Python: the gate's may lie elsewhere.
    here = replace(cell, command=(sys.executable, *cell.command[1:]))
    with tempfile.TemporaryDirectory(prefix="lowtide-cell-") as written:
        ended = run_in_folder(here, Path(written), {**os.environ, **cell.env}, lambda: False, cwd=folder)
        files: dict[str, bytes] = {}
        room = _MOST_BYTES
        # The report first, so that nothing else leaves no room for it.
        for path in sorted(Path(written).rglob("*"), key=lambda each: each.name != "leakcheck.json"):
            if path.is_file() and path.stat().st_size <= room:
                name = path.relative_to(written).as_posix()
                files[name] = path.read_bytes()
                room -= len(files[name])
    return ended, files, socket.gethostname()
