"""What a greenlet that waits has in its variables is held by it; what one had that was ended is no leak."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

PROGRAM = """
import socket

import greenlet
import torch


class Hub:
    def __init__(self):
        self.ready = []


HUB = Hub()


def waits():
    greenlet.getcurrent().parent.switch()


def serve():
    opened = socket.socket()
    waits()


def infer():
    batch = {"input": torch.zeros(1 << 20)}
    waits()


def start(function):
    started = greenlet.greenlet(function)
    HUB.ready.append(started)
    started.switch()
    return started


def test_socket():
    start(serve)


def test_tensor():
    start(infer)


def test_ended():
    start(serve).throw()
    start(infer).throw()


def test_forgotten():
    start(serve)
    start(infer)
    del HUB.ready[-2:]
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": PROGRAM})


@pytest.mark.parametrize(
    ("name", "resource", "variable"),
    [
        ("test_socket", "file-descriptors", "HUB.ready[0].gr_frame.f_back.f_locals['opened'].close()"),
        ("test_tensor", "tensors", "held by test_inner.HUB.ready[1].gr_frame.f_back.f_locals['batch']['input']"),
    ],
)
def test_the_variable_of_the_greenlet_that_waits_is_told(
    run: InnerRun, name: str, resource: str, variable: str
) -> None:
    (finding,) = next(each for each in run.report.subjects if each.id.endswith(f"::{name}")).findings
    assert finding.resource == resource
    assert variable in f"{finding.message}; {finding.advice}"
    assert "greenlet.greenlet" in [hop.type for hop in finding.path]


@pytest.mark.parametrize("name", ["test_ended", "test_forgotten"])
def test_what_ends_with_its_greenlet_is_no_leak(run: InnerRun, name: str) -> None:
    assert next(each for each in run.report.subjects if each.id.endswith(f"::{name}")).findings == ()
