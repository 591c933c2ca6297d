"""What tests leave in other processes: growth under a fixture, and what one test leaves in a process of nobody's."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from lowtide import LeakCheck
from lowtide.leakcheck.growth.quantities import HOST, SHARED
from lowtide.leakcheck.growth.series import LevelKey
from lowtide.leakcheck.processes.other_processes import OtherProcesses, _Outside
from lowtide.leakcheck.processes.process_growth import ProcessGrowth, growing_tensors
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding

MIB = 1 << 20

CHILD = ProcessName(pid=4711, name="engine-core")

KEPT: list[Any] = []


def turns(*levels: int | None, cards: bool = False) -> ProcessGrowth:
    """In MiB."""
    noted = ProcessGrowth("tests with module fixture 'engine'", of_tests=True)
    for turn, level in enumerate(levels, 1):
        size = None if level is None else level * MIB
        on_card = {LevelKey("driver", "cuda:0"): size} if cards else {}
        noted.note(CHILD, {HOST: 100 * MIB if cards else size, **on_card}, turn=turn)
    return noted


def test_a_level_that_rises_with_each_test_is_growth() -> None:
    noted = turns(100, 116, 132, 148)
    (finding,) = noted.findings()
    assert (finding.resource, finding.bytes, finding.trend) == ("host-memory", 48 * MIB, "growth")
    assert (finding.stage, noted.usual_step(finding)) == ("tests with module fixture 'engine'", 16 * MIB)
    assert "pid 4711 (engine-core): host memory +16.0 MiB in each of 3 tests" in finding.message
    (finding,) = turns(100, 116, 132, 148, cards=True).findings()
    assert (finding.resource, finding.device) == ("driver", "cuda:0")


def test_little_in_each_of_many_tests_is_growth_of_host_memory() -> None:
    (finding,) = turns(*range(100, 116)).findings()
    assert (finding.resource, finding.bytes, finding.count) == ("host-memory", 15 * MIB, 15)
    assert "host memory +1.0 MiB in each of 15 tests" in finding.message
    assert turns(*range(100, 116), cards=True).findings() == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (LevelKey("file-descriptors"), "+2 file descriptors in each of 9 tests"),
        (SHARED, "shared memory that it maps +2 B in each of 9 tests"),
    ],
)
def test_what_the_kernel_lists_of_a_process_grows_test_by_test(key: LevelKey, said: str) -> None:
    noted = ProcessGrowth("tests with module fixture 'engine'", of_tests=True)
    for turn in range(10):
        noted.note(CHILD, {key: 30 + 2 * turn}, turn=turn + 1)
    (finding,) = noted.findings()
    assert f"pid 4711 (engine-core): {said}" in finding.message
    assert (finding.resource, finding.bytes or finding.count) == (key.resource, 18)


def test_descriptors_that_come_and_go_or_are_opened_once_are_none() -> None:
    noted = ProcessGrowth("tests with module fixture 'engine'", of_tests=True)
    for turn, count in enumerate((30, 32, 34, 35, 33, 35, 34, 35, 33, 35), 1):
        noted.note(CHILD, {LevelKey("file-descriptors"): count}, turn=turn)
    assert noted.findings() == []


@pytest.mark.parametrize(
    "levels",
    [
        (100, 116, 132),
        (*range(100, 112), *[112] * 8),
        (100, 160, 161, 162, 163),
        (100, 116, 100, 116, 100, 116),
        (100, 140, 116, 156, 132, 172, 148, 188, 164),
        (100, 116, None, 148, 164),
    ],
    ids=["two steps", "filled slowly", "filled once", "up and down", "replaced by another size", "not always known"],
)
def test_other_levels_are_none(levels: tuple[int | None, ...]) -> None:
    assert turns(*levels).findings() == []


def test_a_process_may_get_its_title_late() -> None:
    noted = turns(100, 116)
    for turn, level in ((3, 132), (4, 148)):
        noted.note(ProcessName(pid=4711, name="VLLM::EngineCore"), {HOST: level * MIB}, turn=turn)
    (finding,) = noted.findings()
    assert finding.message.startswith("pid 4711 (VLLM::EngineCore): host memory +16.0 MiB in each of 3 tests")


def test_growth_that_tensors_explain_is_not_reported_again() -> None:
    assert turns(100, 116, 132, 148).findings(named={"cpu": 48 * MIB}) == []
    assert len(turns(100, 116, 132, 148).findings(named={"cpu": 8 * MIB})) == 1


def test_the_last_reading_of_a_test_counts() -> None:
    noted = turns(100, 116, 132)
    for level in (148, 164):
        noted.note(CHILD, {HOST: level * MIB}, turn=3)
    assert noted.findings() == []


def left(by_turn: dict[int, int]) -> list[tuple[Finding, dict[int, int]]]:
    finding = Finding(
        resource="tensors",
        cause="module-global",
        bytes=sum(by_turn.values()),
        count=len(by_turn),
        device="cpu",
        stage="test",
        message="as the process says",
        fingerprint="0" * 16,
        holder="engine.CACHE",
    )
    return [(finding, by_turn)]


def test_a_holder_that_keeps_some_of_each_test_grows() -> None:
    (finding,) = growing_tensors(left({2: MIB, 3: MIB, 4: MIB, 5: MIB}), [1, 2, 3, 4, 5], 0, CHILD, "tests")
    assert (finding.bytes, finding.count, finding.trend, finding.process) == (4 * MIB, 4, "growth", CHILD)
    assert "+1.0 MiB in each of 4 of 5 tests, 4.0 MiB on cpu in all, held by engine.CACHE" in finding.message


@pytest.mark.parametrize(
    ("by_turn", "tolerance"),
    [({1: MIB}, 0), ({8: MIB, 9: MIB, 10: MIB}, 0), (dict.fromkeys(range(1, 11), MIB), MIB)],
    ids=["filled once", "a full cache", "tolerated"],
)
def test_other_holders_do_not(by_turn: dict[int, int], tolerance: int) -> None:
    assert growing_tensors(left(by_turn), range(1, 11), tolerance, CHILD, "tests") == []


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of nobody's and without an agent."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("cards", "what"),
    [({"cuda:0": 1064 * MIB}, "1.0 GiB more memory on cuda:0"), ({"cuda:0": 60 * MIB}, ""), ({"cuda:0": None}, "")],
    ids=["more", "tolerated", "not known"],
)
def test_more_on_a_card_in_a_process_of_nobodys_is_not_judged(
    child: subprocess.Popen[bytes], cards: dict[str, int | None], what: str
) -> None:
    others = OtherProcesses(ProcessTree(), None, asks=True)
    before, now = _Outside(1, 0, {"cuda:0": 40 * MIB}), _Outside(1, 0, cards)
    assert others._left_in(child.pid, before, now) == []
    found = [item.what for item in others.not_measured]
    assert [bool(what) and what in text for text in found] == ([True] if what else [])


def keep_bytes(size: int) -> None:
    KEPT.append(bytearray(size))


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    """One process that is there before any block."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(time.sleep, 0).result()
        yield pool


@pytest.mark.nightly
def test_what_has_no_agent_and_grows_is_not_judged(pool: ProcessPoolExecutor) -> None:
    with LeakCheck("block") as check:
        pool.submit(keep_bytes, 160 * MIB).result()
    (subject,) = check.report.subjects
    assert subject.outcome == "unsupported"
    (item,) = [item for item in subject.not_measured if item.process is not None]
    assert "MiB more host memory than before the test" in item.what
    assert item.why.startswith("it has no agent")


def test_a_block_that_only_uses_such_a_process_is_clean(pool: ProcessPoolExecutor) -> None:
    with LeakCheck("block") as check:
        pool.submit(bytes, 16 * MIB).result()
    (subject,) = check.report.subjects
    assert (subject.outcome, subject.findings, subject.not_measured) == ("clean", (), ())


class Looks:
    """Stands in for `UnmeasuredProcesses`, and notes what it is asked."""

    on_cards = not_measured = ()

    def __init__(self) -> None:
        self.asked: list[object] = []

    def begin(self, held: int | None) -> None:
        self.asked.append(held)

    def look(self, *, always: bool, now: Counters | None) -> None:
        self.asked.append("look")


def counters(*pids: int, held: int) -> Counters:
    return Counters({"processes": {str(pid): 1 for pid in pids}}, {}, {}, own=held)


def test_nobody_is_asked_before_there_is_another_process_and_then_what_was_held_before_it_came_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = ProcessTree()
    # Other tests have started what lives as long as this process, as multiprocessing's resource tracker does.
    monkeypatch.setattr(tree, "any_alive", lambda: False)
    others, seen = OtherProcesses(tree, None), Looks()
    vars(others).update(unmeasured=seen)
    others.judge(())
    others.begin(counters(held=5))
    others.look(now=counters(held=6))
    assert (seen.asked, others.judge(()), others.not_measured, others.readings) == ([], (), (), ())
    others.begin(counters(held=7))
    others.look(now=counters(held=8))
    others.look(now=counters(4711, held=9))
    assert seen.asked == [8, "look"]


def test_the_test_after_one_that_left_a_process_is_asked_about_it(child: subprocess.Popen[bytes]) -> None:
    others, seen = OtherProcesses(ProcessTree(), None), Looks()
    vars(others).update(unmeasured=seen)
    others.judge(())
    # It may have ended between the two, and have left memory on a card.
    others.begin(counters(held=5))
    assert seen.asked == [5]
