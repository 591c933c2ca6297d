"""With two cards: what a test leaves on either is found, and what the first use of the second one takes is no leak."""

from __future__ import annotations

import pytest
import torch

from lowtide.reports.schema import Report
from tests.pytest_plugin.test_cuda import judge, subject

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
]

_TESTS = """
import torch
from cuda.bindings import runtime

KEPT = {}

def allocate_on_the_second():
    runtime.cudaSetDevice(1)
    error, address = runtime.cudaMalloc(48 << 20)
    assert error == 0
    runtime.cudaSetDevice(0)
    return address

def test_leaves_a_tensor_on_the_second():
    KEPT["tensor"] = torch.ones(8 << 20, device="cuda:1")

def test_first_product_on_the_second():
    a = torch.rand(512, 512, device="cuda:1")
    (a @ a).sum().item()

def test_copies_between_both():
    torch.ones(8 << 20, device="cuda:0").to("cuda:1").to("cuda:0").sum().item()

def test_leaves_the_second_as_the_current():
    torch.cuda.set_device(1)

def test_leaves_memory_outside_torch_on_the_second():
    KEPT["address"] = allocate_on_the_second()

def test_gives_memory_outside_torch_back():
    address = allocate_on_the_second()
    runtime.cudaSetDevice(1)
    runtime.cudaFree(address)
    runtime.cudaSetDevice(0)

def test_first_graph_on_the_second():
    with torch.cuda.device(1):
        static = torch.zeros(1 << 18, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static * 2
        graph.replay()
        torch.cuda.synchronize()

def test_trains_on_both():
    model = torch.nn.DataParallel(torch.nn.Linear(256, 256).cuda(0), device_ids=[0, 1])
    model(torch.rand(64, 256, device="cuda:0")).sum().backward()

def test_leaves_half_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512).cuda(0), torch.nn.Linear(512, 512).cuda(1))
    KEPT["half"] = model[1]
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return judge(tmp_path_factory.mktemp("two"), _TESTS, "")


@pytest.mark.parametrize(
    ("name", "resource", "device", "size"),
    [
        ("test_leaves_a_tensor_on_the_second", "tensors", "cuda:1", 32 << 20),
        ("test_leaves_the_second_as_the_current", "globals", "", 0),
        ("test_leaves_memory_outside_torch_on_the_second", "driver", "cuda:1", 48 << 20),
        ("test_leaves_half_of_a_model", "tensors", "cuda:1", (512 * 512 + 512) * 4),
    ],
)
def test_what_is_left_on_the_second_card_is_one_finding(
    report: Report, name: str, resource: str, device: str, size: int
) -> None:
    (finding,) = subject(report, name).findings
    assert (finding.resource, finding.device, finding.bytes) == (resource, device, size)


@pytest.mark.parametrize(
    "name",
    [
        "test_first_product_on_the_second",
        "test_copies_between_both",
        "test_gives_memory_outside_torch_back",
        "test_first_graph_on_the_second",
        "test_trains_on_both",
    ],
)
def test_first_uses_of_the_second_card_are_no_leaks(report: Report, name: str) -> None:
    judged = subject(report, name)
    # The BLAS library's workspace is one for each handle and stream, and known.
    assert (judged.outcome, {finding.cause for finding in judged.findings} - {"library-workspace"}) == ("clean", set())
