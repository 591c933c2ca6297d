"""Judging a climb: what is back at its rung is clean, what is back later is told with what brought it back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lowtide.leakcheck.judging import judge as budgets
from lowtide.leakcheck.judging.judge import UNTRIED, Budget, grouped, judge, missing, one_for_each_level, untried
from lowtide.leakcheck.judging.ladder import ACTIONS, LadderStep
from lowtide.leakcheck.judging.metrics import Metric, Reading, plain_metrics
from lowtide.leakcheck.resources.resource import Rung
from lowtide.reports.schema import Finding, Remedy
from tests.waiting import SleptClock


def metric(resource: Any = "tensors", **options: Any) -> Metric:
    return Metric(resource=resource, device="cuda:0", **{"key": resource, **options})


def levels(**amounts: int | None) -> Reading:
    return Reading(amounts=amounts)


def named(resource: Any, **options: Any) -> Metric:
    return Metric(resource=resource, device="", key=resource, is_named=True, **options)


def climbed_by_name(resource: str, *names: str) -> list[LadderStep[Reading]]:
    reading = Reading({resource: dict.fromkeys(names, 1)})
    return [LadderStep(rung, reading, 0.0) for rung in (Rung.RAW, Rung.SETTLE, Rung.COLLECT)]


def climbed(*readings: int | None, resource: str = "tensors", seconds: float = 1.0) -> list[LadderStep[Reading]]:
    """One step of a second per reading, `raw` first."""
    return [LadderStep(rung, levels(**{resource: now}), seconds) for rung, now in zip(Rung, readings, strict=False)]


def judged(known: Metric, *readings: int | None, baseline: int | None = 0) -> Any:
    steps = climbed(*readings, resource=known.resource)
    return judge([known], levels(**{known.resource: baseline}), steps, stage="shutdown", cycle=2)


RAW, SETTLE, COLLECT, UNFREEZE, IPC_COLLECT, EMPTY_CACHE = 0, 1, 2, 3, 4, 5


def test_what_is_back_at_once_is_clean_and_nothing_is_reported_of_it() -> None:
    judgement = judged(metric(), 0, 0, 0)
    assert (judgement.findings, judgement.returns, judgement.not_measured) == ((), (), ())


def test_less_than_before_is_back() -> None:
    assert judged(metric(), 5, baseline=10).findings == ()


def test_what_the_machine_does_not_say_is_not_judged_and_reported() -> None:
    for baseline, now in ((None, 3), (3, None)):
        judgement = judged(metric(), now, now, now, baseline=baseline)
        (unknown,) = judgement.not_measured
        assert (unknown.what, unknown.why) == ("tensors on cuda:0", "this machine does not say")
        assert (judgement.findings, judgement.returns) == ((), ())


def test_what_is_reported_at_first_and_not_later_has_not_come_back() -> None:
    (found,) = judged(metric(), 9, 7, None).findings
    assert (found.bytes, found.remedy) == (7, None)
    (found,) = judged(metric(), 7, None, None).findings
    assert (found.bytes, found.remedy) == (7, None)


@pytest.mark.parametrize(("back", "seconds"), [(SETTLE, 2.0), (COLLECT, 3.0)])
def test_what_is_back_at_its_rung_is_clean_with_the_time_that_it_took(back: int, seconds: float) -> None:
    readings = [10] * back + [0] * (COLLECT + 1 - back)
    judgement = judged(metric(), *readings)
    assert judgement.findings == ()
    (late,) = judgement.returns
    assert (late.resource, late.device, late.stage, late.cycle) == ("tensors", "cuda:0", "shutdown", 2)
    assert (late.bytes, late.rung, late.seconds) == (10, list(Rung)[back].value, seconds)


def test_what_is_back_at_a_later_rung_is_a_finding_with_what_brought_it_back() -> None:
    (found,) = judged(metric(), 10, 10, 10, 8, 8, 2, 1).findings
    assert found.remedy is None, "nothing is back as long as some of it stays"
    judgement = judged(metric(tolerance=2), 10, 10, 9, 8, 8, 2, 0)
    (found,) = judgement.findings
    # What counts is what was left when it had to be back.
    assert (found.bytes, found.count) == (9, 1)
    assert found.remedy == Remedy(action=ACTIONS[Rung.EMPTY_CACHE], returns_bytes=6)
    assert found.message == "9 B of tensors on cuda:0 still held after shutdown; torch.cuda.empty_cache() returns 6 B"
    (late,) = judgement.returns
    assert (late.bytes, late.rung, late.seconds) == (10, "empty_cache", 6.0)


def test_what_only_is_counted_has_no_bytes() -> None:
    judgement = judged(metric("threads", unit="threads"), 3, 3, 2, 2)
    (found,) = judgement.findings
    assert (found.bytes, found.count) == (0, 2)
    assert found.message == "2 threads still running after shutdown"
    (late,) = judged(metric("threads", unit="threads"), 3, 0).returns
    assert late.bytes == 0


@pytest.mark.parametrize(
    ("tolerance", "is_back"),
    [(9, False), (10, True), (11, True)],
)
def test_as_much_as_the_tolerance_may_stay(tolerance: int, is_back: bool) -> None:
    assert (judged(metric(tolerance=tolerance), 110, baseline=100).findings == ()) is is_back


def test_a_cause_that_says_something_stays_and_one_that_does_not_is_that_of_the_rung() -> None:
    readings = [10] * EMPTY_CACHE + [0]
    causes = {}
    for cause in ("unknown", "driver", "native"):
        (found,) = judged(metric(cause=cause), *readings).findings
        causes[cause] = found.cause
    assert causes == {"unknown": "allocator-cache", "driver": "allocator-cache", "native": "native"}


def test_that_native_code_holds_it_stays_true_whatever_made_that_let_go() -> None:
    readings = [10] * EMPTY_CACHE + [0]
    verdicts = {}
    for verdict in ("native-held", "unexplained"):
        (found,) = judged(metric(verdict=verdict), *readings).findings
        verdicts[verdict] = found.verdict
    assert verdicts == {"native-held": "native-held", "unexplained": "cached"}
    (found,) = judged(metric(verdict="unexplained"), 10, 10, 10).findings
    assert found.verdict == "unexplained"


def test_a_rung_tells_who_held_what_nobody_in_python_did() -> None:
    (found,) = judged(metric("reserved"), *[10] * EMPTY_CACHE, 0).findings
    assert (found.holder, found.advice) == ("torch's caching allocator", None)
    (found,) = judged(metric("tensors"), 10, 10, 10, 0).findings
    assert found.holder == "the heap frozen by gc.freeze()"
    (found,) = judged(metric("tensors"), 10, 10, 10, 10).findings
    assert found.holder is None


def test_of_what_nothing_in_the_process_gives_back_it_is_said_who_can() -> None:
    (found,) = judged(metric("driver", cause="driver"), 10, 10, 10).findings
    assert found.holder == "the driver or native code"
    assert found.advice is not None
    assert found.advice.endswith("what the driver keeps by itself ends with the process")
    steps = climbed_by_name("pinned", "ring at 0x10")
    (found,) = judge([named("pinned", cause="native")], Reading(), steps, stage="shutdown", cycle=1).findings
    assert found.advice == "release or deregister the memory before shutdown ends"


@pytest.mark.parametrize("cause", ["cuda-graph", "library-workspace", "unknown"])
def test_of_other_causes_nothing_is_advised(cause: Any) -> None:
    steps = climbed_by_name("pinned", "ring")
    (found,) = judge([named("pinned", cause=cause)], Reading(), steps, stage="shutdown", cycle=1).findings
    assert (found.holder, found.advice, found.remedy) == ("ring", None, None)
    (found,) = judged(metric("driver", cause=cause), 10, 10, 10).findings
    assert (found.holder, found.advice) == (None, None)


def test_what_is_new_by_name_is_named_and_what_went_hides_nothing() -> None:
    before = Reading({"threads": {"gone": 1, "gone too": 1}})
    steps = climbed_by_name("threads", "b", "a")
    (found,) = judge([named("threads", unit="threads")], before, steps, stage="call", cycle=1).findings
    assert (found.count, found.holder) == (2, "a, b")
    assert found.message == "2 threads still running after call: a, b"


def test_what_is_excused_counts_nowhere_as_the_counters_call_it() -> None:
    known = named("processes", unit="child processes", excused={"12"})
    steps = climbed_by_name("processes", "12 server", "13 worker")
    (found,) = judge([known], Reading(), steps, stage="shutdown", cycle=1).findings
    assert (found.count, known.read(steps[0].reading)) == (1, 1)
    assert [*known.new_items(Reading(), steps[0].reading)] == ["13 worker"]


@pytest.mark.parametrize(
    ("cause", "readings", "holder"),
    [
        ("library-workspace", [4, 4, 4, 4, 4, 4, 4, 0], "workspaces of BLAS libraries"),
        ("library-workspace", [4, 4, 4, 4], "block at 0x10"),
        ("native", [4, 4, 4, 4, 4, 4, 4, 0], "block at 0x10"),
    ],
)
def test_blocks_are_workspaces_only_if_clearing_those_gives_them_back(
    cause: Any, readings: list[int], holder: str
) -> None:
    steps = [
        LadderStep(rung, Reading({"tensors": {"block at 0x10": now} if now else {}}), 0.0)
        for rung, now in zip(Rung, readings, strict=False)
    ]
    known = metric(is_named=True, cause=cause)
    (found,) = judge([known], Reading(), steps, stage="call", cycle=1).findings
    assert found.holder == holder


def test_each_metric_is_judged_by_its_own_readings() -> None:
    late, unknown = metric("reserved", rung=Rung.EMPTY_CACHE), metric("arena")
    metrics = [unknown, late, metric("pinned"), metric("tensors")]
    steps = [
        LadderStep(rung, levels(pinned=0, tensors=5, reserved=7, arena=None), 1.0) for rung in list(Rung)[: COLLECT + 1]
    ]
    steps += [
        LadderStep(rung, levels(pinned=0, tensors=5, reserved=0, arena=None), 1.0)
        for rung in (Rung.UNFREEZE, Rung.EMPTY_CACHE)
    ]
    judgement = judge(metrics, levels(pinned=0, tensors=0, reserved=0), steps, stage="call", cycle=1)
    assert [(found.resource, found.bytes) for found in judgement.findings] == [("tensors", 5)]
    assert [(back.resource, back.bytes) for back in judgement.returns] == [("reserved", 7)]


def test_the_fingerprint_tells_resource_device_stage_and_cause_and_not_how_much() -> None:
    def mark(known: Metric, amount: int, stage: str = "call") -> str:
        (found,) = judge(
            [known],
            levels(**{known.resource: 0}),
            climbed(*[amount] * 3, resource=known.resource),
            stage=stage,
            cycle=1,
        ).findings
        return found.fingerprint

    same = mark(metric(), 10)
    assert mark(metric(), 20) == same
    others = [mark(metric("pinned"), 10), mark(metric(), 10, "wake"), mark(metric(cause="native"), 10)]
    assert len({same, *others}) == 4


# --- findings of one fingerprint -------------------------------------------------------------------------------------


def finding(amount: int, *, count: int = 1, remedy: bool = False, mark: str = "a") -> Finding:
    (found,) = judged(metric(), *[amount] * 3).findings
    reported = Remedy(action="x", returns_bytes=1) if remedy else None
    return msgspec.structs.replace(found, count=count, remedy=reported, fingerprint=mark)


def test_of_one_fingerprint_the_largest_with_a_remedy_stands_for_all() -> None:
    small, large, helped = finding(1), finding(9), finding(5, remedy=True)
    for order in ([small, large, helped], [helped, large, small], [large, helped, small]):
        assert grouped(order) == (helped,)
    assert grouped([small, large]) == grouped([large, small]) == (large,)
    assert grouped([finding(3, count=2), finding(3, count=4)])[0].count == 4


def test_of_equal_ones_the_first_stays_and_the_order_is_that_of_first_appearance() -> None:
    first, again = finding(3), msgspec.structs.replace(finding(3), message="again")
    (kept,) = grouped([first, again])
    assert kept is first
    marks = [found.fingerprint for found in grouped([finding(1, mark="b"), finding(2, mark="a"), finding(3, mark="b")])]
    assert marks == ["b", "a"]


def test_findings_about_one_level_are_one_and_what_has_names_stays_apart() -> None:
    later, named, first = finding(5, mark="late"), finding(2, mark="named"), finding(3, mark="first")
    level: Any = "pinned"
    assert one_for_each_level([first, named, later], {"first": level, "late": level}) == (later, named)
    assert one_for_each_level([first, named, later], {"first": level}) == (first, named, later)


def test_missing_is_what_is_above_its_baseline_and_can_be_read() -> None:
    metrics = [metric("tensors"), metric("reserved"), metric("pinned"), metric("arena", tolerance=4)]
    now = levels(tensors=5, reserved=3, pinned=None, arena=4)
    found = missing(metrics, levels(tensors=0, reserved=3, pinned=0, arena=0), now)
    assert [(item.metric.resource, item.above) for item in found] == [("tensors", 5)]


def test_each_finding_has_its_metric_and_the_metrics_key() -> None:
    metrics = [metric("tensors", key="a"), metric("reserved", key="b"), metric("arena", key="c")]
    steps = [LadderStep(rung, levels(a=1, b=0, c=2), 1.0) for rung in Rung]
    judgement = judge(metrics, levels(a=0, b=0, c=0), steps, stage="shutdown", cycle=1)
    assert [metric.key for metric in judgement.metrics] == ["a", "c"]
    assert judgement.metrics == (metrics[0], metrics[2])


def test_without_a_limit_it_is_never_spent() -> None:
    assert not Budget().is_spent
    assert not Budget().within(100.0).is_spent


def test_it_is_spent_when_its_seconds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleptClock()
    monkeypatch.setattr(budgets, "time", clock)
    budget = Budget(0.02)
    assert not budget.is_spent
    clock.sleep(0.03)
    assert budget.is_spent


def test_a_part_ends_with_the_whole() -> None:
    assert Budget(0.0).within(100.0).is_spent
    assert Budget(100.0).within(0.0).is_spent


def test_an_advice_that_was_not_tried_stays_advice() -> None:
    assert untried("detach it") == f"detach it ({UNTRIED})"
    assert untried(None) == UNTRIED


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
    assert finding.message.startswith("4.0 KiB of memory that waits for a stream on cuda:0 still held after call")


@pytest.mark.parametrize("known", [WAITING, NOTHING])
def test_nothing_that_waits_is_nothing_to_tell(known: Reading) -> None:
    judgement = judge(METRICS, known, [LadderStep(Rung.RAW, NOTHING, 0.0)], stage="call", cycle=1)
    assert (judgement.findings, judgement.returns) == ((), ())
