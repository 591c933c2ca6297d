"""Holders that Python's graph does not show: each leak is one finding that names its holder, and its twin is silent."""

from __future__ import annotations

import pytest

from lowtide.reports.schema import Finding
from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

TESTS = """
import asyncio
import functools
import io
import logging
import os
import warnings

import numpy as np
import pytest
import torch

LOOP = asyncio.new_event_loop()
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated.
HELD = {}


class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, right):
        ctx.operator = {"matrix": matrix.clone()}
        ctx.save_for_backward(right)
        return matrix @ right

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


def cleared(strategy, *_): ...


class Strategy:
    def __init__(self):
        self.inputs = torch.ones(16, 16)
        weights = torch.nn.Parameter(torch.ones(16, 16))
        solved = Solve.apply((weights * 2).sin() - torch.ones(16, 16), torch.ones(16, 16))
        # As gpytorch does it: the graph of what is kept holds the hook, and the hook what keeps it.
        self.kept = {"mean": solved.squeeze(-1)}
        self.handle = self.kept["mean"].grad_fn.register_hook(functools.partial(cleared, self))


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32, 32))
        self.tables = [torch.ones(32, 32)]

    def forward(self, value):
        return value @ self.weight + self.tables[0]


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scripted()

    def forward(self, value):
        return self.inner(value)


def loaded():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted()), file)
    file.seek(0)
    return torch.jit.load(file)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    EARLIER = loaded()


@pytest.fixture(scope="module")
def served():
    return loaded()


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_hook_of_its_own_graph():
    Strategy()


def test_hook_that_was_removed():
    Strategy().handle.remove()


def test_logging_handler():
    logger = logging.getLogger("kept")
    logger.propagate = False
    logger.addHandler(Keeping())
    logger.error("%s", torch.ones(4)[:1])


def test_struct_sequence():
    HELD["decomposed"] = torch.linalg.svd(torch.ones(8, 8))


def test_script_that_was_loaded():
    HELD["loaded"] = loaded()


def test_script_that_was_frozen():
    HELD["frozen"] = torch.jit.freeze(torch.jit.script(Scripted().eval()))


def test_script_with_parts():
    HELD["parts"] = torch.jit.script(Outer())


def test_timer():
    kept = torch.ones(4)
    LOOP.call_later(1e6, lambda: kept)


def test_mapped_file(tmp_path):
    # No text in any encoding, as file names may be.
    HELD["mapped"] = torch.from_numpy(np.memmap(tmp_path / os.fsdecode(b"file\\xff"), np.float32, "w+", shape=(8,)))


def test_mapped_file_that_was_dropped(tmp_path):
    torch.from_numpy(np.memmap(tmp_path / "file", np.float32, "w+", shape=(8,))).sum()


def test_script_that_was_dropped():
    loaded()(torch.ones(1, 32))


def test_script_of_a_fixture(served):
    served(torch.ones(1, 32))
    served.state_dict()


def test_script_that_was_there(served):
    EARLIER.state_dict()
    served.state_dict()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_hidden.py": TESTS})


def findings_of(run: InnerRun, test: str) -> tuple[Finding, ...]:
    return run.subject(f"test_hidden.py::test_{test}").findings


def test_what_a_hook_keeps_through_its_own_graph_is_one_finding(run: InnerRun) -> None:
    (found,) = findings_of(run, "hook_of_its_own_graph")
    hook = "hook functools.partial of function test_hidden.cleared"
    assert found.holder == f"{hook}, held from C or C++"
    # What its owner has, what nodes have saved, and what the context of a function of the program's own keeps.
    assert found.bytes == 6 * 16 * 16 * 4
    assert found.advice is not None
    assert found.advice.startswith(f"remove the {hook} with the handle that registering it gave")
    assert found.advice.endswith("tried, it returns 6.0 KiB")


def test_a_librarys_own_list_is_not_taken_from_it(run: InnerRun) -> None:
    of_logger, of_handler = sorted(findings_of(run, "logging_handler"), key=lambda found: found.resource)[::-1]
    assert (of_logger.resource, of_logger.cause) == ("tensors", "instance-attribute")
    assert of_logger.remedy is not None
    assert of_logger.remedy.action == "del logging.getLogger('kept').handlers[0]"
    assert of_handler.resource == "globals"
    assert "lowtide could not try" not in run.out


@pytest.mark.parametrize(
    ("test", "holder", "remedy"),
    [
        ("struct_sequence", "test_hidden.HELD['decomposed']", "del test_hidden.HELD['decomposed']"),
        ("script_with_parts", "test_hidden.HELD['parts']", "del test_hidden.HELD['parts']"),
        ("mapped_file", "test_hidden.HELD['mapped']", "del test_hidden.HELD['mapped']"),
        ("script_that_was_loaded", "test_hidden.HELD['loaded']", "del test_hidden.HELD['loaded']"),
        # torch keeps the constants of frozen code for as long as the process runs.
        ("script_that_was_frozen", "test_hidden.HELD['frozen'].graph.findAllNodes('prim::Constant')", None),
    ],
)
def test_the_path_to_what_c_holds_is_named(run: InnerRun, test: str, holder: str, remedy: str | None) -> None:
    (found,) = findings_of(run, test)
    assert (found.holder or "").startswith(holder)
    assert (found.remedy and found.remedy.action) == remedy


def test_the_descriptor_of_a_file_is_a_part_of_the_tensors_in_it(run: InnerRun) -> None:
    (found,) = findings_of(run, "mapped_file")
    assert [part.resource for part in found.parts] == ["file-descriptors"]


def test_a_timer_is_to_be_cancelled(run: InnerRun) -> None:
    (found,) = findings_of(run, "timer")
    assert (found.advice or "").endswith("keep what call_later() or call_soon() returned, and call its cancel()")


@pytest.mark.parametrize(
    "test",
    [
        "mapped_file_that_was_dropped",
        "hook_that_was_removed",
        "script_that_was_dropped",
        "script_of_a_fixture",
        "script_that_was_there",
    ],
)
def test_the_clean_twin_is_silent(run: InnerRun, test: str) -> None:
    assert findings_of(run, test) == ()
