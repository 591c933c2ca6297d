"""Host memory of C code: the allocator that stands in glibc's place, and the objects of libraries that have some."""

from __future__ import annotations

import ctypes.util
import os
from unittest import mock

import pytest

from lowtide.reports.schema import Finding
from tests.pytest_plugin.conftest import InnerRun, RunInner

PIECES = """
import ctypes

KEPT = []


def pieces(mib, size=1000):
    # By `malloc` itself, as C code takes memory.
    return [ctypes.create_string_buffer(size) for _ in range(mib * (1 << 20) // size)]


def test_freed():
    pieces(200)


def test_freed_in_other_sizes():
    pieces(250, 3000)


def test_kept():
    KEPT.extend(pieces(150))
"""

FRAMES = """
import zmq

KEPT = []
SIZE = 80 << 20


class Message:
    def __init__(self):
        self.frame = zmq.Frame(b"x" * SIZE, copy=True)


def test_dropped():
    Message()


def test_kept():
    KEPT.append(Message())


def test_many_kept():
    global first, second, third, fourth
    first, second, third, fourth = Message(), Message(), Message(), Message()
"""


TABLES = """
import pyarrow

KEPT = {}


def table():
    return pyarrow.table({"numbers": pyarrow.array(list(range(1000)) * 20_000)})


def test_dropped():
    table()


def test_kept():
    KEPT["table"] = table()
"""


def finding_of(run: InnerRun, name: str) -> Finding | None:
    (subject,) = [each for each in run.report.subjects if each.id == f"test_inner.py::{name}"]
    return next(iter(subject.findings), None)


@pytest.mark.parametrize(
    "allocator",
    ["", "tcmalloc_minimal", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("jemalloc", "mimalloc"))],
)
def test_what_an_allocator_keeps_of_what_was_freed_is_no_leak_and_hides_none(
    run_inner: RunInner, allocator: str
) -> None:
    library = ctypes.util.find_library(allocator) if allocator else ""
    if library is None:
        pytest.skip(f"there is no {allocator} on this machine")
    with mock.patch.dict(os.environ, LD_PRELOAD=library):
        run = run_inner({"test_inner.py": PIECES})
    assert finding_of(run, "test_freed") is finding_of(run, "test_freed_in_other_sizes") is None
    kept = finding_of(run, "test_kept")
    assert kept is not None
    assert kept.resource == "host-memory"
    assert kept.bytes >= 140 << 20


@pytest.fixture(scope="module")
def frames(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": FRAMES})


def test_an_object_of_a_library_that_came_with_the_memory_is_named(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_kept")
    assert finding is not None
    assert (finding.resource, finding.holder) == ("host-memory", "test_inner.KEPT[0].frame")
    assert "it may be what C code of a library has for zmq.sugar.frame.Frame" in finding.message
    assert finding.advice == "del test_inner.KEPT[0]"


def test_where_many_came_with_it_none_is(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_many_kept")
    assert finding is not None
    assert (finding.resource, finding.holder) == ("host-memory", None)


def test_one_that_is_dropped_is_clean(frames: InnerRun) -> None:
    assert finding_of(frames, "test_dropped") is None


@pytest.mark.nightly
def test_pyarrow_s_own_allocator_is_emptied_and_its_tables_say_how_large_they_are(run_inner: RunInner) -> None:
    run = run_inner({"test_inner.py": TABLES})
    assert finding_of(run, "test_dropped") is None
    finding = finding_of(run, "test_kept")
    assert finding is not None
    assert finding.holder == "test_inner.KEPT['table']"
    assert "152.6 MiB in a pyarrow.lib.Table" in finding.message
