"""The tensors of a process that is asked, and what of them must survive a sleep."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.processes import answers, own_tensors
from lowtide.leakcheck.processes.messages import (
    ComparePreserved,
    GrownContainers,
    Question,
    ReadTurn,
    RememberPreserved,
    ask,
)
from lowtide.leakcheck.processes.own_tensors import OwnPreserved, OwnTensors
from lowtide.probes import native
from lowtide.probes.device.torch_allocator import AllocatorReading, PoolSegments
from lowtide.probes.stages import PoolReading, announce, withdraw
from tests.resized_buffers import buffers_resized_meanwhile

SIZE = 4 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena("weights", SIZE, CpuPages())
    yield arena
    arena.close()


@pytest.fixture
def own() -> Iterator[OwnTensors]:
    """What watches its process until that ends, and here until the test does."""
    before = list(gc.callbacks)
    yield OwnTensors()
    gc.callbacks[:] = before


@pytest.mark.nightly
def test_a_tensor_whose_pages_are_gone_holds_nothing(arena: Arena, own: OwnTensors) -> None:
    own.begin("infer", 1)
    before = own.levels()
    tensor = arena.allocate((SIZE,), torch.uint8)
    at_work = own.levels()
    assert at_work.of("cpu") - before.of("cpu") == SIZE
    arena.unmap_to(0)
    assert own.levels().of("cpu") == before.of("cpu")
    assert own.asleep(1, "cpu") == []
    assert all(finding.bytes < SIZE for finding in own.held("sleep(1)", "cpu", 5))
    del tensor


def turn(number: int, *, ends: bool = False) -> GrownContainers:
    """Read what grows after a turn."""
    question = ReadTurn(turns="steps", turn=number, begins=number == 1, asked=True, tells=ends, ends=ends)
    return ask(answers.answer, question, "this process")


KEPT: list[object] = []
GROWING: list[object] = []


@pytest.mark.nightly
@pytest.mark.skipif(native.all_instances is None, reason="the extension is not built here")
def test_no_other_thread_sees_who_holds_what_being_found() -> None:
    before = list(gc.callbacks)
    own = OwnTensors(answers.apart)
    own.begin("infer", 1)
    KEPT.append(torch.ones(1 << 20))
    for number in range(1, 14):
        GROWING.append(bytes(2048))
        turn(number)
    GROWING.append(bytes(2048))
    try:
        with buffers_resized_meanwhile() as errors:
            found = [*own.held("sleep(1)", "cpu", 1), *turn(14, ends=True).findings]
        assert errors == []
        assert {each.holder for each in found} >= {f"{__name__}.KEPT[0]", f"{__name__}.GROWING"}
    finally:
        KEPT.clear()
        GROWING.clear()
        gc.callbacks[:] = before


@pytest.mark.skipif(native.all_instances is None, reason="the extension is not built here")
def test_no_other_thread_sees_what_it_lets_go_of_alive(own: OwnTensors) -> None:
    with buffers_resized_meanwhile() as errors:
        for _ in range(20):
            own.levels()
    assert errors == []


def test_a_tensor_beside_the_arenas_is_still_there_asleep(arena: Arena, own: OwnTensors) -> None:
    own.begin("infer", 1)
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    arena.unmap_to(0)
    (finding,) = own.asleep(1, "cpu")
    assert finding.bytes == SIZE
    assert own.held("sleep(1)", "cpu", 1)[0].bytes == SIZE
    del tensor


@pytest.mark.parametrize(("dropped", "findings"), [(False, 1), (True, 0)])
def test_what_a_sleep_leaves_beside_the_arenas_is_told_after_the_wake(
    dropped: bool, findings: int, arena: Arena, own: OwnTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.begin("infer", 1)
    older = torch.zeros(SIZE, dtype=torch.uint8)
    own.begin("sleep(1)", 1)
    monkeypatch.setattr(answers, "KEPT", [torch.zeros(SIZE, dtype=torch.uint8)], raising=False)
    paged = arena.allocate((SIZE,), torch.uint8)
    own.asleep(1, "cpu")
    own.begin("wake", 1)
    if dropped:
        monkeypatch.undo()
    found = own.more_awake("wake", "cpu")
    assert [(each.bytes, each.stage) for each in found] == [(SIZE, "sleep(1)")] * findings
    assert all("answers.KEPT[0]" in str(each.holder) for each in found)
    assert all("let go of" in str(each.advice) and "in sleep(1)" in str(each.advice) for each in found)
    del older, paged


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_pinned_memory_that_torch_keeps_is_not_unexplained(own: OwnTensors) -> None:
    own.begin("infer", 1)
    torch.zeros(1, device="cuda")
    # What tests before this one left in torch's cache would go with the buffer.
    torch._C._host_emptyCache()
    before = own.levels().resident
    pinned = torch.ones(SIZE, dtype=torch.uint8).pin_memory()
    pinned.to("cuda", non_blocking=True)
    assert own.levels().resident - before == pytest.approx(SIZE, abs=SIZE // 16)
    torch.cuda.synchronize()
    del pinned
    kept = torch.cuda.host_memory_stats()
    assert own.levels().resident - before == pytest.approx(SIZE, abs=SIZE // 16), kept
    torch._C._host_emptyCache()
    assert own.levels().resident - before == pytest.approx(0, abs=SIZE // 16)


class Engine:
    """A table outside of any pool, and one in an arena that a sleep may empty."""

    def __init__(self) -> None:
        self.table = torch.arange(100)
        self.paged = torch.arange(100, 200)
        self.mapped = [(self.paged.data_ptr(), 400), (self.paged.data_ptr() + 400, 400)]

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        return {"table": self.table, "paged": self.paged}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        return {}

    def read_pools(self) -> list[PoolReading]:
        span = (self.paged.data_ptr(), 800)
        mapped = sum(length for _, length in self.mapped)
        return [PoolReading("arena", "runtime", "cpu", 800, mapped, tuple(self.mapped), span)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    announce(engine)
    yield engine
    withdraw(engine)


def asked(question: Question[Any]) -> Any:
    return ask(answers.answer, question, "this process")


def test_what_has_not_changed_is_no_finding(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    assert preserved.tensors == 2
    engine.table = engine.table.clone()
    assert preserved.compare("wake") == []


def test_contents_that_changed_are_found(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    engine.table[7] = 0
    (finding,) = preserved.compare("wake")
    assert (finding.resource, finding.holder, finding.stage) == ("contents", "table", "wake")


def test_a_tensor_without_pages_is_not_read_and_counts_as_lost(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    # On a card to read it would break the process.
    engine.mapped = engine.mapped[:1]
    assert OwnPreserved("cpu").tensors == 1
    (finding,) = preserved.compare("wake")
    assert (finding.resource, finding.holder) == ("contents", "paged")


def test_tensors_on_other_devices_are_another_matter(engine: Engine) -> None:
    assert OwnPreserved("cuda").tensors == 0


def test_an_agent_remembers_from_one_question_to_the_next(engine: Engine) -> None:
    assert asked(RememberPreserved(kind="cpu")) == 2
    engine.paged.zero_()
    lost = asked(ComparePreserved(stage="wake"))
    assert [finding.holder for finding in lost] == ["paged"]
    # Each sleep is compared once.
    assert asked(ComparePreserved(stage="wake")) == []


def test_a_process_that_announces_nothing_preserves_nothing() -> None:
    assert asked(RememberPreserved(kind="cpu")) == 0
    assert asked(ComparePreserved(stage="wake")) == []


def waiting(own: OwnTensors, cycle: int | None) -> list[tuple[int, dict[int, int]]]:
    found = [each for each in own.left(cycle) if each[0].resource == "cuda-ipc"]
    return [(finding.bytes, sizes) for finding, sizes in found]


@pytest.mark.nightly
def test_what_waits_for_importers_is_told_by_the_cycle_in_which_it_was_given_up(
    own: OwnTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[tuple[int, int]] = [(0x1000, 512)]
    monkeypatch.setattr(own_tensors, "any_exported", lambda: bool(exported))
    monkeypatch.setattr(own_tensors, "read_allocators", lambda claimed: (allocator(exported),))
    # What waits before the first stage is nobody's.
    own.begin("test", 1)
    exported += [(0x2000, 2048), (0x3000, 4096)]
    assert waiting(own, 1) == [(6144, {1: 6144})]
    own.begin("test", 2)
    exported[1:2] = [(0x4000, 1024)]
    assert waiting(own, 2) == [(1024, {2: 1024})]
    assert waiting(own, None) == [(5120, {1: 4096, 2: 1024})]
    exported.clear()
    assert waiting(own, None) == []


def allocator(exported: list[tuple[int, int]]) -> AllocatorReading:
    pool = PoolSegments((0, 0), 0, 0, 0, 0, 0, 0, exported_at=tuple(exported))
    return AllocatorReading("cuda:0", 0, 0, (pool,), 0, True, "")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")
def test_what_a_process_has_exported_and_given_up_is_told_with_its_counter(own: OwnTensors) -> None:
    torch.ones(8, device="cuda")
    own.begin("test", 1)
    tensor = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
    kept = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
    exports = [each.untyped_storage()._share_cuda_() for each in (tensor, kept)]  # type: ignore[no-untyped-call]
    del tensor
    ((finding, sizes),) = [each for each in own.left(1) if each[0].resource == "cuda-ipc"]
    assert sizes == {1: 8 << 20}
    assert finding.message.endswith("; counter 1: opened by nobody who lives")
    for export in exports:
        torch.UntypedStorage._release_ipc_counter_cuda(*export[4:6])  # type: ignore[no-untyped-call]
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    assert waiting(own, 1) == []
