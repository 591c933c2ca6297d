"""What the check itself has cost, as the last lines of a run say it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from lowtide.pytest_plugin import session_watch
from lowtide.pytest_plugin.session_watch import Spent
from tests.waiting import SleptClock

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import RunInner


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleptClock:
    clock = SleptClock()
    monkeypatch.setattr(session_watch, "time", clock)
    return clock


def test_blocks_add_up_and_what_is_inside_of_one_counts_once(clock: SleptClock) -> None:
    spent = Spent()
    for _ in range(2):
        with spent.on_judging(), spent.on_judging():
            clock.sleep(0.02)
    assert spent.judging == pytest.approx(0.04)
    assert spent.remedies == 0


def test_what_is_read_to_try_a_remedy_is_no_judging(clock: SleptClock) -> None:
    spent = Spent()
    with spent.on_remedies(), spent.on_judging():
        clock.sleep(0.01)
    assert (spent.judging, spent.remedies) == (0, 0.01)


def test_a_block_that_raises_ends_all_the_same(clock: SleptClock) -> None:
    spent = Spent()
    for _ in range(2):
        try:
            with spent.on_judging():
                raise ValueError
        except ValueError:
            pass
    with spent.on_judging():
        clock.sleep(0.01)
    assert spent.judging == 0.01


def test_the_seconds_of_all_workers_are_reported_together() -> None:
    spent = Spent(1.0, 0.5)
    spent.add(Spent(2.14, 5.9).both())
    assert str(spent) == "judging 3.1 s, remedies 6.4 s"


def test_a_run_ends_with_what_the_check_has_cost(run_inner: RunInner) -> None:
    done = run_inner({"test_one.py": "def test_clean(): pass\n"}, "-n", "1", using=["xdist"])
    assert re.search(r"1 judged, 0 with leaks\njudging \d+\.\d s, remedies 0\.0 s\n", done.out)


LEAKING = """
import functools
import torch

KEPT = []

class Model:
    def __init__(self): self.weight = torch.ones(64)
    @functools.lru_cache
    def supports(self, name): return True

def test_first(): KEPT.append(torch.ones(64))

def test_second(): Model().supports("tasks")

def test_clean(): torch.ones(64)
"""


def test_without_time_no_remedy_is_tried_and_each_verdict_stands(run_inner: RunInner) -> None:
    done = run_inner({"test_kept.py": LEAKING}, "--leakcheck-budget=0")
    assert re.search(
        r"\n2 remedies not tried: 0 s \(4 times --leakcheck-budget\) were over\n3 judged, 2 with", done.out
    )
    for name, holder in (("test_first", "test_kept.KEPT[0]"), ("test_second", "test_kept.Model.supports")):
        (finding,) = done.subject(f"test_kept.py::{name}").findings
        assert finding.remedy is None
        assert not finding.tried
        assert finding.advice is not None
        assert finding.advice.endswith("not tried: the time for remedies was over (--leakcheck-budget)")
        assert str(finding.holder).startswith(holder)
    assert not done.subject("test_kept.py::test_clean").findings


def test_with_time_every_remedy_is_tried(run_inner: RunInner) -> None:
    done = run_inner({"test_kept.py": LEAKING})
    assert "not tried" not in done.out
    for name in ("test_first", "test_second"):
        (finding,) = done.subject(f"test_kept.py::{name}").findings
        assert finding.remedy is not None


def test_a_budget_that_is_no_number_is_refused(run_inner: RunInner) -> None:
    done = run_inner({"test_one.py": "def test_clean(): pass\n"}, "--leakcheck-budget=soon")
    assert done.code == 4
    assert "--leakcheck-budget: 'soon' is no number of seconds" in done.err + done.out
