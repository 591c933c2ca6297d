"""What grows in another process, what does not, and what is not known; `make test` has one case of each."""

from __future__ import annotations

import pytest
import torch

from tests.leakcheck.processes.growing_child import MIB, Child, child

pytestmark = pytest.mark.nightly

__all__ = ["child"]


@pytest.mark.parametrize("what", ["leave one to the collector", "keep nothing"])
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
    # Of what was there before, it is not known either whether it should have come back.
    assert len(child.asked.not_judged) == 2 * (keeps and not ready)
    if keeps and not ready:
        missing, _ = child.asked.not_judged
        assert missing.what == f"what inferring has left asleep in pid {child.pid} (engine-core)"
        assert "let create return once it is" in missing.why


@pytest.mark.parametrize(("made", "more"), [("keep one", 1), ("keep the last", 0)])
def test_what_a_wake_makes_beside_what_the_sleep_has_kept_is_told_in_its_process(
    child: Child, made: str, more: int
) -> None:
    for stage, what in (("create", "keep the last"), ("sleep", "keep nothing"), ("wake", made)):
        child.asked.begin_stage(stage, 1)
        child.requests.send(what)
        assert child.requests.recv() == "done"
        child.asked.end_stage(stage)
        if stage == "sleep":
            child.asked.after_sleep(stage, 1, empties=False)
    assert [each.what for each in child.asked.not_judged] == [
        f"what sleep gives back on cpu in pid {child.pid} (engine-core): 0 B of 8.0 MiB came back"
    ]
    found = child.asked.more_awake("wake")
    assert [(each.bytes, each.stage, each.process and each.process.pid) for each in found] == (
        [(8 * MIB, "wake", child.pid)] * more
    )
    assert all("growing_child.KEPT" in str(each.holder) for each in found)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_tensors_that_each_inference_leaves_on_a_card_are_growth(child: Child) -> None:
    for _ in range(6):
        child.infer("keep one on a card")
    (finding,) = child.asked.findings_at_end()
    assert (finding.resource, finding.device, finding.count) == ("tensors", "cuda:0", 5)
    assert finding.holder is not None
    assert finding.holder.endswith("growing_child.KEPT")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_what_is_replaced_on_a_card_is_none(child: Child) -> None:
    for _ in range(6):
        child.infer("keep the last, on a card")
    assert child.asked.findings_at_end() == []
