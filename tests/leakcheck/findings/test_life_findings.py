"""What several lives leave in tensors: whether it grows, who holds it since when, what gives it back, and how much."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.judging.owners import Claims
from lowtide.leakcheck.judging.storages import read_heap
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.heap.births import Births
from lowtide.probes.objects.listed import frozen_by_program
from lowtide.reports.schema import Finding, Remedy, Subject
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly

GROWS: list[Any] = []
ONCE: dict[str, Any] = {}
REPLACED: dict[str, Any] = {}
LATE: list[Any] = []
ALTERNATING: list[Any] = []
ONE: dict[int, Any] = {}
OTHER: dict[int, Any] = {}
ENGINES: dict[str, Any] = {}
GIVEN_BACK: list[Any] = []

SEEN: list[dict[str, int]] = []
"""What each life finds of the earlier ones' leaks when it begins."""

PLANTED: list[Any] = []


@functools.lru_cache(maxsize=16)
def cached(size: int, life: int) -> torch.Tensor:
    return numbers(size)


def numbers(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


class Quiet:
    """An engine without memory of its own, which gives the same tokens in every life."""

    number = 0

    def __init__(self) -> None:
        type(self).number += 1

    def create(self) -> None: ...

    def infer(self) -> Sequence[Sequence[int]]:
        return [[1, 2, 3]]

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


class Part:
    """An object with tensors."""


class Grown:
    """What there are ever more of."""


class Leaky(Quiet):
    """Leaks in many ways, each in its stage and its lives."""

    number = 0

    def create(self) -> None:
        SEEN.append({"GROWS": len(GROWS), "cached": cached.cache_info().currsize})
        GROWS.append(numbers(1001))
        cached(1002, self.number)
        both = numbers(1003)
        ONE[self.number] = OTHER[self.number] = both
        PLANTED.extend(Grown() for _ in range(200))
        if self.number == 1:
            GIVEN_BACK.append(numbers(1007))

    def infer(self) -> Sequence[Sequence[int]]:
        if self.number == 1:
            ONCE["table"] = numbers(1004)
        if self.number == 2:
            GIVEN_BACK.clear()
        return super().infer()

    def wake(self) -> None:
        REPLACED["buffer"] = numbers(1005)

    def shutdown(self) -> None:
        if self.number != 2:
            ALTERNATING.append(numbers(1006))


def forget() -> None:
    for container in (GROWS, ONCE, REPLACED, LATE, ALTERNATING, ONE, OTHER, ENGINES, GIVEN_BACK, SEEN, PLANTED):
        container.clear()
    cached.cache_clear()


def live(make: Callable[[], Any], cycles: int) -> Subject:
    gc.collect()
    make.number = 0  # type: ignore[attr-defined]
    try:
        driver, script = NoDriver("a test"), ("create", "infer", "sleep(1)", "wake", "shutdown")
        return LifecycleRun("life", make, device="cpu", driver=driver, cycles=cycles, script=script).run()
    finally:
        gc.unfreeze()


@pytest.fixture(scope="module")
def three_lives() -> Iterator[Subject]:
    forget()
    yield live(Leaky, 3)
    forget()


def held_by(subject: Subject, name: str) -> Finding:
    (found,) = [finding for finding in subject.findings if f".{name}" in str(finding.holder)]
    return found


def remedy(action: str, size: int) -> Remedy:
    return Remedy(action=action.replace("~", __name__), returns_bytes=size)


def hops(finding: Finding) -> list[tuple[str, bool, int | None]]:
    return [(hop.edge, hop.suspect, hop.retains_bytes) for hop in finding.path]


# --- over three lives -----------------------------------------------------------------------------------------------


def test_what_every_life_leaves_grows(three_lives: Subject) -> None:
    found = held_by(three_lives, "GROWS")
    assert (found.trend, found.bytes, found.count, found.stage) == ("growth", 3 * 1001, 3, "create")
    assert (found.cause, found.holder, found.verdict) == ("module-global", f"{__name__}.GROWS", "reachable")
    assert found.remedy == remedy("~.GROWS.clear()", 3 * 1001)
    assert found.tried == (found.remedy,)


def test_a_cache_that_every_life_fills_grows(three_lives: Subject) -> None:
    found = held_by(three_lives, "cached")
    assert (found.trend, found.cause, found.bytes) == ("growth", "lru-cache", 3 * 1002)
    assert found.remedy == remedy("~.cached.cache_clear()", 3 * 1002)


def test_what_only_the_first_life_leaves_is_residue(three_lives: Subject) -> None:
    found = held_by(three_lives, "ONCE")
    assert (found.trend, found.bytes, found.count, found.stage) == ("residue", 1004, 1, "infer")
    assert found.holder == f"{__name__}.ONCE['table']"
    assert found.remedy == remedy("del ~.ONCE['table']", 1004)


def test_what_each_life_replaces_is_bounded(three_lives: Subject) -> None:
    found = held_by(three_lives, "REPLACED")
    assert (found.trend, found.bytes, found.count, found.stage) == ("bounded", 1005, 1, "wake")
    assert found.remedy == remedy("del ~.REPLACED['buffer']", 1005)


def test_what_some_lives_leave_is_bounded(three_lives: Subject) -> None:
    found = held_by(three_lives, "ALTERNATING")
    assert (found.trend, found.bytes, found.count) == ("bounded", 2 * 1006, 2)


def test_what_a_shutdown_makes_is_there_since_then(three_lives: Subject) -> None:
    assert held_by(three_lives, "ALTERNATING").stage == "shutdown"


def test_what_a_later_life_gives_back_is_reported_and_bounded(three_lives: Subject) -> None:
    found = held_by(three_lives, "GIVEN_BACK")
    assert (found.trend, found.bytes, found.stage, found.remedy) == ("bounded", 1007, "create", None)


def test_nothing_is_given_back_before_the_last_life_has_ended(three_lives: Subject) -> None:
    assert three_lives.outcome == "leak"
    assert SEEN == [
        {"GROWS": 0, "cached": 0},
        {"GROWS": 1, "cached": 1},
        {"GROWS": 2, "cached": 2},
    ]
    # And then all of it is.
    assert (GROWS, ONCE, REPLACED, cached.cache_info().currsize) == ([], {}, {}, 0)


def test_each_finding_is_one_however_many_lives_there_were(three_lives: Subject) -> None:
    marks = [finding.fingerprint for finding in three_lives.findings]
    assert len(marks) == len(set(marks)) == 7


def test_the_findings_say_what_they_changed(three_lives: Subject) -> None:
    assert held_by(three_lives, "cached").changed == (f"{__name__}.cached is empty",)
    assert held_by(three_lives, "REPLACED").changed == (f"{__name__}.REPLACED['buffer'] is deleted",)
    assert sorted(held_by(three_lives, "GROWS").changed) == [f"{__name__}.GROWS[{n}] is deleted" for n in range(3)]


def test_bytes_with_two_holders_count_once_and_are_said_to_be_shared(three_lives: Subject) -> None:
    (found,) = [finding for finding in three_lives.findings if finding.bytes == 3 * 1003]
    assert (found.shared_bytes, found.count, found.trend) == (3 * 1003, 3, "growth")
    assert [retained for _, suspect, retained in hops(found) if suspect] == [0]
    assert [tried.returns_bytes for tried in found.tried] == [0, 3 * 1003]
    assert found.remedy is not None
    assert {f"{__name__}.ONE.clear()", f"{__name__}.OTHER.clear()"} == set(found.remedy.action.split("; "))


def test_an_edge_retains_what_goes_with_it_to_the_byte(three_lives: Subject) -> None:
    assert hops(held_by(three_lives, "REPLACED"))[-1] == ("['buffer']", True, 1005)
    assert hops(held_by(three_lives, "cached"))[-1] == ("lru_cache value", True, 3 * 1002)
    assert hops(held_by(three_lives, "GROWS"))[-1][1:] == (True, 1001)


def test_the_types_that_grew_in_the_last_life_are_listed(three_lives: Subject) -> None:
    (row,) = [row for row in three_lives.type_growth if row.type == f"{__name__}.Grown"]
    assert (row.before, row.after, row.since, row.until) == (400, 600, "before cycle 3", "after shutdown")


# --- over fewer lives -----------------------------------------------------------------------------------------------


class Sharing(Quiet):
    """Keeps objects with tensors, one of them kept elsewhere too, and many results in a cache."""

    number = 0

    def create(self) -> None:
        for number in range(16):
            cached(10, number)
        part: Any = Part()
        part.small, part.large, part.shared = numbers(100), numbers(5000), numbers(30)
        ENGINES["last"] = part
        LATE.extend([part.shared, numbers(60)])


@pytest.fixture(scope="module")
def one_life() -> Iterator[Subject]:
    forget()
    yield live(Sharing, 1)
    forget()


def test_only_what_is_shared_counts_as_shared(one_life: Subject) -> None:
    late, engine = held_by(one_life, "LATE"), held_by(one_life, "ENGINES")
    assert (late.bytes, late.shared_bytes) == (90, 30)
    assert (engine.bytes, engine.shared_bytes) == (5100, 0)
    assert late.remedy == remedy("~.LATE.clear()", 90)


def test_an_edge_retains_what_lies_behind_it_and_is_not_shared(one_life: Subject) -> None:
    assert hops(held_by(one_life, "ENGINES"))[:3] == [
        (__name__, False, None),
        (".ENGINES", False, None),
        ("['last']", True, 5100),
    ]
    assert hops(held_by(one_life, "cached"))[-1] == ("lru_cache value", True, 160)


def test_every_suspect_edge_of_a_path_says_what_it_retains(one_life: Subject) -> None:
    assert hops(held_by(one_life, "ENGINES"))[3:] == [(".large", True, 5000)]


class Keeps(Quiet):
    """Leaks in every life, and once more in its first."""

    number = 0

    def create(self) -> None:
        GROWS.append(numbers(2001))
        if self.number == 1:
            ONCE["first"] = numbers(2002)


@pytest.fixture
def forgetful() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("cycles", "of_each", "of_the_first"), [(1, None, None), (2, None, "residue")])
def test_two_lives_tell_residue_and_one_tells_nothing(cycles: int, of_each: object, of_the_first: object) -> None:
    subject = live(Keeps, cycles)
    assert held_by(subject, "GROWS").trend == of_each
    assert held_by(subject, "ONCE").trend == of_the_first
    assert held_by(subject, "GROWS").count == cycles


@pytest.mark.usefixtures("forgetful")
def test_lives_that_leave_nothing_say_nothing_of_types() -> None:
    class Clean(Quiet):
        number = 0

        def create(self) -> None:
            PLANTED.extend(Grown() for _ in range(200))

    subject = live(Clean, 2)
    assert (subject.outcome, subject.findings, subject.type_growth) == ("clean", (), ())


@pytest.mark.usefixtures("forgetful")
def test_a_life_that_fails_is_the_last_one_and_its_leaks_are_tried() -> None:
    class Fails(Keeps):
        number = 0

        def wake(self) -> None:
            if self.number == 2:
                raise MemoryError("no room")

    subject = live(Fails, 5)
    assert subject.reason == "cycle 2: wake raised MemoryError: no room; 1 whole cycle was judged"
    assert held_by(subject, "GROWS").remedy == remedy("~.GROWS.clear()", 2 * 2001)
    assert held_by(subject, "ONCE").trend == "residue"


class Handed(Quiet):
    """Keeps a tensor in the engine itself, which its caller still has."""

    number = 0

    def create(self) -> None:
        self.weights = {"layer": numbers(3001)}


@pytest.mark.usefixtures("forgetful")
def test_what_the_engine_still_holds_is_distinguished_from_the_engine_and_given_back() -> None:
    (found,) = live(Handed, 1).findings
    assert found.holder == "engine.weights['layer']"
    assert found.remedy is not None
    assert found.remedy.returns_bytes == 3001
    assert hops(found)[0][0] == "engine"


class Finisher(threading.Thread):
    """Holds its arguments until somebody waits for its end."""

    def __init__(self, *args: object) -> None:
        self.ready, self.over = threading.Event(), threading.Event()
        super().__init__(target=self.hold, args=args, name="finisher", daemon=True)

    def hold(self, *_: object) -> None:
        self.ready.set()
        self.over.wait(HANG_S)

    def join(self, timeout: float | None = None) -> None:
        self.over.set()
        super().join(timeout)


class Worker(Quiet):
    """A thread holds a tensor, and ends after shutdown, when it is waited for."""

    def create(self) -> None:
        thread = Finisher(numbers(4001))
        thread.start()
        assert thread.ready.wait(HANG_S)


@pytest.mark.usefixtures("forgetful")
def test_a_thread_that_ends_late_gives_it_back_when_it_is_joined() -> None:
    (found,) = [finding for finding in live(Worker, 1).findings if finding.resource == "tensors"]
    assert (found.cause, found.holder) == ("thread", "thread 'finisher'")
    assert found.remedy == remedy(
        "next(thread for thread in threading.enumerate() if thread.name == 'finisher').join()", 4001
    )


# --- by itself ------------------------------------------------------------------------------------------------------


@contextmanager
def opened() -> Iterator[LeftoverTensors]:
    births = Births()
    leftovers = LeftoverTensors(births, AllocationStacks(card=False))
    leftovers.open()
    try:
        yield leftovers
    finally:
        births.stop()


@pytest.fixture
def leftovers() -> Iterator[LeftoverTensors]:
    forget()
    with opened() as made:
        yield made
    gc.unfreeze()
    forget()


def concluded(leftovers: LeftoverTensors, devices: Collection[str]) -> tuple[list[Finding], tuple[str, ...]]:
    engine = object()
    return leftovers.conclude(leftovers.leaks_at_end(engine, 1, devices), engine, 1)


def test_what_was_there_before_is_nobodys() -> None:
    forget()
    GROWS.append(numbers(10))
    with opened() as leftovers:
        leftovers.stage("create", 1)
        GROWS.append(numbers(20))
        leftovers.read(Rung.RAW)
        findings, actions = concluded(leftovers, {"cpu"})
    assert [(finding.bytes, finding.stage) for finding in findings] == [(20, "create")]
    assert actions == (f"del {__name__}.GROWS[1]",)
    assert [tensor.numel() for tensor in GROWS] == [10]
    forget()


def test_a_life_that_is_explained_is_not_changed(leftovers: LeftoverTensors) -> None:
    leftovers.stage("create", 1)
    GROWS.append(numbers(10))
    (found,) = leftovers.explain(object(), 1, {"cpu"})
    assert (found.holder, found.remedy, found.tried, found.trend) == (f"{__name__}.GROWS[0]", None, (), None)
    assert len(GROWS) == 1


def test_a_life_is_reported_of_what_it_left_itself(leftovers: LeftoverTensors) -> None:
    for life in (1, 2):
        leftovers.stage("create", life)
        GROWS.append(numbers(10 * life))
        (found,) = leftovers.explain(object(), life, {"cpu"})
        assert (found.bytes, found.count) == (10 * life, 1)


def test_where_nothing_is_missing_nothing_is_explained(leftovers: LeftoverTensors) -> None:
    leftovers.stage("create", 1)
    GROWS.append(numbers(10))
    assert leftovers.explain(object(), 1, set()) == []


def test_what_takes_the_place_of_what_an_earlier_stage_let_go_is_of_its_own_stage(leftovers: LeftoverTensors) -> None:
    leftovers.stage("wake", 1)
    gone = numbers(52)
    leftovers.stage("infer", 1)
    place = id(gone)
    del gone
    leftovers.stage("shutdown", 1)
    made = [numbers(53)]
    while id(made[-1]) != place and len(made) < 1000:
        made.append(numbers(53))
    assert id(made[-1]) == place
    leftovers.read(Rung.RAW)
    findings, _ = concluded(leftovers, {"cpu"})
    assert [finding.stage for finding in findings if finding.bytes == 53 * len(made)] == ["shutdown"]


def test_without_a_freeze_there_is_nothing_to_thaw(leftovers: LeftoverTensors) -> None:
    leftovers.stage("create", 1)
    leftovers.read(Rung.RAW)
    assert not leftovers.thaw()


def test_a_freeze_that_hides_garbage_is_undone_and_that_gives_it_back(leftovers: LeftoverTensors) -> None:
    leftovers.stage("create", 1)
    knot: dict[str, Any] = {"tensor": numbers(40)}
    knot["itself"] = knot
    del knot
    gc.freeze()
    leftovers.stage("infer", 1)
    leftovers.read(Rung.RAW)
    assert leftovers.thaw()
    findings, _ = concluded(leftovers, set())
    (found,) = [finding for finding in findings if finding.bytes == 40]
    assert (found.cause, found.verdict) == ("frozen-garbage", "frozen-garbage")
    assert found.remedy == remedy("gc.unfreeze(); gc.collect()", 40)
    assert frozen_by_program(gc.get_freeze_count()) == 0


@pytest.mark.parametrize("freezes", [False, True])
def test_a_view_made_later_makes_no_storage_younger(freezes: bool) -> None:
    """VLLM's buffers are made before it freezes its heap, and each step views the next of them anew."""
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark("create")
        kept = [torch.zeros(1000)]
        gc.collect()
        if freezes:
            gc.freeze()
        births.begin("infer")
        kept.append(kept[0][:10])
        kept.append(torch.zeros(20))
        held = read_heap(births, Claims(()), (), ()).held
    finally:
        births.stop()
        gc.unfreeze()
    stages = {storage.key[1]: storage.stage for storage in held}
    assert stages[kept[0].data_ptr()] == "create"
    assert stages[kept[2].data_ptr()] == "infer"
