"""A descriptor that the program has as a mere number is told by the object that has it, whose method has opened it."""

from __future__ import annotations

import pytest

from lowtide.reports.schema import Subject
from tests.pytest_plugin.conftest import InnerRun, RunInner

NUMBERS = """
import os
import socket

KEPT = []


class Waker:
    def __init__(self):
        self.reads, self.writes = os.pipe()


class Pair:
    def __init__(self):
        self.both = os.pipe()

    def close(self):
        for number in self.both:
            os.close(number)


class Slots:
    __slots__ = ("number",)

    @classmethod
    def opened(cls):
        made = cls()
        made.number = os.open(__file__, os.O_RDONLY)
        return made


class Several:
    def __init__(self):
        self.numbers = {}
        for turn in range(3):
            self.numbers[turn] = os.memfd_create(str(turn))


class Detached:
    def __init__(self):
        self.number = socket.socket().detach()


class Bystander:
    # It has the same number, and has opened nothing.
    def __init__(self, number):
        self.number = number


def test_waker():
    KEPT.append(Waker())


def test_pair():
    KEPT.append(Pair())


def test_slots():
    KEPT.append(Slots.opened())


def test_several():
    KEPT.append(Several())


def test_detached():
    KEPT.append(Detached())


def test_lost():
    Waker()


def test_bystander():
    number = os.open(__file__, os.O_RDONLY)
    KEPT.append(Bystander(number))


def test_closed():
    pair = Pair()
    pair.close()
    KEPT.append(pair)
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": NUMBERS})


def subject_of(run: InnerRun, name: str) -> Subject:
    (subject,) = [each for each in run.report.subjects if each.id == f"test_inner.py::{name}"]
    return subject


@pytest.mark.parametrize(
    ("name", "count", "place", "advice"),
    [
        ("test_waker", 2, 0, "end test_inner.KEPT[0]"),
        ("test_pair", 2, 1, "call test_inner.KEPT[1].close()"),
        ("test_slots", 1, 2, "end test_inner.KEPT[2]"),
        ("test_several", 3, 3, "end test_inner.KEPT[3]"),
        ("test_detached", 1, 4, "end test_inner.KEPT[4]"),
    ],
)
def test_the_object_with_the_number_is_named(run: InnerRun, name: str, count: int, place: int, advice: str) -> None:
    (finding,) = subject_of(run, name).findings
    assert (finding.resource, finding.count) == ("file-descriptors", count)
    assert finding.holder == f"test_inner.KEPT[{place}]"
    assert (finding.advice or "").startswith(advice)


@pytest.mark.parametrize("name", ["test_lost", "test_bystander"])
def test_where_no_object_has_opened_it_none_is(run: InnerRun, name: str) -> None:
    (finding,) = subject_of(run, name).findings
    assert (finding.resource, finding.path) == ("file-descriptors", ())


def test_a_number_that_is_closed_is_nothing(run: InnerRun) -> None:
    assert subject_of(run, "test_closed").findings == ()
