"""Blocks that wait for a stream: no leak once emptying the cache gave them back, and in flight where it did not."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.judging.judge import judge
from lowtide.leakcheck.judging.ladder import LadderStep
from lowtide.leakcheck.judging.metrics import Reading, plain_metrics
from lowtide.leakcheck.resources.rule import Rung

METRICS = plain_metrics(["cuda:0"])
WAITING = Reading({"in-flight cuda:0": {"block at 0x3000": 4096}})
NOTHING = Reading()


def test_what_emptying_the_cache_gives_back_is_no_finding_and_is_reported() -> None:
    steps = [LadderStep(Rung.RAW, WAITING, 0.0), LadderStep(Rung.EMPTY_CACHE, NOTHING, 0.5)]
    judgement = judge(METRICS, NOTHING, steps, stage="call", cycle=1)
    assert judgement.findings == ()
    (back,) = judgement.returns
    assert (back.resource, back.device, back.bytes, back.rung) == ("tensors", "cuda:0", 4096, "empty_cache")


def test_what_waits_for_ever_is_in_flight() -> None:
    steps = [LadderStep(Rung.RAW, WAITING, 0.0), LadderStep(Rung.EMPTY_CACHE, WAITING, 0.5)]
    (finding,) = judge(METRICS, NOTHING, steps, stage="call", cycle=1).findings
    assert (finding.resource, finding.bytes, finding.verdict) == ("tensors", 4096, "in-flight")
    assert finding.cause == "pending-transfer"
    assert finding.message.startswith("4.0 KiB of memory that waits for a stream on cuda:0 did not come back at call")


@pytest.mark.parametrize("known", [WAITING, NOTHING])
def test_nothing_that_waits_is_nothing_to_tell(known: Reading) -> None:
    judgement = judge(METRICS, known, [LadderStep(Rung.RAW, NOTHING, 0.0)], stage="call", cycle=1)
    assert (judgement.findings, judgement.returns) == ((), ())
