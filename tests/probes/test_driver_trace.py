"""What CUPTI records of who asks the driver for memory, by a double of its binding."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowtide.probes.device.driver_trace import DriverTrace, TracedMemory

MIB = 1 << 20
CUBLAS = "/opt/lib/libcublas.so.13"
PINNED, DEVICE, ARRAY, STATIC = 2, 3, 4, 6


class CuptiError(Exception):
    pass


class FakeCupti:
    """Records in a buffer that is handed over when it is flushed.

    Attributes:
        enabled: the kinds that are recorded.
        with_source: whether each record says who has asked.
    """

    ActivityKind = SimpleNamespace(MEMORY2=49)
    cuptiError = CuptiError  # noqa: N815

    def __init__(self) -> None:
        self.enabled: set[int] = set()
        self.with_source = False
        self._buffer: list[Any] = []
        self._completed: Callable[[Sequence[Any]], None] = lambda activities: None

    def activity_register_callbacks(self, requested: object, completed: Callable[[Sequence[Any]], None]) -> None:
        self._completed = completed

    def activity_enable_allocation_source(self, enable: int) -> None:
        self.with_source = bool(enable)

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        activities, self._buffer = self._buffer, []
        self._completed(activities)

    def call(self, address: int, size: int, kind: int = DEVICE, *, frees: bool = False, device: int = 0) -> None:
        """Take a call of the program's: the record of an allocation or of a release."""
        if self.enabled:
            record = {"memory_operation_type": 2 if frees else 1, "memory_kind": kind, "address": address}
            source = CUBLAS if self.with_source else None
            self._buffer.append(SimpleNamespace(**record, bytes=size, device_id=device, source=source))


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake, package = FakeCupti(), ModuleType("cupti")
    monkeypatch.setattr(package, "cupti", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cupti", package)
    return fake


@pytest.fixture
def trace(cupti: FakeCupti) -> DriverTrace:
    trace = DriverTrace()
    trace.start()
    return trace


def test_what_is_there_has_the_library_that_asked_for_it(cupti: FakeCupti, trace: DriverTrace) -> None:
    cupti.call(0x1000, 24 * MIB)
    cupti.call(0x9000, 64 * MIB, ARRAY, device=1)
    block = TracedMemory(0x1000, 24 * MIB, 0, "libcublas.so.13", is_array=False)
    array = TracedMemory(0x9000, 64 * MIB, 1, "libcublas.so.13", is_array=True)
    assert list(trace.read()) == [block, array]
    assert trace.arrays_on(1) == [array]
    assert trace.arrays_on(0) == []


def test_what_was_freed_is_not_there_and_its_address_may_be_anothers(cupti: FakeCupti, trace: DriverTrace) -> None:
    cupti.call(0x1000, 24 * MIB)
    cupti.call(0x1000, 24 * MIB, frees=True)
    assert trace.read() == []
    cupti.call(0x1000, 2 * MIB)
    assert [each.bytes for each in trace.read()] == [2 * MIB]


@pytest.mark.parametrize("kind", [PINNED, STATIC])
def test_host_memory_and_tables_of_kernels_are_left_out(cupti: FakeCupti, trace: DriverTrace, kind: int) -> None:
    cupti.call(0x1000, 24 * MIB, kind)
    assert trace.read() == []


def test_after_the_end_nothing_is_recorded_or_known(cupti: FakeCupti, trace: DriverTrace) -> None:
    cupti.call(0x1000, 24 * MIB)
    trace.stop()
    assert cupti.enabled == set()
    assert list(trace.read()) == []
    trace.start()
    assert trace.read() == []


def test_it_ends_with_the_last_who_has_asked_for_it(cupti: FakeCupti, trace: DriverTrace) -> None:
    trace.start()
    cupti.call(0x1000, 24 * MIB)
    trace.stop()
    assert len(trace.read()) == 1
    trace.stop()
    assert list(trace.read()) == []


def test_a_fork_asks_nothing_of_cupti(cupti: FakeCupti, trace: DriverTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cupti, "activity_flush_all", asked.append)
    child, code = os.fork(), 255
    if not child:
        try:
            trace.read()
            trace.stop()
            code = len(asked)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trace.read()
    assert len(asked) == 1


def test_a_second_start_registers_nothing_anew(
    cupti: FakeCupti, trace: DriverTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupti.call(0x1000, 24 * MIB)
    monkeypatch.setattr(cupti, "activity_register_callbacks", lambda *_: pytest.fail("registered again"))
    trace.start()
    assert len(trace.read()) == 1


def test_without_the_binding_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    trace = DriverTrace()
    trace.start()
    assert "extra `cupti`" in trace.why
    assert list(trace.read()) == []


def test_where_cupti_refuses_it_says_so(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int) -> None:
        raise CuptiError("NOT_INITIALIZED")

    monkeypatch.setattr(cupti, "activity_enable", refuse)
    trace = DriverTrace()
    trace.start()
    assert trace.why == "CUPTI does not record: NOT_INITIALIZED"
    trace.stop()
    assert not trace.why
