"""Host memory in blocks: where it lies, what it refuses, and what it says once it is closed."""

from __future__ import annotations

import gc

import pytest

from lowtide.engine.device_allocator import host_memory
from lowtide.engine.device_allocator.host_memory import HostBuffer
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages.cpu import CpuPages

MIB = 1 << 20


def test_more_than_there_are_addresses_is_refused_with_its_bytes() -> None:
    with pytest.raises(OutOfMemoryError, match=r"no address range of \d+ bytes on the host for too much") as caught:
        HostBuffer("too much", 1 << 60, MIB, CpuPages())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("huge_page", [host_memory.HUGE_PAGE, 99 * MIB])
def test_a_buffer_begins_at_a_huge_page_and_can_be_used_to_its_end(
    huge_page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a size at which no kernel begins a mapping by itself, too.
    monkeypatch.setattr(host_memory, "HUGE_PAGE", huge_page)
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
