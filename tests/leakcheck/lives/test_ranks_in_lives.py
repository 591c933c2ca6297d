"""Two ranks in processes of their own: one that a sleep does not reach is named by its agent; equal ones are silent."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Subject

pytestmark = pytest.mark.nightly

MIB = 1 << 20

KEPT: list[torch.Tensor] = []


def serve(connection: Connection, rank: int, kept: int, embedding: int) -> None:
    """In a rank: 24 MiB of weights that stay on the host asleep, and a cache of 16 MiB that a sleep drops."""
    weights = torch.ones((24 + embedding) * MIB, dtype=torch.uint8)
    cache = torch.ones((16 + 2 * embedding // 3) * MIB, dtype=torch.uint8)
    KEPT.append(torch.ones(kept * MIB, dtype=torch.uint8))
    connection.send(rank)
    while (name := connection.recv()) != "shutdown":
        if name == "sleep":
            cache = cache[:0].clone()
            if rank == 0:
                KEPT.clear()
        elif name == "wake":
            cache = torch.ones((16 + 2 * embedding // 3) * MIB, dtype=torch.uint8)
            KEPT[:] = [torch.ones(kept * MIB, dtype=torch.uint8)]
        connection.send(weights[:3].tolist())


class RankedLife:
    def __init__(self, *, kept: int = 0, embedding: int = 0) -> None:
        self.kept = kept
        self.embedding = embedding
        self.ranks: list[tuple[Any, Connection]] = []

    def create(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(2):
            here, there = context.Pipe()
            arguments = (there, rank, self.kept, 0 if rank else self.embedding)
            child = context.Process(target=serve, args=arguments, name=f"worker-{rank}")
            os.environ["RANK"] = str(rank)
            child.start()
            del os.environ["RANK"]
            there.close()
            self.ranks.append((child, here))
            here.recv()

    def asked(self, what: str) -> list[Any]:
        for _, connection in self.ranks:
            connection.send(what)
        return [connection.recv() for _, connection in self.ranks]

    def infer(self) -> Sequence[Sequence[int]]:
        return self.asked("infer")[:1]

    def sleep(self, level: int) -> None:
        self.asked("sleep")

    def wake(self) -> None:
        self.asked("wake")

    def shutdown(self) -> None:
        for child, connection in self.ranks:
            connection.send("shutdown")
            child.join()
            child.close()
            connection.close()
        self.ranks = []


def lived(**what: int) -> Subject:
    script = ("create", "infer", "sleep(1)", "wake", "infer", "shutdown")
    run = LifecycleRun(
        "ranks", lambda: RankedLife(**what), device="cpu", driver=NoDriver("a test"), cycles=1, script=script
    )
    return run.run()


def test_a_rank_that_keeps_what_its_peer_gives_back_is_named_with_the_holder() -> None:
    subject = lived(kept=10)
    (finding,) = subject.findings
    assert (finding.bytes, finding.stage, finding.process and finding.process.rank) == (10 * MIB, "sleep(1)", 1)
    assert finding.holder is not None
    assert "KEPT" in finding.holder
    assert "(worker-1, rank 1) keeps 10.0 MiB more in sleep(1) than pid " in finding.message


@pytest.mark.parametrize("embedding", [0, 12])
def test_ranks_that_keep_the_same_part_are_silent(embedding: int) -> None:
    subject = lived(embedding=embedding)
    assert subject.findings == ()
    (asleep,) = [stage for stage in subject.stages if stage.name == "sleep(1)"]
    assert [each.process.rank for each in asleep.processes] == [0, 1]
    for each in asleep.processes:
        assert each.host is not None
        unexplained = each.unexplained["cpu"]
        assert unexplained is not None
        # What is under tensors is explained; the rest is Python and torch.
        assert each.host - unexplained >= each.tensors["cpu"]
        assert 20 * MIB < unexplained < 600 * MIB
    (table,) = tree_tables(subject.stages)
    named = [row.name for row in table.rows if row.name.startswith("pid ")]
    assert [name.partition("(")[2] for name in named] == ["worker-0, rank 0)", "worker-1, rank 1)"]
