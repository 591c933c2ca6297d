"""Memory in other processes of the program: an engine there is never clean, and a helper is no engine."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from multiprocessing import get_context
from multiprocessing.pool import Pool
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from lowtide import LeakCheck, stage
from lowtide.leakcheck.lives.fuzz import fuzz
from lowtide.leakcheck.lives.lifecycle import check_run
from lowtide.leakcheck.processes import unmeasured_processes as unseen
from lowtide.leakcheck.processes.unmeasured_processes import UnmeasuredProcesses
from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.process_tree import ProcessMemory, ProcessTree
from lowtide.reports.outcomes import ENDED, judged_as, largest_of_each
from lowtide.reports.schema import LeaksFoundError, NotMeasured, OtherProcess, Subject
from tests.leakcheck.spawned_target import LEAKED, WEIGHTS, SmallHelper, SpawnedTarget
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly

MIB = 1 << 20
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    KEPT.clear()


def lived(target: type[SpawnedTarget], cycles: int = 1) -> Subject:
    return check_run("check", target, driver=NoDriver("a test"), cycles=cycles).run()


def process_of(missing: NotMeasured) -> OtherProcess:
    assert missing.process is not None
    return missing.process


def others(subject: Subject) -> list[OtherProcess]:
    return [missing.process for missing in subject.not_measured if missing.process is not None]


def test_a_life_whose_engine_is_in_a_child_is_not_judged() -> None:
    subject = lived(SpawnedTarget)
    assert (subject.outcome, subject.findings) == ("unsupported", ())
    (process,) = others(subject)
    assert process.name == "EngineCore"
    # Two infers and two more at the end, which nobody gives back.
    assert WEIGHTS + 4 * LEAKED < (process.host or 0) < WEIGHTS + 4 * LEAKED + 32 * MIB
    assert subject.reason.startswith(f"not judged: memory of pid {process.pid} (EngineCore): ")
    assert subject.reason.endswith(
        " MiB host; it infers too rarely to say whether it grows: run more cycles, so that three inferences follow "
        "another one"
    )


def test_a_ledger_between_two_stages_is_written_once() -> None:
    stages = check_run("life", SmallHelper, driver=NoDriver("none here"), cycles=2).run().stages
    first = [stage.name for stage in stages if stage.before.ledgers]
    assert first == ["create", "create"]
    assert all(stage.after.ledgers for stage in stages)


def test_a_life_with_a_small_helper_is_clean() -> None:
    subject = lived(SmallHelper)
    assert (subject.outcome, subject.reason, others(subject)) == ("clean", "", [])


class AlsoLeaks(SpawnedTarget):
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        KEPT.append(torch.ones(1000))
        return super().infer(prompt_lengths, max_tokens)


def test_a_leak_that_is_seen_is_a_leak_and_one_that_is_known_makes_nothing_clean() -> None:
    subject = lived(AlsoLeaks)
    assert (subject.outcome, len(others(subject))) == ("leak", 1)
    entries = [Suppression(id="known", reason="a test", fingerprint=found.fingerprint) for found in subject.findings]
    judged, _ = Suppressions(tuple(entries)).judge(subject, date(2026, 1, 1))
    assert judged.outcome == "unsupported"
    assert judged.reason.startswith("not judged: memory of pid ")


def test_random_lives_whose_engine_is_in_a_child_are_not_judged() -> None:
    found = fuzz(SpawnedTarget, examples=2, seed=1, steps=4)
    assert found.findings == ()
    # Each life has a process of its own: the largest is told.
    (missing,) = [missing for missing in found.not_measured if missing.process is not None]
    assert process_of(missing).name == "EngineCore"
    assert judged_as("clean", found.not_measured)[0] == "unsupported"


def checked(block: Callable[[], None]) -> Subject:
    with LeakCheck(settle=0.05) as check:
        block()
    (subject,) = check.report.subjects
    if subject.outcome == "unsupported":
        with pytest.raises(LeaksFoundError, match="not judged: memory of pid"):
            check.report.raise_for_leaks()
    return subject


def engine_with_stages() -> None:
    target = SpawnedTarget()
    with stage("create"):
        target.create({})
    for _ in range(2):
        with stage("infer"):
            target.infer([3], 1)
    target.shutdown()


def test_of_an_engine_in_a_child_that_has_ended_it_is_noted_that_its_growth_is_not_known() -> None:
    subject = checked(engine_with_stages)
    assert (subject.outcome, subject.findings, others(subject)) == ("clean", (), [])
    (missing,) = subject.not_measured
    assert missing.what.startswith("whether pid ")
    assert (" (EngineCore) grew while it ran" in missing.what, missing.why) == (True, ENDED)


def engine_that_slept() -> None:
    target = SpawnedTarget()
    target.create({})
    for name in ("infer", "sleep"):
        with stage(name):
            target.ask(name)
    target.shutdown()


def test_a_block_whose_engine_slept_in_a_child_is_not_judged_though_the_child_has_ended() -> None:
    subject = checked(engine_that_slept)
    assert (subject.outcome, subject.findings) == ("unsupported", ())
    assert [process.name for process in others(subject)] == ["EngineCore"]


def engine_without_stages() -> None:
    target = SpawnedTarget()
    target.create({})
    target.infer([3], 1)
    target.shutdown()


def test_of_an_engine_in_a_child_that_begins_and_ends_within_one_stage_the_same_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Beside a test runner that has grown to a gigabyte it is small.
    monkeypatch.setattr(unseen, "SHARE", 0.01)
    subject = checked(engine_without_stages)
    assert (subject.outcome, subject.findings, others(subject)) == ("clean", (), [])
    assert [missing.why for missing in subject.not_measured] == [ENDED]


def short_helpers() -> None:
    subprocess.run([sys.executable, "-c", "held = b'x' * (64 << 20)"], check=True)
    with (
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as helper,
        stage("beside it"),
    ):
        helper.communicate()


def square(number: int) -> int:
    gc.collect()
    return number * number


def forked_pool() -> None:
    pool: Pool
    with get_context("fork").Pool(2) as pool, stage("at work"):
        assert pool.map(square, range(3)) == [0, 1, 4]
    pool.join()


def data_workers() -> None:
    loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    with stage("an epoch"):
        assert len(list(loader)) == 8
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@pytest.mark.parametrize("block", [short_helpers, forked_pool, data_workers])
def test_helpers_and_workers_are_no_engines(block: Callable[[], None]) -> None:
    # In a process of its own: a fork that collects copies all pages with objects, which are more than the objects take
    # where other tests have freed most of a page.
    program = (
        f"from {__name__} import checked, others, {block.__name__} as block\n"
        # What a first use of these leaves is no matter here.
        "block()\n"
        "subject = checked(block)\n"
        "print(subject.outcome, others(subject), subject.findings)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (run.stdout, run.returncode) == ("clean [] ()\n", 0), run.stderr


class FakeTree:
    """What a look at the tree reads, as a test says."""

    def __init__(self, *processes: ProcessMemory, own: int = 400 * MIB) -> None:
        self.processes, self.own = processes, own

    def any_alive(self) -> bool:
        return True

    def read(self, ask: object, *, floor: int) -> tuple[int, list[ProcessMemory]]:
        return self.own, list(self.processes)

    def note(self, held: int | None = None) -> None: ...


def found_in(monkeypatch: pytest.MonkeyPatch, *looks: FakeTree) -> tuple[NotMeasured, ...]:
    seen = UnmeasuredProcesses(ProcessTree(), None)
    monkeypatch.setattr(unseen, "_is_helper", lambda pid: pid == 13)
    seen.begin()
    for tree in looks:
        vars(seen).update(_tree=tree, _memory=tree)
        seen.look(always=True)
    return seen.not_measured


def process(pid: int, size: int, cards: Mapping[str, int | None] | None = None, name: str = "python") -> ProcessMemory:
    return ProcessMemory(pid, name, size, size, size, cards or {})


@pytest.mark.parametrize(
    ("tree", "reported"),
    [
        (FakeTree(process(7, 60 * MIB)), True),
        (FakeTree(process(7, 40 * MIB)), False),
        (FakeTree(process(7, 30 * MIB), own=10 * MIB), False),
        (FakeTree(process(13, 600 * MIB)), False),
        (FakeTree(process(7, 1, {"cuda:0": 0})), True),
        (FakeTree(process(13, 1, {"cuda:0": None})), True),
    ],
    ids=["a tenth", "less than a tenth", "small", "helper", "context", "helper with a context"],
)
def test_a_context_or_a_tenth_of_the_memory_had_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, tree: FakeTree, *, reported: bool
) -> None:
    assert bool(found_in(monkeypatch, tree)) is reported


@pytest.mark.parametrize(
    ("size", "forked", "reported"),
    [(150 * MIB, False, False), (900 * MIB, False, True), (150 * MIB, True, True), (20 * MIB, True, False)],
    ids=["imports", "loads much", "forked with much of its own", "forked"],
)
def test_a_worker_of_a_data_loader_may_have_what_imports_take(
    monkeypatch: pytest.MonkeyPatch, size: int, *, forked: bool, reported: bool
) -> None:
    monkeypatch.setattr(unseen, "_is_data_worker", lambda pid: True)
    tree = FakeTree(msgspec.structs.replace(process(7, size), forked=forked))
    assert bool(found_in(monkeypatch, tree)) is reported


def test_a_worker_that_had_not_its_name_yet_is_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(unseen, "_is_data_worker", lambda pid: next(answers))
    tree = FakeTree(process(7, 150 * MIB))
    assert found_in(monkeypatch, tree, tree) == ()


def test_the_most_that_a_process_held_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    core = {"name": "VLLM::EngineCore"}
    reported = found_in(
        monkeypatch,
        FakeTree(process(7, 900 * MIB, {"cuda:0": 1 << 30}, **core)),
        FakeTree(process(7, 3174 * MIB, {"cuda:0": int(49.2 * (1 << 30))}, **core)),
        FakeTree(process(7, 200 * MIB, **core)),
    )
    assert judged_as("clean", reported) == (
        "unsupported",
        "not judged: memory of pid 7 (VLLM::EngineCore): 49.2 GiB on cuda:0, 3.1 GiB host; run the engine in this "
        "process (VLLM_ENABLE_V1_MULTIPROCESSING=0) to have it judged",
    )


def test_vllms_variable_is_named_where_its_process_has_no_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    (untitled,) = found_in(monkeypatch, FakeTree(process(7, 900 * MIB)))
    (sglang,) = found_in(monkeypatch, FakeTree(process(7, 900 * MIB, name="sglang::scheduler")))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in untitled.why
    assert "VLLM" not in sglang.why


def test_a_process_that_is_a_finding_is_not_reported_again() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as left:
        tree = FakeTree(process(left.pid, 900 * MIB))
        seen = UnmeasuredProcesses(ProcessTree(), None)
        vars(seen).update(_tree=tree, _memory=tree)
        seen.is_reported([left.pid])
        seen.look(always=True)
    assert seen.not_measured == ()


def test_looks_cost_a_share_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr(unseen.time, "perf_counter", lambda: seconds)
    monkeypatch.setattr(unseen, "child_processes", list)
    tree = FakeTree(process(7, 900 * MIB))
    seen = UnmeasuredProcesses(ProcessTree(), None)
    vars(seen).update(_tree=tree, _memory=tree, _spent=1.0)
    seen.look()
    assert seen.not_measured == ()
    seen.look(always=True)
    assert len(seen.not_measured) == 1


def test_a_new_child_is_looked_at_whatever_looks_have_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [7]
    monkeypatch.setattr(unseen.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(unseen, "child_processes", lambda: children)
    monkeypatch.setattr(unseen, "_is_helper", lambda pid: False)
    seen = UnmeasuredProcesses(ProcessTree(), None)
    vars(seen).update(_tree=FakeTree(), _memory=FakeTree(), _spent=1.0)
    seen.look()
    vars(seen).update(_memory=FakeTree(process(7, 900 * MIB)))
    seen.look()
    assert seen.not_measured == ()
    vars(seen).update(_memory=FakeTree(process(8, 900 * MIB)))
    children.append(8)
    seen.look()
    assert len(seen.not_measured) == 1


def test_a_look_during_a_look_is_none() -> None:
    class Asks(FakeTree):
        """As where the driver's library is imported for the first time, under a watch over imports."""

        def read(self, ask: object, *, floor: int) -> tuple[int, list[ProcessMemory]]:
            seen.look(always=True)
            return super().read(ask, floor=floor)

    tree = Asks(process(7, 900 * MIB))
    seen = UnmeasuredProcesses(ProcessTree(), None)
    vars(seen).update(_tree=tree, _memory=tree)
    seen.look(always=True)
    assert len(seen.not_measured) == 1


class ForkedByServer(SpawnedTarget):
    method = "forkserver"


def test_an_engine_that_the_fork_server_has_forked_is_no_server() -> None:
    (process,) = others(lived(ForkedByServer))
    assert process.name == "EngineCore"


class LeftWithServer(SmallHelper):
    method = "forkserver"

    def shutdown(self) -> None:
        KEPT.append(self.child)


def test_a_process_that_the_fork_server_has_forked_is_found_where_it_stays() -> None:
    with LeakCheck(settle=0.05) as check:
        target = LeftWithServer()
        target.create({})
        target.shutdown()
    (child,) = KEPT
    (found,) = [item for item in check.report.subjects[0].findings if item.resource == "processes"]
    assert (found.count, found.holder) == (1, f"{__name__}.KEPT[0]")
    child.kill()
    child.join()


def test_of_many_lives_of_one_program_the_largest_is_reported() -> None:
    def missing(pid: int, name: str, host: int) -> NotMeasured:
        return NotMeasured(what=str(pid), why="", process=OtherProcess(pid=pid, name=name, host=host))

    plain = NotMeasured(what="driver", why="none")
    given = [missing(1, "SpawnProcess-1", 5), plain, missing(2, "SpawnProcess-2", 7), missing(3, "ray", 1), plain]
    assert [item.what for item in largest_of_each(given)] == ["2", "driver", "3"]


def test_counters_that_were_just_read_say_whether_there_is_a_tree_and_what_is_held() -> None:
    held: list[int | None] = []

    class Asked(FakeTree):
        def any_alive(self) -> bool:
            raise AssertionError("the counters have it")

        note = staticmethod(held.append)

    tree = Asked(process(7, 60 * MIB))
    seen = UnmeasuredProcesses(ProcessTree(), None)
    vars(seen).update(_tree=tree, _memory=tree)
    seen.begin(5)
    seen.look(always=True, now=Counters({"processes": {}}, {"host-memory": 6}, {}, own=6))
    assert (held, seen.not_measured) == ([5, 6], ())
    seen.look(always=True, now=Counters({"processes": {"7": 1}}, {"host-memory": 7}, {}, own=7))
    assert len(seen.not_measured) == 1
