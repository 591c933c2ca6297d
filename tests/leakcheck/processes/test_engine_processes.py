"""An engine whose model lives in a child process: judged there, and named by process and holder."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.lifecycle import LifecycleRun, check_run
from lowtide.leakcheck.processes import unmeasured_processes
from lowtide.leakcheck.processes.tree_end import EndedHolders, held_by_a_gone
from lowtide.probes import stages
from lowtide.probes.device.driver import NoDriver, find_driver
from lowtide.probes.processes.agents import AgentError, Agents
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Subject
from lowtide.reports.terminal import stage_table
from tests.leakcheck.spawned_target import LEAKED, SpawnedTarget

pytestmark = pytest.mark.nightly

MIB = 1 << 20

SCRIPT = ("create", "infer", "sleep(1)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")

CACHE: list[torch.Tensor] = []


class Model:
    """In the child: 24 MiB of weights, which a deep sleep drops."""

    def __init__(self, faults: frozenset[str]) -> None:
        self.faults = faults
        self.device = "cuda:0" if "on a card" in faults else "cpu"
        self.weights: torch.Tensor | None = self.loaded()
        if "announces" in faults:
            self.table = torch.arange(1000, device=self.device)
            stages.announce(self)

    def preserved_tensors(self) -> Mapping[str, torch.Tensor]:
        return {"model.table": self.table}

    def graph_addresses(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def loaded(self) -> torch.Tensor:
        return torch.ones(24 * MIB, dtype=torch.uint8, device=self.device)

    def infer(self) -> list[int]:
        if "infer leaks" in self.faults:
            CACHE.append(torch.zeros(16 * MIB, dtype=torch.uint8, device=self.device))
        if "multiplies" in self.faults:
            (torch.ones(64, 64, device=self.device) @ torch.ones(64, 64, device=self.device)).sum().item()
        assert self.weights is not None
        return self.weights[:3].tolist()

    def sleep(self, level: int) -> None:
        if level == 2 and "sleep keeps" not in self.faults:
            self.weights = None
            if self.device != "cpu":
                torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.weights is None:
            self.weights = self.loaded()
            if "wake loses" in self.faults:
                self.table.zero_()


def serve(connection: Connection, faults: frozenset[str]) -> None:
    if "not ready" in faults:
        # As one that still imports torch: without it nobody follows its tensors.
        sys.modules["torch.hidden"] = sys.modules.pop("torch")
    model = Model(faults)
    while True:
        name, *arguments = connection.recv()
        if name == "infer" and "torch.hidden" in sys.modules:
            sys.modules["torch"] = sys.modules.pop("torch.hidden")
        if name == "shutdown":
            return
        if name == "stop yourself":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            connection.send(getattr(model, name)(*arguments))


class ClientLife:
    """In this process: asks the child, and has nothing itself."""

    def __init__(self, *faults: str) -> None:
        self.faults = frozenset(faults)
        self.child: Any = None

    def create(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.child = context.Process(target=serve, args=(there, self.faults), name="engine-core")
        self.child.start()
        there.close()
        if "not ready" not in self.faults:
            self.asked("wake")

    def asked(self, *call: object) -> Any:
        self.connection.send(call)
        return self.connection.recv()

    def infer(self) -> Sequence[Sequence[int]]:
        return [self.asked("infer")]

    def sleep(self, level: int) -> None:
        self.asked("sleep", level)
        if "stops" in self.faults and level == 2:
            self.connection.send(("stop yourself",))

    def wake(self) -> None:
        if "stops" in self.faults:
            os.kill(self.child.pid, signal.SIGCONT)
        self.asked("wake")

    def shutdown(self) -> None:
        if self.child is None:
            return
        self.connection.send(("shutdown",))
        self.child.join()
        self.child.close()
        self.connection.close()
        self.child = None


def lived(make: Callable[[], Any], cycles: int = 1, script: Sequence[str] = SCRIPT) -> Subject:
    return LifecycleRun("client", make, device="cpu", driver=NoDriver("a test"), cycles=cycles, script=script).run()


def test_an_engine_in_a_child_that_gives_all_back_is_clean() -> None:
    subject = lived(ClientLife, cycles=2)
    assert (subject.outcome, subject.reason, subject.findings) == ("clean", "", ())
    assert [item for item in subject.not_measured if item.process is not None] == []
    held: dict[str, list[tuple[str, int]]] = {}
    for stage in subject.stages:
        for each in stage.processes:
            held.setdefault(stage.name, []).append((each.process.name, each.tensors.get("cpu", 0) // MIB))
    assert held.pop("shutdown", None) is None
    assert set(held["infer"]) == {("engine-core", 24)}
    assert held["sleep(1)"] == [("engine-core", 24)] * 2
    assert held["sleep(2)"] == [("engine-core", 0)] * 2
    column = next(figure for figure in stage_table(subject.stages).figures if figure.name == "in engine-core")
    assert column.cells[-4:] == ("0.0", "24.0", "24.0", "")


def test_what_infer_leaves_in_a_child_is_named_with_its_path() -> None:
    subject = lived(lambda: ClientLife("infer leaks"))
    assert subject.outcome == "leak"
    (finding,) = subject.findings
    assert (finding.resource, finding.cause, finding.stage) == ("tensors", "module-global", "infer")
    # Two of the three inferences are followed by a sleep.
    assert finding.bytes == 32 * MIB
    assert finding.holder is not None
    assert finding.holder.endswith("test_engine_processes.CACHE")
    assert finding.process is not None
    assert finding.process.name == "engine-core"
    assert f"pid {finding.process.pid} (engine-core)" in finding.message


def test_a_child_that_was_not_ready_when_create_returned_is_not_judged_asleep() -> None:
    subject = lived(lambda: ClientLife("not ready", "infer leaks"), script=("create", "infer", "sleep(1)", "shutdown"))
    assert (subject.outcome, subject.findings) == ("unsupported", ())
    (missing,) = [
        item for item in subject.not_measured if item.what.startswith("what inferring has left asleep in pid")
    ]
    assert "not ready when the first inference began" in missing.why


class NothingLeaks(SpawnedTarget):
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.ask("nothing")
        return [list(range(max_tokens)) for _ in prompt_lengths]


@pytest.mark.parametrize("loses", [False, True])
def test_contents_that_a_child_announces_must_survive_its_sleep(loses: bool) -> None:
    subject = lived(lambda: ClientLife("announces", *["wake loses"] * loses), cycles=1 if loses else 2)
    if not loses:
        assert (subject.outcome, subject.findings) == ("clean", ())
        return
    (finding,) = subject.findings
    assert (finding.resource, finding.cause, finding.stage) == ("contents", "not-restored", "wake")
    assert (finding.bytes, finding.holder) == (8000, "model.table")
    assert finding.process is not None
    assert finding.message == f"{finding.process.text}: model.table changed its contents between sleep and wake"


def test_bytes_that_each_infer_leaves_in_a_child_without_torch_are_growth() -> None:
    subject = check_run("check", SpawnedTarget, driver=NoDriver("a test"), cycles=3).run()
    (finding,) = subject.findings
    assert (finding.resource, finding.stage, finding.trend) == ("host-memory", "infer", "growth")
    # After the last of a life's inferences there are two more.
    assert abs(finding.bytes - 6 * LEAKED) <= 6 * MIB
    grown = r"under no tensor grows by 1[567]\.\d MiB with each infer, \d+\.\d MiB in 6 of 6 that followed another one"
    assert re.search(grown, finding.message)
    assert "16.0 MiB in a bytes held by thread 'MainThread', local 'held' of serve()" in finding.message
    assert [item for item in subject.not_measured if item.process is not None] == []


def test_a_child_without_torch_that_does_not_grow_is_clean() -> None:
    subject = check_run("check", NothingLeaks, driver=NoDriver("a test"), cycles=2).run()
    assert (subject.outcome, subject.reason, subject.findings) == ("clean", "", ())


def test_a_child_that_infers_too_rarely_is_not_judged_and_the_report_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Beside a test runner that has grown to a gigabyte it is small.
    monkeypatch.setattr(unmeasured_processes, "SHARE", 0.01)
    subject = check_run("check", NothingLeaks, driver=NoDriver("a test"), cycles=1).run()
    assert subject.outcome == "unsupported"
    assert "run more cycles, so that three inferences follow another one" in subject.reason


def test_a_sleep_that_keeps_everything_in_a_child_is_a_finding() -> None:
    subject = lived(lambda: ClientLife("sleep keeps"))
    (finding,) = subject.findings
    assert (finding.stage, finding.bytes) == ("sleep(2)", 24 * MIB)
    assert "sleep(2) gave back 0 B of 24.0 MiB that pid" in finding.message
    assert finding.holder is not None
    assert "local 'model' of serve()" in finding.holder
    assert [hop.edge for hop in finding.path][-1] == ".weights"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")
@pytest.mark.parametrize(
    "faults", [(), ("infer leaks",), ("sleep keeps",)], ids=["clean", "infer leaks", "sleep keeps"]
)
def test_an_engine_on_a_card_in_a_child(faults: tuple[str, ...]) -> None:
    driver = find_driver()
    script = ("create", "infer", "sleep(2)", "wake", "infer", "sleep(2)", "wake", "infer", "shutdown")
    run = LifecycleRun(
        "client", lambda: ClientLife("on a card", *faults), device="cuda:0", driver=driver, cycles=2, script=script
    )
    subject = run.run()
    driver.close()
    assert [item for item in subject.not_measured if item.process is not None] == []
    cores = [
        (stage.name, each.cards["cuda:0"])
        for stage in subject.stages
        for each in stage.processes
        if each.process.name == "engine-core"
    ]
    at_work = [size for stage, size in cores if stage == "infer"]
    asleep = [size for stage, size in cores if stage == "sleep(2)"]
    assert (len(at_work), len(asleep)) == (6, 4)
    assert all(isinstance(size, int) and size > 24 * MIB for size in at_work)
    if not faults:
        assert (subject.outcome, subject.findings) == ("clean", ())
        assert max(filter(None, asleep)) <= min(filter(None, at_work)) - 24 * MIB
        return
    (finding,) = subject.findings
    assert finding.process is not None
    assert finding.process.name == "engine-core"
    assert finding.resource == "tensors"
    assert finding.device == "cuda:0"
    wanted = "CACHE" if faults == ("infer leaks",) else "local 'model'"
    assert wanted in (finding.holder or "")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")
def test_a_child_knows_which_library_has_asked_a_card_for_memory() -> None:
    pytest.importorskip("cupti")
    driver = find_driver()
    script = ("create", "infer", "shutdown")
    made = functools.partial(ClientLife, "on a card", "multiplies")
    subject = LifecycleRun("client", made, device="cuda:0", driver=driver, cycles=1, script=script, native=True).run()
    driver.close()
    (core,) = [each for stage in subject.stages if stage.name == "infer" for each in stage.processes if each.cards]
    libraries = core.libraries["cuda:0"]
    assert [name for name in libraries if name.startswith("libcublas")], libraries
    assert (core.unexplained["cuda:0"] or 0) < 16 * MIB


def test_a_child_that_does_not_answer_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.probes.processes.agents.ANSWER_S", 0.5)
    silent: list[int] = []
    again: list[int] = []
    ask = Agents.ask

    def noted(agents: Agents, pid: int, *arguments: Any) -> bytes:
        if pid in silent:
            again.append(pid)
        try:
            return ask(agents, pid, *arguments)
        except AgentError:
            silent.append(pid)
            raise

    monkeypatch.setattr(Agents, "ask", noted)
    subject = lived(lambda: ClientLife("stops"))
    # Each time the engine would wait.
    assert (len(silent), again) == (1, [])
    reasons = [item.why for item in subject.not_measured]
    assert any("did not answer within 0.5 s: it is stopped" in why for why in reasons)
    assert subject.outcome != "clean"


def test_a_life_reports_what_the_driver_counts_for_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = held_by_a_gone(ProcessName(pid=7, name="VLLM::EngineCore"), {"cuda:0": 300 * MIB})
    monkeypatch.setattr(EndedHolders, "findings", lambda self: [gone])
    subject = lived(ClientLife)
    assert subject.outcome == "leak"
    assert [finding.message for finding in subject.findings] == [gone.message]


class FailsLater(NothingLeaks):
    """The third inference of a life, which is the first of those that are made again, fails."""

    infers = 0

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.infers += 1
        if self.infers > 2:
            raise RuntimeError("no more")
        return super().infer(prompt_lengths, max_tokens)


def test_an_inference_that_is_made_again_and_fails_ends_the_run_with_its_reason() -> None:
    subject = check_run("check", FailsLater, driver=NoDriver("a test"), cycles=1).run()
    assert subject.outcome == "error"
    assert "cycle 1: infer, made again, raised " in subject.reason
    assert "no more" in subject.reason
