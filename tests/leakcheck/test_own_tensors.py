"""What a process of an engine says that it holds: of memory in arenas, the pages that are there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.processes.own_tensors import OwnTensors

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


def test_a_tensor_beside_the_arenas_is_still_there_asleep(arena: Arena, own: OwnTensors) -> None:
    own.begin("infer", 1)
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    arena.unmap_to(0)
    (finding,) = own.asleep(1, "cpu")
    assert finding.bytes == SIZE
    assert own.held("sleep(1)", "cpu", 1)[0].bytes == SIZE
    del tensor


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none")
def test_pinned_memory_that_torch_keeps_is_not_unexplained(own: OwnTensors) -> None:
    own.begin("infer", 1)
    torch.zeros(1, device="cuda")
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
