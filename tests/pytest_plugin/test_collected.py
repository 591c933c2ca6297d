"""What came back only because the judgement collected is noted with its cycle, and a leak where that is asked for."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

CYCLES = """
import gc
import pytest
import torch


class Request:
    def __init__(self, mib):
        self.data = self
        self.table = torch.zeros(mib << 20, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def collected_before():
    # Else Python may collect in the middle of the test.
    gc.collect()


@pytest.fixture(scope="module")
def model():
    return torch.zeros(20 << 20, dtype=torch.uint8)


def test_large():
    Request(28)


def test_many():
    for _ in range(10):
        Request(2)


def test_old():
    kept = Request(28)
    gc.collect()


def test_small():
    Request(8)


class Message:
    def __init__(self):
        self.data = {"request": self, "audio": bytearray(64 << 20)}
        # Counted as the process's only once it is written to.
        self.data["audio"][:] = bytes(range(256)) * (64 << 12)


def test_host_memory():
    Message()
    # What is young goes with the next few objects.
    gc.collect(0), gc.collect(1)


def test_old_host_memory():
    kept = Message()
    gc.collect()


@pytest.mark.leakcheck(cycles="1MiB")
def test_marked():
    Request(8)


def test_view_of_a_fixture(model):
    Request(1).table = model[:10]


def test_that_counting_frees():
    torch.zeros(28 << 20, dtype=torch.uint8)


def test_that_collects():
    Request(28)
    gc.collect()
"""

OF_HOST = "64.0 MiB of host memory came back only when the collector ran, in a cycle through Message.data"
SAID = "{} on cpu came back only when the collector ran, in a cycle through Request.data"
"""Of the size."""

CLEAN = ["test_view_of_a_fixture", "test_that_counting_frees", "test_that_collects"]


@pytest.fixture(scope="module")
def noted(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_cycles.py": CYCLES})


def test_from_a_limit_on_it_is_a_note(noted: InnerRun) -> None:
    for name, size in (("test_large", "28.0 MiB"), ("test_many", "20.0 MiB"), ("test_old", "28.0 MiB")):
        subject = noted.subject(f"test_cycles.py::{name}")
        assert (subject.outcome, subject.reason) == ("clean", SAID.format(size))
        assert f"note test_cycles.py::{name}: {SAID.format(size)}" in noted.out.splitlines()
    subject = noted.subject("test_cycles.py::test_old_host_memory")
    assert (subject.outcome, subject.reason) == ("clean", OF_HOST)
    for name in (*CLEAN, "test_small", "test_host_memory"):
        assert (noted.subject(f"test_cycles.py::{name}").outcome, noted.out.count(f"{name}: ")) == ("clean", 0)


def test_a_marker_makes_it_a_leak(noted: InnerRun) -> None:
    (finding,) = noted.subject("test_cycles.py::test_marked").findings
    assert (finding.resource, finding.cause, finding.bytes) == ("tensors", "cycle", 8 << 20)
    assert finding.message == SAID.format("8.0 MiB")
    assert noted.totals == {"failed": 1, "passed": 9}


def test_an_option_makes_it_a_leak_of_every_test(run_inner: RunInner) -> None:
    run = run_inner({"test_cycles.py": CYCLES}, "--leakcheck-cycles=4MiB")
    assert run.report is not None
    leaking = [each.id.rpartition("::")[2] for each in run.report.subjects if each.outcome == "leak"]
    assert leaking == ["test_large", "test_many", "test_old", "test_small", "test_old_host_memory", "test_marked"]
    # One cause of tensors, and one of host memory.
    of_tensors, of_host = (line for line in run.out.splitlines() if line.startswith("LEAK "))
    assert of_tensors.startswith("LEAK test_cycles.py::test_large tensors/cycle 28.0 MiB held by Request.data; also in")
    assert of_host == "LEAK test_cycles.py::test_old_host_memory host-memory/cycle 64.0 MiB held by Message.data"
