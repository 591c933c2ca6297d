"""The HIP driver makes the right calls with the right arguments; a recording library stands in for the missing card."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from lowtide.engine.errors import DriverError, OutOfMemoryError
from lowtide.engine.pages.card import HipDriver, MemAccessDesc, MemAllocationProp, VmmPages

GRANULARITY = 1 << 21


class RecordingHip:
    """Answers as libamdhip64 does: fills what is passed by reference, returns a code, and remembers each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, int] = {}
        self.hipGetErrorString = _ErrorString()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("hip"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append((name, *map(_plain, args)))
            code = self.fail.get(name, 0)
            if code == 0 and name in _ANSWERS:
                args[0]._obj.value = _ANSWERS[name]
            return code

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


_ANSWERS = {"hipMemGetAllocationGranularity": GRANULARITY, "hipMemAddressReserve": 0x7F00_0000_0000, "hipMemCreate": 42}


class _ErrorString:
    restype: Any = None

    def __call__(self, code: Any) -> bytes:
        return b"invalid argument"


def _plain(arg: Any) -> Any:
    target = getattr(arg, "_obj", arg)
    if isinstance(target, MemAllocationProp):
        return ("prop", target.type, target.requestedHandleType, target.location.type, target.location.id)
    if isinstance(target, MemAccessDesc):
        return ("access", target.location.type, target.location.id, target.flags)
    return "out" if target is not arg else getattr(arg, "value", arg)


@pytest.fixture
def hip() -> RecordingHip:
    return RecordingHip()


@pytest.fixture
def pages(hip: RecordingHip, monkeypatch: pytest.MonkeyPatch) -> VmmPages:
    pages = VmmPages(HipDriver(hip, 1), 1)
    # The wait before an unmap is torch's; there is no card to wait for.
    monkeypatch.setattr(pages, "synchronize", lambda: hip.calls.append(("synchronize",)))
    hip.calls.clear()
    return pages


def test_structs_have_the_layout_of_the_header() -> None:
    # hip_runtime_api.h on x86-64: two ints, {int, int}, a pointer, {uchar, uchar, ushort} padded to 8.
    assert ctypes.sizeof(MemAllocationProp) == 32
    assert MemAllocationProp.location.offset == 8
    assert MemAllocationProp.win32HandleMetaData.offset == 16
    assert MemAllocationProp.allocFlags.offset == 24
    assert ctypes.sizeof(MemAccessDesc) == 12
    assert MemAccessDesc.flags.offset == 8


def test_a_range_is_reserved_mapped_unmapped_and_freed_in_order(hip: RecordingHip, pages: VmmPages) -> None:
    lease = pages.reserve(4 * GRANULARITY)
    part = pages.map(lease, GRANULARITY, 2 * GRANULARITY)
    pages.unmap(lease, part)
    pages.dispose(lease.address, lease.nbytes, [])
    at = 0x7F00_0000_0000 + GRANULARITY
    size = 2 * GRANULARITY
    assert hip.calls == [
        ("hipMemAddressReserve", "out", 4 * GRANULARITY, GRANULARITY, 0, 0),
        ("hipMemCreate", "out", size, ("prop", 1, 0, 1, 1), 0),
        ("hipMemMap", at, size, 0, 42, 0),
        ("hipMemSetAccess", at, size, ("access", 1, 1, 3), 1),
        ("synchronize",),
        ("hipMemUnmap", at, size),
        ("hipMemRelease", 42),
        ("synchronize",),
        ("hipMemAddressFree", 0x7F00_0000_0000, 4 * GRANULARITY),
    ]


def test_what_is_still_mapped_goes_before_its_addresses(hip: RecordingHip, pages: VmmPages) -> None:
    lease = pages.reserve(4 * GRANULARITY)
    parts = [pages.map(lease, 0, GRANULARITY), pages.map(lease, GRANULARITY, GRANULARITY)]
    hip.calls.clear()
    pages.dispose(lease.address, lease.nbytes, parts)
    assert hip.names == [
        "synchronize",
        "hipMemUnmap",
        "hipMemRelease",
        "hipMemUnmap",
        "hipMemRelease",
        "hipMemAddressFree",
    ]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("hipMemCreate", []),
        ("hipMemMap", ["hipMemRelease"]),
        ("hipMemSetAccess", ["hipMemUnmap", "hipMemRelease"]),
    ],
)
def test_a_mapping_that_fails_half_way_is_undone(
    hip: RecordingHip, pages: VmmPages, failing: str, undone: list[str]
) -> None:
    lease = pages.reserve(GRANULARITY)
    hip.fail[failing] = 2
    with pytest.raises(OutOfMemoryError, match="no room for 2097152 bytes"):
        pages.map(lease, 0, GRANULARITY)
    assert hip.names[hip.names.index(failing) + 1 :] == undone


def test_any_other_error_has_the_runtimes_words(hip: RecordingHip, pages: VmmPages) -> None:
    hip.fail["hipMemAddressReserve"] = 1
    with pytest.raises(DriverError, match="HIP runtime answered 1: invalid argument"):
        pages.reserve(GRANULARITY)


def test_host_memory_is_registered_for_all_cards(hip: RecordingHip, pages: VmmPages) -> None:
    pages.pin(4096, 8192)
    pages.unpin(4096)
    assert hip.calls == [("hipHostRegister", 4096, 8192, 1), ("hipHostUnregister", 4096)]


def test_host_memory_that_is_registered_no_more_needs_no_unpinning(hip: RecordingHip, pages: VmmPages) -> None:
    hip.fail["hipHostUnregister"] = 713
    pages.unpin(4096)
    hip.fail["hipHostUnregister"] = 1
    with pytest.raises(DriverError, match="HIP runtime answered 1"):
        pages.unpin(4096)
