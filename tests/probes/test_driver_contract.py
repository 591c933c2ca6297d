"""What holds of a driver, whichever it is: NVML and amdsmi say the same things in the same way.

Both stand in for the libraries, with the shapes and the errors that their documentation gives: NVML's API reference
(nvmlDeviceGetComputeRunningProcesses_v3, `usedGpuMemory` of None where it is not available) and amdsmi's Python
interface (amdsmi_get_gpu_process_list: dicts with `memory_usage.vram_mem`, "N/A" where it is not available).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.judging import ladder as late_release
from lowtide.leakcheck.judging.ladder import SettlePolicy, wait_for_release, wait_until_within
from lowtide.probes.device.driver import Driver
from lowtide.probes.device.driver.amdsmi import AmdsmiDriver
from lowtide.probes.device.driver.nvml import NvmlDriver
from lowtide.probes.host import process_files
from tests.probes.fake_drivers import FakeAmdsmi, FakeNvml, amd_process
from tests.waiting import SleptClock

MIB = 1 << 20
OWN = os.getpid()
QUICK = SettlePolicy(stability=0.05, limit=0.5, first_pause=0.001, longest_pause=0.01)


@dataclass(frozen=True)
class Vendor:
    """A driver over a library's stand-in.

    Attributes:
        open: opens the driver.
        hold: makes the library list processes of the first card, by their identifiers; None for unknown memory.
        refuse: makes the library refuse the list of processes.
        refuse_all: makes it refuse the card's own memory.
    """

    open: Callable[[], Driver]
    hold: Callable[[dict[int, int | None]], None]
    refuse: Callable[[str], None]
    refuse_all: Callable[[str], None]


def nvidia() -> Vendor:
    library = FakeNvml()

    def hold(processes: dict[int, int | None]) -> None:
        library.compute[0] = list(processes.items())

    return Vendor(
        lambda: NvmlDriver(library),
        hold,
        lambda text: library.failing.update(compute=text),
        lambda text: library.failing.update(memory=text),
    )


def amd() -> Vendor:
    library = FakeAmdsmi()

    def hold(processes: dict[int, int | None]) -> None:
        # HIP's first card is amdsmi's second one here.
        library.processes["second"] = [
            amd_process(pid, "N/A" if size is None else size) for pid, size in processes.items()
        ]

    return Vendor(
        lambda: AmdsmiDriver(library),
        hold,
        lambda text: library.failing.update(processes=text),
        lambda text: library.failing.update(usage=text),
    )


@pytest.fixture(params=[nvidia, amd], ids=["nvml", "amdsmi"])
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return request.param()


def test_a_reading_has_the_processs_bytes_and_the_cards(vendor: Vendor) -> None:
    vendor.hold({OWN + 1: 700 * MIB, OWN: 30 * MIB})
    driver = vendor.open()
    reading = driver.read(0)
    assert (reading.device, reading.source, reading.note) == ("cuda:0", driver.name, "")
    assert reading.process_bytes == 30 * MIB
    assert 0 < (reading.card_used or 0) < (reading.card_total or 0) == 1000 * MIB
    assert driver.processes(0) == {OWN + 1: 700 * MIB, OWN: 30 * MIB}


def test_what_is_not_listed_is_nothing_and_what_is_listed_without_memory_is_unknown(vendor: Vendor) -> None:
    driver = vendor.open()
    assert driver.read(0).process_bytes == 0
    vendor.hold({OWN: None, 7: 5 * MIB})
    reading = driver.read(0)
    assert reading.process_bytes is None
    assert reading.note
    assert driver.processes(0) == {OWN: None, 7: 5 * MIB}


def test_a_refused_list_leaves_the_cards_own_figure(vendor: Vendor) -> None:
    vendor.refuse("Insufficient Permissions")
    driver = vendor.open()
    reading = driver.read(0)
    assert reading.process_bytes is None
    assert reading.card_used is not None
    assert "Insufficient Permissions" in reading.note
    assert driver.processes(0) == {}


def test_a_refused_card_leaves_nothing_and_says_why(vendor: Vendor) -> None:
    vendor.refuse_all("GPU is lost")
    reading = vendor.open().read(0)
    assert (reading.process_bytes, reading.card_used, reading.card_total) == (None, None, None)
    assert "GPU is lost" in reading.note


def test_a_card_that_is_not_there_and_a_closed_driver_never_raise(vendor: Vendor) -> None:
    driver = vendor.open()
    assert driver.read(5).card_total is None
    assert driver.processes(5) == {}
    driver.close()
    driver.close()
    assert driver.read(0).process_bytes is None
    assert "closed" in driver.read(0).note
    assert driver.processes(0) == {}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleptClock()
    for waiting in (ladder, late_release):
        monkeypatch.setattr(waiting, "time", clock)


def releasing(vendor: Vendor, *counts: int) -> Callable[[], int]:
    """Reads through the driver what the library lists: prepared figures in MiB, the last one for ever."""
    driver, left = vendor.open(), list(counts)

    def read() -> int:
        vendor.hold({OWN: left[0] * MIB})
        if len(left) > 1:
            left.pop(0)
        return driver.read(0).process_bytes or 0

    return read


def test_memory_that_comes_late_is_waited_for(vendor: Vendor) -> None:
    """As on ROCm in vllm#43023: the driver gives memory back seconds after it was freed."""
    late = wait_for_release(releasing(vendor, 1000, 1000, 1000, 700, 400), 1000 * MIB, 600 * MIB, QUICK)
    assert late is not None
    assert late.bytes == 600 * MIB


def test_memory_that_stays_after_a_reported_release_is_seen(vendor: Vendor) -> None:
    """As on ROCm in vllm#37533: the allocator reports a release, and the physical memory stays."""
    read = releasing(vendor, 1000, 990)
    assert wait_for_release(read, 1000 * MIB, 600 * MIB, QUICK) is None
    assert wait_until_within(read, 400 * MIB, QUICK) == 990 * MIB


@pytest.mark.parametrize(("path", "opened"), [("/dev/kfd", True), ("/dev/nvidia-uvm", True), ("/dev/dri/card0", False)])
def test_who_holds_a_card_has_its_device_open(monkeypatch: pytest.MonkeyPatch, path: str, opened: bool) -> None:
    """`/dev/kfd` is through which ROCm's processes allocate; `/dev/dri` is open in desktops too."""
    monkeypatch.setattr(process_files, "_target", lambda link: path)
    assert process_files.has_opened_a_card(OWN) is opened
