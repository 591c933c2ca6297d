"""Two processes on one card: what one has exported by CUDA IPC, and given up, is told with counter and importers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.reports.schema import Finding, Report
from tests.pytest_plugin.test_cuda import judge, subject

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]

MIB = 1 << 20

_TESTS = """
import gc
import pytest, torch
import torch.multiprocessing

KEPT = []

def importer(questions, answers):
    opened = []
    def follow(name, export):
        # As `rebuild_cuda_tensor` does.
        torch.cuda._lazy_init()
        if name == "keep":
            opened.append(torch.UntypedStorage._new_shared_cuda(*export))
        elif name == "close":
            opened.clear()
        else:
            for _ in range(int(name)):
                torch.UntypedStorage._new_shared_cuda(*export)
        return "done"
    for question in iter(questions.get, None):
        try:
            answers.put(follow(*question))
        except Exception as error:
            answers.put(repr(error))

@pytest.fixture(scope="module")
def ask():
    context = torch.multiprocessing.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    process = context.Process(target=importer, args=(questions, answers), name="receiver")
    process.start()
    def ask(name, export=None):
        questions.put((name, export))
        assert answers.get(timeout=60) == "done"
    yield ask
    questions.put(None)
    process.join(60)
    assert process.exitcode == 0

def weights():
    return torch.ones(8 << 20, dtype=torch.uint8, device="cuda")

def export(tensor):
    return tensor.untyped_storage()._share_cuda_()

def test_first_use(ask):
    tensor = weights()
    ask("1", export(tensor))

def test_closed_once(ask):
    tensor = weights()
    ask("1", export(tensor))

def test_exported_for_each(ask):
    tensor = weights()
    ask("1", export(tensor))
    ask("1", export(tensor))

def test_kept_by_a_tensor(ask):
    KEPT.append(weights())
    ask("keep", export(KEPT[-1]))

def test_closed_twice(ask):
    tensor = weights()
    ask("2", export(tensor))

def test_opened_by_nobody(ask):
    export(weights())

def test_kept_open(ask):
    tensor = weights()
    ask("keep", export(tensor))

def test_not_collected(ask):
    tensor = weights()
    ask("keep", export(tensor))
    del tensor
    ask("close")

def test_collected(ask):
    tensor = weights()
    ask("keep", export(tensor))
    del tensor
    ask("close")
    torch.cuda.ipc_collect()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return judge(tmp_path_factory.mktemp("ipc"), _TESTS, "")


def finding_of(report: Report, name: str) -> Finding:
    (finding,) = subject(report, name).findings
    return finding


@pytest.mark.parametrize("name", ["test_first_use", "test_closed_once", "test_exported_for_each", "test_collected"])
def test_what_is_closed_once_for_each_export_is_clean(name: str, report: Report) -> None:
    assert [finding.message for finding in subject(report, name).findings] == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("test_closed_twice", "counter -1: freed by nobody"),
        ("test_opened_by_nobody", "counter 1: opened by nobody who lives"),
        ("test_kept_open", "counter 1: not closed by all"),
        ("test_not_collected", "torch.cuda.ipc_collect() returns 8.0 MiB"),
    ],
)
def test_what_waits_for_importers_is_one_finding_with_its_counter(name: str, told: str, report: Report) -> None:
    finding = finding_of(report, name)
    assert (finding.resource, finding.bytes, finding.device) == ("cuda-ipc", 8 * MIB, "cuda:0")
    assert told in finding.message


def test_who_has_it_open_is_told(report: Report) -> None:
    assert "1 importer (pid " in finding_of(report, "test_kept_open").message
    assert "(receiver)" in finding_of(report, "test_kept_open").message


def test_what_a_tensor_holds_is_the_tensor_alone(report: Report) -> None:
    finding = finding_of(report, "test_kept_by_a_tensor")
    assert (finding.resource, finding.bytes) == ("tensors", 8 * MIB)


def test_what_the_ladder_returns_is_said(report: Report) -> None:
    remedy = finding_of(report, "test_not_collected").remedy
    assert remedy is not None
    assert (remedy.action, remedy.returns_bytes) == ("torch.cuda.ipc_collect()", 8 * MIB)


@pytest.mark.parametrize("name", ["test_closed_twice", "test_opened_by_nobody"])
def test_what_nobody_has_open_is_given_back_by_its_counter(name: str, report: Report) -> None:
    assert (finding_of(report, name).advice or "").endswith("tried, it returns 8.0 MiB")


def test_a_report_names_where_it_was_made(report: Report, tmp_path: Path) -> None:
    assert "weights" in {frame.function for frame in finding_of(report, "test_closed_twice").allocated_at}
