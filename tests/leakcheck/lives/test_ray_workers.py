"""An engine in an actor of a Ray cluster that was there before: its worker gets an agent, and is judged by it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import lowtide
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.reports.schema import Subject

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: install lowtide[ray]")

from ray.cluster_utils import Cluster  # noqa: E402 - only where Ray is installed

# Ray keeps processes, threads and files of its own until it is shut down.
pytestmark = [pytest.mark.nightly, pytest.mark.no_leakcheck(reason="a Ray cluster lives as long as this file's tests")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


class Engine:
    """In the actor: an engine of which each inference leaves 16 MiB."""

    def __init__(self, leaks: bool) -> None:
        self.leaks = leaks
        self.held: list[torch.Tensor] = []

    def where(self) -> tuple[int, dict[str, str]]:
        return os.getpid(), dict(os.environ)

    def infer(self) -> list[int]:
        made = torch.ones(16 * MIB, dtype=torch.uint8)
        if self.leaks:
            self.held.append(made)
        return made[:3].tolist()


class RayLife:
    """Here: asks the actor."""

    def __init__(self, address: str, *, leaks: bool) -> None:
        self.address = address
        self.leaks = leaks
        self.actor: Any = None

    def create(self) -> None:
        variables = lowtide.agent_environment()
        ray.init(address=self.address, runtime_env={"env_vars": variables}, log_to_driver=False)
        self.actor = ray.remote(num_cpus=1)(Engine).remote(self.leaks)
        self.pid, self.variables = ray.get(self.actor.where.remote(), timeout=60)

    def infer(self) -> Sequence[Sequence[int]]:
        return [ray.get(self.actor.infer.remote(), timeout=60)]

    def sleep(self, level: int) -> None:
        pass

    def wake(self) -> None:
        pass

    def shutdown(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None
        ray.shutdown()


def lived(address: str, monkeypatch: pytest.MonkeyPatch, *, leaks: bool) -> tuple[Subject, RayLife]:
    life = RayLife(address, leaks=leaks)
    # As where somebody else has started the cluster: its workers are nobody's descendants here.
    monkeypatch.setattr(ProcessTree, "_family", lambda self: self._from(list(self._orphans)))
    script = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(1)", "wake", "shutdown")
    run = LifecycleRun("ray", lambda: life, device="cpu", driver=NoDriver("a test"), cycles=1, script=script)
    return run.run(), life


def in_the_worker(subject: Subject, life: RayLife) -> list[Any]:
    return [each for each in subject.findings if each.process is not None and each.process.pid == life.pid]


def test_what_infer_leaves_in_a_worker_is_named_with_its_holder(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, life = lived(cluster.address, monkeypatch, leaks=True)
    assert life.variables["LOWTIDE_AGENTS"]
    (finding,) = [each for each in in_the_worker(subject, life) if each.resource == "tensors"]
    assert finding.bytes == 32 * MIB
    assert "held" in (finding.holder or "")
    assert finding.process.role == "ray worker"
    assert finding.process.name.startswith("ray::Engine")


def test_a_worker_that_keeps_nothing_is_silent(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, life = lived(cluster.address, monkeypatch, leaks=False)
    assert in_the_worker(subject, life) == []
    # Ray keeps idle workers with the same environment.
    assert [finding.message for finding in subject.findings if finding.resource == "processes"] == []
    asleep = [stage for stage in subject.stages if stage.name == "sleep(1)"]
    assert all(life.pid in {each.process.pid for each in stage.processes} for stage in asleep)
