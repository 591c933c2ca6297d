"""Host memory in blocks, and the transfer ring: bytes survive the way to the host and back; errors leave nothing."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lowtide.engine.device_allocator import memory
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.device_allocator.memory import HostBuffer, TransferRing
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages.cpu import CpuPages
from lowtide.probes.stages import announced_pools
from tests.waiting import wait_until

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

MIB = 1 << 20


def test_more_than_there_are_addresses_is_refused_with_its_bytes() -> None:
    with pytest.raises(OutOfMemoryError, match=r"no address range of \d+ bytes on the host for too much") as caught:
        HostBuffer("too much", 1 << 60, MIB, CpuPages())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("huge_page", [memory.HUGE_PAGE, 99 * MIB])
def test_a_buffer_begins_at_a_huge_page_and_can_be_used_to_its_end(
    huge_page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a size at which no kernel begins a mapping by itself, too.
    monkeypatch.setattr(memory, "HUGE_PAGE", huge_page)
    buffer = HostBuffer("offload", 3 * MIB + 1, MIB, CpuPages())
    assert buffer.address % huge_page == 0
    whole = buffer.tensor(0, buffer.size)
    assert whole.data_ptr() == buffer.address
    assert int(whole.fill_(1).sum()) == buffer.size >= 3 * MIB + 1
    buffer.close()


def test_a_closed_buffer_says_so_and_has_given_its_pages_back() -> None:
    buffer = HostBuffer("offload", 3 * MIB, 2 * MIB, CpuPages())
    part = buffer.tensor(2 * MIB, MIB)
    part.fill_(1)
    (pool,) = buffer.read_pools()
    assert (pool.kind, pool.ranges) == ("host", ((buffer.address + 2 * MIB, MIB),))
    assert not buffer.closed
    buffer.close()
    assert buffer.closed
    assert buffer.read_pools() == ()
    # Pages that are not there any more read as zeros.
    assert int(part.sum()) == 0
    del part, buffer
    gc.collect()


SLOT = 1 << 16


class PinningPages(CpuPages):
    """CPU pages that keep the books of pinning as a card's driver would, and can refuse."""

    def __init__(self, refuse_after: int | None = None) -> None:
        super().__init__()
        self.pins_host_memory = True
        self.refuse_after = refuse_after
        self.pinned: dict[int, int] = {}
        self._lock = threading.Lock()

    def pin(self, address: int, size: int) -> None:
        with self._lock:
            if self.refuse_after is not None and len(self.pinned) >= self.refuse_after:
                raise OutOfMemoryError("limit on locked memory")
            assert address not in self.pinned
            self.pinned[address] = size

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an exception that `pytest.raises` caught still holds would be announced in the next test.
    if announced_pools():
        gc.collect()
    monkeypatch.setattr("lowtide.engine.device_allocator.memory.SLOT_BYTES", SLOT)


def filled(size: int, backend: CpuPages) -> tuple[Arena, torch.Tensor]:
    arena = Arena("weights", size, backend)
    contents = torch.randint(0, 256, (size,), dtype=torch.uint8)
    arena.allocate((size,), torch.uint8).copy_(contents)
    return arena, contents


@pytest.mark.parametrize("size", [1, 4096, SLOT - 1, SLOT, SLOT + 1, 8 * SLOT, 8 * SLOT + 1, 21 * SLOT + 5])
@pytest.mark.parametrize("refuse_after", [None, 0, 12], ids=["pinned", "never-pinned", "partly-pinned"])
def test_bytes_survive_two_round_trips(size: int, refuse_after: int | None) -> None:
    backend = PinningPages()
    arena, contents = filled(size, backend)
    ring = TransferRing(backend, size)
    image = ring.new_image(size)
    backend.refuse_after = refuse_after
    for _ in range(2):
        ring.save(arena, image)
        arena.unmap_to(0)
        ring.restore(image, arena, size)
        assert torch.equal(arena.bytes_at(0, size), contents)
        contents = contents.flip(0)
        arena.bytes_at(0, size).copy_(contents)
    image.close()
    ring.close()
    assert backend.pinned == {}
    assert [pool.tag for pool in announced_pools()] == ["weights"]


def test_the_ring_is_bounded_however_much_is_copied() -> None:
    backend = PinningPages(refuse_after=8)
    arena, _ = filled(64 * SLOT, backend)
    ring = TransferRing(backend, 64 * SLOT)
    image = ring.new_image(64 * SLOT)
    ring.save(arena, image)
    assert sum(backend.pinned.values()) == 8 * SLOT


def test_a_small_model_gets_a_small_ring() -> None:
    backend = PinningPages()
    ring = TransferRing(backend, 5000)
    assert sum(backend.pinned.values()) == 8192
    ring.close()


def test_a_failed_copy_raises_as_it_is_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuPages()
    arena, contents = filled(20 * SLOT, backend)
    ring = TransferRing(backend, 20 * SLOT)
    image = ring.new_image(20 * SLOT)
    calls = []

    def refuse(target: torch.Tensor, source: torch.Tensor) -> None:
        calls.append(target)
        if len(calls) == 5:
            raise OSError("bus error")

    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr("lowtide.engine.device_allocator.memory._copy_on_host", refuse)
        with pytest.raises(OSError, match="bus error"):
            ring.save(arena, image)
    assert threading.active_count() == before
    ring.save(arena, image)
    arena.unmap_to(0)
    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr("lowtide.engine.device_allocator.memory._copy_on_host", refuse)
        with pytest.raises(OSError, match="bus error"):
            ring.restore(image, arena, 20 * SLOT)
    assert threading.active_count() == before
    arena.unmap_to(0)
    ring.restore(image, arena, 20 * SLOT)
    assert torch.equal(arena.bytes_at(0, 20 * SLOT), contents)


def test_a_ring_that_cannot_be_pinned_gives_back_what_it_had() -> None:
    backend = PinningPages(refuse_after=3)
    with pytest.raises(OutOfMemoryError, match="limit on locked memory"):
        TransferRing(backend, 20 * SLOT)
    assert backend.pinned == {}
    assert announced_pools() == ()


def test_a_host_buffer_says_what_is_pinned_and_what_is_not() -> None:
    backend = PinningPages()
    # The last block is a shorter one.
    page = mmap.PAGESIZE
    buffer = HostBuffer("image", 3 * SLOT + page, SLOT, backend)
    assert announced_pools() == ()
    buffer.tensor(0, 3 * SLOT + page).zero_()
    for block in (1, 3):
        buffer.pin(block * SLOT)
    starts = [buffer.address + block * SLOT for block in range(4)]
    assert backend.pinned == {starts[1]: SLOT, starts[3]: page}
    host, pinned = announced_pools()
    assert (host.kind, host.mapped, host.ranges) == ("host", 2 * SLOT, ((starts[0], SLOT), (starts[2], SLOT)))
    assert (pinned.kind, pinned.mapped) == ("pinned", SLOT + page)
    assert pinned.ranges == ((starts[1], SLOT), (starts[3], page))
    buffer.close()
    buffer.close()
    assert announced_pools() == ()
    assert backend.pinned == {}


def test_closing_a_host_buffer_gives_back_the_other_blocks_when_one_is_refused_and_that_one_the_next_time() -> None:
    class Refusing(PinningPages):
        refused = 0

        def unpin(self, address: int) -> None:
            if not self.refused:
                self.refused = address
                raise OSError("busy")
            super().unpin(address)

    backend = Refusing()
    buffer = HostBuffer("image", 2 * SLOT + 5, SLOT, backend)
    views = [buffer.tensor(block * SLOT, 5) for block in range(3)]
    for block, view in enumerate(views):
        view.fill_(7)
        buffer.pin(block * SLOT)
    with pytest.raises(ExceptionGroup, match="unpinning block 0 failed") as caught:
        buffer.close()
    assert [str(error) for error in caught.value.exceptions] == ["busy"]
    assert list(backend.pinned) == [buffer.address]
    (pool,) = announced_pools()
    assert (pool.kind, pool.tag, pool.ranges) == ("pinned", "image", ((buffer.address, SLOT),))
    # What the driver still has must not go under it.
    assert [view.tolist() for view in views] == [[7] * 5, [0] * 5, [0] * 5]
    buffer.close()
    assert backend.pinned == {}
    assert announced_pools() == ()
    assert views[0].tolist() == [0] * 5


def is_mapped(address: int) -> bool:
    """Return whether this process has a mapping at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_a_host_buffer_that_is_forgotten_is_unpinned_before_its_pages_go() -> None:
    are_mapped: list[bool] = []

    class Watched(PinningPages):
        def unpin(self, address: int) -> None:
            are_mapped.append(is_mapped(address))
            super().unpin(address)

    backend = Watched()
    buffer = HostBuffer("image", 3 * SLOT, SLOT, backend)
    for block in range(3):
        buffer.tensor(block * SLOT, SLOT).zero_()
        buffer.pin(block * SLOT)
    del buffer
    wait_until(lambda: backend.pinned == {})
    assert are_mapped == [True] * 3


def test_an_image_pinned_in_part_is_saved_right_however_slow_the_threads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PinningPages()
    size = 32 * SLOT
    arena, contents = filled(size, backend)
    ring = TransferRing(backend, size)
    image = ring.new_image(size)
    image.tensor(0, size).zero_()
    for block in (0, 1, 2, 3, 4, 5, 7, 12):
        image.pin(block * SLOT)
    backend.refuse_after = 0
    copy = memory._copy_on_host

    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.01)
        copy(target, source)

    monkeypatch.setattr(memory, "_copy_on_host", slowly)
    ring.save(arena, image)
    assert torch.equal(image.tensor(0, size), contents)
