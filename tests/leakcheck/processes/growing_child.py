"""A process that keeps what it is told to of each inference, and who asks it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents

MIB = 1 << 20

KEPT: list[torch.Tensor] = []
LIBRARY = ctypes.CDLL(None)
LIBRARY.malloc.restype = ctypes.c_void_p
REQUESTS: dict[int, bytes] = {}


def serve(requests: Connection) -> None:
    gc.disable()
    requests.send("ready")
    turn = 0
    while (asked := requests.recv()) != "end":
        turn += 1
        if asked.startswith("remember"):
            REQUESTS[turn if asked == "remember each" else turn % 3] = bytes(2000 + turn)
            requests.send("done")
            continue
        if asked == "take for C":
            ctypes.memset(LIBRARY.malloc(MIB), 1, MIB)
            requests.send("done")
            continue
        device = "cuda" if asked.endswith("on a card") else "cpu"
        made = torch.ones(8 * MIB, dtype=torch.uint8, device=device)
        if asked.startswith("keep one"):
            KEPT.append(made)
        elif asked.startswith("keep the last"):
            KEPT[:] = [made]
        if asked.endswith("leave one to the collector"):
            cycle: list[object] = [torch.ones(32 * MIB, dtype=torch.uint8)]
            cycle.append(cycle)
        del made
        requests.send("done")


@dataclass
class Child:
    """A process that keeps what it is told to, and who asks it."""

    asked: EngineProcesses
    pid: int
    requests: Connection

    def infer(self, what: str, cycle: int = 1) -> None:
        """Have it infer once, from beginning to end."""
        self.asked.begin_stage("infer", cycle)
        self.requests.send(what)
        assert self.requests.recv() == "done"
        self.asked.end_stage("infer")


@pytest.fixture
def child() -> Iterator[Child]:
    tree, agents = ProcessTree(), Agents()
    tree.start()
    agents.start()
    context = get_context("spawn")
    requests, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), name="engine-core")
    process.start()
    try:
        assert requests.recv() == "ready"
        assert process.pid is not None
        yield Child(EngineProcesses(tree, agents, "cpu", None), process.pid, requests)
    finally:
        requests.send("end")
        process.join()
        process.close()
        requests.close()
        there.close()
        agents.stop()
        tree.stop()
