"""What other processes keep on a card while they sleep, and whether they grow: by levels alone."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import re
import subprocess
import sys
from multiprocessing import shared_memory

import msgspec
import pytest

from lowtide.leakcheck.findings.life_findings import has_slept
from lowtide.leakcheck.growth.quantities import HOST, IN_USE, SHARED
from lowtide.leakcheck.growth.series import LevelKey
from lowtide.leakcheck.processes import process_growth
from lowtide.leakcheck.processes.engine_processes import EngineProcesses
from lowtide.leakcheck.processes.messages import Levels
from lowtide.leakcheck.processes.process_growth import (
    CountedThings,
    ProcessGrowth,
    Turns,
    growing_holder,
    grown_under,
    held_by,
    levels_of,
    mappings_of,
    shared_bytes,
)
from lowtide.leakcheck.processes.process_levels import ProcessLevels, SleptLevels
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes.agents import Agents
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, Hop
from lowtide.reports.statement import HolderFacts, Note

MIB = 1 << 20


def grown(*lives: tuple[int, ...], tensors: int = 0) -> ProcessGrowth:
    """Levels in MiB after the inferences of each life, which has a process of its own."""
    growth = ProcessGrowth()
    for number, levels in enumerate(lives):
        for turn, level in enumerate(levels):
            process = ProcessName(pid=100 + number, name=f"worker {number}")
            growth.note(process, levels_of(level * MIB, turn * tensors * MIB, {}))
    return growth


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param([(100, 116, 132, 148)], id="one life"),
        pytest.param([(100, 116), (101, 117), (99, 115)], id="three lives of two inferences"),
        pytest.param([(100, 116, 132), (100, 117, 133)], id="about the same"),
    ],
)
def test_what_each_inference_adds_is_growth(lives: list[tuple[int, ...]]) -> None:
    growth = grown(*lives)
    (finding,) = growth.findings()
    steps = sum(len(levels) - 1 for levels in lives)
    assert (finding.resource, finding.trend, finding.count) == ("host-memory", "growth", steps)
    assert abs(finding.bytes - steps * 16 * MIB) <= 2 * MIB
    assert "host memory that is under no tensor grows by 16.0 MiB with each infer" in finding.message
    assert set(growth.judged) == {100 + number for number in range(len(lives))}


def answering(added: int, turns: int) -> ProcessGrowth:
    """A process that says what its heaps have given out, and takes pages to answer that it gives back some day."""
    growth, taken = ProcessGrowth(), itertools.accumulate(random.Random(1).choice((0, 0, 6, -5)) for _ in range(turns))
    for turn, pages in enumerate(taken):
        in_use = 300 * MIB + turn * added
        growth.note(WORKER, levels_of(in_use + 200 * MIB + pages * MIB, 0, {}, in_use))
    return growth


def test_what_is_hidden_by_the_pages_that_answers_take_shows_in_what_the_heaps_have_given_out() -> None:
    (finding,) = answering(360_000, 60).findings()
    assert (finding.resource, finding.device, finding.trend) == ("host-memory", "cpu", "growth")
    assert "host memory that is under no tensor grows by 351.6 KiB with each infer" in finding.message
    assert answering(0, 60).findings() == []


@pytest.mark.parametrize(("added", "turns", "told"), [(20_000, 500, 1), (20_000, 300, 0), (12_000, 900, 0)])
def test_of_many_turns_each_may_add_less_as_what_the_heaps_have_given_out_is_exact(
    added: int, turns: int, told: int
) -> None:
    assert len(answering(added, turns).findings()) == told


def test_less_than_an_inference_may_add_is_growth_in_many_of_them() -> None:
    (finding,) = grown(tuple(range(100, 120))).findings()
    assert (finding.bytes, finding.count, finding.trend) == (19 * MIB, 19, "growth")
    assert "grows by 1.0 MiB with each infer, 19.0 MiB in 19 of 19" in finding.message


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param((*range(100, 112), *[112] * 10), id="fills"),
        pytest.param((100, 103, 101, 102, 100, 103, 102, 101, 103, 100, 102, 103), id="wanders"),
        pytest.param((*range(100, 106), *range(100, 106), *range(100, 106), *range(100, 106)), id="saw"),
        pytest.param(tuple(100 + turn // 4 for turn in range(20)), id="too little in all"),
    ],
)
def test_what_does_not_keep_on_rising_is_none(levels: tuple[int, ...]) -> None:
    assert grown(levels).findings() == []


def test_what_fills_once_in_some_of_many_processes_is_no_growth() -> None:
    """A host copy that a first reload takes in lives that have one: 5 of 45 steps add 8 MiB, here and there."""
    growth = grown(*([(100, 100, 100)] * 4 + [(100, 108)]) * 5)
    assert growth.findings() == []
    assert len(growth.judged) == 25


@pytest.mark.parametrize(
    ("lives", "tensors"),
    [
        pytest.param([(100, 300, 300, 301, 300)], 0, id="fills once"),
        pytest.param([(100, 103, 107, 110)], 0, id="within what is allowed"),
        pytest.param([(100, 116, 100, 116, 100)], 0, id="comes and goes"),
        pytest.param([(100, 116, 132, 148)], 16, id="tensors, which are followed by themselves"),
    ],
)
def test_what_does_not_repeat_is_none(lives: list[tuple[int, ...]], tensors: int) -> None:
    growth = grown(*lives, tensors=tensors)
    assert growth.findings() == []
    assert set(growth.judged) == {100}


def test_what_another_life_gives_back_hides_no_growth() -> None:
    (finding,) = grown((100, 116, 132, 148), (600, 100, 100)).findings()
    assert (finding.bytes, finding.count) == (48 * MIB, 3)
    assert finding.process == ProcessName(pid=100, name="worker 0")


def test_one_rank_may_grow_alone() -> None:
    growth = ProcessGrowth()
    for turn in range(4):
        for rank in range(4):
            level = 100 + (16 * turn if rank == 1 else 0)
            growth.note(ProcessName(pid=100 + rank, name=f"VLLM::Worker_TP{rank}"), {HOST: level * MIB})
    (finding,) = growth.findings()
    assert (finding.bytes, finding.count) == (48 * MIB, 3)
    assert finding.process == ProcessName(pid=101, name="VLLM::Worker_TP1")


def test_a_heap_that_is_trimmed_corrects_what_came_before() -> None:
    growth = grown((100, 116, 132, 148))
    (process,) = growth.suspects
    growth.correct(process, {HOST: 101 * MIB})
    assert (growth.findings(), list(growth.suspects)) == ([], [])


def test_what_was_free_from_the_beginning_hides_no_growth() -> None:
    growth = grown((100, 108, 116, 124))
    (process,) = growth.suspects
    growth.correct(process, {HOST: 118 * MIB})
    (finding,) = growth.findings()
    assert (finding.bytes, finding.count) == (18 * MIB, 3)


def test_two_steps_say_nothing() -> None:
    growth = grown((100, 116), (100, 116))
    assert growth.findings() == []
    assert (set(growth.judged), set(growth.noted)) == (set(), {100, 101})


def test_the_fingerprint_is_that_of_the_role_and_not_of_the_process() -> None:
    first, second = (grown((100, 116, 132, 148)), grown((5, 5), (100, 116, 132, 148)))
    assert first.findings()[0].fingerprint == second.findings()[0].fingerprint


@pytest.mark.parametrize(
    ("at_work", "asleep", "found"),
    [
        # vLLM 0.24 with 1B shapes on an H200: what stays is the context and what libraries hold.
        (6866 * MIB, 942 * MIB, None),
        (6866 * MIB, 6866 * MIB, 5000 * MIB),
        (6866 * MIB, 1866 * MIB + 2000 * MIB, None),
        (6866 * MIB, 1866 * MIB + 3000 * MIB, 3000 * MIB),
        (None, None, None),
    ],
    ids=["sleeps", "keeps all", "gives more than half", "keeps more than half", "the driver does not say"],
)
def test_on_a_card_the_driver_says_what_a_sleep_has_kept(
    at_work: int | None, asleep: int | None, found: int | None
) -> None:
    levels = Levels(tensors={"cuda:0": 5000 * MIB}, arenas={}, reserved={"cuda:0": 5000 * MIB}, has_torch=True)
    before = ProcessLevels(ProcessName(pid=7, name="VLLM::EngineCore"), levels, {"cuda:0": at_work})
    now = ProcessLevels(ProcessName(pid=7, name="VLLM::EngineCore"), levels, {"cuda:0": asleep})
    slept = SleptLevels.between(before, now, "cuda", 0)
    kept = None if slept is None or has_slept(slept.at_work, slept.asleep) else slept.asleep
    assert kept == found


def test_the_first_inference_after_a_sleep_is_no_growth_and_stages_inside_one_do_not_matter() -> None:
    """What one sleep brings for good is there once, however many lives have one."""
    growth = ProcessGrowth()
    for life in range(3):
        process = ProcessName(pid=100 + life, name="core")
        for level, again in ((100, False), (3000, False), (3000, True), (3001, True)):
            growth.note(process, {HOST: level * MIB}, again=again)
    assert growth.findings() == []
    assert set(growth.judged) == {100, 101, 102}


WORKER = ProcessName(pid=100, name="worker 0")


def grown_tensors(*sizes: dict[str, int]) -> ProcessGrowth:
    """Bytes under tensors by device, after each of some inferences."""
    growth = ProcessGrowth()
    for tensors in sizes:
        growth.note(WORKER, levels_of(100 * MIB, 0, tensors))
    return growth


def test_tensors_that_each_inference_leaves_are_growth_however_small() -> None:
    (finding,) = grown_tensors(*({"cpu": MIB, "cuda:0": MIB + 2048 * turn} for turn in range(8))).findings()
    assert (finding.resource, finding.device, finding.trend) == ("tensors", "cuda:0", "growth")
    assert (finding.bytes, finding.count) == (7 * 2048, 7)
    told = "tensors on cuda:0 grow by 2.0 KiB with each infer, 14.0 KiB in 7 of 7 that followed another one"
    assert finding.message == f"{WORKER.text}: {told}"


def test_of_growth_with_few_inferences_it_is_said_how_few() -> None:
    (finding,) = grown_tensors(*({"cpu": MIB + 2048 * (turn // 3)} for turn in range(16))).findings()
    told = "tensors on cpu grow by 2.0 KiB with one infer in 3, 10.0 KiB in 5 of 15 that followed another one"
    assert finding.message == f"{WORKER.text}: {told}"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([64, 64, 64, 64, 64], id="the same"),
        pytest.param([64, 128, 128, 128, 128], id="fills once"),
        pytest.param([64, 128, 64, 128, 64], id="comes and goes"),
        pytest.param([64, 96, 128, 0, 96], id="goes"),
    ],
)
def test_tensors_that_do_not_repeat_are_none(sizes: list[int]) -> None:
    growth = grown_tensors(*({"cpu": size} if size else {} for size in sizes))
    assert (growth.findings(), growth.suspects) == ([], [])


def test_garbage_that_a_collection_frees_is_no_growth() -> None:
    growth = grown_tensors(*({"cpu": size} for size in (64, 128, 192, 256)))
    assert growth.suspects == [WORKER]
    growth.correct(WORKER, levels_of(100 * MIB, 0, {}))
    assert (growth.findings(), growth.suspects) == ([], [])


def holder(name: str, *turns: int, device: str = "cpu", size: int = 8) -> tuple[Finding, dict[int, int]]:
    finding = Finding(
        resource="tensors",
        cause="module-global",
        bytes=size * len(turns),
        count=len(turns),
        device=device,
        stage="infer",
        message="",
        fingerprint=name,
        holder=name,
    )
    return finding, dict.fromkeys(turns, size)


FIRST_ALONE, CACHE_OF_ONE, EACH, LARGER = (
    holder("workspace", 1, size=1 << 30),
    holder("cache", 6, size=1 << 20),
    holder("KEPT", 1, 2, 3, 4, 5, 6),
    holder("engine.kept", 2, 3, 5, 6, size=16),
)


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ([FIRST_ALONE, CACHE_OF_ONE, EACH], "KEPT"),
        ([EACH, LARGER], "engine.kept"),
        ([holder("KEPT", 2, 3, 4, device="cuda:0")], None),
        ([holder("", 2, 3, 4)], None),
        ([FIRST_ALONE, CACHE_OF_ONE], None),
        ([], None),
    ],
    ids=[
        "what is filled once, or replaced, is not to blame",
        "the largest",
        "another device",
        "nobody",
        "once",
        "none",
    ],
)
def test_to_blame_is_who_keeps_some_of_most_inferences(
    left: list[tuple[Finding, dict[int, int]]], named: str | None
) -> None:
    facts = growing_holder(left, holder("", *range(2, 7))[0])
    assert (None if facts is None else facts.note.holder) == named


@pytest.mark.parametrize(("adding", "named"), [(5, "images"), (40, None)])
def test_of_turns_that_seldom_add_to_blame_is_who_keeps_what_these_do(adding: int, named: str | None) -> None:
    left = [holder("images", 2, 11, 20, 29, 47), holder("cache", 48, size=1 << 20)]
    facts = growing_holder(left, holder("", *range(adding))[0])
    assert (None if facts is None else facts.note.holder) == named


def test_growth_that_two_holders_keep_has_two_fingerprints() -> None:
    (finding,) = grown_tensors(*({"cpu": turn} for turn in range(1, 6))).findings()
    facts = [growing_holder([each], finding) for each in (EACH, LARGER)]
    named = [held_by(finding, each) for each in facts if each is not None]
    assert [each.holder for each in named] == ["KEPT", "engine.kept"]
    assert len({finding.fingerprint, *(each.fingerprint for each in named)}) == 3


def test_growth_of_host_memory_is_not_advised_to_let_go_of_the_arrays_that_are_there() -> None:
    (finding,) = grown((100, 116, 132, 148)).findings()
    note = Note("; held by ", "kept")
    facts = HolderFacts(note=note, cause="frame", verdict=None, path=(), advice="let go of kept in teardown")
    named = held_by(finding, facts)
    assert named.holder == "kept"
    assert named.advice == "let go of what each request adds when it ends, or bound what is kept"


def under(root: str, name: str, *turns: int) -> tuple[Finding, dict[int, int]]:
    finding, sizes = holder(name, *turns)
    return msgspec.structs.replace(finding, path=(Hop(type="object", edge=root),)), sizes


def test_growth_under_an_engine_is_told_by_each_of_its_parts_that_keeps_it() -> None:
    left = [
        under("engine", "engine.kept", 1, 2, 3, 4, 5),
        under("engine", "engine.log", 2, 3, 4, 5),
        under("engine", "engine.last", 5),
        under("engine", "engine.first", 1),
        under("test_it", "test_it.RESULTS", 1, 2, 3, 4, 5),
    ]
    found = grown_under("engine", left, Turns(count=5, again=[2, 3, 4, 5]))
    assert [(each.holder, each.bytes, each.count, each.process) for each in found] == [
        ("engine.kept", 4 * 8, 4, None),
        ("engine.log", 4 * 8, 4, None),
    ]
    assert found[0].message == (
        "tensors on cpu grow by 8 B with each infer, 32 B in 4 of 4 that followed another one, held by engine.kept"
    )
    assert grown_under("engine", left, Turns(count=3, again=[2, 3])) == []


def test_of_inferences_count_those_that_followed_another_one() -> None:
    inferences = Turns()
    for stage in ("create", "infer", "infer", "sleep(1)", "wake", "infer", "step", "infer", "infer"):
        inferences.after(stage)
    assert (inferences.count, inferences.again) == (5, [2, 4, 5])


def test_what_inferences_add_after_which_nothing_is_read_is_none_of_the_next_one_s() -> None:
    processes = EngineProcesses(ProcessTree(), Agents(), "cpu", lambda: NoDriver("a test"))
    for passed in (0, 0, 8, 0):
        if passed:
            processes.pass_over(passed)
        processes.end_stage("infer")
    assert (processes._growth.turns.again, processes._turn) == ([2, 4], 12)


def test_of_what_a_process_says_its_heaps_have_given_out_what_is_free_in_them_is_not_in_use() -> None:
    processes = EngineProcesses(ProcessTree(), Agents(), "cpu", lambda: NoDriver("a test"))
    heaps = {"Python's heap in use": 5, "malloc in use": 7, "malloc's heap, free": 90, "Python's heap, free": 9}
    now = ProcessLevels.of(
        os.getpid(), Levels(tensors={}, arenas={}, reserved={}, has_torch=True, resident=0, heaps=heaps), {}
    )
    assert processes._levels(now, now.levels)[IN_USE] == 12


def test_of_updates_count_all_but_the_first_with_whatever_between_two() -> None:
    updates = Turns("update_weights")
    for stage in ("create", "infer", "update_weights", "sleep(1)", "wake", "infer", "update_weights", "update_weights"):
        updates.after(stage)
    assert (updates.count, updates.again) == (3, [2, 3])
    updates.after("create")
    updates.after("update_weights")
    assert (updates.count, updates.again) == (4, [2, 3])


def test_inferences_of_a_loop_with_updates_between_them_are_judged() -> None:
    inferences = Turns()
    for stage in ("infer", "update_weights", "infer", "infer"):
        inferences.after(stage)
    assert inferences.again == [2, 3]


def test_inferences_of_a_loop_that_sleeps_between_them_are_judged_from_its_second_turn_on() -> None:
    inferences = Turns()
    turn = ("infer", "sleep(1)", "train", "wake", "update_weights")
    for stage in ("create", *3 * turn, "infer", "sleep(2)", "wake", "infer", "sleep(1)", "wake", "infer"):
        inferences.after(stage)
    # Of the other level of sleep it is the first one.
    assert inferences.again == [3, 4, 6]
    for stage in ("shutdown", "create", *2 * turn):
        inferences.after(stage)
    assert (inferences.count, inferences.again) == (8, [3, 4, 6])


@pytest.mark.parametrize(
    ("levels", "resources"),
    [
        ((SHARED,), ["shared-memory"]),
        # Pages of a mapping that nobody else maps are this process's own, too; and a tensor over it is the whole tale.
        ((SHARED, HOST), ["shared-memory"]),
        ((SHARED, HOST, LevelKey("tensors", "cpu")), ["tensors"]),
        ((SHARED, LevelKey("tensors", "cuda:0")), ["shared-memory", "tensors"]),
        ((HOST,), ["host-memory"]),
    ],
)
def test_what_lies_under_several_levels_is_told_once(levels: tuple[LevelKey, ...], resources: list[str]) -> None:
    growth = ProcessGrowth("update_weights")
    process = ProcessName(pid=812, name="lowtide::Engine")
    for turn in range(6):
        growth.note(process, dict.fromkeys(levels, turn * (8 << 20)), again=turn > 0)
    found = growth.findings()
    assert sorted(finding.resource for finding in found) == resources
    assert {finding.stage for finding in found} == {"update_weights"}
    assert all("grow" in finding.message and "with each update_weights" in finding.message for finding in found)


MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapping = mmap.mmap(file.fileno(), 8192)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_who_else_maps_a_file_is_told_by_number() -> None:
    file = os.memfd_create("lowtide-test-bucket")
    os.ftruncate(file, 8192)
    path = f"/proc/{os.getpid()}/fd/{file}"
    child = subprocess.Popen([sys.executable, "-c", MAPS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        alone = mappings_of(child.pid, {os.getpid(), child.pid})
        with mmap.mmap(file, 8192):
            shared = mappings_of(child.pid, {os.getpid(), child.pid})
        assert (shared_bytes(child.pid), shared_bytes(2**22 + 1)) == (8192, None)
        child.stdin.close()
    os.close(file)
    assert alone is not None
    assert shared is not None
    assert alone.note.holder == "1 mapping of /memfd:lowtide-test-bucket (deleted), which nobody else maps"
    assert shared.note.holder == (
        f"1 mapping of /memfd:lowtide-test-bucket (deleted), mapped by pid {os.getpid()}, too"
    )
    assert mappings_of(2**22 + 1, {os.getpid()}) is None


def test_many_mappings_with_a_name_each_are_told_together() -> None:
    buckets = [shared_memory.SharedMemory(create=True, size=1 << 20) for _ in range(3)]
    facts = mappings_of(os.getpid(), {os.getpid()})
    for each in buckets:
        each.close()
        each.unlink()
    assert facts is not None
    assert re.match(r"\d+ mappings as /dev/shm/", facts.note.holder), facts.note.holder


def test_what_a_process_has_is_listed_again_once_something_has_come_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []
    listing = process_growth.things_of
    monkeypatch.setattr(process_growth, "things_of", lambda pid: (listed.append(pid), listing(pid))[1])
    descriptors, threads = LevelKey("file-descriptors"), LevelKey("threads")
    things = CountedThings(lambda pid, asked: None)

    def levels() -> list[int]:
        found = things.all_levels(child.pid)
        return [found[key] or 0 for key in (descriptors, threads, SHARED)]

    steps = """
import mmap, os, sys, threading, time
KEPT = []

def bucket():
    path = f"/dev/shm/lowtide_test_{os.getpid()}"
    number = os.open(path, os.O_RDWR | os.O_CREAT)
    os.unlink(path)
    os.ftruncate(number, 1 << 20)
    mapped = mmap.mmap(number, 1 << 20)
    os.close(number)
    return mapped

for step in (
    lambda: os.open("/dev/null", os.O_RDONLY),
    lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(),
    # No page of it is touched.
    bucket,
):
    print(flush=True)
    sys.stdin.readline()
    KEPT.append(step())
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", steps], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        first = levels()
        assert levels() == first
        assert len(listed) == 1
        for added in ((1, 0, 0), (1, 1, 0), (1, 1, MIB)):
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            assert [now - then for now, then in zip(levels(), first, strict=True)] == [*added]
        child.communicate()
