"""Lives of small engines that lose something around a sleep, or change their process, and the clean twin of each."""

from __future__ import annotations

import gc
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.lives import workspace_growth
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.lives.script import SCRIPT
from lowtide.leakcheck.lives.workspace_growth import GROWTH, GrowthWatch
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.torch_allocator import AllocatedRanges
from lowtide.probes.memory.ranges import merge
from lowtide.probes.stages import listening, stage
from lowtide.reports.schema import Finding, Subject

pytestmark = pytest.mark.nightly

MIB = 1 << 20


class Sleeper:
    """A clean engine: weights in an arena that every sleep drops and every wake fills, a table in one that stays."""

    def __init__(self) -> None:
        self.pages = CpuPages()
        self.reported: list[str] = []

    def create(self) -> None:
        self.arenas = {tag: Arena(tag, 2 * MIB, self.pages) for tag in ("weights", "kv_cache", "runtime")}
        self.weights = self.arenas["weights"].allocate((1000,), torch.int64)
        self.table = self.arenas["runtime"].allocate((10,), torch.int64)
        self.table.copy_(torch.arange(10))
        self.arenas["kv_cache"].map_to(MIB)
        self.fill()

    def fill(self) -> None:
        self.weights.copy_(torch.arange(1000))

    def infer(self) -> Sequence[Sequence[int]]:
        self.reported.append("infer")
        return [[1, 2, 3]]

    def sleep(self, level: int) -> None:
        self.arenas["weights"].unmap_to(0)
        self.arenas["kv_cache"].unmap_to(0)

    def wake(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        self.arenas["kv_cache"].map_to(MIB)
        self.fill()

    def preserved(self) -> Mapping[str, torch.Tensor]:
        return {"weights": self.weights, "table": self.table}

    def shutdown(self) -> None:
        for name in ("weights", "table", "scratch"):
            self.__dict__.pop(name, None)
        for arena in self.__dict__.pop("arenas", {}).values():
            arena.close()


ONE_SLEEP = ("create", "infer", "sleep(1)", "wake", "infer", "shutdown")


def live(life: type[Sleeper], script: Sequence[str] = ONE_SLEEP) -> tuple[Subject, Sleeper]:
    made: list[Sleeper] = []

    def make() -> Sleeper:
        made.append(life())
        return made[-1]

    subject = LifecycleRun("small", make, device="cpu", driver=NoDriver("a test"), cycles=1, script=script).run()
    return subject, made[0]


def only(life: type[Sleeper]) -> Finding:
    subject, _ = live(life)
    (finding,) = subject.findings
    return finding


def is_clean(life: type[Sleeper]) -> bool:
    subject, _ = live(life)
    return (subject.outcome, subject.reason, subject.findings) == ("clean", "", ())


def test_the_clean_engine_is_clean_and_infers_to_the_end() -> None:
    subject, engine = live(Sleeper, SCRIPT)
    assert (subject.outcome, subject.findings) == ("clean", ())
    assert engine.reported == ["infer"] * 3


# --- a sleep that gives nothing back ---------------------------------------------------------------------------------


class DropsItsCache(Sleeper):
    """Has its cache in no arena, and makes it again in the wake."""

    def create(self) -> None:
        super().create()
        self.cache = torch.zeros(8 * MIB, dtype=torch.uint8)

    def sleep(self, level: int) -> None:
        super().sleep(level)
        del self.cache

    def wake(self) -> None:
        super().wake()
        self.cache = torch.zeros(8 * MIB, dtype=torch.uint8)

    def shutdown(self) -> None:
        self.__dict__.pop("cache", None)
        self.__dict__.pop("spare", None)
        super().shutdown()


class KeepsAViewOfIt(DropsItsCache):
    def sleep(self, level: int) -> None:
        self.spare = self.cache[:100]
        super().sleep(level)


class KeepsIt(DropsItsCache):
    def sleep(self, level: int) -> None:
        Sleeper.sleep(self, level)

    def wake(self) -> None:
        Sleeper.wake(self)


def test_what_an_engine_kept_of_its_cache_asleep_is_told_once_it_has_made_another() -> None:
    finding = only(KeepsAViewOfIt)
    assert (finding.resource, finding.stage, finding.bytes, finding.holder) == (
        "tensors",
        "wake",
        8 * MIB,
        "engine.spare",
    )
    assert is_clean(DropsItsCache)


@pytest.mark.parametrize("script", [ONE_SLEEP, ("create", "infer", "sleep(2)", "wake", "infer", "shutdown")])
def test_what_stays_asleep_is_told_where_nothing_may_and_not_judged_where_nobody_says(script: Sequence[str]) -> None:
    subject, _ = live(KeepsIt, script)
    unsaid = [item.what for item in subject.not_measured if "gives back" in item.what]
    if "sleep(1)" in script:
        assert subject.findings == ()
        assert unsaid == ["what sleep(1) gives back on cpu: 1.0 MiB of 9.0 MiB came back"]
    else:
        (finding,) = subject.findings
        assert (finding.resource, finding.stage, finding.holder) == ("tensors", "sleep(2)", "engine.cache")
        assert unsaid == []


# --- a wake that fails ----------------------------------------------------------------------------------------------


class FailsOnce(Sleeper):
    failures = 1

    def wake(self) -> None:
        if self.failures:
            self.failures -= 1
            self.fail()
        super().wake()

    def fail(self) -> None:
        raise OutOfMemoryError("no room")


class FailsHalfWay(FailsOnce):
    def fail(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        super().fail()


class FailsTwice(FailsOnce):
    failures = 2


class FailsWithAnotherError(FailsHalfWay):
    def fail(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        raise RuntimeError("planted")


def test_a_wake_without_room_that_undoes_it_is_made_again_and_reported() -> None:
    subject, _ = live(FailsOnce)
    assert (subject.outcome, subject.reason, subject.findings) == ("clean", "", ())
    (reported,) = [item for item in subject.not_measured if item.what == "the first try of wake"]
    assert reported.why == "in cycle 1 it raised OutOfMemoryError: no room; made again, it worked"


def test_a_wake_that_fails_for_another_reason_ends_the_run_and_is_judged() -> None:
    subject, _ = live(FailsWithAnotherError)
    assert subject.reason == "cycle 1: wake raised RuntimeError: planted"
    assert [(finding.resource, finding.holder) for finding in subject.findings] == [("arena", "arena 'weights'")]


def test_what_a_failed_wake_leaves_mapped_is_found() -> None:
    finding = only(FailsHalfWay)
    assert (finding.resource, finding.cause, finding.stage) == ("arena", "not-restored", "wake")
    assert (finding.bytes, finding.holder) == (8192, "arena 'weights'")


def test_a_wake_that_fails_again_ends_the_run_with_its_error() -> None:
    subject, _ = live(FailsTwice)
    assert (subject.outcome, subject.findings) == ("error", ())
    assert subject.reason == "cycle 1: wake raised OutOfMemoryError: no room"


# --- contents and addresses -----------------------------------------------------------------------------------------


class LosesWeights(Sleeper):
    def wake(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        self.arenas["kv_cache"].map_to(MIB)


def test_lost_contents_are_named_and_nothing_is_computed_with_them() -> None:
    subject, engine = live(LosesWeights)
    (finding,) = subject.findings
    assert (finding.resource, finding.cause, finding.holder) == ("contents", "not-restored", "weights")
    assert (finding.bytes, finding.stage) == (8000, "wake")
    assert engine.reported == ["infer"]
    assert subject.stages[-1].name == "shutdown"


class MovesTable(Sleeper):
    def create(self) -> None:
        super().create()
        self.recorded = {"table": (self.table.data_ptr(), self.table.nbytes)}

    def graph_buffers(self) -> Mapping[str, tuple[int, int]]:
        return self.recorded

    def wake(self) -> None:
        super().wake()
        table = self.arenas["runtime"].allocate((10,), torch.int64)
        table.copy_(self.table)
        self.table = table


class RecordsTable(MovesTable):
    def wake(self) -> None:
        Sleeper.wake(self)


def test_a_table_that_moved_from_under_a_graph_is_named() -> None:
    finding = only(MovesTable)
    assert (finding.resource, finding.cause, finding.holder, finding.stage) == (
        "pointers",
        "cuda-graph",
        "table",
        "wake",
    )


def test_a_table_that_stays_where_a_graph_reads_it_is_clean() -> None:
    assert is_clean(RecordsTable)


class PointsIntoTheCache(Sleeper):
    def create(self) -> None:
        super().create()
        self.table[3] = self.arenas["kv_cache"].bytes_at(0, 1).data_ptr() + 4096

    def wake(self) -> None:
        self.arenas["weights"].map_to(self.arenas["weights"].used)
        self.fill()


def test_a_pointer_to_pages_that_did_not_come_back_is_found_beside_them() -> None:
    subject, _ = live(PointsIntoTheCache)
    assert [(finding.resource, finding.cause, finding.holder) for finding in subject.findings] == [
        ("arena", "not-restored", "arena 'kv_cache'"),
        ("pointers", "not-restored", "table"),
    ]


# --- what inferring leaves while it sleeps --------------------------------------------------------------------------


class KeepsScratch(Sleeper):
    def infer(self) -> Sequence[Sequence[int]]:
        self.scratch = torch.ones(1000)
        return super().infer()


class DropsScratch(KeepsScratch):
    def sleep(self, level: int) -> None:
        self.scratch = None
        super().sleep(level)


class KeepsFromCreate(Sleeper):
    def create(self) -> None:
        super().create()
        self.scratch = torch.ones(1000)


class KeepsInItsArena(Sleeper):
    def infer(self) -> Sequence[Sequence[int]]:
        self.scratch = self.arenas["kv_cache"].bytes_at(0, 4000)
        return super().infer()


def test_what_inferring_made_and_a_sleep_keeps_is_found_with_its_holder() -> None:
    finding = only(KeepsScratch)
    assert (finding.resource, finding.cause, finding.stage) == ("tensors", "instance-attribute", "infer")
    assert (finding.bytes, finding.holder) == (4000, "engine.scratch")


@pytest.mark.parametrize("life", [DropsScratch, KeepsFromCreate, KeepsInItsArena])
def test_what_was_dropped_or_made_before_or_lies_in_an_arena_is_not(life: type[Sleeper]) -> None:
    assert is_clean(life)


# --- the process ----------------------------------------------------------------------------------------------------


class ChangesDtype(Sleeper):
    def create(self) -> None:
        super().create()
        torch.set_default_dtype(torch.float64)


class RestoresDtype(ChangesDtype):
    def shutdown(self) -> None:
        torch.set_default_dtype(torch.float32)
        super().shutdown()


def test_a_setting_that_stays_is_found_and_put_back() -> None:
    finding = only(ChangesDtype)
    assert (finding.resource, finding.cause, finding.holder) == ("globals", "not-restored", "torch.get_default_dtype()")
    assert finding.message.startswith("torch.get_default_dtype() was torch.float32, is torch.float64, and not restored")
    assert finding.remedy is not None
    assert finding.remedy.action == "torch.set_default_dtype(torch.float32)"
    assert torch.get_default_dtype() is torch.float32
    assert is_clean(RestoresDtype)


class PatchesCuda(Sleeper):
    def create(self) -> None:
        super().create()
        torch.cuda.empty_cache = lambda: None


def test_a_function_that_stays_replaced_is_found_and_put_back() -> None:
    original = torch.cuda.empty_cache
    finding = only(PatchesCuda)
    assert (finding.resource, finding.holder) == ("globals", "torch.cuda.empty_cache")
    assert finding.remedy is not None
    assert torch.cuda.empty_cache is original


class KeepsProcess(Sleeper):
    children: list[subprocess.Popen[bytes]]

    def create(self) -> None:
        super().create()
        KeepsProcess.children = [subprocess.Popen(["sleep", "600"])]


def test_a_child_process_that_stays_is_named() -> None:
    try:
        finding = only(KeepsProcess)
    finally:
        (child,) = KeepsProcess.children
        child.kill()
        child.wait()
    assert (finding.resource, finding.count) == ("processes", 1)
    assert f"pid {child.pid} (sleep)" in finding.message
    assert (finding.holder or "").endswith(".children[0]")


class EndsAThreadLate(Sleeper):
    def shutdown(self) -> None:
        if "arenas" in self.__dict__:
            threading.Thread(target=time.sleep, args=(0.3,)).start()
        super().shutdown()


def test_a_thread_that_ends_by_itself_is_waited_for() -> None:
    subject, _ = live(EndsAThreadLate)
    assert (subject.outcome, subject.findings) == ("clean", ())
    (back,) = subject.returns
    assert (back.resource, back.rung) == ("threads", "settle")
    assert back.seconds > 0


# --- growths --------------------------------------------------------------------------------------------------------


class Allocator:
    """What torch would count on a card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = self.allocated = 0
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(workspace_growth, "release", self.empty)

    def stats(self, device: object) -> dict[str, Any]:
        return {
            "reserved_bytes": {"all": {"current": self.reserved}},
            "allocated_bytes": {"all": {"current": self.allocated}},
        }

    def empty(self, rung: object) -> bool:
        self.reserved = self.allocated
        return True

    def grow(self, by: int, *, keeping: int = 0) -> None:
        with stage("grow_workspace"):
            self.allocated += by
            self.reserved += by + keeping


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


@pytest.fixture
def watch(allocator: Allocator) -> Iterator[GrowthWatch]:
    watch = GrowthWatch("cuda:0")
    with listening(watch):
        yield watch


def test_growths_that_keep_the_old_memory_are_added_up(watch: GrowthWatch, allocator: Allocator) -> None:
    allocator.grow(64 * MIB, keeping=32 * MIB)
    allocator.grow(2 * MIB, keeping=96 * MIB)
    found = watch.finding("infer")
    assert found is not None
    assert (found.resource, found.cause, found.stage) == ("reserved", "allocator-cache", "infer")
    assert (found.bytes, found.count) == (128 * MIB, 2)
    assert found.remedy is not None
    assert (found.remedy.action, found.remedy.returns_bytes) == ("torch.cuda.empty_cache()", 128 * MIB)
    assert watch.finding("infer") is None


def test_growths_that_reserve_what_they_hold_are_clean(watch: GrowthWatch, allocator: Allocator) -> None:
    allocator.grow(64 * MIB)
    allocator.grow(64 * MIB, keeping=8 * MIB)
    assert watch.finding("infer") is None


def test_a_growth_that_ends_with_less_in_use_and_as_much_reserved_keeps_nothing(
    watch: GrowthWatch, allocator: Allocator
) -> None:
    allocator.reserved = allocator.allocated = 256 * MIB
    allocator.grow(-64 * MIB, keeping=64 * MIB)
    assert watch.finding("infer") is None


class Blocks:
    """The blocks of torch's allocator on a card: each fills a segment, and is free or in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: dict[int, tuple[int, bool]] = {}
        monkeypatch.setattr(workspace_growth, "allocated_ranges", self.ranges)
        monkeypatch.setattr(workspace_growth, "release", self.empty)
        monkeypatch.setattr(GrowthWatch, "_figures", lambda watch: (0, 0))

    def ranges(self, index: int) -> AllocatedRanges:
        assert index == 1
        in_use = [(address, size) for address, (size, used) in self.segments.items() if used]
        return AllocatedRanges(merge((at, size) for at, (size, _) in self.segments.items()), merge(in_use))

    def allocate(self, address: int, size: int) -> None:
        self.segments[address] = (size, True)

    def free(self, address: int) -> None:
        self.segments[address] = (self.segments[address][0], False)

    def empty(self, rung: object) -> bool:
        self.segments = {address: held for address, held in self.segments.items() if held[1]}
        return True


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    return Blocks(monkeypatch)


@pytest.fixture
def seeing(blocks: Blocks) -> Iterator[GrowthWatch]:
    watch = GrowthWatch("cuda:1")
    with listening(watch):
        yield watch


def test_a_buffer_that_was_replaced_is_reported_although_the_new_one_came_out_of_what_was_cached(
    seeing: GrowthWatch, blocks: Blocks
) -> None:
    blocks.allocate(0, 16 * MIB)
    blocks.allocate(1 << 30, 512 * MIB)
    blocks.free(1 << 30)
    blocks.allocate(1 << 31, 512 * MIB)
    blocks.free(1 << 31)
    with stage("grow_workspace"):
        blocks.free(0)
        blocks.allocate(1 << 30, 512 * MIB)
    found = seeing.finding("infer")
    assert found is not None
    assert (found.bytes, found.count, found.device) == (16 * MIB, 1, "cuda:1")
    # Not the other 512 MiB that emptying the cache gives back, too: they were free before.
    assert found.remedy is not None
    assert found.remedy.returns_bytes == 16 * MIB
    assert "16.0 MiB stay reserved on cuda:1 after a growth of a workspace in infer" in found.message
    assert seeing.finding("infer") is None


def test_what_two_growths_left_at_one_place_is_there_once(seeing: GrowthWatch, blocks: Blocks) -> None:
    for address in (0, 1 << 30):
        blocks.allocate(address, 64 * MIB)
        with stage("grow_workspace"):
            blocks.free(address)
    blocks.allocate(0, 64 * MIB)
    with stage("grow_workspace"):
        blocks.free(0)
    found = seeing.finding("infer")
    assert found is not None
    assert (found.bytes, found.count) == (128 * MIB, 3)


@pytest.mark.parametrize("way", ["in place", "given back", "a temporary", "as large as the segment", "used again"])
def test_a_growth_that_leaves_nothing_of_its_own_is_clean(seeing: GrowthWatch, blocks: Blocks, way: str) -> None:
    blocks.allocate(0, 16 * MIB)
    with stage("grow_workspace"):
        if way == "in place":
            blocks.allocate(0, 64 * MIB)
        elif way == "given back":
            blocks.free(0)
            blocks.allocate(1 << 30, 64 * MIB)
            blocks.empty(None)
        elif way == "a temporary":
            blocks.allocate(1 << 30, 64 * MIB)
            blocks.free(1 << 30)
        elif way == "as large as the segment":
            # A segment of 20 MiB for 8 of them: 12 MiB more are reserved than held, and nothing old is kept.
            blocks.allocate(1 << 30, 8 * MIB)
            blocks.segments[(1 << 30) + 8 * MIB] = (12 * MIB, False)
        else:
            blocks.free(0)
    if way == "used again":
        blocks.allocate(0, 16 * MIB)
    assert seeing.finding("infer") is None


def test_what_a_collection_frees_is_nothing_that_a_growth_let_go_of(seeing: GrowthWatch, blocks: Blocks) -> None:
    blocks.allocate(0, 16 * MIB)
    blocks.allocate(1 << 30, 16 * MIB)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with suppress(KeyError), stage("grow_workspace"), stage("grow_workspace"):
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_other_stages_may_reserve_what_they_like(watch: GrowthWatch, allocator: Allocator) -> None:
    with stage("infer"):
        allocator.reserved += 1 << 30
    assert watch.finding("infer") is None


def test_on_a_cpu_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: pytest.fail("it was asked"))
    watch = GrowthWatch("cpu")
    with listening(watch), stage("grow_workspace"):
        pass
    assert watch.finding("infer") is None


def test_the_engine_marks_its_growths(tmp_path: Path) -> None:
    from lowtide.engine.device_allocator.arena import Workspace

    heard: list[str] = []

    class Listener:
        def stage_entered(self, entered: Any) -> None:
            heard.append(entered.name)

        def stage_left(self, left: Any, error: BaseException | None) -> None:
            pass

    workspace = Workspace(Arena("workspace", MIB, CpuPages()))
    with listening(Listener()):
        workspace.get(((1000,), torch.uint8))
        workspace.get(((1000,), torch.uint8))
    workspace.close()
    assert heard == [GROWTH]
