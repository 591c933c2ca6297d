"""Waiting for what a test has left ends, whatever else appears all the time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.watching.first_pass import wait_for_return
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.host.counters import Counters


class Books:
    """A test that had nothing before."""

    def new_items(self, key: str, now: Counters, subject: object, ended: object) -> dict[str, int]:
        return dict(now.items.get(key, {}))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: sum(made), sleep=made.append))
    return made


def waited(readings: Iterator[set[str]]) -> None:
    watched: Any = SimpleNamespace(
        counters=SimpleNamespace(read=lambda: Counters({"threads": dict.fromkeys(next(readings), 1)}, {}, {})),
        ownership=Books(),
        policy=Policy(settle=0.5),
    )
    wait_for_return(watched, (), slack=lambda key: 0, let_go=lambda: None)


def test_what_appears_all_the_time_is_waited_for_no_longer_than_what_stays(pauses: list[float]) -> None:
    waited({"left", f"new {number}"} for number in itertools.count())
    assert 0.5 <= sum(pauses) < 0.7


def test_each_that_ends_is_a_reason_to_wait_for_the_next(pauses: list[float]) -> None:
    five = [f"thread {number}" for number in range(5)]
    waited(iter([set(five[turn // 5 :]) for turn in range(25)] + [set()]))
    assert sum(pauses) > 1.5
