"""The CUDA driver makes the calls that HIP's makes; stand-ins answer for the missing card."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lowtide.engine.errors import DriverError, OutOfMemoryError
from lowtide.engine.pages.card import CudaDriver, VmmPages

driver = pytest.importorskip("cuda.bindings.driver")
GRANULARITY = 1 << 21
ADDRESS = 0x7F00_0000_0000
GIVEN = {"cuMemGetAllocationGranularity": GRANULARITY, "cuMemAddressReserve": ADDRESS, "cuMemCreate": 42}
NAMES = (
    *("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    *("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemHostRegister", "cuMemHostUnregister"),
)


class Card:
    """What a driver without a card answers.

    Attributes:
        calls: their names and arguments, but for the context's.
        fail: the code that a call answers by its name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Any] = {}
        self.contexts: list[object] = []
        done = driver.CUresult.CUDA_SUCCESS
        monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (done, "primary"))
        monkeypatch.setattr(driver, "cuCtxPushCurrent", lambda context: (self.contexts.append(context), (done,))[1])
        monkeypatch.setattr(driver, "cuCtxPopCurrent", lambda: (done, self.contexts.pop()))
        monkeypatch.setattr(driver, "cuGetErrorName", lambda code: (done, code.name.encode()))
        monkeypatch.setattr(driver, "cuGetErrorString", lambda code: (done, b"invalid argument"))
        for name in NAMES:
            monkeypatch.setattr(driver, name, self._answering(name))
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7, 9))
        self.pages = VmmPages(CudaDriver(1), 1)
        self.calls.clear()

    def _answering(self, name: str) -> Any:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            assert self.contexts == ["primary"]
            self.calls.append((name, *arguments))
            code = self.fail.get(name, driver.CUresult.CUDA_SUCCESS)
            return (code, GIVEN[name]) if name in GIVEN else (code,)

        return answer


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_a_range_is_reserved_mapped_unmapped_and_freed_in_order(card: Card) -> None:
    lease = card.pages.reserve(4 * GRANULARITY)
    card.pages.unmap(lease, card.pages.map(lease, GRANULARITY, 2 * GRANULARITY))
    card.pages.dispose(lease.address, lease.nbytes, [])
    at, size = ADDRESS + GRANULARITY, 2 * GRANULARITY
    (_, created, properties, flags), (_, *accessed) = card.calls[1], card.calls[3]
    assert (created, properties.location.id, flags) == (size, 1, 0)
    assert (*accessed[:2], accessed[2][0].location.id, accessed[3]) == (at, size, 1, 1)
    del card.calls[3], card.calls[1]
    assert card.calls == [
        ("cuMemAddressReserve", 4 * GRANULARITY, GRANULARITY, 0, 0),
        ("cuMemMap", at, size, 0, 42, 0),
        ("cuMemUnmap", at, size),
        ("cuMemRelease", 42),
        ("cuMemAddressFree", ADDRESS, 4 * GRANULARITY),
    ]


def test_host_memory_is_registered_for_all_cards(card: Card) -> None:
    card.pages.pin(4096, 8192)
    card.pages.unpin(4096)
    assert card.calls == [("cuMemHostRegister", 4096, 8192, 1), ("cuMemHostUnregister", 4096)]


def test_an_error_says_what_there_is_no_room_for_or_has_the_drivers_words(card: Card) -> None:
    lease = card.pages.reserve(GRANULARITY)
    card.fail["cuMemMap"] = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemoryError, match="no room for 2097152 bytes: 7 of 9 bytes are free"):
        card.pages.map(lease, 0, GRANULARITY)
    assert card.calls[-1] == ("cuMemRelease", 42)
    card.fail["cuMemHostUnregister"] = driver.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    card.pages.unpin(4096)
    card.fail["cuMemHostUnregister"] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="CUDA driver answered CUDA_ERROR_INVALID_VALUE: invalid argument"):
        card.pages.unpin(4096)
