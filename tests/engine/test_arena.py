"""Arenas: addresses stay, pages come and go, memory goes with the last tensor; workspaces grow in place."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lowtide.engine.device_allocator.arena import ALIGNMENT, Arena, Workspace, WorkspaceViews, padded, tensor_over
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages import Lease, Part
from lowtide.engine.pages.cpu import CpuPages
from lowtide.probes.host.readings import resident_bytes
from lowtide.probes.stages import announced_pools
from tests.sent_signals import all_arrive_elsewhere
from tests.waiting import HANG_S, wait_until

PAGE = 4096


class Recorder(CpuPages):
    """CPU pages that can refuse the n-th mapping and remember what was disposed of."""

    def __init__(self, refuse_at: int | None = None) -> None:
        super().__init__()
        self.maps = 0
        self.refuse_at = refuse_at
        self.disposed: list[tuple[int, int]] = []
        self.dispose_error: Exception | None = None

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        self.maps += 1
        if self.maps == self.refuse_at:
            raise OutOfMemoryError("refused")
        return super().map(lease, offset, size)

    def dispose(self, address: int, size: int, parts: object) -> None:
        self.disposed.append((address, size))
        if self.dispose_error is not None:
            raise self.dispose_error
        super().dispose(address, size, parts)  # type: ignore[arg-type]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_tensors_keep_address_and_lose_contents_when_pages_are_dropped() -> None:
    arena = Arena("weights", 64 * PAGE, CpuPages())
    tensor = arena.allocate((1000,), torch.float32)
    tensor.fill_(7.0)
    address = tensor.data_ptr()
    arena.unmap_to(0)
    assert arena.mapped == 0
    arena.map_to(arena.used)
    assert tensor.data_ptr() == address
    assert not tensor.any()
    tensor.fill_(8.0)
    assert tensor.sum() == 8000.0


def test_mapped_pages_are_really_there_and_dropped_ones_are_not() -> None:
    arena = Arena("kv_cache", 1024 * PAGE, CpuPages())
    arena.map_to(512 * PAGE)
    start = arena.bytes_at(0, 1).data_ptr()
    assert resident_bytes(start, 512 * PAGE) == 512 * PAGE
    arena.unmap_to(0)
    assert resident_bytes(start, 512 * PAGE) == 0


def test_each_tensor_has_a_storage_of_its_own_size() -> None:
    arena = Arena("weights", 16 * PAGE, CpuPages())
    first = arena.allocate((3, 5), torch.bfloat16)
    second = arena.allocate((7,), torch.int64)
    assert first.untyped_storage().nbytes() == 30
    assert second.untyped_storage().nbytes() == 56
    assert second.data_ptr() - first.data_ptr() == padded((3, 5), torch.bfloat16) == ALIGNMENT
    assert first.shape == (3, 5)
    assert first.is_contiguous()
    assert first._base is None


def test_an_empty_tensor_takes_nothing() -> None:
    arena = Arena("weights", PAGE, CpuPages())
    assert arena.allocate((0, 5), torch.float32).shape == (0, 5)
    assert arena.mapped == 0


def test_a_refused_mapping_leaves_the_arena_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engine.device_allocator.arena.PART_BYTES", 4 * PAGE)
    arena = Arena("weights", 64 * PAGE, Recorder(refuse_at=4))
    arena.map_to(4 * PAGE)
    with pytest.raises(OutOfMemoryError, match="arena 'weights' cannot grow from 49152"):
        arena.map_to(64 * PAGE - 12 * PAGE)
    assert arena.mapped == 4 * PAGE
    arena.map_to(64 * PAGE)
    assert arena.mapped == 64 * PAGE


def test_more_than_the_capacity_is_refused() -> None:
    arena = Arena("workspace", PAGE, CpuPages())
    with pytest.raises(OutOfMemoryError, match="4096 bytes of addresses, 8192 are needed"):
        arena.allocate((PAGE + 1,), torch.uint8)
    assert arena.used == 0


def test_more_than_the_host_has_is_refused_before_the_kernel_kills() -> None:
    arena = Arena("weights", PAGE, CpuPages())
    with pytest.raises(OutOfMemoryError, match="bytes available"):
        CpuPages().map(arena._require_lease(), 0, 1 << 45)


@pytest.mark.usefixtures("without_collector")
def test_close_gives_back_at_once_when_no_tensor_is_left() -> None:
    backend = Recorder()
    arena = Arena("weights", PAGE, backend)
    tensor = arena.allocate((10,), torch.float32)
    del tensor
    arena.close()
    assert len(backend.disposed) == 1
    assert announced_pools() == ()


@pytest.mark.usefixtures("without_collector")
def test_memory_of_a_leaked_tensor_goes_with_it_and_is_announced_until_then() -> None:
    backend = Recorder()
    arena = Arena("weights", 4 * PAGE, backend)
    tensor = arena.allocate((10,), torch.float32)
    tensor.fill_(3.0)
    view = tensor[2:]
    del tensor
    arena.close()
    assert backend.disposed == []
    assert [pool.mapped for pool in announced_pools()] == [PAGE]
    assert view.sum() == 24.0
    del view
    assert announced_pools() == ()
    assert len(backend.disposed) == 1


@pytest.mark.usefixtures("without_collector")
def test_an_arena_that_is_forgotten_keeps_nothing() -> None:
    backend = Recorder()
    arena = Arena("weights", PAGE, backend)
    arena.allocate((10,), torch.float32)
    gone = weakref.ref(arena)
    del arena
    assert gone() is None
    wait_until(lambda: backend.disposed)
    assert len(backend.disposed) == 1


def test_memory_that_is_on_its_way_back_is_waited_for_before_there_is_too_little() -> None:
    class OneAtATime(Recorder):
        def map(self, lease: Lease, offset: int, size: int) -> Part:
            if not self.disposed:
                raise OutOfMemoryError("the first arena has it all")
            return super().map(lease, offset, size)

        def dispose(self, address: int, size: int, parts: list[Part]) -> None:
            asked.wait(HANG_S)
            super().dispose(address, size, parts)

    asked = threading.Event()
    backend = OneAtATime()
    Arena("weights", PAGE, backend)
    arena = Arena("weights", PAGE, backend)
    timer = threading.Timer(0.1, asked.set)
    timer.start()
    arena.map_to(PAGE)
    assert arena.mapped == PAGE
    timer.join()
    arena.close()


def test_memory_that_is_on_its_way_back_is_not_announced_any_more() -> None:
    class Slow(Recorder):
        def dispose(self, address: int, size: int, parts: list[Part]) -> None:
            goes_on.wait(HANG_S)
            super().dispose(address, size, parts)

    goes_on = threading.Event()
    arena = Arena("weights", PAGE, Slow())
    arena.map_to(PAGE)
    assert [pool.mapped for pool in announced_pools()] == [PAGE]
    del arena
    timer = threading.Timer(0.1, goes_on.set)
    timer.start()
    assert announced_pools() == ()
    timer.join()


def dropped_arena() -> partial[object]:
    arenas = [Arena("weights", PAGE, Recorder())]
    return partial(arenas.clear)


def test_all_signals_arrive_that_come_before_an_arena_is_dropped() -> None:
    all_arrive_elsewhere(__name__, "dropped_arena")


def test_an_error_of_giving_back_comes_out_of_close_once() -> None:
    backend = Recorder()
    backend.dispose_error = OSError("the driver says no")
    arena = Arena("weights", PAGE, backend)
    arena.map_to(PAGE)
    with pytest.raises(OSError, match="the driver says no"):
        arena.close()
    assert [pool.mapped for pool in announced_pools()] == [PAGE]
    backend.dispose_error = None
    arena.close()
    assert announced_pools() == ()
    arena.close()
    assert len(backend.disposed) == 2


def test_a_tensor_over_memory_is_laid_out_row_by_row_from_its_offset() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = tensor_over(raw, 8, (2, 3, 4), torch.int16)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == ((2, 3, 4), (12, 4, 1), torch.int16)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == raw.data_ptr() + 8
    assert tensor.untyped_storage().nbytes() == 64
    assert torch.equal(tensor.view(-1), raw[8:56].view(torch.int16))


def test_what_was_given_back_is_not_given_back_again(without_collector: None) -> None:
    backend = Recorder()
    arena = Arena("weights", PAGE, backend)
    for _ in range(3):
        arena.close()
    assert len(backend.disposed) == 1


def test_pages_are_mapped_in_parts_of_a_quarter_of_a_gib() -> None:
    backend = Recorder()
    arena = Arena("weights", 600 << 20, backend)
    arena.map_to(600 << 20)
    assert [part.size for part in arena._record.parts] == [256 << 20, 256 << 20, 88 << 20]
    arena.unmap_to(0)
    arena.close()


def test_tensors_begin_where_every_load_is_aligned() -> None:
    arena = Arena("weights", PAGE, CpuPages())
    tensors = [arena.allocate((size,), torch.uint8) for size in (1, 511, 512, 513, 3)]
    starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    assert starts == [0, 512, 1024, 1536, 2560]
    arena.close()


def test_a_closed_arena_gives_no_memory() -> None:
    arena = Arena("weights", PAGE, CpuPages())
    arena.close()
    with pytest.raises(ValueError, match="arena 'weights' is closed"):
        arena.allocate((1,), torch.uint8)


@pytest.mark.usefixtures("without_collector")
def test_what_is_announced_are_the_mapped_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engine.device_allocator.arena.PART_BYTES", 2 * PAGE)
    arena = Arena("kv_cache", 8 * PAGE, CpuPages())
    arena.map_to(3 * PAGE)
    (pool,) = announced_pools()
    start = arena.bytes_at(0, 1).data_ptr()
    assert (pool.kind, pool.tag, pool.device, pool.reserved, pool.mapped) == (
        "arena",
        "kv_cache",
        "cpu",
        8 * PAGE,
        3 * PAGE,
    )
    assert pool.ranges == ((start, 2 * PAGE), (start + 2 * PAGE, PAGE))


def test_parts_go_back_one_by_one_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []

    class Recording(CpuPages):
        def unmap(self, lease: Lease, part: Part) -> None:
            given_back.append(part.offset)
            super().unmap(lease, part)

    pages = Recording()
    size = pages.granularity
    monkeypatch.setattr("lowtide.engine.device_allocator.arena.PART_BYTES", size)
    arena = Arena("weights", 4 * size, pages)
    arena.map_to(4 * size)
    arena.unmap_to(size)
    assert (given_back, arena.mapped) == ([3 * size, 2 * size, size], size)
    arena.close()


def test_an_arena_for_nothing_can_be_had_and_given_back() -> None:
    pages = CpuPages()
    arena = Arena("workspace", 0, pages)
    assert (arena.capacity, arena.mapped) == (pages.granularity, 0)
    assert arena.allocate((0, 3), torch.float32).shape == (0, 3)
    arena.close()


MIB = 1 << 20


def make(capacity: int = 64 * MIB) -> tuple[Arena, Workspace]:
    arena = Arena("workspace", capacity, CpuPages())
    return arena, Workspace(arena)


def test_tensors_lie_side_by_side_and_do_not_overlap() -> None:
    _, workspace = make()
    first, second = workspace.get(((100,), torch.bfloat16), ((3, 4), torch.float32))
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 100
    assert second.shape == (3, 4)
    assert first.data_ptr() + 200 <= second.data_ptr()


def test_growing_keeps_the_address_and_never_holds_old_and_new() -> None:
    arena, workspace = make()
    (small,) = workspace.get(((MIB,), torch.uint8))
    (large,) = workspace.get(((8 * MIB,), torch.uint8))
    assert large.data_ptr() == small.data_ptr()
    assert arena.mapped == 8 * MIB


def test_what_was_enough_is_not_mapped_again() -> None:
    arena, workspace = make()
    workspace.get(((8 * MIB,), torch.uint8))
    workspace.get(((MIB,), torch.uint8))
    assert arena.mapped == 8 * MIB


def test_a_view_that_somebody_kept_still_reads_its_bytes_after_growth() -> None:
    _, workspace = make()
    (kept,) = workspace.get(((1000,), torch.float32))
    kept.fill_(5.0)
    workspace.get(((8 * MIB,), torch.uint8))
    assert kept.sum() == 5000.0


def test_beyond_its_capacity_it_says_what_to_lower() -> None:
    _, workspace = make(MIB)
    with pytest.raises(OutOfMemoryError, match="lower max_num_batched_tokens or max_model_len"):
        workspace.get(((2 * MIB,), torch.uint8))


def test_dropped_pages_come_back_with_the_next_get() -> None:
    arena, workspace = make()
    workspace.get(((MIB,), torch.uint8))
    workspace.drop_pages()
    assert arena.mapped == 0
    (again,) = workspace.get(((MIB,), torch.uint8))
    again.fill_(1)
    assert arena.mapped == MIB


def test_views_are_cut_once_for_the_same_tensors_and_anew_for_others() -> None:
    _, workspace = make()
    views = WorkspaceViews(workspace)
    first = views.get(((100,), torch.float32))
    assert views.get(((100,), torch.float32))[0] is first[0]
    (other,) = views.get(((100,), torch.float16))
    assert other.dtype is torch.float16


def test_views_have_pages_again_after_a_sleep() -> None:
    arena, workspace = make()
    views = WorkspaceViews(workspace)
    (kept,) = views.get(((MIB,), torch.uint8))
    workspace.drop_pages()
    (again,) = views.get(((MIB,), torch.uint8))
    assert again is kept
    assert arena.mapped == MIB
