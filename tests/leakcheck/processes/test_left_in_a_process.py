"""What another process keeps is named by its own agent, with when it appeared; and whether it grows."""

from __future__ import annotations

import pytest

from tests.leakcheck.processes.growing_child import MIB, Child, child

pytestmark = pytest.mark.nightly

__all__ = ["child"]


def test_what_a_process_keeps_is_named_and_nothing_where_it_keeps_nothing(child: Child) -> None:
    child.asked.begin_stage("infer", 1)
    assert child.asked.left(child.pid, None) == []
    child.infer("keep one", cycle=2)
    ((finding, by_cycle),) = child.asked.left(child.pid, None)
    assert by_cycle == {2: 8 * MIB}
    assert child.asked.left(child.pid, 1) == []
    assert finding.holder is not None
    assert finding.holder.endswith("growing_child.KEPT[0]")
    assert finding.process is not None
    assert (finding.process.pid, finding.process.name) == (child.pid, "engine-core")


def test_tensors_that_each_inference_leaves_are_growth_with_their_holder_and_without_garbage(child: Child) -> None:
    for _ in range(5):
        child.infer("keep one and leave one to the collector")
    (finding,) = child.asked.findings_at_end()
    assert (finding.resource, finding.stage, finding.trend) == ("tensors", "infer", "growth")
    assert (finding.bytes, finding.count) == (4 * 8 * MIB, 4)
    assert finding.holder is not None
    assert finding.holder.endswith("growing_child.KEPT")
    assert finding.message.startswith(f"pid {child.pid} (engine-core): tensors on cpu grow by 8.0 MiB with each infer")


def test_what_is_replaced_is_no_growth(child: Child) -> None:
    for _ in range(5):
        child.infer("keep the last")
    assert child.asked.findings_at_end() == []
    assert child.asked.not_measured == {}
