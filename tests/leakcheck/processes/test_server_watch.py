"""When the watch over a server ends, and with what."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from lowtide.leakcheck.growth.quantities import HeldSource
from lowtide.leakcheck.processes import server_watch
from lowtide.leakcheck.processes.held_series import HeldKey, HeldReading, HeldSeries, Point
from lowtide.leakcheck.processes.server_watch import HANGS_S, SLOW_S, ServerWatch
from lowtide.probes.device.driver import find_driver
from lowtide.probes.host.process_files import anonymous_bytes_of, stat
from lowtide.reports.schema import Finding, NotMeasured

OWN = os.getpid()


def growth(size: int, holder: str = "KEPT") -> Finding:
    return Finding(
        resource="host-memory",
        cause="module-global",
        bytes=size,
        count=1,
        device="",
        stage="intervals",
        message=f"{holder} grows",
        fingerprint=holder,
        holder=holder,
    )


@dataclass
class Window:
    """What a window of some seconds has found."""

    seconds_read: float
    found: Sequence[Finding] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    not_judged: tuple[NotMeasured, ...] = ()
    is_over: bool = False
    has_begun: bool = False
    is_gone: bool = False
    tensors: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def look(self) -> None:
        self.is_over, self.has_begun = self.has_begun, True

    def findings(self) -> Sequence[Finding]:
        return self.found

    def end(self, status: int | None = None) -> None:
        pass


@dataclass
class Client:
    """One whose server answers 50 requests between two questions."""

    answered: int = 0
    failed: int = 0
    failure: str = ""
    is_needed: bool = True
    url: str = "http://127.0.0.1:8000"
    silent: float | None = 0.0
    steps: Sequence[int] = ()

    def silent_for(self) -> float | None:
        return self.silent

    def requests(self) -> int:
        step, *self.steps = self.steps or [50]
        self.answered += step
        return self.answered

    def stop(self) -> None:
        self.silent = None


def watched(*by_window: Sequence[Finding], seconds: float = 3000.0, client: Client | None = None) -> ServerWatch:
    """Look until the watch is over, or the windows are."""
    lengths: list[float] = []
    found: Iterator[Sequence[Finding]] = iter(by_window)

    def begin(length: float, is_first: bool) -> Window:
        lengths.append(length)
        assert is_first is (len(lengths) == 1)
        return Window(length, next(found))

    watch = ServerWatch(begin, seconds, lambda text: None, client)
    while not watch.is_over:
        try:
            watch.look()
        except StopIteration:
            break
    assert lengths == [12.0 * 2**turn for turn in range(len(lengths))]
    return watch


def test_what_grows_on_in_the_next_window_is_decided() -> None:
    watch = watched([growth(1200)], [growth(2400)], [])
    assert watch.is_over
    assert [finding.bytes for finding in watch.findings()] == [2400]
    assert watch.rates == [(watch.rates[0][0], 100.0)]


def test_what_fills_ever_more_slowly_is_not() -> None:
    watch = watched([growth(1200)], [growth(1200)], [growth(1200)], [])
    assert not watch.is_over
    assert watch.findings() == []


def test_nor_is_what_grows_in_one_window_alone() -> None:
    assert watched([growth(1200)], [], [growth(4800)], []).findings() == []
    assert watched([growth(1200, "A")], [growth(2400, "B")], []).findings() == []


def test_what_grew_in_the_last_window_counts_by_itself() -> None:
    watch = watched([], [growth(2400)], seconds=12.0)
    assert watch.is_over
    assert watch.findings() == []
    assert [finding.bytes for finding in watched([growth(10)], seconds=12.0).findings()] == [10]


@pytest.mark.parametrize(("seconds", "lengths"), [(60, [12, 24, 24]), (100, [12, 24, 64]), (40, [12, 28]), (20, [12])])
def test_no_window_is_shorter_than_the_one_before(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lengths: list[float]
) -> None:
    now, begun = 100.0, list[float]()
    monkeypatch.setattr(server_watch.time, "monotonic", lambda: now)

    def begin(length: float, is_first: bool) -> Window:
        begun.append(length)
        return Window(length)

    watch = ServerWatch(begin, seconds, lambda text: None)
    while not watch.is_over:
        watch.look()
        now += begun[-1] if watch._window is not None else 0
    assert begun == lengths


def test_requests_are_told_and_are_what_the_rate_is_of() -> None:
    # Twice as long and half as many requests in each second: as much in each second would be twice as much in each.
    client = Client(steps=[0, 50, 0, 50])
    (finding,) = watched([growth(5000)], [growth(5000)], client=client).findings()
    assert finding.message == "KEPT grows; 100 B a request over 50 requests"
    slower = Client(steps=[0, 50, 0, 500])
    assert watched([growth(5000)], [growth(5000)], [], client=slower).findings() == []


def test_a_rate_by_second_is_not_compared_with_one_by_request() -> None:
    lost = Client(steps=[0, 500, 0, 0])
    assert watched([growth(5000)], [growth(5000)], [], client=lost).findings() == []


def test_a_server_that_answers_no_more_hangs_and_its_stacks_are_told() -> None:
    told: list[str] = []
    client = Client(silent=HANGS_S + 1)
    watch = ServerWatch(lambda length, _: Window(length), 300, told.append, client, stacks=lambda: ["MainThread: wait"])
    watch.look()
    assert watch.is_over
    (finding,) = watch.findings()
    assert finding.message.startswith("the server has answered nothing for 61 s, and its processes are there")
    assert told == ["MainThread: wait"]


def test_one_that_has_been_slow_at_the_end_is_not_judged() -> None:
    watch = watched([], seconds=12.0, client=Client(silent=SLOW_S + 1))
    assert watch.findings() == []
    (missing,) = watch.not_measured
    assert missing.why == "the last answer of the server came 16 s ago: watch it for longer"
    assert watched([], seconds=12.0, client=Client(silent=1.0)).not_measured == ()


def test_nothing_is_read_before_it_answers() -> None:
    client = Client(silent=None)
    watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, client)
    watch.look()
    assert watch._window is None
    client.silent = 0.0
    watch.look()
    assert watch._window is not None
    unneeded = ServerWatch(
        lambda length, _: Window(length), 300, lambda text: None, Client(silent=None, is_needed=False)
    )
    unneeded.look()
    assert unneeded._window is not None


def test_an_end_is_a_finding_unless_somebody_has_asked_for_it() -> None:
    ends = ((3, " with exit code 3", False), (-9, " by signal 9", True), (-15, " by signal 15", False))
    for status, how, may_be_the_kernels in (*ends, (None, "", True)):
        watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, held=lambda: {OWN: 1 << 30})
        watch.look()
        watch.end(status)
        (finding,) = watch.findings()
        assert finding.message.startswith(f"the server ended{how} while it was watched; its processes held 1.0 GiB")
        assert ("dmesg" in str(finding.advice)) == may_be_the_kernels
    asked = ServerWatch(lambda length, _: Window(length), 300, lambda text: None)
    asked.look()
    asked.end(-15, asked=True)
    assert (asked.is_over, asked.findings()) == (True, [])


def test_what_was_read_of_a_process_is_no_growth_of_what_it_holds() -> None:
    held = iter([1 << 20, 1 << 30, 1 << 30, 1 << 30])
    watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, held=lambda: {OWN: next(held)})
    watch.look()
    assert [size for _, size in watch._course] == [1 << 30]


MISSING = (NotMeasured(what="what grows", why="no answer"),)


@pytest.mark.parametrize(
    ("window", "is_over"),
    [
        (Window(0, not_measured=MISSING), True),
        (Window(12, not_measured=MISSING), False),
        (Window(0, not_measured=MISSING, is_gone=True), False),
    ],
    ids=["never answered", "answered at first", "ended"],
)
def test_the_watch_goes_on_where_the_next_window_may_tell(window: Window, *, is_over: bool) -> None:
    watch = ServerWatch(lambda *_: window, 300, lambda text: None)
    watch.look()
    watch.look()
    assert watch.is_over is is_over


def test_a_process_that_ended_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(server_watch.time, "monotonic", lambda: now)
    there = {OWN: 1 << 20, os.getppid(): 1 << 20}
    watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, held=lambda: dict(there))
    watch.look()
    now += 30
    del there[OWN]
    watch.look()
    now += 2
    watch.end(1)
    (finding,) = watch.findings()
    assert f"pid {OWN} (" in finding.message
    assert finding.message.endswith(" had ended 2.0 s before")


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_end_between_two_looks_the_first_is_named(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(server_watch, "_STAYS_S", 0.0)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    held = {child.pid: 1 << 20 for child in children}
    watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, held=lambda: held)
    watch.look()
    for child in (children[first], children[1 - first]):
        child.kill()
        child.wait()
        time.sleep(0.3)
    watch.end(-9)
    (finding,) = watch.findings()
    told = re.findall(r"; pid (\d+) \(sleep\) had ended 0\.\d s before", finding.message)
    assert told == [str(children[first].pid)]


def test_those_that_end_together_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "_STAYS_S", 0.0)
    monkeypatch.setattr(server_watch, "_TOGETHER_S", 5.0)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    held = {child.pid: 1 << 20 for child in children}
    watch = ServerWatch(lambda length, _: Window(length), 300, lambda text: None, held=lambda: held)
    watch.look()
    for child in children:
        child.kill()
        child.wait()
    watch.end(-9)
    (finding,) = watch.findings()
    assert "had ended" not in finding.message


def test_a_few_requests_that_fail_are_told() -> None:
    some = watched([], seconds=12.0, client=Client(failed=3, failure="500 no"))
    (told,) = some.not_judged
    assert told.why.startswith("3 of ")
    assert told.why.endswith(" failed, most often: 500 no")
    assert some.not_measured == ()


@pytest.mark.parametrize(("steps", "why"), [([50, 50], "20 of 120 failed, most often"), ([0, 0], "all 20 failed")])
def test_of_a_server_that_fails_at_work_nothing_is_known_but_what_grows(steps: Sequence[int], why: str) -> None:
    silent = watched([], seconds=12.0, client=Client(failed=20, failure="500 no", steps=steps))
    (missing,) = silent.not_measured
    assert missing.why == f"{why}: 500 no"
    assert silent.not_judged == ()
    grows = watched([growth(10)], seconds=12.0, client=Client(failed=20, failure="500 no", steps=steps))
    assert grows.findings()
    assert grows.not_measured == ()


def test_a_server_that_had_not_answered_when_it_was_asked_to_end_is_not_judged() -> None:
    watch = ServerWatch(lambda seconds, is_first: Window(seconds, []), 12.0, lambda text: None, Client(silent=None))
    watch.look()
    watch.end(0, asked=True)
    (missing,) = watch.not_measured
    where = "at http://127.0.0.1:8000 when the watch ended: --url says where it listens"
    assert missing.why == f"it had not answered {where}"


def test_what_grows_over_the_readings_of_all_watches_is_found_where_no_window_shows_it() -> None:
    process = stat(OWN)
    assert process is not None
    held, kept = anonymous_bytes_of(OWN), list[HeldReading]()
    earlier = [Point(1e9 + turn, held - (40 - turn) * (1 << 20)) for turn in range(40)]
    driver = find_driver()
    series = HeldSeries(
        HeldSource(lambda: [OWN], driver, dict),
        {HeldKey(OWN, process.started, "host-memory", ""): [earlier]},
        kept.extend,
        is_judged=True,
    )
    watch = ServerWatch(lambda length, _: Window(length), 12.0, lambda text: None, series=series)
    while not watch.is_over:
        watch.look()
    driver.close()
    (finding,) = watch.findings()
    assert finding.message.endswith("more of host memory over 39 s in 2 watches, 1.0 MiB a second")
    assert {reading.key.resource for reading in kept} >= {"host-memory", "threads"}
