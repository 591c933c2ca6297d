"""Host memory of C code: the allocator that stands in glibc's place, and the objects of libraries that have some."""

from __future__ import annotations

import ctypes.util
import inspect
import os
from unittest import mock

import pytest

from lowtide.reports.schema import Finding
from tests.probes import thread_arenas
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

IN_THREADS = """
import ctypes

from thread_arenas import free, take

KEPT = []


def test_freed():
    free(take(4, 300))


def test_freed_again():
    free(take(8, 300))


def test_kept():
    KEPT.extend(take(4, 250))


def test_freed_and_kept_elsewhere():
    free(take(8, 300))
    KEPT.append(ctypes.create_string_buffer(b"x" * 100_000_000))
"""

FRAMES = """
import ctypes

import zmq

KEPT, LISTED = [], []
SIZE = 80 << 20


class Message:
    def __init__(self):
        self.frame = zmq.Frame(b"x" * SIZE, copy=True)


def test_dropped():
    Message()


def test_kept():
    KEPT.append(Message())


def test_kept_by_c():
    global small
    small = zmq.Frame(b"x" * 100, copy=True)
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.memset(ctypes.c_void_p(library.malloc(ctypes.c_size_t(SIZE))), 1, ctypes.c_size_t(SIZE))


def test_many_kept_in_one_list():
    LISTED.extend(Message() for _ in range(6))


def test_many_kept():
    global first, second, third, fourth
    first, second, third, fourth = Message(), Message(), Message(), Message()
"""

REQUESTS = """
import functools

LOG, BY_NUMBER = [], {}


def texts(count):
    return [f"{number:8}" * 20 for number in range(count)]


@functools.lru_cache(maxsize=None)
def rendered(number):
    return f"{number:8}" * 20


def test_dropped():
    texts(400_000)


def test_logged():
    LOG.extend(texts(400_000))


def test_logged_again():
    LOG.extend(texts(400_000))


def test_by_number():
    BY_NUMBER.update(enumerate(texts(400_000)))


def test_rendered():
    for number in range(400_000):
        rendered(number)


def test_a_part():
    LOG.extend(texts(200_000))


def test_another_part():
    BY_NUMBER.update((400_000 + number, text) for number, text in enumerate(texts(200_000)))


def test_a_third_part():
    LOG.extend(texts(200_000))
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


@pytest.mark.nightly
@pytest.mark.parametrize("allocator", ["", "tcmalloc_minimal", "jemalloc", "mimalloc"])
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


def test_what_threads_have_freed_is_no_leak_and_hides_none(run_inner: RunInner) -> None:
    run = run_inner({"test_inner.py": IN_THREADS, "thread_arenas.py": inspect.getsource(thread_arenas)})
    names = ["test_freed", "test_freed_again", "test_kept", "test_freed_and_kept_elsewhere"]
    found = [finding_of(run, name) for name in names]
    assert [None if each is None else (each.resource, round(each.bytes / 1e8)) for each in found] == [
        None,
        None,
        ("host-memory", 1),
        ("host-memory", 1),
    ]


@pytest.fixture(scope="module")
def frames(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": FRAMES})


def test_an_object_of_a_library_that_came_with_the_memory_is_named(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_kept")
    assert finding is not None
    assert (finding.resource, finding.holder) == ("host-memory", "test_inner.KEPT[0].frame")
    assert "it may be what C code of a library has for zmq.sugar.frame.Frame" in finding.message
    assert finding.advice == "del test_inner.KEPT[0]"
    assert finding.remedy is not None
    assert finding.remedy.action == "del test_inner.KEPT[0]"
    assert finding.remedy.returns_bytes >= 80 << 20


def test_one_that_gives_nothing_back_is_not(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_kept_by_c")
    assert finding is not None
    assert (finding.resource, finding.holder, finding.remedy) == ("host-memory", None, None)
    assert [remedy.action for remedy in finding.tried] == ["test_inner.small = None"]
    assert "zmq" not in finding.message


def test_where_many_came_with_it_none_is(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_many_kept")
    assert finding is not None
    assert (finding.resource, finding.holder) == ("host-memory", None)


def test_many_in_one_container_are(frames: InnerRun) -> None:
    finding = finding_of(frames, "test_many_kept_in_one_list")
    assert finding is not None
    assert finding.holder in {f"test_inner.LISTED[{index}].frame" for index in range(6)}
    assert "for zmq.sugar.frame.Frame held by test_inner.LISTED[" in finding.message
    assert "and 3 more" in finding.message
    assert finding.remedy is not None


def test_one_that_is_dropped_is_clean(frames: InnerRun) -> None:
    assert finding_of(frames, "test_dropped") is None


@pytest.fixture(scope="module")
def requests(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": REQUESTS})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "holder", "change"),
    [
        ("test_logged", "LOG", "del test_inner.LOG[0:400000]"),
        ("test_logged_again", "LOG", "del test_inner.LOG[400000:800000]"),
        (
            "test_by_number",
            "BY_NUMBER",
            "for key in list(test_inner.BY_NUMBER)[0:400000]: del test_inner.BY_NUMBER[key]",
        ),
        ("test_rendered", "rendered", "test_inner.rendered.cache_clear()"),
    ],
)
def test_many_small_things_of_one_test_are_named_by_their_container(
    requests: InnerRun, name: str, holder: str, change: str
) -> None:
    finding = finding_of(requests, name)
    assert finding is not None
    assert (finding.resource, finding.holder) == ("host-memory", f"test_inner.{holder}")
    assert "in 400,000 entries of a " in finding.message
    assert finding.remedy is not None
    assert finding.remedy.action == change
    assert finding.remedy.returns_bytes * 2 >= finding.bytes


@pytest.mark.nightly
def test_of_what_many_tests_keep_the_containers_are_named(requests: InnerRun) -> None:
    assert finding_of(requests, "test_dropped") is finding_of(requests, "test_another_part") is None
    finding = finding_of(requests, "test_a_third_part")
    assert finding is not None
    assert "kept over the session" in finding.message
    assert "test_inner.LOG" in finding.message


@pytest.mark.nightly
def test_pyarrow_s_own_allocator_is_emptied_and_its_tables_say_how_large_they_are(run_inner: RunInner) -> None:
    run = run_inner({"test_inner.py": TABLES})
    assert finding_of(run, "test_dropped") is None
    finding = finding_of(run, "test_kept")
    assert finding is not None
    assert finding.holder == "test_inner.KEPT['table']"
    assert "152.6 MiB in a pyarrow.lib.Table" in finding.message
