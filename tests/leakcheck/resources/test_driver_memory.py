"""Host memory that a card's driver has given out, as the process sees it; on a card in `pytest_plugin/test_cuda.py`."""

from __future__ import annotations

import ctypes
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.resources.driver_memory import Allocations, PageLocked
from lowtide.probes.device import allocations, driver_trace
from lowtide.probes.device.allocations import HostAllocation
from lowtide.probes.device.driver_trace import TracedMemory
from lowtide.probes.memory import array_interfaces, tensors

MIB = 1 << 20


class Memory:
    """What the driver and the kernel say."""

    def __init__(self) -> None:
        self.given_out: list[HostAllocation] = []
        self.asked = 0
        self.pages = 1000

    def give_out(self, address: int, size: int, *, managed: bool = False) -> None:
        self.given_out.append(HostAllocation(address, size, managed))
        self.pages += size // mmap.PAGESIZE

    def read_all(self) -> list[HostAllocation]:
        self.asked += 1
        return self.given_out

    def contents(self, path: str) -> bytes:
        assert path == "/proc/self/statm"
        return f"{self.pages} 10 10 1 0 1 0\n".encode()


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def pages() -> tuple[torch.Tensor, int]:
    """A tensor of 2 MiB in memory that torch has not allocated, with its address."""
    mapping = mmap.mmap(-1, 2 * MIB)
    return torch.frombuffer(mapping, dtype=torch.uint8), ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def resource(memory: Memory) -> PageLocked:
    return PageLocked(memory.read_all, memory.contents)


def test_they_are_read_by_kind_and_address(memory: Memory) -> None:
    memory.give_out(0x7F0000000000, 32 * MIB)
    memory.give_out(0x7F4000000000, 64 * MIB, managed=True)
    expected = {"page-locked memory at 0x7f0000000000": 32 * MIB, "managed memory at 0x7f4000000000": 64 * MIB}
    assert resource(memory).read() == expected


def test_the_driver_is_asked_only_where_the_process_has_changed(memory: Memory) -> None:
    locked = resource(memory)
    assert (locked.read(), locked.read(), memory.asked) == ({}, {}, 1)
    memory.give_out(0x7F0000000000, MIB)
    assert (len(locked.read()), memory.asked) == (1, 2)


@pytest.mark.parametrize("is_used", [False, True])
def test_it_is_read_only_where_torch_uses_a_card(monkeypatch: pytest.MonkeyPatch, *, is_used: bool) -> None:
    read: list[object] = []
    monkeypatch.setattr(PageLocked, "read", lambda self: read.append(self) or {})
    monkeypatch.setattr(torch.cuda, "_initialized", is_used)
    assert read_items()["page-locked"] == {}
    assert bool(read) == is_used


def test_what_a_tensor_lies_in_is_the_tensor_s(memory: Memory, pages: tuple[torch.Tensor, int]) -> None:
    tensor, address = pages
    locked = resource(memory)
    memory.give_out(address, 2 * MIB)
    memory.give_out(address + 64 * MIB, 2 * MIB)
    under, beside = locked.read()
    assert set(locked.staying([under, beside])) == {under}
    del tensor


def test_managed_memory_under_a_tensor_of_a_card_is_the_tensor_s(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_card = SimpleNamespace(device="cuda:0", address=0x7F0000000000, bytes=MIB)
    monkeypatch.setattr(tensors, "survey_storages", lambda: SimpleNamespace(storages=[on_card]))
    locked = resource(memory)
    memory.give_out(0x7F0000000000, MIB, managed=True)
    assert set(locked.staying(locked.read())) == set(locked.read())


@pytest.mark.parametrize(("managed", "call"), [(False, "cudaFreeHost"), (True, "cudaFree")])
def test_each_is_told_with_what_gives_it_back(memory: Memory, call: str, *, managed: bool) -> None:
    locked = resource(memory)
    memory.give_out(0x7F0000000000, 32 * MIB, managed=managed)
    (name,) = locked.read()
    kind = "managed" if managed else "page-locked"
    assert locked.describe(name) == f"32.0 MiB of {kind} memory at 0x7f0000000000"
    assert locked.identity(name).text == f"{kind} memory"
    assert locked.advice([name]) == f"give it back in teardown: {call}"


def test_cupy_s_pointer_stands_for_what_it_points_to(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    class PinnedMemoryPointer:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr
            self.mem: list[object] = []

    classes = SimpleNamespace(PinnedMemoryPointer=PinnedMemoryPointer, MemoryPointer=PinnedMemoryPointer)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=classes))
    pointer, locked = PinnedMemoryPointer(0x7F0000000000), resource(memory)
    memory.give_out(0x7F0000000000, 16 * MIB)
    memory.give_out(0x7F4000000000, 16 * MIB)
    first, second = locked.read()
    assert locked.objects([first, second]) == {first: pointer}
    assert locked.advice([first]) == ""
    assert locked.advice([second]) != ""


def test_who_holds_an_allocation_is_asked_on_cards_with_a_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, array = [], object()

    def range_at(card: int, address: int) -> tuple[int, int] | None:
        asked.append(card)
        return (0x7F0000000000, 2 * MIB) if card == 2 else None

    monkeypatch.setattr(allocations, "cards_with_contexts", lambda: [1, 2])
    monkeypatch.setattr(allocations, "range_at", range_at)
    monkeypatch.setattr(array_interfaces, "arrays_by_address", lambda: {0x7F0000000200: array})
    assert Allocations().objects(["allocation at 0x7f0000000000"]) == {"allocation at 0x7f0000000000": array}
    assert Allocations().objects(["allocation at 0x7f9000000000"]) == {}
    assert set(asked) == {1, 2}


def test_an_allocation_is_told_with_the_library_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = driver_trace.DriverTrace()
    monkeypatch.setattr(driver_trace, "TRACE", trace)
    monkeypatch.setattr(allocations, "TRACE", trace)
    names = {"allocation at 0x1000", "array at 0x2000"}
    assert not Allocations().remark(names)
    found = [
        TracedMemory(0x1000, 2 * MIB, 0, "libcufft.so.12", is_array=False),
        TracedMemory(0x2000, 64 * MIB, 0, "libapp.so", is_array=True),
        TracedMemory(0x3000, 8 * MIB, 0, "libother.so", is_array=False),
    ]
    monkeypatch.setattr(trace, "read", lambda: found)
    assert Allocations().remark(names) == ", asked for by libapp.so (64.0 MiB), libcufft.so.12 (2.0 MiB)"


def test_why_it_could_not_be_recorded_is_told_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_trace, "TRACE", driver_trace.DriverTrace())
    driver_trace.TRACE.why = "CUPTI does not record: X"
    assert Allocations().remark({"allocation at 0x1000"}).endswith("is not known: CUPTI does not record: X")


def test_an_array_has_a_name_of_its_own_for_ever() -> None:
    assert Allocations().identity("array at 0x2000").text != Allocations().identity("allocation at 0x2000").text
