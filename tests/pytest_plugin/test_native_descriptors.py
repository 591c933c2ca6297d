"""What C code of a library has opened is told by the object of its that the program has; else it is once so far."""

from __future__ import annotations

import pytest

from lowtide.reports.schema import Finding, Subject
from tests.pytest_plugin.conftest import InnerRun, RunInner

NATIVE = """
import ctypes
import gc

import lmdb
import pytest
import zmq

KEPT = []


class Store:
    environment = None


def test_of_the_library_alone():
    zmq.Context.instance().socket(zmq.PUSH).close()


def test_of_another_library():
    # Of another kind, and nothing in Python knows the numbers.
    assert ctypes.CDLL(None).pipe((ctypes.c_int * 2)()) == 0


def test_more_of_another_library():
    assert ctypes.CDLL(None).pipe((ctypes.c_int * 2)()) == 0


def test_context():
    context = zmq.Context()
    context.socket(zmq.PUSH).close()
    KEPT.append(context)


def test_socket_and_its_context():
    context = zmq.Context()
    # Then the socket comes first in the collector's lists.
    gc.collect()
    pushing = context.socket(zmq.PUSH)
    pushing.bind("tcp://127.0.0.1:*")
    KEPT.append((pushing, context))


def test_what_is_not_tracked(tmp_path):
    Store.environment = lmdb.open(str(tmp_path))


class Folder:
    def __init__(self, path):
        self.stream = ctypes.c_void_p(LIBC.opendir(str(path).encode()))

    def close(self):
        LIBC.closedir(self.stream)


LIBC = ctypes.CDLL(None)
LIBC.opendir.restype = ctypes.c_void_p


def test_pointer_beside_an_object_that_was_there(tmp_path):
    # Of lmdb's environment, which is not tracked, nobody knows the age.
    Store.folder = Folder(tmp_path)


def test_pointer_that_is_closed(tmp_path):
    Folder(tmp_path).close()


def test_ended(tmp_path):
    context = zmq.Context()
    pair = [context.socket(zmq.PAIR) for _ in range(2)]
    pair[0].bind("inproc://pair")
    pair[1].connect("inproc://pair")
    pair[0].send(b"x")
    assert pair[1].recv() == b"x"
    context.destroy(0)
    lmdb.open(str(tmp_path)).close()


@pytest.fixture(scope="module", autouse=True)
def at_the_end():
    yield
    for kept in KEPT:
        for each in kept if type(kept) is tuple else (kept,):
            each.destroy(0) if type(each) is zmq.Context else each.close(0)
    Store.environment.close()
    Store.folder.close()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": NATIVE})


def subject_of(run: InnerRun, name: str) -> Subject:
    (subject,) = [each for each in run.report.subjects if each.id.endswith(f"::{name}")]
    return subject


def finding_of(run: InnerRun, name: str) -> Finding:
    (finding,) = subject_of(run, name).findings
    return finding


@pytest.mark.parametrize(
    ("name", "holder", "ending"),
    [
        ("test_context", "test_inner.KEPT[0]", "KEPT[0].destroy()"),
        ("test_socket_and_its_context", "test_inner.KEPT[1]", "KEPT[1][1].destroy()"),
        ("test_what_is_not_tracked", "test_inner.Store.environment", "Store.environment.close()"),
        ("test_pointer_beside_an_object_that_was_there", "test_inner.Store.folder", "Store.folder.close()"),
    ],
)
def test_it_is_told_by_the_object_that_came_with_it(run: InnerRun, name: str, holder: str, ending: str) -> None:
    finding = finding_of(run, name)
    assert (finding.resource, finding.holder) == ("file-descriptors", holder)
    assert ending in (finding.advice or "")
    # What was there before is the library's own.
    assert "the first came with" not in finding.message


@pytest.mark.parametrize(
    "name", ["test_ended", "test_pointer_that_is_closed", "test_of_the_library_alone", "test_of_another_library"]
)
def test_what_is_ended_and_what_only_a_library_has_is_no_leak(run: InnerRun, name: str) -> None:
    assert subject_of(run, name).findings == ()


def test_of_what_a_library_has_more_of_it_is_said_that_no_python_code_has_opened_it(run: InnerRun) -> None:
    finding = finding_of(run, "test_more_of_another_library")
    assert "the first came with test_inner.py::test_of_another_library" in finding.message
    assert "no Python code was seen to open it" in (finding.advice or "")


@pytest.mark.parametrize(
    ("name", "kind"), [("test_of_the_library_alone", "eventfd"), ("test_of_another_library", "pipe")]
)
def test_what_only_a_library_has_is_listed_by_its_kind(run: InnerRun, name: str, kind: str) -> None:
    listed = [each.what for each in subject_of(run, name).not_measured]
    assert any(f"of native code ({kind})" in what for what in listed)
