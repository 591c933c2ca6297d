"""Whole lives on a card: the ledger adds up to the driver's figure, a clean engine is clean, a defect is found."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lowtide.engine import EngineConfig
from lowtide.engine.defects import find_defect
from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife
from lowtide.leakcheck.targets.reference import FixedReference, reference_target
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
from lowtide.probes.device.driver import Driver, find_driver
from lowtide.reports.schema import Subject
from tests.leakcheck.swept import sweep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none"),
]

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = find_driver()
    yield driver
    driver.close()


def live(driver: Driver, cycles: int = 2) -> Subject:
    config = EngineConfig(device="cuda:0")
    run = LifecycleRun(
        "tiny", lambda: TargetLife(lambda: FixedReference(config)), device="cuda:0", driver=driver, cycles=cycles
    )
    return run.run()


def test_a_clean_engine_is_clean_and_back_at_once(driver: Driver) -> None:
    subject = live(driver, cycles=3)
    assert (subject.outcome, subject.findings, subject.not_measured) == ("clean", (), ())
    assert subject.returns == ()


def test_the_ledger_adds_up_to_the_drivers_figure_and_explains_it(driver: Driver) -> None:
    stages = [stage for stage in live(driver, cycles=3).stages if stage.cycle > 1]
    start = stages[0].before.ledgers[0].unexplained
    assert start is not None
    for stage in stages:
        ledger = stage.after.ledgers[0]
        assert (ledger.device, ledger.source) == ("cuda:0", "nvml")
        assert ledger.unexplained is not None
        assert ledger.total == sum(line.bytes for line in ledger.lines) + ledger.unexplained
        assert abs(ledger.unexplained - start) <= 32 * MIB


def keep(kept: list[torch.Tensor]) -> None:
    kept.append(torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda:0"))


class KeepsATensor(FixedReference):
    """Leaves 3 MiB on the card in each infer."""

    kept: ClassVar[list[torch.Tensor]] = []

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        keep(self.kept)
        return super().infer(prompt_lengths, max_tokens)


@pytest.mark.parametrize("leaks", [False, True])
def test_torch_s_snapshot_of_a_leaking_stage_has_the_block_and_who_allocated_it(
    driver: Driver, tmp_path: Path, leaks: bool
) -> None:
    config = EngineConfig(device="cuda:0")
    make = KeepsATensor if leaks else FixedReference
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "lowtide-cycle-9-shutdown.pickle").touch()
    (tmp_path / "snapshots" / "rank0.pickle").touch()
    snapshots = AllocatorSnapshots(tmp_path)
    snapshots.remove_old()
    LifecycleRun(
        "tiny",
        lambda: TargetLife(lambda: make(config)),
        device="cuda:0",
        driver=driver,
        cycles=1,
        script=("create", "infer", "shutdown"),
        snapshots=snapshots,
    ).run()
    KeepsATensor.kept.clear()
    # The file of an earlier run is gone; another one is nobody's to remove.
    names = ["lowtide-cycle-1-shutdown.pickle", "rank0.pickle"] if leaks else ["rank0.pickle"]
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == names
    if not leaks:
        return
    snapshot = pickle.loads((tmp_path / "snapshots" / names[0]).read_bytes())
    frames = [
        frame["name"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["size"] == 3 * MIB
        for frame in block["frames"]
    ]
    assert "keep" in frames


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_that_cannot_be_written_is_named(tmp_path: Path, fails: bool) -> None:
    torch.zeros(1, device="cuda:0")
    snapshots = AllocatorSnapshots(tmp_path)
    if fails:
        (tmp_path / "snapshots").write_text("a file in the folder's place")
    assert bool(snapshots.keep("cycle 1 shutdown")) is fails


BETWEEN_TOKENS = ("create", "reload", "sleep(1)", "wake from 1", "wake from 2", "shutdown", "shutdown asleep")


def test_whatever_fails_while_memory_is_taken_or_given_back_is_survived() -> None:
    target = reference_target("cuda:0", None)
    swept = list(sweep(target.factory, config=target.thorough, among=BETWEEN_TOKENS))
    assert [item for item in swept if item.findings] == []
    points = {(item.stage, item.kind): item.points for item in swept}
    # Among them each block of page-locked memory that a shutdown unpins.
    assert points["shutdown", "interrupt"] >= 7
    assert points["create", "pin"] == 2


class SavesForBackward(FixedReference):
    """A forward without `no_grad`: autograd saves a large tensor that no Python object names (vllm#46046)."""

    kept: ClassVar[list[torch.Tensor]] = []

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        leaf = torch.ones(4 * MIB, device="cuda", requires_grad=True)
        self.kept.append(leaf.exp().sum())


def test_what_autograd_saved_is_found_though_python_cannot_see_it(driver: Driver) -> None:
    config = EngineConfig(device="cuda:0")
    run = LifecycleRun(
        "tiny", lambda: TargetLife(lambda: SavesForBackward(config)), device="cuda:0", driver=driver, cycles=2
    )
    try:
        subject = run.run()
        findings = [each for finding in subject.findings for each in (finding, *finding.parts)]
    finally:
        SavesForBackward.kept.clear()
    (native,) = [item for item in findings if item.cause == "native"]
    assert (native.bytes >= 16 * MIB, native.verdict, native.stage) == (True, "native-held", "shutdown")
    # The sum itself Python does see, and the leaf behind it torch tells of; letting go of the sum gives all back.
    reported = {item.verdict: item for item in findings if item.cause != "native"}
    assert set(reported) <= {"reachable", "native-held"}
    assert reported["reachable"].holder is not None
    assert reported["reachable"].holder.endswith("SavesForBackward.kept")
    assert all(item.remedy is not None and "SavesForBackward.kept" in item.remedy.action for item in findings)
    # Each of the two lives leaves one result: the finding is of the last, and letting go gives back both.
    assert native.remedy is not None
    assert native.remedy.returns_bytes == 2 * native.bytes


@pytest.mark.parametrize("name", ["shutdown-noop", "worker-keeps-everything"])
def test_a_defect_is_reported_holder_by_holder_on_the_card(driver: Driver, name: str) -> None:
    with find_defect(name).activate():
        subject = live(driver)
    assert {(item.resource, item.device, item.cause) for item in subject.findings} == {
        ("tensors", "cuda:0", "instance-attribute")
    }
    assert [(item.holder or "").rpartition(".")[2] for item in subject.findings].count("model_runner") == 1
    for finding in subject.findings:
        assert finding.stage in ("create", "infer")
        assert finding.remedy is not None
        assert finding.remedy.returns_bytes == finding.bytes


class KeepsItsMemory:
    """Has its weights in a pool of their own, and does nothing in a sleep."""

    def create(self) -> None:
        self.pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.pool):
            self.weights = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")

    def infer(self) -> Sequence[Sequence[int]]:
        return [[int(self.weights[:8].sum())]]

    def sleep(self, level: int) -> None:
        pass

    def wake(self, tags: Sequence[str] | None) -> None:
        pass

    def shutdown(self) -> None:
        del self.weights, self.pool


class Saved(KeepsItsMemory):
    """Has them with torch_memory_saver, as SGLang: they stay in a sleep, without memory behind them."""

    def create(self) -> None:
        self.saver = pytest.importorskip("torch_memory_saver").torch_memory_saver
        if self.saver._impl is None:
            self.saver.hook_mode = "torch"
        with self.saver.region(tag="weights"):
            self.weights = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")

    def sleep(self, level: int) -> None:
        self.saver.pause("weights")

    def wake(self, tags: Sequence[str] | None) -> None:
        self.saver.resume("weights")
        self.weights.fill_(1)

    def shutdown(self) -> None:
        del self.weights


@pytest.mark.parametrize(("life", "found"), [(KeepsItsMemory, ["tensors"]), (Saved, [])])
def test_a_pool_whose_memory_is_unmapped_asleep_gave_it_back(
    driver: Driver, life: type[KeepsItsMemory], found: list[str]
) -> None:
    run = LifecycleRun(
        "saved",
        life,
        device="cuda:0",
        driver=driver,
        cycles=2,
        script=("create", "infer", "sleep(1)", "wake", "shutdown"),
    )
    subject = run.run()
    assert [finding.resource for finding in subject.findings if finding.stage == "sleep(1)"] == found
    for stage in subject.stages:
        (ledger,) = [ledger for ledger in stage.after.ledgers if ledger.device == "cuda:0"]
        assert -16 * MIB < (ledger.unexplained or 0) < 64 * MIB
