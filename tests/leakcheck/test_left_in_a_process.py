"""What another process keeps is named by its own agent, with the cycle in which it appeared."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents

MIB = 1 << 20

KEPT: list[torch.Tensor] = []


def serve(requests: Connection) -> None:
    requests.send("ready")
    while requests.recv() == "keep":
        KEPT.append(torch.ones(8 * MIB, dtype=torch.uint8))
        requests.send("kept")


def test_what_a_process_keeps_is_named_and_nothing_where_it_keeps_nothing() -> None:
    tree, agents = ProcessTree(), Agents()
    tree.start()
    agents.start()
    context = get_context("spawn")
    requests, there = context.Pipe()
    child = context.Process(target=serve, args=(there,), name="engine-core")
    child.start()
    try:
        assert requests.recv() == "ready"
        asked = EngineProcesses(tree, agents, "cpu", None)
        asked.begin_stage("infer", 1)
        assert child.pid is not None
        assert asked.left(child.pid, None) == []
        asked.begin_stage("infer", 2)
        requests.send("keep")
        assert requests.recv() == "kept"
        ((finding, by_cycle),) = asked.left(child.pid, None)
        assert by_cycle == {2: 8 * MIB}
        assert finding.holder is not None
        assert finding.holder.endswith("test_left_in_a_process.KEPT[0]")
        assert finding.process is not None
        assert (finding.process.pid, finding.process.name) == (child.pid, "engine-core")
    finally:
        requests.send("end")
        child.join()
        child.close()
        requests.close()
        there.close()
        agents.stop()
        tree.stop()
