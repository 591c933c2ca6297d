"""When a program has started, and which of its processes grow by more than they may."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import pytest

from lowtide.leakcheck.processes.timed_growth import LookedGrowth, Start, grown_above
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


def causes(on_card: Sequence[int], *found: Finding) -> list[Finding]:
    """What grows in this process, with what torch has given out on a card after each of some intervals."""
    window = LookedGrowth({}, 60)
    window.named[OWN] = ProcessName(pid=OWN, name="core")
    for size in on_card:
        window._note_tensors({OWN: {"cpu": 0, "cuda:0": size}, OWN + 1: {"cuda:0": 0}})
    return window._causes(OWN, found)


def held(size: int, device: str = "") -> Finding:
    return msgspec.structs.replace(grown(OWN, size), holder="core.KEPT", device=device)


def test_tensors_on_a_card_of_which_each_interval_adds_some_are_told_with_their_rate() -> None:
    (finding,) = causes(RISING)
    said = "19.0 MiB more of tensors on cuda:0 over 19 intervals, 1.0 MiB with each (341.3 KiB a second)"
    assert finding.message == f"pid {OWN} (core): {said}"
    assert (finding.resource, finding.device, finding.trend) == ("tensors", "cuda:0", "growth")
    assert (finding.bytes, finding.count) == (19 * MIB, 19)


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
