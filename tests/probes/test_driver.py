"""The driver's figures: which library is asked for which card, and what is said where it does not tell."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.probes.device.driver import CUDA, Driver, DriverError, NoDriver, find_driver, visible_card
from lowtide.probes.device.driver.amdsmi import AmdsmiDriver
from lowtide.probes.device.driver.nvml import NvmlDriver
from tests.loaded_modules import load_instead
from tests.probes.fake_drivers import FakeAmdsmi, FakeNvml, amd_process

MIB = 1 << 20
OWN = os.getpid()
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml()


def torch_with_a_context(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True, get_device_properties=lambda index: SimpleNamespace(**properties)
    )
    bindings = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: True)
    load_instead(monkeypatch, "torch", SimpleNamespace(cuda=cuda, _C=bindings))  # type: ignore[arg-type]


def test_nvml_tells_this_processs_bytes_and_the_cards(nvml: FakeNvml) -> None:
    nvml.compute[0] = [(OWN + 1, 700 * MIB), (OWN, 30 * MIB)]
    reading = NvmlDriver(nvml).read(0)
    assert (reading.device, reading.source, reading.note) == ("cuda:0", "nvml", "")
    assert (reading.process_bytes, reading.card_used, reading.card_total) == (30 * MIB, 100 * MIB, 1000 * MIB)


def test_a_process_that_nvml_does_not_list_holds_nothing(nvml: FakeNvml) -> None:
    nvml.compute[0] = [(OWN + 1, 700 * MIB)]
    assert NvmlDriver(nvml).read(0).process_bytes == 0


def test_a_process_with_a_context_that_nvml_does_not_list_is_unknown(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with_a_context(monkeypatch, uuid="aaaa-0")
    reading = NvmlDriver(nvml).read(0)
    assert reading.process_bytes is None
    assert "PID namespace" in reading.note
    assert reading.card_used == 100 * MIB


def test_a_process_that_nvml_lists_without_its_memory_is_unknown(nvml: FakeNvml) -> None:
    nvml.compute[0] = [(OWN, None)]
    reading = NvmlDriver(nvml).read(0)
    assert reading.process_bytes is None
    assert "without its memory" in reading.note


def test_a_process_that_computes_and_draws_counts_once(nvml: FakeNvml) -> None:
    nvml.compute[0] = nvml.graphics[0] = [(OWN, 30 * MIB)]
    assert NvmlDriver(nvml).read(0).process_bytes == 30 * MIB


def test_nvml_lists_all_processes_with_their_bytes(nvml: FakeNvml) -> None:
    nvml.compute[1] = [(7, 30 * MIB), (8, 5 * MIB), (7, 2 * MIB), (9, None)]
    nvml.graphics[1] = [(8, 6 * MIB), (9, 4 * MIB), (10, 1 * MIB)]
    driver = NvmlDriver(nvml)
    assert driver.processes(1) == {7: 32 * MIB, 8: 6 * MIB, 9: None, 10: 1 * MIB}
    assert driver.processes(0) == {}
    nvml.failing["compute"] = "not permitted"
    assert driver.processes(1) == {}
    nvml.failing.clear()
    driver.close()
    assert driver.processes(1) == {}


def test_a_process_that_only_draws_counts(nvml: FakeNvml) -> None:
    nvml.graphics[0] = [(OWN, 30 * MIB)]
    assert NvmlDriver(nvml).read(0).process_bytes == 30 * MIB


def test_visible_devices_reorder_the_cards(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    nvml.compute[1] = [(OWN, 30 * MIB)]
    reading = NvmlDriver(nvml).read(0)
    assert (reading.device, reading.process_bytes, reading.card_used) == ("cuda:0", 30 * MIB, 200 * MIB)


def test_a_card_that_torch_does_not_see_is_none(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise AssertionError("Invalid device id")

    torch_with_a_context(monkeypatch)
    monkeypatch.setattr(sys.modules["torch"].cuda, "get_device_properties", refuse)
    reading = NvmlDriver(nvml).read(7)
    assert (reading.card_total, reading.note) == (None, "torch sees no card of index 7")


def test_an_abbreviated_uuid_names_a_card(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert NvmlDriver(nvml).read(0).card_used == 200 * MIB


def test_a_mig_slice_is_asked_for_by_its_uuid(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cc")
    NvmlDriver(nvml).read(0)
    assert "by uuid MIG-cc" in nvml.calls


def test_a_hidden_card_is_unknown(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    reading = NvmlDriver(nvml).read(1)
    assert (reading.process_bytes, reading.card_used, reading.card_total) == (None, None, None)
    assert "shows no card of index 1" in reading.note


def test_once_torch_runs_its_uuid_decides(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    torch_with_a_context(monkeypatch, uuid="bbbb-1")
    assert NvmlDriver(nvml).read(0).card_used == 200 * MIB


def test_a_card_that_nvml_does_not_know_is_unknown(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with_a_context(monkeypatch, uuid="zzzz")
    assert "GPU-zzzz" in NvmlDriver(nvml).read(0).note


@pytest.mark.parametrize("call", ["memory", "by index"])
def test_an_nvml_that_fails_leaves_everything_unknown(nvml: FakeNvml, call: str) -> None:
    nvml.failing[call] = "GPU is lost"
    reading = NvmlDriver(nvml).read(0)
    assert (reading.process_bytes, reading.card_used) == (None, None)
    assert "GPU is lost" in reading.note


def test_an_nvml_that_lists_no_processes_still_tells_the_cards_memory(nvml: FakeNvml) -> None:
    nvml.failing["compute"] = "Not Supported"
    reading = NvmlDriver(nvml).read(0)
    assert (reading.process_bytes, reading.card_used) == (None, 100 * MIB)
    assert "Not Supported" in reading.note


def test_nvml_is_opened_once_and_shut_down_once(nvml: FakeNvml) -> None:
    driver = NvmlDriver(nvml)
    driver.read(0)
    driver.read(1)
    driver.close()
    driver.close()
    assert nvml.calls.count("init") == nvml.calls.count("shutdown") == 1


def test_a_closed_nvml_driver_says_so_instead_of_reading(nvml: FakeNvml) -> None:
    driver = NvmlDriver(nvml)
    driver.close()
    before = list(nvml.calls)
    assert "closed" in driver.read(0).note
    assert nvml.calls == before


@pytest.mark.parametrize("call", ["init", "count"])
def test_an_nvml_that_does_not_start_is_an_error_that_says_why(nvml: FakeNvml, call: str) -> None:
    nvml.failing[call] = "Driver Not Loaded"
    with pytest.raises(DriverError, match="Driver Not Loaded"):
        NvmlDriver(nvml)
    assert nvml.calls.count("shutdown") == (call != "init")


def test_an_nvml_without_a_card_is_an_error_and_shut_down(nvml: FakeNvml) -> None:
    nvml.uuids = []
    with pytest.raises(DriverError, match="no card"):
        NvmlDriver(nvml)
    assert nvml.calls[-1] == "shutdown"


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> FakeAmdsmi:
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return FakeAmdsmi()


def test_amdsmi_tells_this_processs_bytes_and_the_cards(amdsmi: FakeAmdsmi) -> None:
    amdsmi.processes["second"] = [amd_process(OWN + 1, 700 * MIB), amd_process(OWN, 30 * MIB)]
    reading = AmdsmiDriver(amdsmi).read(0)
    assert (reading.device, reading.source, reading.note) == ("cuda:0", "amdsmi", "")
    assert (reading.process_bytes, reading.card_used, reading.card_total) == (30 * MIB, 200 * MIB, 1000 * MIB)


def test_an_older_amdsmi_is_asked_process_by_process(amdsmi: FakeAmdsmi) -> None:
    facts = {"a handle": amd_process(OWN, 30 * MIB), "another": amd_process(OWN + 1, 5)}
    amdsmi.processes["second"] = list(facts)
    amdsmi.amdsmi_get_gpu_process_info = lambda card, handle: facts[handle]  # type: ignore[attr-defined]
    assert AmdsmiDriver(amdsmi).read(0).process_bytes == 30 * MIB


def test_a_process_that_amdsmi_does_not_list_holds_nothing(amdsmi: FakeAmdsmi) -> None:
    assert AmdsmiDriver(amdsmi).read(0).process_bytes == 0


def test_a_process_with_a_context_that_amdsmi_does_not_list_is_unknown(
    amdsmi: FakeAmdsmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with_a_context(monkeypatch, pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    reading = AmdsmiDriver(amdsmi).read(0)
    assert (reading.process_bytes, reading.card_used) == (None, 100 * MIB)


def test_a_process_that_amdsmi_lists_without_its_memory_is_unknown(amdsmi: FakeAmdsmi) -> None:
    amdsmi.processes["second"] = [amd_process(OWN, "N/A")]
    assert AmdsmiDriver(amdsmi).read(0).process_bytes is None


def test_amdsmi_lists_all_processes_with_their_bytes(amdsmi: FakeAmdsmi) -> None:
    several = [(7, 30 * MIB), (8, 5 * MIB), (7, 2 * MIB), (9, "N/A"), (9, 4 * MIB)]
    amdsmi.processes["second"] = [amd_process(pid, amount) for pid, amount in several]
    driver = AmdsmiDriver(amdsmi)
    assert driver.processes(0) == {7: 32 * MIB, 8: 5 * MIB, 9: None}
    assert driver.processes(7) == {}
    amdsmi.failing["processes"] = "not permitted"
    assert driver.processes(0) == {}
    amdsmi.failing.clear()
    driver.close()
    assert driver.processes(0) == {}


def test_once_torch_runs_the_place_on_the_bus_decides(amdsmi: FakeAmdsmi, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with_a_context(monkeypatch, pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert AmdsmiDriver(amdsmi).read(0).card_used == 100 * MIB


def test_hip_visible_devices_reorder_the_cards(amdsmi: FakeAmdsmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert AmdsmiDriver(amdsmi).read(0).card_used == 100 * MIB


def test_an_amd_uuid_is_a_serial_number(amdsmi: FakeAmdsmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-bb22")
    assert AmdsmiDriver(amdsmi).read(0).card_used == 200 * MIB


def test_an_amdsmi_that_does_not_tell_hips_numbers_is_taken_in_its_own_order(amdsmi: FakeAmdsmi) -> None:
    amdsmi.amdsmi_get_gpu_enumeration_info = None  # type: ignore[assignment, method-assign]
    assert AmdsmiDriver(amdsmi).read(0).card_used == 100 * MIB


def test_a_card_that_amdsmi_does_not_have_is_unknown(amdsmi: FakeAmdsmi) -> None:
    reading = AmdsmiDriver(amdsmi).read(7)
    assert reading.card_used is None
    assert "index 7" in reading.note


def test_an_amdsmi_that_fails_leaves_everything_unknown(amdsmi: FakeAmdsmi) -> None:
    amdsmi.failing["usage"] = "device busy"
    reading = AmdsmiDriver(amdsmi).read(0)
    assert (reading.process_bytes, reading.card_used) == (None, None)
    assert "device busy" in reading.note


def test_an_amdsmi_that_lists_no_processes_still_tells_the_cards_memory(amdsmi: FakeAmdsmi) -> None:
    amdsmi.failing["processes"] = "not permitted"
    reading = AmdsmiDriver(amdsmi).read(0)
    assert (reading.process_bytes, reading.card_used) == (None, 200 * MIB)
    assert "not permitted" in reading.note


def test_amdsmi_is_shut_down_once(amdsmi: FakeAmdsmi) -> None:
    driver = AmdsmiDriver(amdsmi)
    driver.close()
    driver.close()
    assert amdsmi.calls.count("shutdown") == 1
    assert "closed" in driver.read(0).note


def test_an_amdsmi_without_a_card_is_an_error_and_shut_down(amdsmi: FakeAmdsmi) -> None:
    amdsmi.cards = []
    with pytest.raises(DriverError, match="no card"):
        AmdsmiDriver(amdsmi)
    assert amdsmi.calls[-1] == "shutdown"


def test_an_amdsmi_without_its_library_is_an_error_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so'); raise KeyError('ROCM')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(DriverError, match="KeyError: 'ROCM'"):
        AmdsmiDriver()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("listed", "index", "card"),
    [
        (None, 3, 3),
        ("2,0", 0, 2),
        ("2,0", 1, 0),
        ("2,0", 2, None),
        ("", 0, None),
        ("-1", 0, None),
        ("1,-1,0", 1, None),
        (" 1 , GPU-ab ", 1, "GPU-ab"),
        ("MIG-ab", 0, "MIG-ab"),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(listed: str | None, index: int, card: int | str | None) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_card(environment, CUDA, index) == card


def test_no_driver_says_that_it_does_not_know_and_why() -> None:
    reading = NoDriver("nothing here").read(2)
    assert (reading.device, reading.source) == ("cuda:2", "none")
    assert (reading.process_bytes, reading.card_used, reading.card_total) == (None, None, None)
    assert "nothing here" in reading.note
    assert NoDriver("nothing here").processes(2) == {}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="this machine has a driver")
def test_a_machine_without_a_driver_gets_none_with_both_reasons() -> None:
    driver = find_driver()
    assert driver.name == "none"
    assert "NVML" in driver.read(0).note
    assert "amdsmi" in driver.read(0).note
    driver.close()


def test_nvml_comes_before_amdsmi(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, amdsmi: FakeAmdsmi) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)  # type: ignore[arg-type]
    assert find_driver().name == "nvml"


def test_amdsmi_comes_where_nvml_does_not_start(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, amdsmi: FakeAmdsmi
) -> None:
    nvml.failing["init"] = "no driver"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)  # type: ignore[arg-type]
    assert find_driver().name == "amdsmi"


@pytest.mark.cuda
@needs_card
def test_on_a_card_the_driver_sees_what_torch_reserves() -> None:
    torch.zeros(1, device="cuda")
    driver: Driver = find_driver()
    try:
        before = driver.read(0)
        kept = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        after = driver.read(0)
    finally:
        driver.close()
    assert before.process_bytes is not None, before.note
    assert after.process_bytes is not None, after.note
    assert after.process_bytes - before.process_bytes == kept.nbytes
    assert after.card_total is not None
    assert after.card_used is not None
    assert after.process_bytes <= after.card_used <= after.card_total


@pytest.mark.cuda
@needs_card
def test_on_a_card_the_driver_lists_this_process_and_another() -> None:
    torch.zeros(1, device="cuda")
    takes = "import sys, torch; torch.zeros(1, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    with (
        contextlib.closing(find_driver()) as driver,
        subprocess.Popen(
            [sys.executable, "-c", takes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        listed = driver.processes(0)
        other.communicate()
        assert listed[OWN] == driver.read(0).process_bytes
        assert (listed[other.pid] or 0) > 100 * MIB
        assert other.pid not in driver.processes(0)
