"""What a finding says of memory that CUDA IPC has exported, by torch's counters and who has it open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from lowtide.leakcheck.resources import driver_memory, resource_of
from lowtide.leakcheck.resources.driver_memory import CudaIpc
from lowtide.probes.device.cuda_ipc import Counter
from tests.probes.ipc_records import BLOCK, Records, importer_of

NAME = f"block at {BLOCK:#x}"


@pytest.fixture
def records() -> Iterator[Records]:
    made = Records()
    yield made
    made.close()


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(driver_memory, "has_opened_a_card", lambda pid: pid == child.pid)
    with importer_of(os.getpid()) as child:
        yield child.pid


def test_it_is_found_by_the_key_of_a_card() -> None:
    assert isinstance(resource_of("cuda-ipc cuda:1"), CudaIpc)
    assert resource_of("native cuda:1") is None


@pytest.mark.parametrize(
    ("value", "meaning", "advice"),
    [
        (-1, "counter -1: freed by nobody", "open and close each export once"),
        (0, "counter 0: closed by all, and not collected", r"call torch\.cuda\.ipc_collect\(\)"),
        (1, "counter 1: opened by nobody who lives", "close it in the process that has opened it"),
    ],
)
def test_the_counter_tells_what_it_waits_for(value: int, meaning: str, advice: str, records: Records) -> None:
    records.export(4, value)
    assert CudaIpc().remark([NAME]) == f", exported by pid {os.getpid()}; {meaning}"
    assert re.match(advice, CudaIpc().advice([NAME]))


def test_who_has_it_open_is_told(records: Records, importer: int) -> None:
    records.export(4, 1)
    told = CudaIpc().remark([NAME])
    assert told.startswith(f", exported by pid {os.getpid()}; 1 importer (pid {importer} (")
    assert told.endswith("), counter 1: not closed by all")
    assert CudaIpc().changes([NAME]) == []


def test_of_several_exports_of_one_block_the_last_is_what_it_waits_for(records: Records) -> None:
    records.export(4, -1), records.export(5, 1), records.export(6, 0, BLOCK + 512)
    assert CudaIpc().remark([NAME]).endswith("; counter 1: opened by nobody who lives")


def test_what_was_not_exported_has_no_remark(records: Records) -> None:
    records.export(4, -1)
    assert CudaIpc().remark([]) == ""
    assert CudaIpc().remark(["block at 0x7000"]) == ""
    assert CudaIpc().changes(["block at 0x7000"]) == []


@pytest.mark.parametrize("value", [-1, 1])
def test_what_nobody_has_open_is_given_back_by_its_counter(value: int, records: Records) -> None:
    records.export(4, value), records.export(5, 1, BLOCK + 512)
    (change,) = CudaIpc().changes([NAME])
    change.apply()
    assert [Counter(records.file, slot).value() for slot in (4, 5)] == [0, 1]


def test_where_it_lies_is_not_what_it_is() -> None:
    assert CudaIpc().identity(NAME) == CudaIpc().identity("block at 0x7000")
