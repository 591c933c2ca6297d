"""What the processes of a watched server hold over several watches: what is taken for growth, and what is not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from lowtide.leakcheck.growth.quantities import HeldSource
from lowtide.leakcheck.processes.held_series import GrownLevel, HeldKey, HeldReading, HeldSeries, Point
from lowtide.leakcheck.processes.process_growth import ToldGrowth
from lowtide.probes.device.driver import find_driver
from lowtide.probes.host.process_files import anonymous_bytes_of, descriptors_of, stat
from lowtide.reports.schema import ResourceName

OWN = os.getpid()
MIB = 1 << 20
TURNS = 40


@pytest.fixture
def source() -> Iterator[HeldSource]:
    driver = find_driver()
    yield HeldSource(lambda: [OWN], driver, lambda: {OWN: {"cuda:0": 5 * MIB}})
    driver.close()


def key(resource: ResourceName, device: str = "", started: int | None = None) -> HeldKey:
    process = stat(OWN)
    assert process is not None
    return HeldKey(OWN, process.started if started is None else started, resource, device)


def stretch(*amounts: int, since: float = 1e9) -> list[Point]:
    return [Point(since + place, amount) for place, amount in enumerate(amounts)]


def grown(
    source: HeldSource, which: HeldKey, *earlier: Sequence[Point], explained: float = 0.0, is_judged: bool = True
) -> list[GrownLevel]:
    """What grows once this process has been read again."""
    series = HeldSeries(source, {which: earlier}, len, is_judged=is_judged)
    series.look(has_begun=True)
    known = ToldGrowth()
    known.add((OWN, False), explained)
    return series.grown(known)


def rising(now: int, step: int) -> list[Point]:
    return stretch(*(now - step * turn for turn in reversed(range(TURNS))))


def test_host_memory_that_has_risen_in_an_earlier_watch_is_found_with_the_readings_of_both(source: HeldSource) -> None:
    (found,) = grown(source, key("host-memory"), rising(anonymous_bytes_of(OWN), MIB))
    assert found.finding.message.startswith(f"pid {OWN} (")
    assert "39.0 MiB more of host memory over 39 s in 2 watches, 1.0 MiB a second" in found.finding.message
    assert (found.finding.process is not None and found.finding.process.pid, found.finding.trend) == (OWN, "growth")
    assert found.rate == pytest.approx(MIB, rel=0.1)


def test_what_its_containers_explain_is_told_with_these(source: HeldSource) -> None:
    assert grown(source, key("host-memory"), rising(anonymous_bytes_of(OWN), MIB), explained=0.6 * MIB) == []


def test_where_there_is_no_history_it_is_not_judged(source: HeldSource) -> None:
    assert grown(source, key("host-memory"), rising(anonymous_bytes_of(OWN), MIB), is_judged=False) == []


def test_its_quiet_twin_and_what_rises_once_are_clean(source: HeldSource) -> None:
    now = anonymous_bytes_of(OWN)
    assert grown(source, key("host-memory"), stretch(*[now - MIB] * TURNS)) == []
    assert grown(source, key("host-memory"), stretch(*[now - 60 * MIB] * 20, *[now - MIB] * 20)) == []


def test_what_was_taken_between_two_watches_is_no_growth(source: HeldSource) -> None:
    now = anonymous_bytes_of(OWN)
    watches = [stretch(*[now - 2 * MIB * turn] * 3, since=1e9 - 1e6 * turn) for turn in reversed(range(30))]
    assert grown(source, key("host-memory"), *watches) == []


def test_what_was_given_back_between_two_watches_speaks_against_growth(source: HeldSource) -> None:
    now = anonymous_bytes_of(OWN)
    saw = [stretch(*(now - MIB * turn for turn in reversed(range(10)))) for _ in range(5)]
    assert grown(source, key("host-memory"), *saw) == []


def test_another_process_that_had_the_number_is_another_one(source: HeldSource) -> None:
    assert grown(source, key("host-memory", started=1), rising(anonymous_bytes_of(OWN), MIB)) == []


def test_descriptors_that_become_more_are_counted_with_their_kind(source: HeldSource) -> None:
    now = len(descriptors_of(OWN))
    (found,) = grown(source, key("file-descriptors"), rising(now, 1))
    assert "39 file descriptors more over 39 s in 2 watches, 1 a second: " in found.finding.message
    assert (found.finding.bytes, found.finding.count) == (0, 39)
    assert grown(source, key("file-descriptors"), stretch(*[now, now + 1] * 20)) == []


def test_tensors_on_a_card_that_become_more_are_found(source: HeldSource) -> None:
    (found,) = grown(source, key("tensors", "cuda:0"), rising(5 * MIB, MIB))
    assert "39.0 MiB more of tensors on cuda:0 over" in found.finding.message


def test_what_was_read_before_the_server_had_started_is_forgotten(source: HeldSource) -> None:
    kept: list[HeldReading] = []
    series = HeldSeries(source, {}, kept.extend, is_judged=True)
    series.look(has_begun=True)
    assert {course.key.resource for course in series.courses()} >= {"host-memory", "tensors", "threads"}
    series.look(has_begun=False)
    series.settle()
    assert (series.courses(), kept) == ([], [])


def test_what_was_read_is_kept_once_it_is_known_to_be_after_the_start(source: HeldSource) -> None:
    kept: list[HeldReading] = []
    series = HeldSeries(source, {}, kept.extend, is_judged=True)
    series.look(has_begun=True)
    assert kept == []
    series.settle()
    (memory,) = (reading for reading in kept if reading.key == key("host-memory"))
    assert memory.point.amount > MIB
    assert memory.process.startswith(f"pid {OWN} (")
