"""What an engine in this process keeps of each inference is a leak of its life, though its shutdown gives it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Subject

pytestmark = pytest.mark.nightly

KIB = 1 << 10
LEFT: list[torch.Tensor] = []
RESULTS: list[torch.Tensor] = []


class Engine:
    """Keeps what `keeps` says, and infers with 2 KiB."""

    def __init__(self, keeps: str, device: str) -> None:
        self.keeps, self.device = keeps, device
        self.kept: list[torch.Tensor] = []
        self.results: list[torch.Tensor] | None = None
        self.inferred = 0

    def create(self, config: Mapping[str, Any]) -> None: ...

    def infer(self, prompt_lengths: Sequence[int] = (3,), max_tokens: int = 2) -> list[list[int]]:
        self.inferred += 1
        made = torch.ones(2 * KIB, dtype=torch.uint8, device=self.device)
        if self.keeps.startswith("each") or (self.keeps == "the first" and not self.kept):
            self.kept.append(made)
        elif self.keeps == "the last":
            self.kept = [made]
        elif self.keeps == "in a module":
            LEFT.append(made)
        elif self.keeps == "in a module for a life":
            RESULTS.append(made)
        if "garbage" in self.keeps:
            cycle: list[object] = [torch.ones(8 * KIB, dtype=torch.uint8)]
            cycle.append(cycle)
        return [list(range(max_tokens)) for _ in prompt_lengths]

    def shutdown(self) -> None:
        RESULTS.clear()
        if self.keeps != "each, for good":
            self.kept = []


class Life:
    """As `check` drives a target."""

    def __init__(self, keeps: str, engines: list[Engine], device: str) -> None:
        self.engine = Engine(keeps, device)
        engines.append(self.engine)

    def create(self) -> None: ...

    def infer(self) -> list[list[int]]:
        return self.engine.infer()

    def shutdown(self) -> None:
        self.engine.shutdown()


def lived(keeps: str, cycles: int = 3, infers: int = 1, device: str = "cpu") -> tuple[Subject, list[Engine]]:
    engines: list[Engine] = []
    script = ("create", *["infer"] * infers, "shutdown")
    run = LifecycleRun(
        "engine",
        lambda: Life(keeps, engines, device),
        device=device,
        driver=NoDriver("a test"),
        cycles=cycles,
        script=script,
    )
    return run.run(), engines


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    LEFT.clear()


@pytest.mark.parametrize(("cycles", "infers", "steps"), [(3, 1, 3), (1, 5, 4), (1, 2, 3)])
def test_what_each_inference_adds_to_an_engine_is_growth(cycles: int, infers: int, steps: int) -> None:
    subject, _ = lived("each", cycles, infers)
    assert len(subject.findings) == 1, subject.findings
    (finding,) = subject.findings
    assert (subject.outcome, finding.resource, finding.trend) == ("leak", "tensors", "growth")
    assert (finding.bytes, finding.count, finding.stage) == (steps * 2 * KIB, steps, "infer")
    assert finding.holder == "engine.kept"
    told = (
        f"tensors on cpu grow by 2.0 KiB with each infer, {steps * 2}.0 KiB in {steps} of {steps} that followed another"
    )
    assert finding.message.startswith(told)
    assert finding.process is None


def test_garbage_is_no_part_of_it() -> None:
    (finding,) = lived("each, and garbage")[0].findings
    assert (finding.bytes, finding.holder) == (3 * 2 * KIB, "engine.kept")


@pytest.mark.parametrize("keeps", ["nothing", "the first", "the last", "garbage", "in a module for a life"])
def test_what_does_not_add_up_is_none(keeps: str) -> None:
    subject, _ = lived(keeps, infers=2)
    assert (subject.outcome, subject.findings) == ("clean", ())


def test_it_infers_more_in_the_last_life_where_the_engine_keeps_some_of_its_last_inference() -> None:
    assert [engine.inferred for engine in lived("the last", infers=2)[1]] == [2, 2, 2]
    assert [engine.inferred for engine in lived("each", infers=2)[1]] == [2, 2, 4]
    assert [engine.inferred for engine in lived("in a module", infers=2)[1]] == [2, 2, 2]


def test_what_the_engine_still_keeps_after_its_shutdown_is_told_once() -> None:
    subject, _ = lived("each, for good", cycles=1, infers=5)
    (finding,) = subject.findings
    assert (finding.holder, finding.stage) == ("engine.kept", "infer")
    assert finding.message.startswith("10.0 KiB in 5 tensors on cpu")


def test_what_is_left_after_the_shutdown_is_told_by_that_alone() -> None:
    subject, _ = lived("in a module", infers=3)
    (finding,) = subject.findings
    assert (finding.resource, finding.holder) == ("tensors", f"{__name__}.LEFT")
    assert finding.message.startswith("18.0 KiB in 9 tensors on cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
@pytest.mark.parametrize("keeps", ["each", "the last"])
def test_the_same_on_a_card(keeps: str) -> None:
    found = [finding for finding in lived(keeps, device="cuda:0")[0].findings if finding.resource == "tensors"]
    assert [(finding.device, finding.holder) for finding in found] == [("cuda:0", "engine.kept")] * (keeps == "each")
