"""Ranges of addresses that are reserved, with no memory behind them."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.resources.address_space import LEAST, AddressSpace, Range, parts_of, reserved_ranges
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.mappings import mappings_in

GIB = 1 << 30
MAPS = """\
10000000-50000000 ---p 00000000 00:00 0
60000000-a0000000 rw-p 00000000 00:00 0
100000000-1c0000000 ---s 00000000 00:01 1024 /dev/zero (deleted)
200000000-300000000 ---p 00000000 fe:00 77 /srv/model.safetensors
400000000-43fff0000 ---p 00000000 00:00 0
500000000-580000000 ---p 00000000 00:00 0 [anon: arena]
"""
CARD = "7f0000000000-7f0000001000 rw-s 00000000 00:05 9 /dev/nvidia0\n"


class Memory:
    """What the kernel says of a process."""

    def __init__(self) -> None:
        self.maps = ""
        self.listed = 0
        self.pages = 0

    def contents(self, path: str) -> bytes:
        if path == "/proc/self/statm":
            return f"{self.pages} 1 1 1 0 1 0\n".encode()
        assert path == "/proc/self/maps"
        self.listed += 1
        return self.maps.encode()

    def map(self, *ranges: Range, and_more: str = "") -> None:
        self.maps = "".join(f"{low:x}-{high:x} ---p 00000000 00:00 0\n" for low, high in ranges) + and_more
        self.pages = sum(high - low for low, high in ranges) // mmap.PAGESIZE


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def reserved() -> Iterator[mmap.mmap]:
    reserved = reserve()
    yield reserved
    reserved.close()


def reserve(size: int = 2 * GIB, access: int = 0) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=access)


def test_large_ranges_without_access_and_without_a_file_are_read() -> None:
    expected = [(0x10000000, 0x50000000), (0x100000000, 0x1C0000000), (0x500000000, 0x580000000)]
    assert reserved_ranges(mappings_in(MAPS.encode())) == expected


def test_what_is_reserved_is_seen_and_what_is_given_back_is_gone(reserved: mmap.mmap) -> None:
    space = AddressSpace()
    before = space.read()
    other = reserve(3 * GIB)
    (new,) = space.read().keys() - before.keys()
    assert space.describe(new).startswith("3.0 GiB at 0x")
    assert space.identity(new).text == "3.0 GiB"
    assert space.objects([new]) == {new: other}
    assert space.advice([new]) == ""
    other.close()
    assert space.read() == before


@pytest.mark.parametrize(("size", "access"), [(LEAST // 2, 0), (2 * GIB, mmap.PROT_READ | mmap.PROT_WRITE)])
def test_what_is_small_or_may_be_written_is_not_seen(size: int, access: int) -> None:
    space = AddressSpace()
    before = space.read()
    other = reserve(size, access)
    assert space.read() == before
    other.close()


def test_they_are_listed_only_where_the_process_has_changed_by_much(memory: Memory) -> None:
    space = AddressSpace(memory.contents)
    memory.map((0, GIB))
    assert len(space.read()) == len(space.read()) == 1
    assert memory.listed == 1
    memory.pages += 1000
    space.read()
    assert memory.listed == 1
    memory.map((0, 2 * GIB))
    assert len(space.read()) == 2
    assert memory.listed == 2


def test_what_comes_beside_another_is_one_of_its_own(memory: Memory) -> None:
    space = AddressSpace(memory.contents)
    memory.map((4 * GIB, 6 * GIB))
    first = set(space.read())
    memory.map((2 * GIB, 8 * GIB))
    assert {space.describe(name) for name in space.read().keys() - first} == {
        "2.0 GiB at 0x80000000",
        "2.0 GiB at 0x180000000",
    }
    assert first < space.read().keys()
    memory.map((4 * GIB, 6 * GIB))
    assert set(space.read()) == first


def test_where_a_card_is_used_none_is_judged(memory: Memory) -> None:
    space = AddressSpace(memory.contents)
    memory.map((0, GIB))
    assert list(space.staying(space.read())) == []
    memory.map((0, GIB), (4 * GIB, 300 * GIB), and_more=CARD)
    now = space.read()
    assert set(space.staying(now)) == set(now)


def test_what_no_object_stands_for_has_advice(memory: Memory) -> None:
    space = AddressSpace(memory.contents)
    memory.map((0, GIB))
    assert space.advice(list(space.read())) == "give the addresses back in teardown: munmap"


LEFT: list[mmap.mmap] = []


class Reserves:
    """An engine that reserves addresses, and gives them back or leaves them."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps

    def create(self) -> None:
        LEFT.append(reserve())

    def infer(self) -> list[list[int]]:
        return [[1]]

    def shutdown(self) -> None:
        if not self.keeps:
            LEFT.pop().close()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_life_is_judged_by_what_it_leaves(*, keeps: bool) -> None:
    make: Any = functools.partial(Reserves, keeps=keeps)
    script = ("create", "infer", "shutdown")
    run = LifecycleRun("small", make, device="cpu", driver=NoDriver("a test"), cycles=2, script=script)
    found = run.run().findings
    for left in LEFT:
        left.close()
    LEFT.clear()
    assert [(each.resource, each.count, each.stage) for each in found] == [("address-space", 2, "shutdown")] * keeps
    for finding in found:
        assert finding.message.startswith("2 reserved ranges of addresses still reserved after shutdown: 2.0 GiB at 0x")
        assert f"held by {__name__}.LEFT" in finding.message


_ranges = st.lists(st.integers(1, 60), min_size=2, max_size=8, unique=True).map(
    lambda ends: [(low * GIB, high * GIB) for low, high in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)


@given(_ranges, _ranges)
def test_parts_cover_what_is_there_and_keep_what_was(before: list[Range], now: list[Range]) -> None:
    parts = parts_of(parts_of([], before), now)
    assert sum(high - low for low, high in parts) == sum(high - low for low, high in now)
    assert all(any(low <= begin and end <= high for low, high in now) for begin, end in parts)
    assert parts == sorted(parts)
    # What was there and is there as a whole has not changed.
    whole = [each for each in before if any(low <= each[0] and each[1] <= high for low, high in now)]
    assert set(whole) <= set(parts)
    assert parts_of(parts, now) == parts
