"""A change that gives a leak back may run the program's code: what waits there for ever is broken off."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lowtide.leakcheck.findings import remedies
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.remedies import UnendingChangeError, time_limit, try_actions
from lowtide.leakcheck.resources.resource import Change
from lowtide.reports.schema import Finding
from tests.waiting import HANG_S

LOCK = threading.Lock()
STOP = threading.Event()


def working_on() -> None:
    """Catch what fails, as a loop over its work does, and wait again."""
    for _ in range(3):
        with suppress(Exception):
            threading.Event().wait(HANG_S)


def stubborn() -> None:
    """Wait again whatever has ended the first wait."""
    try:
        threading.Event().wait(HANG_S)
    finally:
        threading.Event().wait(HANG_S)


def locked() -> None:
    with LOCK, LOCK:
        pass


def joining() -> None:
    thread = threading.Thread(target=STOP.wait, daemon=True)
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(each) for each in (signal.SIGURG, signal.SIGWINCH)]
    yield
    assert [signal.getsignal(each) for each in (signal.SIGURG, signal.SIGWINCH)] == before


@pytest.mark.parametrize("wait", [threading.Event().wait, locked, working_on, stubborn, lambda: time.sleep(HANG_S)])
def test_what_waits_is_broken_off(wait: Callable[[], object]) -> None:
    started = time.monotonic()
    with pytest.raises(UnendingChangeError, match=r"^it did not end in 0\.1 s$"), time_limit(0.1):
        wait()
    assert time.monotonic() - started >= 0.1


def test_what_a_thread_waits_for_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "_LONGEST_S", 0.1)
    finding = Finding(
        resource="threads", cause="thread", bytes=0, count=1, device="", stage="test", message="", fingerprint="0"
    )
    leak = ItemLeak(finding, key="threads", names={"one": 1}, subject=0)
    changes = [Change("POLLER.close()", "", joining), Change("POLLER.end()", "", lambda: left.clear())]
    left = {"one": 1}
    try:
        found = try_actions(leak, changes, lambda: left, lambda: 0)
    finally:
        STOP.set()
    assert found.tried[0].action == "POLLER.close() (raised UnendingChangeError: it did not end in 0.1 s)"
    assert found.remedy is not None
    assert found.remedy.action == "POLLER.end()"


def test_what_was_waited_for_in_vain_is_no_part_of_the_remedy() -> None:
    """The join of a timer that nobody has cancelled: who does that first waits for as long as the timer."""
    finding = Finding(
        resource="threads", cause="thread", bytes=0, count=1, device="", stage="test", message="", fingerprint="0"
    )
    leak = ItemLeak(finding, key="threads", names={"one": 1}, subject=0)
    left = {"one": 1}
    join, cancel = Change("TIMER.join()", "", lambda: None), Change("TIMER.cancel()", "", lambda: left.clear())
    waited = try_actions(leak, [join], lambda: left, lambda: 0)
    assert (waited.remedy, [each.action for each in waited.tried]) == (None, ["TIMER.join()"])
    found = try_actions(msgspec.structs.replace(leak, finding=waited), [cancel, join], lambda: left, lambda: 0)
    assert found.remedy is not None
    assert found.remedy.action == "TIMER.cancel()"


def test_what_ends_in_time_is_let_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: heard.append(number))
    try:
        with time_limit(HANG_S):
            # The program's own.
            signal.raise_signal(signal.SIGURG)
        assert heard == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


def test_nothing_is_raised_on_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    block: Any = time_limit(HANG_S)
    with block:
        handler: Any = signal.getsignal(signal.SIGURG)
        later = time.monotonic() + 2 * HANG_S
        monkeypatch.setattr(remedies, "time", SimpleNamespace(monotonic=lambda: later))
        # It would leave the handler behind, to raise in whatever runs next.
        handler(signal.SIGURG, block.gen.gi_frame)
        with pytest.raises(UnendingChangeError):
            handler(signal.SIGURG, sys._getframe())


@pytest.mark.parametrize("foreign", [[signal.SIGURG], [signal.SIGURG, signal.SIGWINCH]])
def test_a_handler_that_is_c_s_stays(monkeypatch: pytest.MonkeyPatch, foreign: list[signal.Signals]) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGURG, signal.SIGWINCH)}
    monkeypatch.setattr(remedies.signal, "getsignal", lambda each: None if each in foreign else before[each])
    with time_limit(HANG_S):
        changed = [each for each in before if signal.getsignal(each) is not before[each]]
    assert changed == [each for each in before if each not in foreign]


def test_in_another_thread_nothing_is_broken_off() -> None:
    ended = []

    def wait() -> None:
        with time_limit(0.01):
            time.sleep(0.1)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert ended == [True]


def test_what_is_collected_may_wait_as_long() -> None:
    class Waits:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            threading.Event().wait(HANG_S)

    Waits()
    with remedies.unraisable_texts() as texts, time_limit(0.1):
        gc.collect()
    assert texts == ["UnendingChangeError: it did not end in 0.1 s"]
