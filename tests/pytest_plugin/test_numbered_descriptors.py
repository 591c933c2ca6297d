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


def opened():
    number = os.open(__file__, os.O_RDONLY)
    return lambda: os.close(number)


def test_function():
    KEPT.append(opened())


def test_function_that_was_called():
    KEPT.append(opened())
    KEPT[-1]()
    KEPT.append(open(__file__))


def test_closed():
    pair = Pair()
    pair.close()
    KEPT.append(pair)


def test_import():
    # Only now: what is judged before goes through a heap without torch.
    import torch.multiprocessing


def sent():
    import torch.multiprocessing
    made = torch.multiprocessing.get_context("spawn").Queue()
    made.put(torch.ones(1000))
    assert made._reader.poll(60)
    return made


def in_a_file():
    import torch.multiprocessing
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return sent()
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


def test_queue():
    KEPT.append(sent())


def test_queue_of_files():
    KEPT.append(in_a_file())


def test_queue_that_was_closed():
    made = sent()
    made.close()
    made.join_thread()


def test_queue_of_files_that_was_closed():
    made = in_a_file()
    made.close()
    made.join_thread()


def test_taken():
    for made in (sent(), in_a_file()):
        made.get()
        made.close()
        made.join_thread()
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


@pytest.mark.parametrize("name", ["test_closed", "test_taken"])
def test_a_number_that_is_closed_is_nothing(run: InnerRun, name: str) -> None:
    assert subject_of(run, name).findings == ()


@pytest.mark.parametrize(
    ("name", "kind"), [("test_function", "function"), ("test_function_that_was_called", "_io.TextIOWrapper")]
)
def test_a_function_that_closes_a_number_has_it_until_a_file_does(run: InnerRun, name: str, kind: str) -> None:
    (finding,) = subject_of(run, name).findings
    assert (finding.resource, finding.path[-1].type) == ("file-descriptors", kind)


@pytest.mark.parametrize(
    ("name", "part"), [("test_queue", "file-descriptors"), ("test_queue_of_files", "shared-memory")]
)
def test_what_nobody_has_taken_from_a_queue_is_a_part_of_that(run: InnerRun, name: str, part: str) -> None:
    (finding,) = subject_of(run, name).findings
    assert finding.resource == "threads"
    assert "torch_" in next(each.message for each in finding.parts if each.resource == part)
    assert "get() for each that nobody has taken, then " in (finding.advice or "")


@pytest.mark.parametrize("name", ["test_queue_that_was_closed", "test_queue_of_files_that_was_closed"])
def test_of_a_queue_that_is_gone_it_is_to_be_taken(run: InnerRun, name: str) -> None:
    (finding,) = subject_of(run, name).findings
    assert "get() " in (finding.advice or "")
