"""What seems to be left is read once, and waiting for it ends, whatever else appears all the time."""

from __future__ import annotations

import gc
import itertools
import logging
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide import LeakCheck
from lowtide.leakcheck.judging import ladder
from lowtide.leakcheck.watching.first_pass import Stayed, wait_for_return
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.heap.births import Births, Newborn
from lowtide.probes.host.counters import Counters

FILES, GC = resource.getrlimit(resource.RLIMIT_NOFILE), gc.get_threshold()


class Books:
    """A test that had before what earlier ones have left."""

    def __init__(self, earlier: Iterable[str]) -> None:
        self._earlier = {*earlier}

    def new_items(self, key: str, now: Counters, subject: object, ended: object) -> dict[str, int]:
        return {name: 1 for name in now.items.get(key, {}) if name not in self._earlier}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: sum(made), sleep=made.append))
    return made


def waited(readings: Iterator[set[str]], stayed: Stayed | None = None) -> Stayed:
    watched: Any = SimpleNamespace(
        counters=SimpleNamespace(read=lambda: Counters({"threads": dict.fromkeys(next(readings), 1)}, {}, {})),
        ownership=Books(() if stayed is None else stayed.values()),
        policy=Policy(settle=0.5),
        makers=SimpleNamespace(place_of=lambda key, name: name.partition(" ")[0]),
    )
    stayed = {} if stayed is None else stayed
    wait_for_return(watched, (), slack=lambda key: 0, let_go=lambda: None, stayed=stayed)
    return stayed


def test_what_appears_all_the_time_is_waited_for_no_longer_than_what_stays(pauses: list[float]) -> None:
    waited({"left", f"new {number}"} for number in itertools.count())
    assert 0.5 <= sum(pauses) < 0.7


def test_each_that_ends_is_a_reason_to_wait_for_the_next(pauses: list[float]) -> None:
    five = [f"thread {number}" for number in range(5)]
    waited(iter([set(five[turn // 5 :]) for turn in range(25)] + [set()]))
    assert sum(pauses) > 1.5


def test_what_a_line_makes_is_waited_for_no_more_while_the_last_that_it_made_is_there(pauses: list[float]) -> None:
    stayed = waited(itertools.repeat({"poll.py:3 1"}))
    pauses.clear()
    assert waited(itertools.repeat({"poll.py:3 1", "poll.py:3 2"}), stayed) == {("threads", "poll.py:3"): "poll.py:3 2"}
    assert sum(pauses) < 0.2


@pytest.mark.parametrize(
    "left",
    [{"poll.py:3 2"}, {"poll.py:3 1", "poll.py:9 2"}],
    ids=["the last one has ended since", "another line's is there, too"],
)
def test_else_it_is_waited_for_as_ever(left: set[str], pauses: list[float]) -> None:
    stayed = waited(itertools.repeat({"poll.py:3 1"}))
    pauses.clear()
    waited(itertools.repeat(left), stayed)
    assert sum(pauses) >= 0.5


@pytest.mark.nightly
def test_a_block_in_which_nothing_is_born_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    survivors = Births.survivors

    def counted(births: Births, *args: Any, **kwargs: Any) -> list[Newborn]:
        found = survivors(births, *args, **kwargs)
        looks.append(len(found))
        return found

    monkeypatch.setattr(Births, "survivors", counted)
    kept: list[torch.Tensor] = []
    with LeakCheck() as check:
        pass
    assert (check.report.subjects[0].findings, looks) == ((), [0])
    with LeakCheck() as check:
        kept.append(torch.ones(3))
    assert [finding.resource for finding in check.report.subjects[0].findings] == ["tensors"]
    # And again, since what was found may have been garbage.
    assert len(looks) > 2


@pytest.mark.parametrize(
    ("setting", "set_it", "put_back"),
    [
        pytest.param(
            "resource.getrlimit(resource.RLIMIT_NOFILE)",
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[0] - 1, FILES[1])),
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, FILES),
            id="a limit",
        ),
        pytest.param(
            "name of logging level 33",
            lambda: logging.addLevelName(33, "LOUD"),
            lambda: logging._levelToName.pop(33, None),  # type: ignore[attr-defined]
            id="the name of a level",
        ),
        pytest.param(
            "gc.get_threshold()", lambda: gc.set_threshold(900), lambda: gc.set_threshold(*GC), id="a runner's"
        ),
    ],
)
def test_a_setting_is_found_in_the_test_that_leaves_it_and_in_no_other(
    setting: str, set_it: Callable[[], None], put_back: Callable[[], None]
) -> None:
    watch = Watch()
    watch.open()
    try:
        found = []
        for turn in range(4):
            watch.begin(follows=turn > 0, subject=f"test {turn}")
            if turn == 2:
                set_it()
            found.append([finding.message.partition(" (")[0] for finding in watch.end().findings])
    finally:
        watch.close()
        put_back()
    assert [len(each) for each in found] == [0, 0, 1, 0]
    assert setting in found[2][0]


POOLS: list[ThreadPoolExecutor] = []


@pytest.mark.parametrize("is_older", [True, False])
def test_a_pool_that_was_there_may_start_its_workers_and_a_new_one_may_not_stay(is_older: bool) -> None:
    if is_older:
        POOLS.append(ThreadPoolExecutor(2))
    with LeakCheck(settle=0.05) as check:
        if not is_older:
            POOLS.append(ThreadPoolExecutor(2))
        POOLS[0].submit(int).result()
    POOLS.pop().shutdown()
    (subject,) = check.report.subjects
    assert {finding.resource for finding in subject.findings} == (set() if is_older else {"threads"})
