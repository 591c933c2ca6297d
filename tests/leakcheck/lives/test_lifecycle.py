"""Lives of small engines, each with one thing wrong, and the clean twin: what the run finds and what it does not."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.judging.judge import excesses
from lowtide.leakcheck.judging.ladder import ACTIONS, SettlePolicy
from lowtide.leakcheck.judging.metrics import Metric, Reading, shutdown_metrics, unaccounted_host_memory
from lowtide.leakcheck.lives import life_reader
from lowtide.leakcheck.lives.life_reader import LifeReader
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.lives.script import SCRIPT, Event, Interrupts
from lowtide.leakcheck.lives.shutdown_judgement import ShutdownJudgement
from lowtide.leakcheck.resources.driver_memory import PageLocked
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes import stages
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.torch_allocator import PinnedReading
from lowtide.probes.host.readings import Resident
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import announce
from lowtide.reports.schema import Finding, Readings, Remedy, Subject

pytestmark = pytest.mark.nightly

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

MIB = 1 << 20

LIBC = ctypes.CDLL(None)
LIBC.malloc.argtypes, LIBC.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
LIBC.free.argtypes, LIBC.free.restype = (ctypes.c_void_p,), None


class SmallLife:
    """A clean engine of a few MiB: weights and cache in arenas, tokens that depend on the weights' contents."""

    def __init__(self) -> None:
        self.pages = CpuPages()
        self.arenas: dict[str, Arena] = {}

    def create(self) -> None:
        for tag in ("weights", "kv_cache", "runtime"):
            self.arenas[tag] = Arena(tag, 2 * MIB, self.pages)
        self.weights = self.arenas["weights"].allocate((1000,), torch.int64)
        self.weights.copy_(torch.arange(1000))
        self.arenas["kv_cache"].map_to(MIB)

    def infer(self) -> Sequence[Sequence[int]]:
        return [self.weights[:5].tolist(), self.weights[-3:].tolist()]

    def sleep(self, level: int) -> None:
        self.saved = self.weights.clone() if level == 1 else None
        self.arenas["weights"].unmap_to(0)
        self.arenas["kv_cache"].unmap_to(0)

    def wake(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        self.arenas["kv_cache"].map_to(MIB)
        self.weights.copy_(torch.arange(1000) if self.saved is None else self.saved)
        self.saved = None

    def shutdown(self) -> None:
        for name in ("weights", "saved"):
            self.__dict__.pop(name, None)
        for arena in self.arenas.values():
            arena.close()
        self.arenas = {}


SHORT = ("create", "infer", "shutdown")
"""For what shows at the end: each stage costs two readings of the whole heap."""


def live(make: Callable[[], Any], cycles: int, script: Sequence[str] = SCRIPT) -> LifecycleRun:
    return LifecycleRun("small", make, device="cpu", driver=NoDriver("a test"), cycles=cycles, script=script)


def found(
    make: Callable[[], Any], cycles: int = 1, script: Sequence[str] = SHORT
) -> tuple[Subject, tuple[Finding, ...]]:
    subject = live(make, cycles, script).run()
    return subject, subject.findings


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()
    KEPT.clear()


KEPT: list[Any] = []


def test_a_clean_life_is_clean_and_has_every_stage() -> None:
    started = time.perf_counter()
    run = live(SmallLife, 2)
    subject = run.run()
    findings = subject.findings
    assert not run.interrupted
    assert sum(stage.seconds for stage in subject.stages) < time.perf_counter() - started
    assert (subject.outcome, subject.reason, findings, subject.returns) == ("clean", "", (), ())
    assert [(stage.cycle, stage.name) for stage in subject.stages] == [(c, name) for c in (1, 2) for name in SCRIPT]
    for stage in subject.stages:
        assert stage.seconds >= 0
        assert (stage.tokens_per_second is not None) == (stage.name == "infer")
        assert [ledger.device for ledger in stage.after.ledgers] == ["cpu"]
    # A sleep that keeps the weights, and the wake from it, move them; no other stage moves anything.
    moved = [round((stage.bytes_per_second or 0) * stage.seconds) for stage in subject.stages]
    assert moved == 2 * [8 << 10 if turn in (2, 3) else 0 for turn in range(len(SCRIPT))]
    asleep = [stage.after.arenas for stage in subject.stages if stage.name.startswith("sleep")]
    assert asleep == [{"weights": 0, "kv_cache": 0, "runtime": 0}] * 4


class KeepsOne(SmallLife):
    """Keeps a tensor of each infer, which a sleep shows too, and maps an arena in a level 2 sleep."""

    def infer(self) -> Sequence[Sequence[int]]:
        KEPT.append(torch.zeros(1000))
        return super().infer()

    def sleep(self, level: int) -> None:
        super().sleep(level)
        if level == 2:
            self.arenas["kv_cache"].map_to(MIB)


@pytest.mark.parametrize(
    ("make", "kept"),
    [(SmallLife, []), (KeepsOne, ["sleep(1)", "sleep(2)", "shutdown"])],
    ids=["clean", "leaks"],
)
def test_torch_s_snapshot_is_kept_after_stages_that_leave_something(make: Callable[[], Any], kept: list[str]) -> None:
    asked: list[str] = []

    class Snapshots(AllocatorSnapshots):
        def keep(self, name: str) -> str:
            asked.append(name)
            return "the disk is full"

    run = LifecycleRun(
        "small",
        make,
        device="cpu",
        driver=NoDriver("a test"),
        cycles=1,
        script=("create", "infer", "sleep(1)", "wake", "sleep(2)", "shutdown"),
        snapshots=Snapshots(Path("nowhere")),
    )
    subject = run.run()
    assert asked == [f"cycle 1 {stage}" for stage in kept]
    problems = [(item.what, item.why) for item in subject.not_measured if "snapshot" in item.what]
    assert problems == [(f"torch's snapshot after {stage}", "the disk is full") for stage in kept]


def without_ledgers(readings: Readings) -> Readings:
    """As a stage has them that follows another: the other one has the ledgers."""
    return msgspec.structs.replace(readings, ledgers=())


def test_a_stage_begins_where_the_one_before_it_ended() -> None:
    subject, _ = found(SmallLife, cycles=2, script=SCRIPT)
    for left, right in pairwise(subject.stages):
        if left.cycle == right.cycle:
            assert right.before == without_ledgers(left.after), right.name
    assert {stage.name: stage.before.arenas for stage in subject.stages}["shutdown"] == {
        "weights": 8 << 10,
        "kv_cache": MIB,
        "runtime": 0,
    }
    # Also where a shutdown follows another stage than the first left it: what sleeps has no pages.
    subject, _ = found(SmallLife, script=("create", "sleep(2)", "shutdown"))
    asleep = without_ledgers(subject.stages[-2].after)
    assert subject.stages[-1].before == asleep != without_ledgers(subject.stages[0].after)


def test_without_a_card_nobody_waits_for_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[SettlePolicy] = []
    real = life_reader.climb

    def watched(*args: Any, **settings: Any) -> Any:
        policies.append(settings["policy"])
        return real(*args, **settings)

    monkeypatch.setattr(life_reader, "climb", watched)
    found(SmallLife)
    assert set(policies) == {SettlePolicy()} != {life_reader.DRIVER_PATIENCE}


def test_each_stage_is_announced_before_it_starts() -> None:
    heard: list[Event] = []
    LifecycleRun("small", SmallLife, device="cpu", driver=NoDriver("a test"), cycles=2, listener=heard.append).run()
    names = (*SCRIPT, "judgement")
    assert [(event.cycle, event.stage) for event in heard] == [(c, name) for c in (1, 2) for name in names]
    assert [event.done for event in heard] == [*range(10), *range(9, 19)]
    assert {(event.cycles, event.total) for event in heard} == {(2, 18)}


def test_an_event_has_the_sizes_of_the_reading_before_it_as_whole_numbers() -> None:
    heard: list[Event] = []
    run = LifecycleRun("small", SmallLife, device="cpu", driver=NoDriver("a test"), cycles=2, listener=heard.append)
    stages = run.run().stages
    read = [stages[0].before, *(stage.after for stage in stages[:9]), stages[9].before]
    read += [stage.after for stage in stages[9:]]
    assert [event.sizes["RSS"] for event in heard] == [readings.rss for readings in read]
    assert {type(size) for event in heard for size in event.sizes.values()} == {int}


@pytest.fixture
def plain_ctrl_c() -> Iterator[None]:
    # A worker of pytest-xdist is deaf to it.
    known = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, known)


@pytest.mark.usefixtures("plain_ctrl_c")
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_ctrl_c_ends_the_run_after_its_life_even_if_it_was_lost(is_lost: bool) -> None:
    class Interrupted(SmallLife):
        def infer(self) -> Sequence[Sequence[int]]:
            with contextlib.suppress(KeyboardInterrupt) if is_lost else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
            return super().infer()

    run = live(Interrupted, 3, SHORT)
    subject = run.run()
    assert run.interrupted
    # Of one that is lost nobody knows before the life is over.
    judged = "; 1 whole cycle was judged, and everything that was judged came back"
    assert subject.reason == "interrupted in cycle 1" + (judged if is_lost else "")
    assert {stage.cycle for stage in subject.stages} == {1}
    assert subject.stages[-1].name == "shutdown"
    assert subject.findings == ()


# --- after shutdown -------------------------------------------------------------------------------------------------


class KeepsTensor(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(torch.ones(1000))


def test_a_tensor_that_something_keeps_is_found_in_the_first_life_already() -> None:
    subject, (finding,) = found(KeepsTensor)
    assert subject.outcome == "leak"
    assert (finding.resource, finding.bytes, finding.device, finding.stage) == ("tensors", 4000, "cpu", "create")
    holder = f"{__name__}.KEPT[0]"
    assert (finding.cause, finding.holder, finding.verdict) == ("module-global", holder, "reachable")
    assert finding.remedy == Remedy(action=f"del {__name__}.KEPT[0]", returns_bytes=4000)


class KeepsOneByte(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(torch.ones(1, dtype=torch.uint8))


def test_one_byte_is_enough() -> None:
    _, (finding,) = found(KeepsOneByte)
    assert (finding.resource, finding.bytes) == ("tensors", 1)


class Cycle(SmallLife):
    def create(self) -> None:
        super().create()
        holder: dict[str, Any] = {"tensor": torch.ones(1000)}
        holder["itself"] = holder


def test_garbage_in_a_cycle_is_clean_and_said_to_come_back_at_collect() -> None:
    gc.disable()
    try:
        subject, findings = found(Cycle)
    finally:
        gc.enable()
    assert (subject.outcome, findings) == ("clean", ())
    assert {(item.resource, item.rung, item.bytes) for item in subject.returns} == {("tensors", "collect", 4000)}
    # The stage itself ends before anything is done about it.
    assert subject.stages[-1].after.tensors - subject.stages[0].before.tensors == 4000


class ReplacesATensor(Cycle):
    """One of the program's, by another of its size."""

    def create(self) -> None:
        super().create()
        KEPT[:] = [torch.ones(1000)]


def test_what_came_back_at_collect_makes_no_leak_of_a_tensor_that_replaced_another() -> None:
    KEPT.append(torch.zeros(1000))
    gc.disable()
    try:
        subject, findings = found(ReplacesATensor)
    finally:
        gc.enable()
    assert (subject.outcome, findings) == ("clean", ())


@functools.lru_cache(maxsize=16)
def cached(owner: object) -> int:
    return id(owner)


class Model:
    """Something with a tensor whose method is asked about."""

    def __init__(self) -> None:
        self.weight = torch.ones(1000)

    def forward(self) -> torch.Tensor:
        return self.weight


class CachesMethod(SmallLife):
    def create(self) -> None:
        super().create()
        cached(Model().forward)


def test_a_clean_run_leaves_the_caches_of_the_program_as_they_are() -> None:
    cached.cache_clear()
    cached(None)
    _, findings = found(SmallLife)
    assert findings == ()
    assert cached.cache_info().currsize == 1


def test_a_bound_method_in_an_lru_cache_is_found_with_its_remedy() -> None:
    cached.cache_clear()
    subject, findings = found(CachesMethod)
    assert subject.outcome == "leak"
    assert [(item.resource, item.cause) for item in findings] == [("tensors", "lru-cache")]
    remedy = findings[0].remedy
    assert remedy is not None
    assert "cache_clear()" in remedy.action
    assert remedy.returns_bytes == findings[0].bytes


class Freezes(SmallLife):
    def create(self) -> None:
        super().create()
        holder: dict[str, Any] = {"tensor": torch.ones(1000)}
        holder["itself"] = holder
        gc.freeze()


def test_a_freeze_without_its_pair_is_found_with_what_it_hides() -> None:
    _, findings = found(Freezes)
    kinds = {(item.resource, item.cause) for item in findings}
    assert ("gc-frozen", "not-restored") in kinds
    frozen = next(item for item in findings if item.resource == "gc-frozen")
    assert frozen.count > 1000
    assert frozen.remedy is not None
    assert frozen.remedy.action == "gc.unfreeze(); gc.collect()"


class KeepsThread(SmallLife):
    stop = threading.Event()

    def create(self) -> None:
        super().create()
        threading.Thread(target=self.stop.wait, args=(600,), name="forgotten-worker").start()


class EndsItsThreadsOneAfterTheOther(SmallLife):
    """Together they take longer than anything may stand still."""

    def shutdown(self) -> None:
        super().shutdown()
        for number in range(1, 5):
            threading.Thread(target=time.sleep, args=(0.3 * number,)).start()


def test_what_still_comes_back_is_waited_for() -> None:
    assert 2 * SettlePolicy().stability < 4 * 0.3
    subject, findings = found(EndsItsThreadsOneAfterTheOther)
    assert findings == ()
    assert [(item.resource, item.rung) for item in subject.returns] == [("threads", "settle")]


def test_a_thread_that_runs_on_is_found_by_name() -> None:
    try:
        _, (finding,) = found(KeepsThread)
    finally:
        KeepsThread.stop.set()
    assert (finding.resource, finding.count, finding.bytes) == ("threads", 1, 0)
    assert "forgotten-worker" in finding.message


class KeepsDescriptor(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(os.open("/dev/null", os.O_RDONLY))


def test_a_descriptor_left_open_is_found_from_the_second_life_on() -> None:
    try:
        subject, (finding,) = found(KeepsDescriptor, cycles=2)
    finally:
        for descriptor in KEPT:
            os.close(descriptor)
    assert (finding.resource, finding.count) == ("file-descriptors", 1)
    assert "/dev/null" in finding.message
    assert subject.not_measured == ()
    # Only one of the two lives was judged.
    assert finding.trend is None


def test_what_is_judged_from_the_second_life_on_grows_if_every_life_from_there_leaves_some() -> None:
    try:
        _, (finding,) = found(KeepsDescriptor, cycles=4)
    finally:
        for descriptor in KEPT:
            os.close(descriptor)
    assert (finding.resource, finding.trend) == ("file-descriptors", "growth")


class KeepsArena(SmallLife):
    def shutdown(self) -> None:
        del self.weights
        KEPT.append(self.arenas)


def test_what_is_judged_from_the_first_life_on_grows_if_every_life_leaves_some() -> None:
    _, findings = found(KeepsArena, cycles=3)
    assert {(finding.resource, finding.trend) for finding in findings} == {("arena", "growth")}


def test_an_arena_without_tensors_is_found_as_an_arena() -> None:
    # Two lives: what the first one left must not be blamed on the second one's sleep.
    _, (finding,) = found(KeepsArena, cycles=2, script=("create", "sleep(1)", "wake", "shutdown"))
    assert (finding.resource, finding.device) == ("arena", "cpu")
    assert finding.bytes == 2 * (MIB + 8192)


class KeepsArenaByTensor(SmallLife):
    def shutdown(self) -> None:
        KEPT.append(self.weights)
        super().shutdown()


def test_an_arena_that_a_tensor_keeps_is_that_tensors_leak_alone() -> None:
    _, (finding,) = found(KeepsArenaByTensor)
    assert (finding.resource, finding.bytes) == ("tensors", 8000)


class KeepsATensorAndAnArena(KeepsArena):
    """The tensor has nothing to do with the arena."""

    def create(self) -> None:
        super().create()
        KEPT.append(torch.ones(1000))


def test_an_arena_is_reported_beside_tensors_that_do_not_keep_it() -> None:
    _, findings = found(KeepsATensorAndAnArena)
    assert sorted(finding.resource for finding in findings) == ["arena", "tensors"]


class FreezesAndKeepsAnArena(KeepsArena):
    """What is frozen does not keep it."""

    def create(self) -> None:
        super().create()
        gc.freeze()


def test_an_arena_is_reported_beside_a_heap_that_stayed_frozen() -> None:
    _, findings = found(FreezesAndKeepsAnArena)
    assert {finding.resource for finding in findings} == {"arena", "gc-frozen"}


class HidesATensorInAnArena(SmallLife):
    def create(self) -> None:
        super().create()
        holder: dict[str, Any] = {"tensor": self.weights}
        holder["itself"] = holder
        gc.freeze()


@pytest.mark.parametrize("cycles", [1, 2])
def test_an_arena_that_only_frozen_garbage_keeps_is_reported_with_what_lies_in_it(cycles: int) -> None:
    _, findings = found(HidesATensorInAnArena, cycles)
    assert sorted(finding.resource for finding in findings) == ["gc-frozen", "tensors"]
    assert {finding.verdict for finding in findings} == {"frozen-garbage"}


class LeavesAnArenaToTheNextLife(SmallLife):
    """Which closes it."""

    def create(self) -> None:
        super().create()
        self.is_second = bool(KEPT)
        while KEPT:
            KEPT.pop().close()

    def shutdown(self) -> None:
        if not self.is_second:
            KEPT.append(self.arenas.pop("runtime"))
            KEPT[-1].map_to(MIB)
        super().shutdown()


def test_what_a_life_that_is_not_the_last_leaves_is_reported_although_the_next_gives_it_back() -> None:
    _, findings = found(LeavesAnArenaToTheNextLife, cycles=2)
    assert [(finding.resource, finding.bytes) for finding in findings] == [("arena", MIB)]


def touched(size: int) -> mmap.mmap:
    """Resident host memory of exactly this size, which no allocator keeps for later."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


class KeepsHostMemory(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(touched(40 * MIB))


class KeepsNativeMemory(SmallLife):
    taken: ClassVar[list[int]] = []

    def create(self) -> None:
        super().create()
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        self.taken.append(libc.malloc(40 * MIB))
        ctypes.memset(self.taken[-1], 1, 40 * MIB)


@pytest.mark.parametrize("cycles", [1, 2])
def test_host_memory_beyond_the_tolerance_is_found(cycles: int) -> None:
    _, (finding,) = found(KeepsHostMemory, cycles=cycles)
    assert (finding.resource, finding.device) == ("host-memory", "cpu")
    assert 32 * MIB < finding.bytes < 48 * MIB


def test_of_host_memory_that_no_array_has_one_life_says_that_it_cannot_tell() -> None:
    _, (finding,) = found(KeepsNativeMemory, cycles=2)
    assert (finding.resource, finding.cause) == ("host-memory", "unknown")
    subject, findings = found(KeepsNativeMemory)
    assert findings == ()
    assert {item.what for item in subject.not_measured} == {"host-memory", "file-descriptors"}
    while KeepsNativeMemory.taken:
        ctypes.CDLL(None).free(ctypes.c_void_p(KeepsNativeMemory.taken.pop()))


class KeepsMuchHostMemory(SmallLife):
    """So much that what a run itself leaves free in the heap makes no difference."""

    def create(self) -> None:
        super().create()
        KEPT.append(touched(160 * MIB))


def test_the_holder_of_host_memory_is_named_by_the_size_of_what_it_holds() -> None:
    _, (finding,) = found(KeepsMuchHostMemory, cycles=2)
    # The last life's own.
    assert finding.holder == f"{__name__}.KEPT[1]"
    assert f"; 160.0 MiB in a mmap.mmap held by {__name__}.KEPT[1]" in finding.message
    assert (finding.resource, finding.cause) == ("host-memory", "module-global")


class KeepsHostMemoryByATensor(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append((torch.ones(1000), touched(40 * MIB)))


def test_what_a_cut_gave_back_besides_tensors_has_it_as_its_remedy() -> None:
    _, findings = found(KeepsHostMemoryByATensor, cycles=2)
    of_tensors, of_host = sorted(findings, key=lambda finding: finding.bytes)
    assert (of_tensors.resource, of_host.resource) == ("tensors", "host-memory")
    cut = f"{__name__}.KEPT.clear()"
    assert of_tensors.remedy == Remedy(action=cut, returns_bytes=8000)
    assert of_host.remedy is not None
    assert of_host.remedy.action == cut
    assert of_host.remedy.returns_bytes > 32 * MIB


class LoadsALibrary(SmallLife):
    def create(self) -> None:
        super().create()
        if not KEPT:
            KEPT.append(touched(24 * MIB))


def test_what_a_first_life_brought_to_stay_is_a_line_of_its_own_from_the_second_on() -> None:
    subject, findings = found(LoadsALibrary, cycles=2)
    assert findings == ()
    lines = [
        (stage.cycle, line.bytes)
        for stage in subject.stages
        for line in stage.after.ledgers[0].lines
        if line.name.startswith("libraries")
    ]
    assert [cycle for cycle, _ in lines] == [2] * len(SHORT)
    assert all(24 * MIB <= size < 56 * MIB for _, size in lines)


class LeavesHolesInTheHeap(SmallLife):
    """At the end of its second life C's heap has free pieces below one that is in use."""

    lives = 0

    def shutdown(self) -> None:
        super().shutdown()
        type(self).lives += 1
        if self.lives == 2:
            pieces = [LIBC.malloc(64 << 10) for _ in range(2048)]
            for piece in pieces:
                ctypes.memset(piece, 1, 64 << 10)
            KEPT.append(pieces.pop())
            for piece in pieces:
                LIBC.free(piece)


def test_what_is_free_in_the_heap_at_the_end_of_a_life_is_no_leak() -> None:
    LeavesHolesInTheHeap.lives = 0
    # Holes that are there already would be filled first.
    LIBC.malloc_trim(0)
    try:
        _, findings = found(LeavesHolesInTheHeap, cycles=2)
    finally:
        LIBC.free(KEPT.pop())
    assert findings == ()


@functools.lru_cache(maxsize=4)
def table(owner: object) -> mmap.mmap:
    return touched(64 * MIB)


class CachesHostMemory(SmallLife):
    """In which there is no tensor that would lead to the cache."""

    def create(self) -> None:
        super().create()
        table(object())


def test_what_cleared_caches_give_back_has_them_as_its_remedy() -> None:
    table.cache_clear()
    _, (finding,) = found(CachesHostMemory, cycles=2)
    assert finding.resource == "host-memory"
    assert finding.remedy is not None
    assert finding.remedy.action == ACTIONS[Rung.CLEAR_CACHES]
    assert finding.remedy.returns_bytes > 60 * MIB


class KeepsALittleHostMemory(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(touched(20 * MIB))


def test_what_each_life_keeps_within_the_tolerance_adds_up() -> None:
    _, findings = found(KeepsALittleHostMemory, cycles=1)
    assert findings == ()
    KEPT.clear()
    # Of the first life's only that is told which can be seen to be an array.
    _, (finding,) = found(KeepsALittleHostMemory, cycles=2)
    assert (finding.resource, finding.bytes) == ("host-memory", 40 * MIB)
    KEPT.clear()
    _, (finding,) = found(KeepsALittleHostMemory, cycles=4)
    assert (finding.resource, finding.device) == ("host-memory", "cpu")
    assert 55 * MIB < finding.bytes < 70 * MIB


def strict(make: Callable[[], Any], cycles: int, tolerances: Mapping[str, int]) -> LifecycleRun:
    return LifecycleRun(
        "small",
        make,
        device="cpu",
        driver=NoDriver("a test"),
        cycles=cycles,
        script=SHORT,
        tolerances=tolerances,
    )


def test_a_smaller_tolerance_of_a_run_finds_what_the_table_allows() -> None:
    run = strict(KeepsALittleHostMemory, 2, {"host-memory": 8 * MIB})
    (finding,) = run.run().findings
    assert finding.resource == "host-memory"
    first, second = ({item.metric.key: item for item in life} for life in run.excesses)
    assert "host-memory" not in first
    assert second["host-memory"].above == finding.bytes
    assert second["host-memory"].metric.tolerance == 32 * MIB
    assert first["tensors cpu"].above == second["tensors cpu"].above == 0


class KeepsTwoMibOfHostMemory(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(touched(2 * MIB))


def test_a_tolerance_of_a_run_is_for_one_life_and_what_lives_add_up_to_is_judged_by_the_table() -> None:
    assert strict(KeepsALittleHostMemory, 1, {"host-memory": 60 * MIB}).run().findings == ()
    KEPT.clear()
    # 20 MiB in each life, 40 in the two after the first: more than the table's 32.
    assert strict(KeepsALittleHostMemory, 2, {"host-memory": 60 * MIB}).run().findings == ()
    KEPT.clear()
    (finding,) = strict(KeepsALittleHostMemory, 3, {"host-memory": 60 * MIB}).run().findings
    assert 32 * MIB < finding.bytes < 48 * MIB
    KEPT.clear()
    # 2 MiB in each life, 10 in the five after the first: less than the table's, and more than one life may leave.
    assert strict(KeepsTwoMibOfHostMemory, 6, {"host-memory": 4 * MIB}).run().findings == ()


class GivesBackInItsLastLife(KeepsALittleHostMemory):
    lives = 0

    def create(self) -> None:
        super().create()
        type(self).lives += 1
        if self.lives == 4:
            KEPT.clear()


def test_what_some_lives_keep_within_the_tolerance_and_the_last_gives_back_is_clean() -> None:
    GivesBackInItsLastLife.lives = 0
    _, findings = found(GivesBackInItsLastLife, cycles=4)
    assert findings == ()


@pytest.mark.parametrize(("device", "stays"), [("cpu", 32 * MIB), ("cuda:0", 64 * MIB)])
def test_host_memory_may_move_more_where_an_engine_uses_a_card(device: str, stays: int) -> None:
    def read(anonymous: int) -> Any:
        nothing = Resident(0, 0)
        return SimpleNamespace(
            host=SimpleNamespace(own=anonymous, shared=0, kept_free=0),
            pool_residency=(),
            tensor_residency=nothing,
            file_residency=nothing,
            pinned=PinnedReading(0, 0),
        )

    def level(anonymous: int) -> Reading:
        return Reading(amounts={"host-memory": unaccounted_host_memory(read(anonymous))})

    (metric,) = [item for item in shutdown_metrics(device) if item.key == "host-memory"]
    before = level(1 << 30)
    for left, is_back in ((stays, True), (stays + 1, False)):
        (excess,) = excesses((metric,), before, level((1 << 30) + left))
        assert excess.is_back is is_back


def test_what_is_there_to_stay_is_not_judged_and_another_process_is() -> None:
    reader = LifeReader("cpu", NoDriver("a test"))
    reader.start()
    before = reader.read()
    resource_tracker.ensure_running()
    child = subprocess.Popen(["sleep", "600"])
    try:
        now = reader.read()
    finally:
        child.kill()
        child.wait()
        reader.stop()
    metrics = {metric.key: metric for metric in shutdown_metrics("cpu")}
    assert metrics["processes"].new_items(before, now) == {f"{child.pid} sleep": 1}
    assert metrics["file-descriptors"].above(before, now) == 0


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Metric(resource="pinned", device="cpu", key="unknown")
    monkeypatch.setattr(life_reader, "shutdown_metrics", lambda device: (*shutdown_metrics(device), unknown))
    real = life_reader.reading_of

    def read(snapshot: Snapshot, device: str) -> Reading:
        found = real(snapshot, device)
        return msgspec.structs.replace(found, amounts={**found.amounts, "unknown": None})

    monkeypatch.setattr(life_reader, "reading_of", read)
    subject, findings = found(SmallLife, cycles=2)
    assert findings == ()
    assert [item.what for item in subject.not_measured] == ["pinned on cpu"]


def test_a_run_records_nothing_when_it_is_over() -> None:
    before = list(gc.callbacks)
    found(SmallLife)
    assert gc.callbacks == before


class TakesWhatGarbageLeaves(SmallLife):
    def create(self) -> None:
        super().create()
        gc.collect()
        KEPT.append(torch.ones(1000))


def test_garbage_from_before_hides_no_leak_of_its_size() -> None:
    gc.disable()
    try:
        holder: dict[str, Any] = {"tensor": torch.ones(1000)}
        holder["itself"] = holder
        del holder
        _, (finding,) = found(TakesWhatGarbageLeaves)
    finally:
        gc.enable()
    assert (finding.resource, finding.bytes) == ("tensors", 4000)


class TakesWhatTheFirstLifeLeftToTheCollector(SmallLife):
    lives = 0

    def shutdown(self) -> None:
        super().shutdown()
        type(self).lives += 1
        if self.lives == 1:
            holder: dict[str, Any] = {"memory": touched(64 * MIB)}
            holder["itself"] = holder
        else:
            gc.collect()
            KEPT.append(touched(64 * MIB))


def test_garbage_of_an_earlier_life_hides_no_leak_of_its_size() -> None:
    TakesWhatTheFirstLifeLeftToTheCollector.lives = 0
    gc.disable()
    try:
        _, (finding,) = found(TakesWhatTheFirstLifeLeftToTheCollector, cycles=2)
    finally:
        gc.enable()
    assert finding.resource == "host-memory"
    assert finding.bytes > 48 * MIB


class LeavesAProcessGroup(SmallLife):
    """Which has descriptors open."""

    lives = 0

    def create(self) -> None:
        super().create()
        type(self).lives += 1
        if self.lives == 2:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_what_a_process_group_holds_is_reported_with_it_alone() -> None:
    LeavesAProcessGroup.lives = 0
    _, findings = found(LeavesAProcessGroup, cycles=2)
    assert not torch.distributed.is_initialized()
    assert [finding.resource for finding in findings] == ["process-groups"]


class LeavesAProcessGroupInEachLife(SmallLife):
    """The default one, and then others beside it."""

    def create(self) -> None:
        super().create()
        distributed = torch.distributed
        if distributed.is_initialized():
            distributed.new_group([0], backend="gloo", use_local_synchronization=True)
        else:
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def test_process_groups_of_all_lives_are_one_finding_with_what_they_hold_as_parts() -> None:
    _, findings = found(LeavesAProcessGroupInEachLife, cycles=3)
    assert not torch.distributed.is_initialized()
    (finding,) = findings
    assert (finding.resource, finding.count) == ("process-groups", 3)
    assert finding.remedy is not None
    assert finding.remedy.action == "torch.distributed.destroy_process_group()"
    assert [part.resource for part in finding.parts] == ["file-descriptors"]


def test_page_locked_memory_of_the_groups_goes_with_them_and_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: PageLocked) -> dict[str, int]:
        of_groups = {"page-locked memory at 0x10": 2 << 20} if torch.distributed.is_initialized() else {}
        return {**of_groups, **({"page-locked memory at 0x90": 8 << 20} if KEPT else {})}

    monkeypatch.setattr(PageLocked, "kept_in", ())
    monkeypatch.setattr(PageLocked, "read", read)
    _, findings = found(LeavesAProcessGroupInEachLife, cycles=3)
    (groups,) = findings
    assert sorted(part.resource for part in groups.parts) == ["file-descriptors", "pinned"]
    _, findings = found(LeavesAProcessGroupAndAPipe, cycles=2)
    for pipe in KEPT:
        os.close(pipe[0])
        os.close(pipe[1])
    KEPT.clear()
    of_others = next(finding for finding in findings if finding.resource == "pinned")
    assert of_others.bytes == 8 << 20


class LeavesAProcessGroupAndAPipe(LeavesAProcessGroupInEachLife):
    """Of which only the one goes with the other."""

    def create(self) -> None:
        super().create()
        KEPT.append(os.pipe())


def test_what_the_groups_remedy_does_not_give_back_is_a_finding_of_its_own() -> None:
    _, findings = found(LeavesAProcessGroupAndAPipe, cycles=2)
    own = {f"{end} -> pipe" for pipe in KEPT[1:] for end in pipe}
    for pipe in KEPT:
        os.close(pipe[0])
        os.close(pipe[1])
    KEPT.clear()
    descriptors, groups = sorted(findings, key=lambda finding: finding.resource)
    assert (descriptors.resource, groups.resource) == ("file-descriptors", "process-groups")
    # And what they did give back is none of that finding's.
    assert descriptors.count == 2
    assert {name.partition(":")[0] for name in (descriptors.holder or "").split(", ")} == own


def test_a_level_that_comes_back_at_the_last_rung_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = [0]

    def snapshot(**asked: Any) -> Snapshot:
        reading = PinnedReading(pinned[0], pinned[0])
        return msgspec.structs.replace(take_snapshot(**asked), pinned=reading)

    def trim() -> bool:
        pinned[0] = 0
        return True

    class PinsOnce(SmallLife):
        def create(self) -> None:
            super().create()
            pinned[0] = 8 * MIB

    monkeypatch.setattr(life_reader, "take_snapshot", snapshot)
    monkeypatch.setattr(ladder, "trim_heap", trim)
    # What torch keeps of it the driver has given out, too.
    monkeypatch.setattr(PageLocked, "kept_in", ())
    monkeypatch.setattr(PageLocked, "read", lambda _: {"page-locked memory at 0x10": pinned[0]} if pinned[0] else {})
    _, (finding,) = found(PinsOnce, cycles=2)
    assert (finding.resource, finding.cause, finding.bytes) == ("pinned", "allocator-cache", 8 * MIB)
    assert (finding.remedy is not None, finding.trend) == (True, "residue")


class SwapsDescriptors(SmallLife):
    def create(self) -> None:
        super().create()
        opened = os.open("/dev/zero" if len(SWAPPED) else "/dev/full", os.O_RDONLY)
        os.close(KEPT.pop())
        KEPT.append(opened)
        SWAPPED.append(opened)


SWAPPED: list[int] = []


def test_a_descriptor_that_went_hides_none_that_stayed() -> None:
    KEPT.append(os.open("/dev/null", os.O_RDONLY))
    try:
        subject, findings = found(SwapsDescriptors, cycles=2)
    finally:
        os.close(KEPT.pop())
    assert subject.outcome == "leak"
    assert [(item.resource, item.count) for item in findings] == [("file-descriptors", 1)]
    assert "/dev/zero" in findings[0].message


class KeepsOpaqueTensor(SmallLife):
    def create(self) -> None:
        super().create()
        KEPT.append(torch.ones(1000).to_mkldnn())


def test_a_tensor_whose_memory_cannot_be_read_is_still_found() -> None:
    _, (finding,) = found(KeepsOpaqueTensor)
    assert (finding.resource, finding.count) == ("tensors", 1)
    assert "cannot be read" in finding.message


class LeavesSharedMemory(SmallLife):
    def create(self) -> None:
        super().create()
        name = Path(f"/dev/shm/lowtide_{os.getpid()}_{len(KEPT)}")
        name.write_bytes(b"x" * 4096)
        KEPT.append(name)


def test_shared_memory_that_is_closed_and_never_unlinked_is_found() -> None:
    try:
        _, (finding,) = found(LeavesSharedMemory)
        assert (finding.resource, finding.bytes) == ("shared-memory", 4096)
        assert KEPT[0].name in finding.message
    finally:
        for name in KEPT:
            name.unlink()


# --- at the stages --------------------------------------------------------------------------------------------------


class HoldsBlocks(SmallLife):
    """And has no step that could end that."""

    def kv_blocks_held(self) -> dict[str, int]:
        return {"a prefix cache": 2}


def test_blocks_that_nobody_lets_go_of_are_found_in_an_engine_that_cannot_step() -> None:
    _, (finding,) = found(HoldsBlocks)
    assert (finding.resource, finding.stage, finding.count, finding.holder) == (
        "kv-blocks",
        "infer",
        2,
        "a prefix cache",
    )


class SleepsWithCache(SmallLife):
    def sleep(self, level: int) -> None:
        super().sleep(level)
        if level == 2:
            self.arenas["kv_cache"].map_to(MIB)


def test_an_arena_that_stays_mapped_asleep_is_found_with_the_stage() -> None:
    _, (finding,) = found(SleepsWithCache, script=SCRIPT)
    assert (finding.resource, finding.stage, finding.bytes) == ("arena", "sleep(2)", MIB)
    assert "'kv_cache'" in finding.message


class WakesHalf(SmallLife):
    def wake(self) -> None:
        super().wake()
        self.arenas["kv_cache"].unmap_to(0)


def test_an_arena_that_does_not_come_back_is_found() -> None:
    _, (finding,) = found(WakesHalf, script=SCRIPT)
    assert (finding.resource, finding.cause, finding.stage) == ("arena", "not-restored", "wake")


class LosesContents(SmallLife):
    def wake(self) -> None:
        self.saved = torch.zeros(1000, dtype=torch.int64)
        super().wake()


def test_contents_that_did_not_survive_are_found_by_the_tokens() -> None:
    _, (finding,) = found(LosesContents, script=SCRIPT)
    assert (finding.resource, finding.cause, finding.stage) == ("contents", "not-restored", "infer")
    assert finding.message.startswith("2 of 2 prompts")


class SaysNothing(SmallLife):
    def infer(self) -> Sequence[Sequence[int]]:
        return []


def test_an_engine_that_gives_no_token_does_not_pass() -> None:
    _, (finding,) = found(SaysNothing)
    assert (finding.resource, finding.message) == ("contents", "infer gave no token")


class ForgetsAPrompt(SmallLife):
    woken = False

    def wake(self) -> None:
        super().wake()
        self.woken = True

    def infer(self) -> Sequence[Sequence[int]]:
        return super().infer()[: 1 if self.woken else 2]


def test_an_engine_that_answers_fewer_prompts_after_a_wake_does_not_pass() -> None:
    _, (finding,) = found(ForgetsAPrompt, script=SCRIPT)
    assert (finding.resource, finding.stage) == ("contents", "infer")
    assert finding.message.startswith("1 of 2 prompts")


class RaisesInShutdown(SmallLife):
    calls = 0

    def shutdown(self) -> None:
        type(self).calls += 1
        super().shutdown()
        raise RuntimeError("Cannot access accelerator device when none is available")


def test_a_shutdown_that_raises_is_a_finding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaisesInShutdown, "calls", 0)
    run = live(RaisesInShutdown, 1, SHORT)
    (finding,) = run.run().findings
    # Nobody interrupted it, so it is not made again.
    assert (run.interrupted, RaisesInShutdown.calls) == (False, 1)
    assert (finding.resource, finding.stage) == ("teardown", "shutdown")
    assert "Cannot access accelerator device" in finding.message


# --- ends -----------------------------------------------------------------------------------------------------------


class FailsToWake(SmallLife):
    def wake(self) -> None:
        raise MemoryError("no room")


def test_an_error_ends_the_run_with_the_engine_shut_down() -> None:
    subject, findings = found(FailsToWake, script=SCRIPT)
    assert (subject.outcome, subject.reason) == ("error", "cycle 1: wake raised MemoryError: no room")
    assert findings == ()
    assert [stage.name for stage in subject.stages] == ["create", "infer", "sleep(1)", "shutdown"]
    assert subject.stages[-1].after.arenas == {}


class CreatesWithoutRoom(SmallLife):
    creates = 0

    def create(self) -> None:
        type(self).creates += 1
        raise MemoryError("no room")


def test_only_a_wake_without_room_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CreatesWithoutRoom, "creates", 0)
    subject, findings = found(CreatesWithoutRoom)
    assert (subject.reason, findings) == ("cycle 1: create raised MemoryError: no room", ())
    assert CreatesWithoutRoom.creates == 1


class FailsInShutdownAtACtrlC(SmallLife):
    """Gives back nothing when that comes, and all of it at the next call."""

    calls = 0

    def shutdown(self) -> None:
        type(self).calls += 1
        if self.calls == 1:
            raise BaseExceptionGroup("shutting down", [KeyboardInterrupt(), ValueError("the ring is busy")])
        super().shutdown()


def test_a_shutdown_that_is_interrupted_is_made_again_and_what_failed_in_it_besides_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FailsInShutdownAtACtrlC, "calls", 0)
    run = live(FailsInShutdownAtACtrlC, 1, SHORT)
    (finding,) = run.run().findings
    assert (finding.resource, finding.message) == ("teardown", "shutdown raised: ValueError: the ring is busy")
    assert (run.interrupted, FailsInShutdownAtACtrlC.calls) == (True, 2)


@pytest.mark.parametrize("at", ["create", "infer", "sleep", "wake", "shutdown"])
def test_ctrl_c_at_any_stage_ends_the_run_with_the_engine_shut_down(at: str) -> None:
    class Interrupted(SmallLife):
        pass

    original = getattr(SmallLife, at)
    once: list[None] = []

    def interrupted(self: SmallLife, *args: Any) -> Any:
        result = original(self, *args)
        if not once:
            once.append(None)
            raise KeyboardInterrupt
        return result

    setattr(Interrupted, at, interrupted)
    run = live(Interrupted, cycles=2)
    subject = run.run()
    assert run.interrupted
    assert subject.stages[-1].name == "shutdown"
    assert subject.stages[-1].after.arenas == {}
    assert {stage.cycle for stage in subject.stages} == {1}
    assert subject.reason == "interrupted in cycle 1"
    assert subject.outcome == "error"


def test_ctrl_c_before_the_first_life_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LifecycleRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LifecycleRun, "_open_device", interrupted)
    subject = live(SmallLife, cycles=2).run()
    assert (subject.outcome, subject.reason, subject.stages) == ("error", "interrupted before the first life", ())


class IsNotCreatedTwice(Cycle):
    """Its first life leaves garbage."""

    lives = 0

    def create(self) -> None:
        type(self).lives += 1
        if self.lives > 1:
            raise ValueError("no second one")
        super().create()


def test_the_shutdown_of_a_life_that_did_not_come_about_begins_where_the_life_began() -> None:
    IsNotCreatedTwice.lives = 0
    gc.disable()
    try:
        subject, _ = found(IsNotCreatedTwice, cycles=2)
    finally:
        gc.enable()
    first, (shutdown,) = subject.stages[: len(SHORT)], subject.stages[len(SHORT) :]
    assert first[-1].after.tensors == first[0].before.tensors + 4000
    assert shutdown.before.tensors == first[0].before.tensors


def interrupt_reading(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C once in one of the readings: before a life and after its shutdown."""
    original, turns = LifeReader.read, itertools.count(1)

    def interrupted(self: LifeReader) -> Any:
        if next(turns) == place:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(LifeReader, "read", interrupted)


@pytest.mark.parametrize("place", [pytest.param(3, id="before cycle 2"), pytest.param(2, id="after shutdown")])
def test_ctrl_c_while_reading_keeps_what_there_is(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_reading(place, monkeypatch)
    run = live(SmallLife, cycles=2)
    subject = run.run()
    assert run.interrupted
    assert subject.outcome == "error"
    assert len(subject.stages) >= len(SCRIPT) - 1


def test_one_ctrl_c_while_reading_after_shutdown_does_not_lose_that_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_reading(2, monkeypatch)
    subject = live(SmallLife, cycles=2).run()
    assert [(stage.cycle, stage.name) for stage in subject.stages] == [(1, name) for name in SCRIPT]
    assert subject.reason == "interrupted in cycle 1"
    assert (subject.outcome, subject.findings) == ("error", ())


@pytest.mark.usefixtures("plain_ctrl_c")
def test_a_ctrl_c_that_got_lost_before_the_run_ends_it_before_its_first_life() -> None:
    with Interrupts():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        subject, _ = found(SmallLife, cycles=2)
    assert (subject.outcome, subject.reason, subject.stages) == ("error", "interrupted before the first life", ())


class IsInterruptedInItsThirdLife(SmallLife):
    """And keeps something of each life before."""

    lives = 0
    keeps = False

    def infer(self) -> Sequence[Sequence[int]]:
        type(self).lives += 1
        if self.lives == 3:
            raise KeyboardInterrupt
        if self.keeps:
            KEPT.append(torch.zeros(1000))
        return super().infer()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_whole_lives_before_a_ctrl_c_are_judged(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IsInterruptedInItsThirdLife, "lives", 0)
    monkeypatch.setattr(IsInterruptedInItsThirdLife, "keeps", keeps)
    subject, findings = found(IsInterruptedInItsThirdLife, cycles=5)
    judged = "interrupted in cycle 3; 2 whole cycles were judged"
    if keeps:
        assert [(finding.resource, finding.bytes) for finding in findings] == [("tensors", 8000)]
        assert (subject.outcome, subject.reason) == ("leak", judged)
    else:
        assert (subject.outcome, subject.reason) == ("error", f"{judged}, and everything that was judged came back")


def test_a_ctrl_c_between_two_lives_does_not_lose_what_the_first_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ShutdownJudgement.begin

    def interrupted(self: ShutdownJudgement, cycle: int) -> Snapshot:
        if cycle == 2:
            raise KeyboardInterrupt
        return original(self, cycle)

    monkeypatch.setattr(ShutdownJudgement, "begin", interrupted)
    subject, findings = found(KeepsTensor, cycles=3)
    assert [finding.resource for finding in findings] == ["tensors"]
    assert subject.outcome == "leak"


def test_each_life_that_others_follow_is_kept_with_what_it_has_left() -> None:
    kept: list[Subject] = []
    run = live(KeepsTensor, 3, SHORT)
    run.keep = kept.append
    run.run()
    assert [[(stage.cycle, stage.name) for stage in subject.stages] for subject in kept] == [
        [(cycle, name) for name in SHORT] for cycle in (1, 2)
    ]
    assert [[finding.resource for finding in subject.findings] for subject in kept] == [["tensors"]] * 2


class BrokenSource:
    """An announced pool that fails once when it is read."""

    def __init__(self) -> None:
        self.broken = True
        announce(self)

    def read_pools(self) -> tuple[Any, ...]:
        if self.broken:
            self.broken = False
            raise OSError("gone")
        return ()


class CannotBeRead(SmallLife):
    def wake(self) -> None:
        super().wake()
        KEPT.append(BrokenSource())


def test_an_error_of_the_checker_itself_is_said_to_be_one_and_the_engine_is_shut_down() -> None:
    subject, _ = found(CannotBeRead, script=SCRIPT)
    assert subject.outcome == "error"
    assert "lowtide itself failed: PoolSourceError" in subject.reason
    assert subject.stages[-1].name == "shutdown"
    assert subject.stages[-1].after.arenas == {}


def test_the_same_leak_in_every_life_is_one_finding() -> None:
    subject, findings = found(KeepsTensor, cycles=2)
    assert len(findings) == 1
    assert len(subject.stages) == 2 * len(SHORT)


# --- out of memory --------------------------------------------------------------------------------------------------


class RunsOut(SmallLife):
    """Asks for more than there is in an infer, and gives back what it holds when it hears no."""

    def infer(self) -> Sequence[Sequence[int]]:
        self.activations = [torch.zeros(MIB) for _ in range(2)]
        try:
            with stages.stage("attention"):
                torch.empty(1 << 50)
        except RuntimeError as error:
            self.activations.clear()
            raise ValueError("infer failed") from error
        return super().infer()


class GoesOn(RunsOut):
    def infer(self) -> Sequence[Sequence[int]]:
        with contextlib.suppress(ValueError):
            super().infer()
        return SmallLife.infer(self)


def test_a_life_that_ends_for_want_of_memory_says_who_held_it() -> None:
    subject, _ = found(RunsOut, cycles=2)
    assert subject.reason == "cycle 1: infer raised ValueError: infer failed"
    told = subject.out_of_memory
    assert told is not None
    assert (told.device, told.stage, told.asked) == ("cpu", "infer", 1 << 52)
    (released,) = [part for part in told.held if part.bytes == 8 * MIB]
    assert (released.count, released.stage) == (2, "infer")
    assert "freed while the error went up" in released.message


def test_what_is_read_then_is_no_memory_of_the_engine_s() -> None:
    made: list[SmallLife] = []

    def make() -> SmallLife:
        # Of a first life it is not judged what host memory it leaves.
        made.append(RunsOut() if made else SmallLife())
        return made[-1]

    subject, findings = found(make, cycles=2)
    assert subject.out_of_memory is not None
    assert [finding.resource for finding in findings if finding.resource == "host-memory"] == []


def test_a_life_whose_engine_goes_on_is_judged_as_any_other() -> None:
    subject, _ = found(GoesOn)
    assert (subject.outcome, subject.reason, subject.out_of_memory) == ("clean", "", None)
