"""What lies inside a library is not cut: the remedy is what the library offers, or advice, and the library works on."""

from __future__ import annotations

import json
import re

import pytest

from lowtide.reports.schema import Finding
from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

KEPT = """
import concurrent.futures
import contextlib
import threading
import torch

LINEAR = torch.nn.Linear(2, 2)
POOL = concurrent.futures.ThreadPoolExecutor(1)
STACK = contextlib.ExitStack()
STOP = threading.Event()
PATCHED = None


class Own:
    def __init__(self, size):
        self.weight = torch.ones(size)

    def method(self, *args, **kwargs):
        return None


class Pickled: ...
"""

TESTS = """
import copyreg
import functools
import json
import multiprocessing.util
import sys
import torch
import unittest.mock
import weakref

import torch._dynamo.convert_frame

import engine_of_others
import kept
from kept import Own


def dispatch_table():
    copyreg.pickle(kept.Pickled, Own(100).method)


def finalizer():
    multiprocessing.util.Finalize(None, Own(101).method, exitpriority=5)


def patch():
    unittest.mock.patch("kept.PATCHED", Own(102)).start()


def bytecode_hook():
    torch._dynamo.convert_frame.register_bytecode_hook(Own(103).method)


def forward_hook():
    kept.LINEAR.register_forward_hook(Own(104).method)


def global_hook():
    torch.nn.modules.module.register_module_forward_hook(Own(105).method)


def exit_stack():
    kept.STACK.callback(Own(106).method)


def backlog():
    kept.POOL.submit(kept.STOP.wait, 60)
    kept.POOL.submit(Own(107).method)


def package():
    torch.serialization.register_package(99, lambda item, own=Own(108): None, lambda item, location: None)


def private_name():
    functools._kept = Own(109)


def public_name():
    json.kept = Own(110)


def private_attribute():
    kept.LINEAR._extra = torch.ones(111)


def public_attribute():
    kept.LINEAR.extra = torch.ones(112)


def finder_before_the_others():
    class Finder:
        def find_spec(self, *args):
            return None

    finder = Finder()
    finder.own = Own(113)
    sys.meta_path.insert(0, finder)


def custom_operator():
    own = Own(114)

    @torch.library.custom_op("kept::operator", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x + own.weight.sum()


def entry_of_an_installed_engine():
    engine_of_others._BUFFERS["workspace"] = torch.ones(115)


def singleton_of_an_installed_engine():
    engine_of_others.Allocator.instance = Own(116)


def finalizer_of_an_object():
    weakref.finalize(kept.LINEAR, Own(117).method)


def replaced_method_of_an_installed_engine():
    before, own = engine_of_others.Allocator.run, Own(118)
    engine_of_others.Allocator.run = lambda self: (before(self), own)


def replaced_method_of_an_engine_that_is_new():
    import late_engine

    before, own = late_engine.Late.run, Own(119)
    late_engine.Late.run = lambda self: (before(self), own)


def engine_that_is_new_and_keeps_it():
    import late_engine

    late_engine.add(Own(120))


def test_leaks():
    for leak in (
        dispatch_table,
        finalizer,
        patch,
        bytecode_hook,
        forward_hook,
        global_hook,
        exit_stack,
        backlog,
        package,
        private_name,
        public_name,
        private_attribute,
        public_attribute,
        finder_before_the_others,
        custom_operator,
        entry_of_an_installed_engine,
        singleton_of_an_installed_engine,
        finalizer_of_an_object,
        replaced_method_of_an_installed_engine,
        replaced_method_of_an_engine_that_is_new,
        engine_that_is_new_and_keeps_it,
    ):
        leak()
"""


SIZES = {
    "dispatch_table": 400,
    "finalizer": 404,
    "patch": 408,
    "bytecode_hook": 412,
    "forward_hook": 416,
    "global_hook": 420,
    "exit_stack": 424,
    "backlog": 428,
    "package": 432,
    "private_name": 436,
    "public_name": 440,
    "private_attribute": 444,
    "public_attribute": 448,
    "finder_before_the_others": 452,
    "custom_operator": 456,
    "entry_of_an_installed_engine": 460,
    "singleton_of_an_installed_engine": 464,
    "finalizer_of_an_object": 468,
    "replaced_method_of_an_installed_engine": 472,
    "replaced_method_of_an_engine_that_is_new": 476,
    "engine_that_is_new_and_keeps_it": 480,
}
"""How many bytes each of them leaks."""

CONFTEST = '''
import json
import multiprocessing
import pathlib
import sys

import pytest

SITE = pathlib.Path(__file__).with_name("site")
(SITE / "engine_of_others-1.0.dist-info").mkdir(parents=True)
OF_OTHERS = """
_BUFFERS = {}

class Allocator:
    instance = None

    def run(self): ...
"""
LATE = """
def _adding(kept):
    def add(item):
        kept.append(item)

    return add

add = _adding([])

class Late:
    def run(self): ...
"""
(SITE / "engine_of_others.py").write_text(OF_OTHERS)
(SITE / "late_engine-1.0.dist-info").mkdir()
(SITE / "late_engine.py").write_text(LATE)
sys.path.insert(0, str(SITE))


def compiles():
    import torch

    assert torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist() == [3, 3]


def imports():
    import wave
    import xml.sax.expatreader


def starts_a_process():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    import kept

    kept.STOP.set()
    said = {}
    for step in (compiles, imports, starts_a_process):
        try:
            step()
        except BaseException as error:
            said[step.__name__] = repr(error)
    pathlib.Path(__file__).with_name("after.json").write_text(json.dumps(said))
'''


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"kept.py": KEPT, "test_insides.py": TESTS, "conftest.py": CONFTEST})


def tensors_of(run: InnerRun, leak: str) -> Finding:
    findings = run.subject("test_insides.py::test_leaks").findings
    (found,) = (item for item in findings if (item.resource, item.bytes) == ("tensors", SIZES[leak]))
    return found


@pytest.mark.parametrize(
    ("leak", "action"),
    [
        ("dispatch_table", "del copyreg.dispatch_table[kept.Pickled]"),
        ("patch", "unittest.mock.patch.stopall()"),
        ("exit_stack", "kept.STACK.close()"),
        ("backlog", "kept.POOL.shutdown(wait=False, cancel_futures=True)"),
        ("public_name", "del json.kept"),
        ("public_attribute", "kept.LINEAR.extra = None"),
        ("entry_of_an_installed_engine", "del engine_of_others._BUFFERS['workspace']"),
        ("singleton_of_an_installed_engine", "engine_of_others.Allocator.instance = None"),
    ],
)
def test_the_remedy_is_what_the_owner_offers(run: InnerRun, leak: str, action: str) -> None:
    remedy = tensors_of(run, leak).remedy
    assert remedy is not None
    assert action in remedy.action.split("; ")


@pytest.mark.parametrize(
    ("leak", "advice"),
    [
        ("finalizer", "call cancel() of the multiprocessing.util.Finalize"),
        ("bytecode_hook", "keep the handle that registering it returned, and call its remove()"),
        ("forward_hook", "keep the handle that registering it returned, and call its remove()"),
        ("global_hook", "keep the handle that registering it returned, and call its remove()"),
        ("package", "undo what put it there, by what torch offers for that"),
        ("private_name", "undo what put it there, by what functools offers for that"),
        ("private_attribute", "undo what put it there, by what torch offers for that"),
        ("finder_before_the_others", "sys's: put back what was there, or take out what was added"),
        ("custom_operator", "let the registered function hold no tensors"),
        ("finalizer_of_an_object", "call detach() of weakref.finalize("),
    ],
)
def test_where_it_offers_nothing_there_is_advice(run: InnerRun, leak: str, advice: str) -> None:
    found = tensors_of(run, leak)
    assert found.remedy is None
    assert advice in (found.advice or "")


@pytest.mark.parametrize(
    ("leak", "advice"),
    [
        ("replaced_method_of_an_installed_engine", "put back what engine_of_others.Allocator.run was"),
        ("replaced_method_of_an_engine_that_is_new", "put back what late_engine.Late.run was"),
    ],
)
def test_what_took_the_place_of_a_librarys_method_gives_way_to_it(run: InnerRun, leak: str, advice: str) -> None:
    found = tensors_of(run, leak)
    assert found.remedy is None
    assert advice in (found.advice or "")


def test_a_new_librarys_own_function_does_not(run: InnerRun) -> None:
    found = tensors_of(run, "engine_that_is_new_and_keeps_it")
    assert "put back" not in f"{found.message} {found.advice}"


def test_nothing_inside_a_library_was_tried(run: InnerRun) -> None:
    assert run.report is not None
    tried = [item.action for subject in run.report.subjects for found in subject.findings for item in found.tried]
    assert tried
    inside = re.compile(r"\._(?!dynamo\.reset|BUFFERS)[a-zA-Z]")
    assert [action for action in tried if inside.search(action)] == []


def test_the_libraries_work_as_before(run: InnerRun) -> None:
    assert json.loads((run.folder / "after.json").read_text()) == {}
    assert "Traceback" not in run.err
