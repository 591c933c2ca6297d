"""A test that replaces functions of Python's is judged all the same, and what it put in their place is not called."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

REPLACED = """
import contextlib
import importlib
import os
import sys
import threading
import types
import unittest.mock

import pytest
import torch

NAMES = '''
    os.open os.read os.close os.listdir os.scandir os.stat os.lstat os.readlink os.path.exists os.waitid os.getpid
    builtins.open io.open pathlib.Path.read_bytes pathlib.Path.exists pathlib.Path.iterdir pathlib.Path.stat
    time.time time.perf_counter time.monotonic time.sleep time.clock_gettime
    threading.enumerate threading.current_thread gc.collect gc.get_objects gc.get_freeze_count gc.isenabled
    sys.getsizeof sys.getrefcount sys._getframe resource.getrusage logging.getLoggerClass tempfile.gettempdir
    psutil.Process psutil.virtual_memory subprocess.Popen multiprocessing.active_children weakref.ref
    dataclasses.replace torch.cuda.is_initialized torch.cuda.is_available torch.cuda.device_count torch.is_grad_enabled
    numpy.arange numpy.array numpy.concatenate numpy.empty numpy.flatnonzero numpy.frombuffer numpy.fromiter numpy.zeros
'''.split()
KEPT = []
STAY = threading.Event()
OF_THE_CHECKER = ("lowtide.probes", "lowtide.leakcheck", "lowtide.pytest_plugin")
frame_of = sys._getframe


def called_by_the_checker():
    frame = frame_of(2)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        # Where it lets pytest and other plugins do the rest.
        if name in ("run_test", "_run", "pytest_runtest_protocol"):
            return ""
        if module.startswith(OF_THE_CHECKER):
            return f"{module}.{name}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def in_place_of(names, answer):
    callers = set()

    def called(*args, **kwargs):
        callers.add(called_by_the_checker())
        return answer()

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(unittest.mock.patch(name, side_effect=called))
        yield
    assert callers <= {""}


def fails():
    raise FileNotFoundError(2, "nothing is there")


@pytest.fixture(scope="class", params=NAMES)
def failing(request):
    with in_place_of([request.param], fails):
        yield


@pytest.fixture(scope="class", params=[name for name in NAMES if name != "os.stat"])
def mocked(request):
    with in_place_of([request.param], lambda: unittest.mock.DEFAULT):
        yield


class TestFailing:
    def test_first(self, failing): ...
    def test_second(self, failing): ...


class TestMocked:
    def test_first(self, mocked): ...
    def test_second(self, mocked): ...


@pytest.fixture(scope="class")
def many():
    with in_place_of(["os.stat", "os.listdir", "os.open", "builtins.open", "gc.collect", "time.sleep"], fails):
        yield


class TestMany:
    def test_clean(self, many): ...
    def test_leak(self, many): KEPT.append(torch.ones(1 << 18))
    def test_descriptor(self, many): KEPT.append(os.pipe())


@pytest.fixture(scope="class")
def frozen():
    with in_place_of(["time.time", "time.perf_counter", "time.monotonic"], lambda: 1.0):
        yield


class TestFrozen:
    def test_thread_that_ends_soon(self, frozen): threading.Timer(0.1, int).start()
    def test_thread_that_stays(self, frozen): threading.Thread(target=STAY.wait, daemon=True).start()


@pytest.fixture(scope="class")
def everywhere():
    # As pyfakefs and freezegun do: in the globals of every loaded module.
    false = {id(os): types.ModuleType("os"), id(open): fails, id(os.listdir): fails}
    places = [
        (module, name, value)
        for module in list(sys.modules.values())
        if type(module) is types.ModuleType and not module.__name__.startswith(("_pytest", "pytest", "pluggy", "os"))
        for name, value in list(vars(module).items())
        if id(value) in false and module.__name__.partition(".")[0] in (__name__, "lowtide", "psutil", "torch")
    ]
    for module, name, value in places:
        setattr(module, name, false[id(value)])
    yield
    for module, name, value in places:
        setattr(module, name, value)


class TestEverywhere:
    def test_clean(self, everywhere): ...
    def test_leak(self, everywhere): KEPT.append(torch.ones(1 << 18))


READ = "lowtide.probes.host.counters.read_status"


@pytest.fixture(scope="class")
def unreadable():
    with in_place_of(["os.stat"], fails), unittest.mock.patch(READ, side_effect=OSError("gone")):
        yield


@pytest.fixture(scope="class")
def broken():
    with unittest.mock.patch(READ, side_effect=OSError("gone")):
        yield


class TestUnreadable:
    def test_first(self, unreadable): ...
    def test_second(self, unreadable): ...


class TestBroken:
    def test_first(self, broken): ...
    def test_second(self, broken): ...


ENTRIES = ["torch", "numpy", "decimal", "socket", "locale", "tracemalloc", "psutil", "multiprocessing.process"]


@pytest.fixture(scope="class", params=ENTRIES)
def entry(request):
    with unittest.mock.patch.dict(sys.modules, {request.param: types.ModuleType(request.param)}):
        yield


@pytest.fixture(scope="class", params=ENTRIES)
def no_entry(request):
    with unittest.mock.patch.dict(sys.modules, {request.param: None}):
        yield


class TestEntry:
    def test_first(self, entry): ...
    def test_second(self, entry): ...


class TestNoEntry:
    def test_first(self, no_entry): ...
    def test_second(self, no_entry): ...
"""

LEAKING = {
    "test_inner.py::TestMany::test_leak",
    "test_inner.py::TestMany::test_descriptor",
    "test_inner.py::TestEverywhere::test_leak",
    "test_inner.py::TestFrozen::test_thread_that_stays",
}

UNREADABLE = {
    f"test_inner.py::Test{kind}::test_{turn}" for kind in ("Unreadable", "Broken") for turn in ("first", "second")
}


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": REPLACED})


def test_what_is_replaced_neither_fails_a_test_nor_is_called(run: InnerRun) -> None:
    assert set(run.blamed) == LEAKING
    judged = {test for test in run.phases if test not in UNREADABLE}
    assert {test for test in judged if run.counted(test) != "passed" or not run.is_clean(test)} == LEAKING
    assert len(run.phases) > 150


def test_a_leak_is_found_and_explained_meanwhile(run: InnerRun) -> None:
    assert {name: run.counted(name) for name in LEAKING} == dict.fromkeys(LEAKING, "failed")
    for name in (test for test in LEAKING if test.endswith("test_leak")):
        (finding,) = run.subject(name).findings
        assert (finding.resource, (finding.holder or "").startswith("test_inner.KEPT[")) == ("tensors", True)


def test_what_cannot_be_read_fails_no_test_that_has_replaced_something_and_is_said_once(run: InnerRun) -> None:
    outcomes = {run.subject(test).outcome for test in UNREADABLE if "Unreadable" in test}
    assert (outcomes, {run.counted(test) for test in UNREADABLE if "Unreadable" in test}) == (
        {"unsupported"},
        {"passed"},
    )
    reported = [line for line in run.out.splitlines() if line.startswith("not judged in ")]
    assert [line.partition(" (")[0] for line in reported] == [
        "not judged in 2 tests: what a test leaves with os.stat replaced"
    ]


def test_what_cannot_be_read_though_nothing_is_replaced_is_an_error(run: InnerRun) -> None:
    assert {run.subject(test).outcome for test in UNREADABLE if "Broken" in test} == {"error"}
