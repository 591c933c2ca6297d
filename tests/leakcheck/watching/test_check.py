"""`LeakCheck`: what a block of code leaves behind, in which stage, and what an error in the block makes of it."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

import lowtide
from lowtide import LeakCheck
from lowtide.leakcheck.watching.check import LeakCheckError
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Verdict
from lowtide.probes.heap.births import Births
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.probes.stages import stage
from lowtide.reports.schema import Finding, LeaksFoundError, NotMeasured, Subject
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly


class Engine:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def infer(self, *, keep: bool) -> None:
        made = torch.ones(1000)
        if keep:
            self.kept.append(made)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def subject(check: LeakCheck) -> Subject:
    (subject,) = check.report.subjects
    return subject


def stages_of(check: LeakCheck) -> list[tuple[str, int]]:
    """Stage and bytes of each finding about tensors."""
    findings: tuple[Finding, ...] = subject(check).findings
    return [(finding.stage, finding.bytes) for finding in findings if finding.resource == "tensors"]


def test_a_block_that_keeps_a_tensor_leaks(engine: Engine) -> None:
    with LeakCheck() as check:
        engine.infer(keep=True)
    assert subject(check).outcome == "leak"
    assert stages_of(check) == [("block", 4000)]


def test_a_block_s_leak_is_left_alone_unless_its_remedy_is_asked_for(engine: Engine) -> None:
    with LeakCheck() as check:
        engine.infer(keep=True)
    (finding,) = subject(check).findings
    assert (finding.remedy, finding.tried, finding.changed) == (None, (), ())
    assert len(engine.kept) == 1
    with LeakCheck(remedies=True) as check:
        engine.infer(keep=True)
    (finding,) = subject(check).findings
    # No expression leads to a fixture's value.
    assert (finding.remedy, finding.advice) == (None, "delete fixture 'engine'.kept[1]: tried, it returns 3.9 KiB")
    assert [item.returns_bytes for item in finding.tried] == [4000]
    assert len(finding.changed) == 1
    assert len(engine.kept) == 1


KEPT: list[torch.Tensor] = []


def test_what_would_give_it_back_is_said_with_the_leak_though_it_is_not_tried() -> None:
    with LeakCheck() as check:
        KEPT.extend(torch.zeros(1000) for _ in range(3))
    advice = f"{__name__}.KEPT.clear() (not tried)"
    (finding,) = subject(check).findings
    assert (finding.remedy, finding.advice) == (None, advice)
    with pytest.raises(LeaksFoundError, match=re.escape(f"held by {__name__}.KEPT; {advice}")):
        check.report.raise_for_leaks()
    KEPT.clear()


def test_a_block_that_keeps_nothing_is_clean(engine: Engine) -> None:
    with LeakCheck() as check:
        engine.infer(keep=False)
    assert subject(check).outcome == "clean"
    assert subject(check).findings == ()


def test_what_was_kept_before_the_block_is_not_the_block_s(engine: Engine) -> None:
    engine.infer(keep=True)
    with LeakCheck() as check:
        engine.infer(keep=False)
    assert subject(check).outcome == "clean"


def test_what_is_garbage_at_the_end_is_no_leak(engine: Engine) -> None:
    with LeakCheck() as check:
        engine.infer(keep=True)
        cycle: list[object] = [engine.kept]
        cycle.append(cycle)
        engine.kept = []
        del cycle
    assert subject(check).outcome == "clean"


@pytest.fixture
def done() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Layer(torch.nn.Module):
    """Is in a cycle with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000))
        self.weight.loader = self.load  # type: ignore[attr-defined]

    def load(self) -> None: ...


@pytest.mark.parametrize(("keeps", "outcome"), [(False, "clean"), (True, "leak")])
def test_what_is_garbage_once_other_garbage_has_died_is_no_leak(keeps: bool, outcome: str) -> None:
    """As vLLM's registry of layers holds a tied embedding: for as long as the output layer lives."""
    registry: weakref.WeakKeyDictionary[Layer, object] = weakref.WeakKeyDictionary()
    kept: list[Layer] = []
    with LeakCheck() as check:
        head, embedding = Layer(), Layer()
        registry[head] = embedding.load
        kept += [head] if keeps else []
        # To where only a full collection looks.
        gc.collect()
        del head, embedding
    assert subject(check).outcome == outcome


@pytest.mark.parametrize("ends", [True, False])
def test_a_thread_that_the_block_leaves_is_waited_for_and_then_reported(done: threading.Event, ends: bool) -> None:
    timer = threading.Timer(0.2, done.set)
    with LeakCheck(settle=1.0 if ends else 0.05) as check:
        threading.Thread(target=done.wait, daemon=True, name="left").start()
        if ends:
            timer.start()
    assert subject(check).outcome == ("clean" if ends else "leak")
    assert ["left (" in finding.message for finding in subject(check).findings] == ([] if ends else [True])
    timer.join() if ends else done.set()


@pytest.mark.parametrize(("tolerance", "outcome"), [(4000, "clean"), (3999, "leak")])
def test_as_much_as_is_tolerated_may_stay(engine: Engine, tolerance: int, outcome: str) -> None:
    with LeakCheck(tolerance=tolerance) as check:
        engine.infer(keep=True)
    assert subject(check).outcome == outcome


def test_the_block_has_its_name_in_the_report() -> None:
    with LeakCheck("load and serve") as check:
        pass
    assert subject(check).id == "load and serve"
    assert check.report.version == lowtide.__version__


# Stages.


def test_a_finding_has_the_stage_in_which_it_appeared(engine: Engine) -> None:
    with LeakCheck() as check:
        with stage("load"):
            engine.infer(keep=False)
        with stage("serve"):
            engine.infer(keep=True)
        engine.infer(keep=False)
    assert stages_of(check) == [("serve", 4000)]


def test_after_a_stage_it_is_the_block_again(engine: Engine) -> None:
    with LeakCheck() as check:
        with stage("load"):
            pass
        engine.infer(keep=True)
    assert stages_of(check) == [("block", 4000)]


def test_after_an_inner_stage_it_is_the_outer_one_again(engine: Engine) -> None:
    other = Engine()
    with LeakCheck() as check, stage("serve"):
        with stage("prefill"):
            engine.infer(keep=True)
        other.infer(keep=True)
    assert sorted(stages_of(check)) == [("serve", 4000), ("serve/prefill", 4000)]


def test_a_stage_that_raises_is_over_too(engine: Engine) -> None:
    with LeakCheck() as check:
        with pytest.raises(KeyError), stage("load"):
            raise KeyError
        engine.infer(keep=True)
    assert stages_of(check) == [("block", 4000)]


def test_the_stages_of_another_thread_are_not_the_block_s(engine: Engine) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with stage("elsewhere"):
            entered.set()
            leave.wait(HANG_S)

    thread = threading.Thread(target=other)
    with LeakCheck() as check:
        thread.start()
        assert entered.wait(HANG_S)
        engine.infer(keep=True)
        leave.set()
        thread.join()
    assert stages_of(check) == [("block", 4000)]


# An error in the block, and what remains of the watch.


def test_an_error_in_the_block_is_raised_and_reported_as_one(engine: Engine) -> None:
    def fails() -> None:
        engine.infer(keep=True)
        raise ValueError("of the block")

    check = LeakCheck()
    with pytest.raises(ValueError, match="of the block"), check:
        fails()
    assert subject(check).outcome == "error"
    assert subject(check).reason == "the block raised ValueError"
    assert subject(check).findings == ()


def test_there_is_no_report_before_the_end() -> None:
    check = LeakCheck()
    with pytest.raises(LeakCheckError, match="before the block has ended"):
        _ = check.report
    with check, pytest.raises(LeakCheckError, match="before the block has ended"):
        _ = check.report
    assert subject(check).outcome == "clean"


@pytest.mark.parametrize("fails", [True, False])
def test_after_the_block_nobody_watches(fails: bool) -> None:
    before = list(gc.callbacks)
    try:
        with LeakCheck():
            assert len(gc.callbacks) > len(before)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert gc.callbacks == before


def test_what_could_not_be_reported_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    excused = NotMeasured(what="driver cuda:0: 2 MiB", why="libcublas.so.12 was first used here")
    monkeypatch.setattr(Watch, "end", lambda _: Verdict(not_measured=(excused,)))
    with LeakCheck() as check:
        pass
    assert subject(check).not_measured == (excused,)


@pytest.mark.parametrize("leaks", [False, True])
def test_what_a_driver_does_not_tell_is_not_measured(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = CounterReader.read

    def silent(self: CounterReader, last: Counters | None = None) -> Counters:
        return replace(read(self, last), unmeasured={"driver cuda:0": "it is not listed"})

    monkeypatch.setattr(CounterReader, "read", silent)
    kept = []
    with LeakCheck() as check:
        if leaks:
            kept.append(torch.ones(1000))
    assert subject(check).not_measured == (NotMeasured(what="driver cuda:0", why="it is not listed"),)
    assert subject(check).outcome == ("leak" if leaks else "clean")


def test_an_interpreter_whose_collector_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.leakcheck.watching.check.young_generations_tell", lambda: False)
    with pytest.raises(LeakCheckError, match=r"needs CPython 3\.10 to 3\.13"), LeakCheck():
        pass


def test_a_stage_that_is_entered_in_a_loop_does_not_cost_a_look_for_the_dead_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[None] = []

    def slowly(self: Births) -> None:
        looks.append(None)
        time.sleep(0.4)

    monkeypatch.setattr(Births, "forget_dead", slowly)
    with LeakCheck():
        for _ in range(50):
            with stage("step"):
                pass
    # In the first second, and in a tenth of the time; by the watch of these tests too.
    assert 3 <= len(looks) <= 10


def test_a_block_that_ends_for_want_of_memory_says_who_held_it() -> None:
    def fill() -> None:
        weights = [torch.zeros(1 << 20) for _ in range(2)]  # noqa: F841
        with stage("load"):
            torch.empty(1 << 50)

    check = LeakCheck()
    with pytest.raises(RuntimeError), check:
        fill()
    found = subject(check).out_of_memory
    assert found is not None
    assert (found.device, found.stage, found.asked) == ("cpu", "load", 1 << 52)
    (weights,) = [part for part in found.held if part.bytes == 8 << 20]
    assert (weights.count, weights.stage) == (2, "block")
    assert str(weights.holder).endswith("fill() f_locals['weights']")


def test_a_block_that_goes_on_says_nothing_of_memory(engine: Engine) -> None:
    with LeakCheck() as check:
        with pytest.raises(RuntimeError), stage("load"):
            torch.empty(1 << 50)
        engine.infer(keep=False)
    assert (subject(check).outcome, subject(check).out_of_memory) == ("clean", None)
