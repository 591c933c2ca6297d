"""What another process keeps is named by its own agent, with when it appeared; and whether it grows."""

from __future__ import annotations

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


def serve(requests: Connection) -> None:
    gc.disable()
    requests.send("ready")
    while (asked := requests.recv()) != "end":
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


def test_what_a_process_keeps_is_named_and_nothing_where_it_keeps_nothing(child: Child) -> None:
    child.asked.begin_stage("infer", 1)
    assert child.asked.left(child.pid, None) == []
    child.infer("keep one", cycle=2)
    ((finding, by_cycle),) = child.asked.left(child.pid, None)
    assert by_cycle == {2: 8 * MIB}
    assert child.asked.left(child.pid, 1) == []
    assert finding.holder is not None
    assert finding.holder.endswith("test_left_in_a_process.KEPT[0]")
    assert finding.process is not None
    assert (finding.process.pid, finding.process.name) == (child.pid, "engine-core")


def test_tensors_that_each_inference_leaves_are_growth_with_their_holder(child: Child) -> None:
    for _ in range(5):
        child.infer("keep one")
    (finding,) = child.asked.findings_at_end()
    assert (finding.resource, finding.stage, finding.trend) == ("tensors", "infer", "growth")
    assert (finding.bytes, finding.count) == (4 * 8 * MIB, 4)
    assert finding.holder is not None
    assert finding.holder.endswith("test_left_in_a_process.KEPT")
    assert finding.message.startswith(f"pid {child.pid} (engine-core): tensors on cpu grow by 8.0 MiB with each infer")


def test_garbage_is_no_part_of_it(child: Child) -> None:
    for _ in range(5):
        child.infer("keep one and leave one to the collector")
    (finding,) = child.asked.findings_at_end()
    assert (finding.resource, finding.bytes, finding.count) == ("tensors", 4 * 8 * MIB, 4)


@pytest.mark.parametrize("what", ["keep the last", "leave one to the collector", "keep nothing"])
def test_what_is_replaced_or_garbage_is_no_growth(child: Child, what: str) -> None:
    for _ in range(6):
        child.infer(what)
    assert child.asked.findings_at_end() == []
    assert child.asked.not_measured == {}


def test_what_a_sleep_has_kept_is_told_by_that_alone(child: Child) -> None:
    for _ in range(5):
        child.infer("keep one")
    child.asked.begin_stage("sleep(1)", 1)
    child.asked.end_stage("sleep(1)")
    (kept,) = child.asked.after_sleep("sleep(1)", 1, empties=False)
    assert (kept.resource, kept.bytes) == ("tensors", 5 * 8 * MIB)
    assert child.asked.findings_at_end() == []


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("what", ["keep one", "keep nothing"])
def test_what_was_not_ready_when_inferring_began_is_not_judged_asleep(child: Child, what: str, ready: bool) -> None:
    if ready:
        child.asked.begin_stage("infer", 1)
    child.requests.send(what)
    assert child.requests.recv() == "done"
    child.asked.end_stage("infer")
    child.asked.begin_stage("sleep(1)", 1)
    child.asked.end_stage("sleep(1)")
    found = child.asked.after_sleep("sleep(1)", 1, empties=False)
    keeps = what == "keep one"
    assert len(found) == (keeps and ready)
    assert len(child.asked.not_judged_asleep) == (keeps and not ready)
    if keeps and not ready:
        (missing,) = child.asked.not_judged_asleep
        assert missing.what == f"what inferring has left asleep in pid {child.pid} (engine-core)"
        assert "let create return once it is" in missing.why


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_tensors_that_each_inference_leaves_on_a_card_are_growth(child: Child) -> None:
    for _ in range(6):
        child.infer("keep one on a card")
    (finding,) = child.asked.findings_at_end()
    assert (finding.resource, finding.device, finding.count) == ("tensors", "cuda:0", 5)
    assert finding.holder is not None
    assert finding.holder.endswith("test_left_in_a_process.KEPT")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_what_is_replaced_on_a_card_is_none(child: Child) -> None:
    for _ in range(6):
        child.infer("keep the last, on a card")
    assert child.asked.findings_at_end() == []
