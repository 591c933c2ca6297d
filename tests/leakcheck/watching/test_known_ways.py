"""What hangs on a way that was explained before: reported as by a walk of the whole heap, and without one."""

from __future__ import annotations

import atexit
import gc
import os
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.resources.resource import Change
from lowtide.leakcheck.watching import judgement
from lowtide.leakcheck.watching import watch as watching
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.heap import holders as heap
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.graph import Graph
from lowtide.reports.schema import Finding

pytestmark = pytest.mark.nightly


class Model:
    def __init__(self) -> None:
        self.weight = torch.ones(8)
        self.parts = [torch.ones(2)]


class Cycle:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.ones(3)


@dataclass
class Judged:
    """What a test was found to have left.

    Attributes:
        findings: what was found.
        walks: how many walks of the whole heap that took.
        collections: how many full collections.
    """

    findings: tuple[Finding, ...]
    walks: int
    collections: int

    @property
    def holders(self) -> list[str | None]:
        return sorted(finding.holder or "" for finding in self.findings)


class Session:
    """Judges pieces of a program one after the other, as the tests of one session."""

    def __init__(self, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = program
        self.walks = self.collections = 0
        self.patience = 0.01
        self.watch = Watch(Policy(card=False, settle=self.patience, remedies="later"))
        graph, collect = heap.Graph, watching.collect

        def walked(*args: Any) -> Graph:
            self.walks += 1
            return graph(*args)

        def collected(*args: Any) -> None:
            self.collections += 1
            collect(*args)

        monkeypatch.setattr(heap, "Graph", walked)
        monkeypatch.setattr(watching, "collect", collected)

    def judge(self, test: Callable[[Any], object]) -> Judged:
        self.walks = self.collections = 0
        self.watch.begin(module="test_program.py")
        test(self.program)
        findings = self.watch.end().findings
        return Judged(findings, self.walks, self.collections)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    module = types.ModuleType("program")
    vars(module).update(FIRST=[], SECOND=[], OLD=torch.ones(50))
    sys.modules["program"] = module
    session = Session(module, monkeypatch)
    session.watch.open()
    yield session
    session.watch.close()
    del sys.modules["program"]


def keep(program: Any) -> None:
    program.FIRST.append(torch.ones(4))


def test_a_leak_whose_holder_is_known_takes_no_walk_and_no_full_collection(session: Session) -> None:
    first, later = session.judge(keep), session.judge(keep)
    # That it is no table of a library's shows without a walk.
    assert (first.walks, first.collections) == (1, 1)
    assert (later.walks, later.collections) == (0, 0)
    assert (first.holders, later.holders) == (["program.FIRST[0]"], ["program.FIRST[1]"])
    (one,), (other,) = first.findings, later.findings
    assert one.fingerprint == other.fingerprint
    assert [hop.retains_bytes for hop in other.path] == [hop.retains_bytes for hop in one.path] == [None, None, 16]
    assert one.message.replace("[0]", "[1]") == other.message


def test_what_was_left_is_seen_to_be_held_where_it_was(session: Session) -> None:
    left = []
    for test in (keep, keep, lambda program: program.SECOND.append(Cycle())):
        session.watch.begin(module="test_program.py")
        test(session.program)
        left.append(session.watch.end().unproven.tensors)
    session.walks = 0
    assert [session.watch.are_held(leaks) for leaks in left] == [True, True, True]
    del session.program.FIRST[0], session.program.SECOND[0]
    # The second one has moved, and the third one is garbage that only a full collection would find.
    assert [session.watch.are_held(leaks) for leaks in left[1:]] == [True, False]
    assert session.walks == 0


def test_so_it_is_in_a_frozen_heap_with_a_frozen_holder(session: Session) -> None:
    gc.freeze()
    try:
        first, later = session.judge(keep), session.judge(keep)
    finally:
        gc.unfreeze()
    assert (first.walks > 0, later.walks, later.collections) == (True, 0, 0)
    (one,), (other,) = first.findings, later.findings
    assert one.message.replace("[0]", "[1]") == other.message
    assert (one.verdict, other.verdict) == ("frozen-holder", "frozen-holder")
    assert (one.cause, one.fingerprint) == (other.cause, other.fingerprint)


def test_it_is_reported_with_what_is_new_on_the_way_and_with_its_own_bytes(session: Session) -> None:
    session.judge(keep)
    found = session.judge(lambda program: program.FIRST.append({"model": Model()}))
    assert found.walks == 0
    assert [(finding.bytes, finding.count) for finding in found.findings] == [(40, 2)]
    assert found.holders == ["program.FIRST[1]['model']"]


def test_a_large_one_explains_the_memory_that_the_process_has_more(session: Session) -> None:
    session.judge(keep)
    found = session.judge(lambda program: program.FIRST.append(torch.ones(24 << 20)))
    assert ([finding.bytes for finding in found.findings], found.walks) == ([96 << 20], 0)

    def with_plain_memory(program: Any) -> None:
        program.FIRST.append(torch.ones(4))
        program.SECOND.append(b"x" * (96 << 20))

    found = session.judge(with_plain_memory)
    assert sorted(finding.resource for finding in found.findings) == ["host-memory", "tensors"]

    def with_plain_memory_in_garbage(program: Any) -> None:
        with_plain_memory(program)
        old, program.SECOND = program.SECOND, []
        old.append(old)

    # What the earlier one has left is in it, too.
    found = session.judge(with_plain_memory_in_garbage)
    assert [finding.resource for finding in found.findings] == ["tensors"]


def test_another_holder_is_explained_by_a_walk(session: Session) -> None:
    session.judge(keep)
    found = session.judge(lambda program: program.SECOND.append(torch.ones(4)))
    assert (found.holders, found.walks > 0) == (["program.SECOND[0]"], True)

    def in_both(program: Any) -> None:
        program.FIRST.append(torch.ones(4))
        program.SECOND.append(torch.ones(4))

    again = session.judge(in_both)
    assert (again.holders, again.walks) == (["program.FIRST[1]", "program.SECOND[1]"], 0)
    assert len({finding.fingerprint for finding in again.findings}) == 2


def test_what_something_else_holds_too_is_explained_by_a_walk(session: Session) -> None:
    session.judge(keep)

    def keep_twice(program: Any) -> None:
        program.FIRST.append(torch.ones(4))
        program.SECOND.append(program.FIRST[-1])

    found = session.judge(keep_twice)
    assert found.walks > 0
    # Neither of the two would give it back alone.
    assert [hop.retains_bytes for hop in found.findings[0].path] == [None, None, 0]


def test_what_only_torch_holds_too_is_explained_by_a_walk(session: Session) -> None:
    session.judge(keep)

    def keep_part_of_a_graph(program: Any) -> None:
        program.FIRST.append(torch.nn.Parameter(torch.ones(4)))
        program.SECOND.append((program.FIRST[-1] * 2).sum())

    assert session.judge(keep_part_of_a_graph).walks > 0


def test_a_dead_container_is_no_holder(session: Session) -> None:
    session.judge(keep)

    def replace(program: Any) -> None:
        # A cycle that only a full collection ends: the list is old.
        old, program.FIRST = program.FIRST, []
        old.append(old)
        old.append(torch.ones(4))

    found = session.judge(replace)
    assert (found.findings, found.collections) == ((), 1)


def test_garbage_beside_it_is_collected_before_it_is_judged(session: Session) -> None:
    session.judge(keep)

    def keep_beside_garbage(program: Any) -> None:
        program.FIRST.append(torch.ones(4))
        program.SECOND.append(torch.ones(300))
        old, program.SECOND = program.SECOND, []
        old.append(old)

    found = session.judge(keep_beside_garbage)
    assert ([finding.bytes for finding in found.findings], found.collections) == ([16], 1)


def test_a_view_of_what_was_there_is_no_leak(session: Session) -> None:
    session.judge(keep)
    assert session.judge(lambda program: program.FIRST.append(program.OLD[3:])).findings == ()


def test_a_gradient_that_nobody_has_looked_at_is_reported_with_its_tensor(session: Session) -> None:
    session.judge(keep)

    def train(program: Any) -> None:
        program.FIRST.append(torch.nn.Parameter(torch.ones(4)))
        (program.FIRST[-1] * 2).sum().backward()

    (found,) = session.judge(train).findings
    assert (found.bytes, found.count) == (32, 2)


def test_an_attribute_with_a_computed_name_is_named_by_all_code_there_is(session: Session) -> None:
    # No code of its module has the name.
    session.program.HOLDER = type("Holder", (), {"__module__": "program"})()
    session.judge(lambda program: setattr(program.HOLDER, "weight", torch.ones(4)))
    found = session.judge(lambda program: setattr(program.HOLDER, f"no_{'name'}_in_a_class", torch.ones(4)))
    assert (found.holders, found.walks) == (["program.HOLDER.no_name_in_a_class"], 0)


def no_name_in_a_class() -> None:
    """Has the name as its own, in the code of this module."""
    assert not hasattr(no_name_in_a_class, "no_name_in_a_class")


def start(program: Any, name: str | None = None) -> None:
    program.FIRST.append(threading.Thread(target=program.DONE.wait, name=name, daemon=True))
    program.FIRST[-1].start()


def test_threads_of_one_cause_are_waited_for_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def actions_for(leak: ItemLeak, patience: float, **more: Any) -> list[Change]:
        waited.append(patience)
        return actions(leak, patience, **more)

    actions = judgement.actions_for
    monkeypatch.setattr(judgement, "actions_for", actions_for)
    session.program.DONE = threading.Event()
    try:
        first, later = session.judge(start), session.judge(start)
        other = session.judge(lambda program: start(program, "other"))
    finally:
        session.program.DONE.set()
    (one,), (two,), (three,) = first.findings, later.findings, other.findings
    assert one.fingerprint == two.fingerprint != three.fingerprint
    assert waited == [session.patience, 0.0, session.patience]
    assert one.tried[0].returns_bytes == two.tried[0].returns_bytes == 0


def test_a_later_thread_that_ends_by_itself_is_no_leak(session: Session) -> None:
    session.program.DONE = threading.Event()

    def start_and_end(program: Any) -> None:
        start(program)
        program.DONE.set()

    assert session.judge(start).findings
    session.program.FIRST.clear()
    assert session.judge(start_and_end).findings == ()


class Worker:
    """Works in a thread of its own, which holds it for as long as it runs."""

    def __init__(self, done: threading.Event, size: int = 4) -> None:
        self.weight = torch.ones(size)
        self.thread = threading.Thread(target=self.work, args=(done,), name="worker", daemon=True)
        self.thread.start()

    def work(self, done: threading.Event) -> None:
        done.wait()

    def end(self) -> None:
        """Nothing is to be done at the end."""


@pytest.fixture
def workers(session: Session) -> Iterator[Session]:
    session.program.DONE = threading.Event()
    yield session
    session.program.DONE.set()


def work(program: Any) -> None:
    Worker(program.DONE)


def test_what_a_new_thread_holds_as_an_earlier_one_did_takes_no_walk_and_no_full_collection(workers: Session) -> None:
    first, later, last = [workers.judge(work) for _ in range(3)]
    assert (first.walks > 0, first.collections) == (True, 1)
    assert (later.walks, later.collections, last.walks, last.collections) == (0, 0, 0, 0)
    (one,), (other,) = first.findings, last.findings
    assert (one.resource, one.holder, [part.resource for part in one.parts]) == (
        "tensors",
        "Worker.weight of thread 'worker'",
        ["threads"],
    )
    assert (one.fingerprint, one.message, one.path, one.advice) == (
        other.fingerprint,
        other.message,
        other.path,
        other.advice,
    )
    assert [hop.retains_bytes for hop in other.path][-1] == 16


def test_a_new_thread_that_holds_nothing_takes_no_walk_either(workers: Session) -> None:
    workers.program.WAIT = workers.program.DONE.wait

    def test(program: Any) -> None:
        threading.Thread(target=program.WAIT, name="alone", daemon=True).start()

    first, later = workers.judge(test), workers.judge(test)
    assert (first.walks > 0, later.walks, later.collections) == (True, 0, 0)
    (one,), (other,) = first.findings, later.findings
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("part", "holder"),
    [("weight", "program.DONE"), ("thread", "program.SECOND[0]._target.__self__"), ("__self__", "program.SECOND[0]")],
    ids=["the tensor", "the thread", "its object"],
)
def test_what_something_else_than_the_thread_holds_takes_a_walk(workers: Session, part: str, holder: str) -> None:
    workers.judge(work)

    def test(program: Any) -> None:
        worker = Worker(program.DONE)
        program.SECOND.append(worker if part == "__self__" else getattr(worker, part))

    found = workers.judge(test)
    assert found.walks > 0
    every = [each for finding in found.findings for each in (finding, *finding.parts)]
    assert holder in [each.path and way_text(each.path) for each in every if each.resource == "threads"]


def consume(waiting: queue.Queue[None]) -> None:
    waiting.get()


def test_who_holds_what_a_thread_works_for_takes_a_walk_to_be_found(workers: Session) -> None:
    waiting: list[queue.Queue[None]] = []

    def start_consumer(program: Any, kept: list[queue.Queue[None]]) -> None:
        kept.append(queue.Queue())
        threading.Thread(target=consume, args=(kept[-1],), name="consumer", daemon=True).start()

    try:
        for kept in (waiting, waiting, workers.program.SECOND):
            found = workers.judge(lambda program, kept=kept: start_consumer(program, kept))
    finally:
        for each in (*waiting, *workers.program.SECOND):
            each.put(None)
    assert (found.walks > 0, found.holders) == (True, ["program.SECOND[0]"])


def test_nothing_is_learned_from_one_that_something_else_holds_too(workers: Session) -> None:
    found = [
        workers.judge(lambda program: program.SECOND.append(Worker(program.DONE).weight)),
        workers.judge(lambda program: program.FIRST.append(Worker(program.DONE).weight)),
    ]
    assert [each.walks > 0 for each in found] == [True, True]
    assert [each.holders for each in found] == [
        ["program.DONE", "program.SECOND[0]"],
        ["program.DONE", "program.FIRST[0]"],
    ]


def test_nor_from_one_that_is_held_until_exit(workers: Session) -> None:
    def test(program: Any) -> None:
        # Nothing but C holds the method.
        atexit.register(Worker(program.DONE).end)

    try:
        found = [workers.judge(test) for _ in range(2)]
    finally:
        running: list[Any] = [thread for thread in threading.enumerate() if thread.name == "worker"]
        for thread in running:
            atexit.unregister(thread._target.__self__.end)
    assert [each.walks > 0 for each in found] == [True, True]
    assert [[hop.retains_bytes for hop in each.findings[0].path[1:-1]] for each in found] == [[0, 0]] * 2


def test_what_garbage_beside_the_thread_holds_is_collected_before_it_is_judged(workers: Session) -> None:
    workers.judge(work)

    def work_beside_garbage(program: Any) -> None:
        cycle: list[object] = [Worker(program.DONE).weight, torch.ones(300)]
        cycle.append(cycle)
        gc.collect(1)

    found = workers.judge(work_beside_garbage)
    assert ([finding.bytes for finding in found.findings], found.collections) == ([16], 1)


def test_a_later_worker_that_ends_by_itself_is_no_leak(workers: Session) -> None:
    workers.judge(work)
    workers.judge(work)
    workers.patience = 0.5

    def work_and_end(program: Any) -> None:
        done = threading.Event()
        Worker(done)
        threading.Timer(0.005, done.set).start()

    assert workers.judge(work_and_end).findings == ()


# Things for which an object stands.


@pytest.fixture
def files(session: Session) -> Iterator[Session]:
    yield session
    for name in ("FIRST", "SECOND"):
        for file in vars(session.program)[name]:
            file.close()


def keep_open(program: Any) -> None:
    program.FIRST.append(open(os.devnull))  # noqa: PTH123, SIM115 - that it stays open is the point


def test_a_descriptor_whose_holder_is_known_takes_no_walk_and_no_full_collection(files: Session) -> None:
    first, later = files.judge(keep_open), files.judge(keep_open)
    assert (first.walks, first.collections) == (1, 1)
    assert (later.walks, later.collections) == (0, 0)
    assert (first.holders, later.holders) == (["program.FIRST[0]"], ["program.FIRST[1]"])
    (one,), (other,) = first.findings, later.findings
    assert (one.fingerprint, one.cause) == (other.fingerprint, other.cause)
    assert one.advice.replace("[0]", "[1]") == other.advice
    assert [hop.type for hop in other.path] == [hop.type for hop in one.path]


def test_a_descriptor_that_another_object_holds_takes_a_walk(files: Session) -> None:
    files.judge(keep_open)
    found = files.judge(lambda program: program.SECOND.append(open(os.devnull)))  # noqa: PTH123, SIM115
    assert (found.walks, found.holders) == (1, ["program.SECOND[0]"])


def test_so_does_one_that_something_else_holds_too(files: Session) -> None:
    files.judge(keep_open)

    def test(program: Any) -> None:
        keep_open(program)
        program.SECOND.append(program.FIRST[-1])

    assert files.judge(test).walks == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_descriptor_in_garbage_beside_it_is_no_leak(files: Session) -> None:
    files.judge(keep_open)

    def test(program: Any) -> None:
        keep_open(program)
        cycle: list[object] = [open(os.devnull)]  # noqa: PTH123, SIM115
        cycle.append(cycle)
        gc.collect(1)

    found = files.judge(test)
    assert (found.collections, found.holders) == (1, ["program.FIRST[1]"])
    assert [finding.count for finding in found.findings] == [1]


def test_what_an_owner_has_got_of_it_is_the_owners_and_grows_there(files: Session) -> None:
    files.judge(keep_open)
    owner = Owner("a fixture", lambda: iter([files.program.FIRST]))
    files.watch.enter(owner)
    files.watch.leave()

    def test(program: Any) -> None:
        files.watch.used([owner])
        keep_open(program)

    assert [files.judge(test).findings for _ in range(4)] == [()] * 4
    files.watch.begin(module="test_program.py")
    files.watch.ending(owner)
    grown = files.watch.end([owner]).of_owners[owner.label]
    assert {(finding.resource, finding.trend) for finding in grown} == {("file-descriptors", "growth")}


# What is not in the heap.

LEFT = "LOWTIDE_LEFT"


@pytest.fixture
def _variable() -> Iterator[None]:
    yield
    os.environ.pop(LEFT, None)


class PutsBack:
    """Puts a variable back when it dies; it is in a cycle, so that only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self
        os.environ[LEFT] = "1"

    def __del__(self) -> None:
        os.environ.pop(LEFT, None)


@pytest.mark.usefixtures("_variable")
def test_a_setting_takes_no_walk_no_list_of_tensors_and_no_full_collection(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[int] = []
    list_all = Births.all_watched
    monkeypatch.setattr(Births, "all_watched", lambda births: lists.append(1) or list_all(births))
    session.judge(lambda program: None)
    found = session.judge(lambda program: os.environ.update({LEFT: "1"}))
    assert [finding.resource for finding in found.findings] == ["globals"]
    assert (found.walks, found.collections, lists) == (0, 0, [])


@pytest.mark.usefixtures("_variable")
@pytest.mark.parametrize("generation", [0, 1])
def test_a_setting_that_garbage_puts_back_is_no_leak(session: Session, generation: int) -> None:
    session.judge(lambda program: None)

    def test(program: Any) -> None:
        item = PutsBack()
        gc.collect(0)
        # From here on only a full collection finds it.
        gc.collect(generation)
        del item

    found = session.judge(test)
    assert LEFT not in os.environ
    assert (found.findings, found.collections) == ((), generation)
