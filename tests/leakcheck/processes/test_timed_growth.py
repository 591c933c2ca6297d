"""When a program has started, and which of its processes grow by more than they may."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from lowtide.leakcheck.cli.execute import with_known
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS
from lowtide.leakcheck.processes import answers
from lowtide.leakcheck.processes.messages import GrownContainers, ReadTurn, Seen
from lowtide.leakcheck.processes.timed_growth import LookedGrowth, Start, TimedGrowth, grown_above
from lowtide.probes.host.memory_parts import MemoryParts
from lowtide.probes.processes.agents import NoAgentError
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding

OWN = os.getpid()
PAGE = os.sysconf("SC_PAGE_SIZE")


def touch(pages: int) -> None:
    """Have this process touch so much new memory."""
    import mmap

    with mmap.mmap(-1, (pages + 1) * PAGE) as fresh:
        for page in range(pages):
            fresh[page * PAGE] = 1


def looks(start: Start, until: float, *, pages: int = 0, since: float = 0.0) -> float:
    """Look each half second; return when it had started, or the end."""
    now = since
    while now < until:
        touch(pages)
        if start.is_over([OWN], now):
            return now
        now += 0.5
    return until


def test_a_program_that_rests_has_started() -> None:
    assert looks(Start(None, 0.0), 60) == 3


def test_one_that_touches_new_memory_has_not_before_it_is_there_for_long() -> None:
    assert looks(Start(None, 0.0), 60, pages=2000) == 30


def test_a_new_process_begins_it_anew() -> None:
    start = Start(None, 0.0)
    looks(start, 2.5)
    assert not start.is_over([OWN, 1], 2.6)
    assert not start.is_over([OWN, 1], 3.6)
    assert not start.is_over([OWN, 1], 6.0)
    assert start.is_over([OWN, 1], 6.7)


def test_a_child_that_is_forked_for_a_request_does_not() -> None:
    start = Start(None, 0.0)
    moments = [tenth / 4 for tenth in range(60)]
    over = [now for turn, now in enumerate(moments) if start.is_over([OWN, 2**22 + 1 + turn // 2], now)]
    assert 3.0 <= over[0] < 5.0


def test_who_says_when_it_has_started_is_taken_at_their_word() -> None:
    assert looks(Start(7.0, 0.0), 60) == 7
    assert looks(Start(0.0, 0.0), 60, pages=2000) == 0


@pytest.mark.parametrize("warm_up", [None, 1.0])
def test_without_a_process_to_ask_there_is_nothing_to_watch(warm_up: float | None) -> None:
    start = Start(warm_up, 0.0)
    assert not any(start.is_over([], float(now)) for now in range(100))


def grown(pid: int, size: int) -> Finding:
    return Finding(
        resource="host-memory",
        cause="native",
        bytes=size,
        count=1,
        device="",
        stage="intervals",
        message="",
        fingerprint=f"{pid} {size}",
        process=ProcessName(pid=pid, name="core"),
    )


MIB = 1 << 20
RISING = range(0, 20 * MIB, MIB)


def causes(on_card: Sequence[int], *found: Finding, each: int = 1) -> list[Finding]:
    """What grows in this process, with what torch has given out on a card after `each` of some intervals."""
    window = LookedGrowth({}, 60)
    window.named[OWN] = ProcessName(pid=OWN, name="core")
    for size in on_card:
        window._turn += each if window._turn else 1
        window._note_levels({OWN: {"cpu": 0, "cuda:0": size}, OWN + 1: {"cuda:0": 0}})
    return window._causes(OWN, found)


def held(size: int, device: str = "") -> Finding:
    return msgspec.structs.replace(grown(OWN, size), holder="core.KEPT", device=device)


def test_tensors_on_a_card_of_which_each_interval_adds_some_are_told_with_their_rate() -> None:
    (finding,) = causes(RISING)
    said = "19.0 MiB more of tensors on cuda:0 over 19 intervals, 1.0 MiB with each (341.3 KiB a second)"
    assert finding.message == f"pid {OWN} (core): {said}"
    assert (finding.resource, finding.device, finding.trend) == ("tensors", "cuda:0", "growth")
    assert (finding.bytes, finding.count) == (19 * MIB, 19)


def test_where_readings_take_longer_than_an_interval_a_second_is_a_part_of_what_they_take() -> None:
    (finding,) = causes(RISING, each=3)
    assert "1.0 MiB with each (113.8 KiB a second)" in finding.message


KEPT: list[bytes] = []
FILLED: list[bytes] = []


def watched(apart: int) -> list[Finding]:
    """What is told of this process, of which each reading takes so many intervals of a second, and one leaves a block.

    Another list is full after three.
    """

    def read(pids: object, question: ReadTurn) -> dict[int, GrownContainers]:
        KEPT.extend([bytes(8000 + len(KEPT))] * (not question.ends))
        FILLED.extend([bytes(9000 + len(FILLED))] * (len(FILLED) < 3))
        return {OWN: answers._grown(question, lambda modules: contextlib.nullcontext())}

    engine: Any = MagicMock(not_measured={})
    engine.tree.descendants.return_value = [OWN]
    engine.read_turn = read
    window = TimedGrowth(engine, 12, 0.0, lambda text: None)
    while not window.is_over:
        window._turn += apart if window._turn else 1
        window._read()
    KEPT.clear()
    FILLED.clear()
    return [each for each in window.findings() if "KEPT" in str(each.holder) or "FILLED" in str(each.holder)]


def test_what_each_of_few_requests_leaves_is_told_where_readings_take_longer_than_an_interval() -> None:
    for apart, rate in ((1, "1 item (7.9 KiB) a second"), (5, "0.2 items (1.6 KiB) a second")):
        (finding,) = watched(apart)
        assert finding.holder == f"{__name__}.KEPT"
        assert finding.message.endswith(f"; that is {rate}")


class Looked:
    """A process that is looked into, until it ends before one of the looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def ask(self, question: object) -> Seen:
        self.left -= 1
        if self.left < 0:
            raise NoAgentError("it has ended")
        return Seen(
            ids=b"", kinds=b"", lengths=b"", parts=dict.fromkeys(MemoryParts.__struct_fields__, 0), malloc=0, tensors={}
        )


def looked_into(*looks: int) -> LookedGrowth:
    """What is known after looks at some processes that each took three intervals, until it is over."""
    asked: Any = {OWN + turn: Looked(each) for turn, each in enumerate(looks)}
    window = LookedGrowth(asked, 12)
    while not window.is_over:
        window._turn += 3
        window._read()
    return window


def test_it_is_looked_into_often_enough_however_long_that_takes() -> None:
    window = looked_into(50)
    assert (window._turn, window.not_measured) == (3 * FEWEST_TURNS, ())


def test_a_worker_may_end_but_not_all_of_them() -> None:
    assert looked_into(50, 5).not_measured == ()
    ended = looked_into(3, 5)
    assert ended.is_gone
    assert [missing.why for missing in ended.not_measured] == ["it has ended"] * 2
    assert len(looked_into().not_measured) == 1


def opened_by(turn: Callable[[list[int]], object], *found: Finding) -> list[Finding]:
    """What grows in this process that does something with its descriptors in each of some intervals."""
    window, numbers = LookedGrowth({}, 60), list[int]()
    window.named[OWN] = ProcessName(pid=OWN, name="core")
    try:
        for _ in range(20):
            turn(numbers)
            window._turn += 1
            window._note_levels({OWN: {}})
        return window._causes(OWN, found)
    finally:
        for number in numbers:
            os.close(number)


def open_one(numbers: list[int]) -> None:
    numbers.append(os.open("/dev/null", os.O_RDONLY))


def fill(numbers: list[int]) -> None:
    if len(numbers) < 12:
        open_one(numbers)


def open_and_close(numbers: list[int]) -> None:
    open_one(numbers)
    if len(numbers) > 4:
        os.close(numbers.pop(0))


def test_descriptors_that_each_interval_leaves_are_told_with_their_rate_and_what_they_are() -> None:
    (finding,) = opened_by(open_one)
    said = "19 file descriptors more over 19 intervals, 1 with each (0.33 a second): "
    assert finding.message.startswith(f"pid {OWN} (core): {said}")
    # The folder that lists a process's own is one of them.
    assert finding.message.endswith("/dev/null")
    assert (finding.resource, finding.count, finding.bytes) == ("file-descriptors", 19, 0)
    assert finding.advice == "close with each interval the descriptors that it opens"


@pytest.mark.parametrize("turn", [fill, open_and_close])
def test_those_of_a_pool_are_no_growth(turn: Callable[[list[int]], object]) -> None:
    assert opened_by(turn) == []


def start_one(numbers: list[int]) -> int:
    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ)
    # It has ended, and may be waited for.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    numbers.append(child)
    return child


def start_and_wait(numbers: list[int]) -> None:
    start_one(numbers)
    if len(numbers) > 4:
        os.waitpid(numbers.pop(0), 0)


@pytest.mark.parametrize("turn", [start_one, start_and_wait])
def test_children_that_nobody_waits_for_are_growth(turn: Callable[[list[int]], object]) -> None:
    window, numbers = LookedGrowth({}, 60), list[int]()
    window.named[OWN] = ProcessName(pid=OWN, name="server")
    try:
        for _ in range(14):
            turn(numbers)
            window._turn += 1
            window._note_levels({OWN: {}})
        found = window._causes(OWN, [])
    finally:
        for number in numbers:
            os.waitpid(number, 0)
    if turn is start_and_wait:
        assert found == []
        return
    (finding,) = found
    assert finding.resource == "processes"
    assert finding.message.startswith(f"pid {OWN} (server): 13 child processes more over 13 intervals, 1 with each")
    assert finding.message.endswith(" that has ended, and nobody has waited for it")
    assert finding.advice == "end with each interval the processes that it starts, and wait for the end of each"


@pytest.mark.parametrize("ends", [True, False])
def test_one_that_ends_while_it_is_read_is_called_as_before(ends: bool) -> None:
    window, command = LookedGrowth({}, 60), [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        window.named[process.pid] = ProcessName(pid=process.pid, name="VLLM::EngineCore")
        if ends:
            process.communicate(b"\n")
        window._name(process.pid, {}, "")
        process.communicate(None if ends else b"\n")
    name = window.named[process.pid].name
    assert name == "VLLM::EngineCore" if ends else name.startswith("python")


def test_bytes_that_are_allowed_allow_no_descriptors() -> None:
    (finding,) = opened_by(open_one)
    assert with_known([finding, grown(OWN, 1000)], 1000) == [
        finding,
        msgspec.structs.replace(grown(OWN, 1000), suppressed_by="--max-growth 1000 B"),
    ]


@pytest.mark.parametrize(
    "sizes",
    [[5 * MIB] * 20, [*range(0, 8 * MIB, MIB), *[8 * MIB] * 12], [0, MIB] * 10, range(0, 20 * 1024, 1024)],
    ids=["the same", "fills", "comes and goes", "next to nothing"],
)
def test_other_tensors_on_a_card_do_not_grow(sizes: Sequence[int]) -> None:
    assert causes(sizes) == []


def test_what_a_container_takes_explains_half_of_what_grows_where_it_lies() -> None:
    host = grown(OWN, 20 * MIB)
    assert [each.resource for each in causes(RISING, host)] == ["tensors", "host-memory"]
    assert [each.holder for each in causes(RISING, held(10 * MIB), host)] == ["core.KEPT"]
    # On the card it is no host memory.
    assert [each.holder for each in causes(RISING, held(10 * MIB, "cuda:0"), host)] == ["core.KEPT", None]
    assert [each.device for each in causes(RISING, held(2 * MIB, "cuda:0"))] == ["cuda:0", "cuda:0"]


def test_what_grows_in_a_process_counts_together() -> None:
    findings = [grown(1, 600), grown(1, 600), grown(2, 1000)]
    assert grown_above(findings, 1000) == {1}
    assert grown_above(findings, 999) == {1, 2}
    assert grown_above(findings, 1200) == set()
