"""What the CUDA driver lists, asked of a double of the driver in the address space that this process reserves."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.device import allocations
from lowtide.probes.device.allocations import (
    AllocationsError,
    HostAllocation,
    Outside,
    OutsideTorch,
    read_allocations,
    read_host_allocations,
    read_mappings_without_access,
)
from lowtide.probes.device.driver_trace import TracedMemory
from lowtide.probes.stages import PoolReading

MIB = 1 << 20
STEP = 2 * MIB
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
_TELL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
_RETAIN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
_RELEASE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_DESCRIBE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
_CONTEXT, _MANAGED, _DEVICE_ORDINAL, _SHAREABLE, _POOL = 1, 8, 9, 10, 17
_RANGE_START, _RANGE_SIZE = 11, 12


@dataclass
class FakeDriver:
    """A driver that reserves addresses as the real one does, and the calls by which it is asked.

    Attributes:
        base: the first step of the reserved addresses.
        listed: the length of each allocation, by its offset from there.
        of_code: offsets of those that belong to kernels.
        elsewhere: offsets of those on another card.
        managed: offsets of those that move to a card and back.
        handles: handles of the memory that is mapped without access, by the offset of the step.
        odd: what it answers for an address, as first address and length, in place of what is listed; None for an error.
        asked: how often it was asked about an address.
    """

    base: int
    listed: dict[int, int] = field(default_factory=dict)
    of_code: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)
    managed: set[int] = field(default_factory=set)
    handles: dict[int, int] = field(default_factory=dict)
    odd: Callable[[int], tuple[int, int] | None] | None = None
    asked: int = 0
    retained: list[int] = field(default_factory=list)

    def library(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        return SimpleNamespace(
            cuMemGetAddressRange_v2=_ASK(self._range),
            cuPointerGetAttribute=_TELL(self._attribute),
            cuMemRetainAllocationHandle=_RETAIN(self._retain),
            cuMemRelease=_RELEASE(self._release),
            cuMemGetAllocationPropertiesFromHandle=_DESCRIBE(self._describe),
        )

    def at(self, *offsets: int) -> tuple[tuple[int, int], ...]:
        return tuple((self.base + offset, self.listed[offset]) for offset in offsets)

    def _begin(self, address: int) -> int | None:
        starts = sorted(self.listed)
        place = bisect.bisect_right(starts, address - self.base) - 1
        found = starts[place] if place >= 0 else None
        return found if found is not None and address - self.base < found + self.listed[found] else None

    def _range(self, start: int, length: int, address: int) -> int:
        self.asked += 1
        if self.odd is not None and (answer := self.odd(address)) is not None:
            ctypes.c_uint64.from_address(start).value = answer[0] % (1 << 64)
            ctypes.c_uint64.from_address(length).value = answer[1] % (1 << 64)
            return 0
        begin = self._begin(address)
        if begin is None:
            return 1
        ctypes.c_uint64.from_address(start).value = self.base + begin
        ctypes.c_size_t.from_address(length).value = self.listed[begin]
        return 0

    def _attribute(self, value: int, which: int, address: int) -> int:
        begin = self._begin(address)
        if which in (_RANGE_START, _RANGE_SIZE):
            if begin is None:
                return 1
            answer = self.base + begin if which == _RANGE_START else self.listed[begin]
            ctypes.c_uint64.from_address(value).value = answer
            return 0
        reported = {_CONTEXT: 1, _MANAGED: int(begin in self.managed), _POOL: 0}
        reported |= {_DEVICE_ORDINAL: int(begin in self.elsewhere), _SHAREABLE: int(begin not in self.of_code)}
        ctypes.c_uint64.from_address(value).value = reported[which]
        return 0

    def _retain(self, handle: int, address: int) -> int:
        found = self.handles.get(address - self.base)
        if found is None:
            return 1
        self.retained.append(found)
        ctypes.c_uint64.from_address(handle).value = found
        return 0

    def _release(self, handle: int) -> int:
        self.retained.remove(handle)
        return 0

    def _describe(self, properties: int, handle: int) -> int:
        (ctypes.c_int * 4).from_address(properties)[3] = 0
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver that has reserved 64 MiB of addresses, beside whatever else this process has reserved."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, 64 * MIB, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    fake = FakeDriver(-(-address // STEP) * STEP)
    card = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(is_integrated=False),
        device=lambda index: contextlib.nullcontext(),
    )
    torch = SimpleNamespace(version=SimpleNamespace(hip=None), cuda=card)
    monkeypatch.setattr(allocations, "initialized_torch", lambda: torch)
    monkeypatch.setattr(allocations.ctypes, "CDLL", fake.library)
    yield fake
    monkeypatch.undo()
    libc.munmap(address, 64 * MIB)


def test_allocations_are_found_wherever_they_lie_in_what_is_reserved(driver: FakeDriver) -> None:
    driver.listed = {0: STEP, 6 * MIB: 5 * MIB + 256, 14 * MIB: 512, 40 * MIB: 20 * MIB}
    assert read_allocations(0) == driver.at(0, 6 * MIB, 14 * MIB, 40 * MIB)


def test_small_allocations_are_found_wherever_they_lie_behind_the_first_of_their_step(driver: FakeDriver) -> None:
    driver.listed = {8 * MIB: 512, 8 * MIB + 512: 1024, 8 * MIB + 4096: 512, 10 * MIB: 512}
    assert read_allocations(0) == driver.at(8 * MIB, 8 * MIB + 512, 8 * MIB + 4096, 10 * MIB)


def test_behind_a_large_allocation_only_steps_are_asked_about(driver: FakeDriver) -> None:
    read_allocations(0)
    empty, driver.asked = driver.asked, 0
    driver.listed = {8 * MIB: 3 * MIB}
    read_allocations(0)
    assert driver.asked <= empty + 1


def test_small_allocations_that_are_known_are_found_when_the_first_of_their_step_is_gone(driver: FakeDriver) -> None:
    driver.listed = {8 * MIB: 512, 8 * MIB + 4096: 512, 8 * MIB + 8192: 512}
    earlier = read_allocations(0)
    assert earlier is not None
    del driver.listed[8 * MIB]
    assert read_allocations(0) == ()
    assert read_allocations(0, known=earlier) == driver.at(8 * MIB + 4096, 8 * MIB + 8192)


def test_what_belongs_to_kernels_or_to_another_card_is_left_out(driver: FakeDriver) -> None:
    driver.listed = {0: STEP, 4 * MIB: STEP, 6 * MIB: STEP, 8 * MIB: STEP}
    driver.of_code, driver.elsewhere = {4 * MIB}, {6 * MIB}
    assert read_allocations(0) == driver.at(0, 8 * MIB)


def test_nothing_is_listed_of_addresses_that_nobody_reserved(driver: FakeDriver) -> None:
    driver.listed = {1 << 40: STEP}
    assert read_allocations(0) == ()


def test_of_an_earlier_list_only_what_is_still_there_is_asked_about(driver: FakeDriver) -> None:
    driver.listed = {0: STEP, 6 * MIB + 512: 512, 20 * MIB: 8 * MIB, 40 * MIB: STEP}
    earlier = driver.at(0, 6 * MIB + 512, 20 * MIB)
    del driver.listed[0]
    driver.asked = 0
    assert read_allocations(0, earlier) == driver.at(6 * MIB + 512, 20 * MIB)
    # One step each, and what is behind the first of each two.
    assert driver.asked == 3


def test_in_the_place_of_what_is_gone_what_is_there_now_is_found(driver: FakeDriver) -> None:
    driver.listed = {20 * MIB: 8 * MIB}
    earlier = driver.at(20 * MIB)
    driver.listed = {20 * MIB: 2 * MIB, 24 * MIB: 2 * MIB}
    assert read_allocations(0, earlier) == driver.at(20 * MIB, 24 * MIB)


def test_what_is_mapped_without_access_is_reported_by_its_handle(driver: FakeDriver) -> None:
    driver.listed = {0: STEP, 6 * MIB: 512}
    driver.handles = {0: 1, 6 * MIB: 2, 10 * MIB: 7, 12 * MIB: 7, 14 * MIB: 8, 30 * MIB: 8}
    found = read_mappings_without_access(0, driver.at(0, 6 * MIB))
    assert found == tuple(
        (driver.base + at, size) for at, size in ((10 * MIB, 2 * STEP), (14 * MIB, STEP), (30 * MIB, STEP))
    )
    assert driver.retained == []


ODD_ANSWERS: dict[str, Callable[[int], tuple[int, int] | None]] = {
    "a range below the address, as for a CUDA array": lambda address: (address - 4096, 4096),
    "a range above the address": lambda address: (address + 512, STEP),
    "a range of no bytes": lambda address: (address, 0),
    "a negative length": lambda address: (address, -4096),
    "a range that wraps around": lambda address: (address - 512, (1 << 64) - 4096),
    "one range for every address": lambda address: (1 << 30, STEP),
    "addresses of nothing": lambda address: (0, 0),
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_an_answer_without_the_address_asked_is_skipped_with_its_step(
    driver: FakeDriver, answer: Callable[[int], tuple[int, int] | None]
) -> None:
    driver.listed = {0: STEP, 40 * MIB: STEP}
    assert read_allocations(0) == driver.at(0, 40 * MIB)
    once, driver.asked = driver.asked, 0
    inside = range(driver.base + 10 * MIB, driver.base + 20 * MIB)
    driver.odd = lambda address: answer(address) if address in inside else None
    assert read_allocations(0) == driver.at(0, 40 * MIB)
    assert driver.asked == once
    driver.asked = 0
    assert read_allocations(0, [(inside.start + 512, len(inside) - 512)]) == ()
    assert driver.asked <= len(inside) // STEP + 1


def test_allocations_of_a_byte_each_are_asked_about_where_one_may_begin(driver: FakeDriver) -> None:
    driver.odd = lambda address: (address, 1) if driver.base <= address < driver.base + STEP else None
    found = read_allocations(0)
    assert found is not None
    assert len(found) == STEP // 256


def test_a_driver_that_answers_too_slowly_is_not_asked_for_ever(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(allocations.time, "monotonic", lambda: 3.0 * next(seconds))
    driver.listed = {0: STEP, 4 * MIB: STEP, 8 * MIB: STEP, 12 * MIB: STEP}
    with pytest.raises(AllocationsError, match="had not listed its allocations on cuda:0 after 10 s"):
        read_allocations(0)
    driver.handles = dict.fromkeys(driver.listed, 7)
    with pytest.raises(AllocationsError, match="cuda:0 after 10 s"):
        read_mappings_without_access(0, ())
    assert driver.retained == []


@pytest.fixture
def shared(driver: FakeDriver) -> Iterator[FakeDriver]:
    """The driver, with 16 MiB of shared memory in which it has given something out."""
    mapping = mmap.mmap(-1, 16 * MIB)
    driver.base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    yield driver
    gc.collect()
    mapping.close()


def test_what_the_driver_has_given_out_on_the_host_is_found(shared: FakeDriver) -> None:
    shared.listed = {0: MIB, MIB + 512: 3 * MIB, 5 * MIB: 1000, 10 * MIB: 6 * MIB}
    shared.managed = {10 * MIB}
    expected = [(0, MIB, False), (MIB + 512, 3 * MIB, False), (10 * MIB, 6 * MIB, True)]
    assert read_host_allocations(MIB) == tuple(HostAllocation(shared.base + at, *rest) for at, *rest in expected)


def test_shared_memory_of_which_the_driver_knows_nothing_is_not_its(shared: FakeDriver) -> None:
    assert read_host_allocations(MIB) == ()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the driver list a segment of torch's, an arena, and 3 MiB of somebody's; return the cards it is asked of."""
    cards: list[int] = []

    def listed(index: int) -> tuple[tuple[int, int], ...]:
        cards.append(index)
        return ((0, 8 * MIB), (16 * MIB, 4 * MIB), (32 * MIB, 3 * MIB))

    arenas = (
        PoolReading("arena", "weights", "cuda:0", 4 * MIB, 4 * MIB, ((16 * MIB, 4 * MIB),)),
        PoolReading("arena", "weights", "cuda:1", 3 * MIB, 3 * MIB, ((32 * MIB, 3 * MIB),)),
    )
    monkeypatch.setattr(allocations, "read_allocations", listed)
    monkeypatch.setattr(allocations, "read_segments", lambda index: [((0, 0), 0, 8 * MIB, True)])
    monkeypatch.setattr(allocations, "announced_pools", lambda: arenas)
    monkeypatch.setattr(allocations, "pooled_bytes", lambda index: MIB)
    traced = [
        TracedMemory(0, 8 * MIB, 0, "libc10_cuda.so", is_array=False),
        TracedMemory(32 * MIB, 3 * MIB, 0, "libapp.so", is_array=False),
        TracedMemory(7, 2 * MIB, 0, "libapp.so", is_array=True),
    ]
    monkeypatch.setattr(allocations.TRACE, "read", lambda: traced)
    return cards


def test_what_others_have_asked_for_is_neither_torchs_nor_an_arenas_and_has_arrays(asked: list[int]) -> None:
    assert OutsideTorch().read("cuda:0", 700 * MIB) == Outside((3 + 1 + 2) * MIB, {"libapp.so": 5 * MIB})


def test_the_driver_is_asked_again_only_where_its_figure_has_moved(asked: list[int]) -> None:
    outside = OutsideTorch()
    assert [outside.read("cuda:0", 700 * MIB) for _ in range(3)] == [Outside(6 * MIB, {"libapp.so": 5 * MIB})] * 3
    assert asked == [0]
    outside.read("cuda:0", 701 * MIB)
    outside.read("cuda:1", 701 * MIB)
    assert asked == [0, 0, 1]


def _too_slow(index: int) -> None:
    raise AllocationsError("too slow")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("read_segments", lambda index: None),
        ("read_allocations", lambda index: None),
        ("read_allocations", _too_slow),
        ("pooled_bytes", lambda index: None),
    ],
)
def test_of_a_driver_that_does_not_list_it_is_not_known(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[[int], Any]
) -> None:
    monkeypatch.setattr(allocations, name, answer)
    assert OutsideTorch().read("cuda:0", 700 * MIB) is None


def test_a_driver_that_was_too_slow_once_is_not_asked_again(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    outside = OutsideTorch()
    with monkeypatch.context() as slow:
        slow.setattr(allocations, "read_allocations", _too_slow)
        assert outside.read("cuda:0", 700 * MIB) is None
    assert outside.read("cuda:0", 701 * MIB) is None
    assert asked == []
    assert outside.read("cuda:1", 701 * MIB) is not None
