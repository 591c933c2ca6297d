"""`--leakcheck-native` on a card: which library has asked the driver for what is left, CUDA arrays among it."""

from __future__ import annotations

import pytest

from lowtide.reports.schema import Report
from tests.pytest_plugin.test_cuda import judge, subject

pytestmark = pytest.mark.cuda
for name in ("cupti", "cupy", "cuda.bindings"):
    pytest.importorskip(name)

MIB = 1 << 20

_TESTS = """
import ctypes, pytest, torch
from cuda.bindings import runtime
from cupy.cuda import runtime as of_cupy

KEPT = []

def make_array():
    torch.zeros(1, device="cuda")
    kind = runtime.cudaChannelFormatKind.cudaChannelFormatKindFloat
    error, array = runtime.cudaMallocArray(runtime.cudaCreateChannelDesc(32, 32, 32, 32, kind)[1], 4096, 1024, 0)
    assert error == 0
    return array

def test_array(): KEPT.append(make_array())
def test_array_given_back(): assert runtime.cudaFreeArray(make_array())[0] == 0
def test_allocation(): KEPT.append(of_cupy.malloc(48 << 20))
def test_allocation_given_back(): of_cupy.free(of_cupy.malloc(48 << 20))
def test_tensor_given_back(): (torch.rand(512, 512, device="cuda") @ torch.rand(512, 512, device="cuda")).sum().item()
def test_first_fft(): torch.fft.fft(torch.rand(4096, device="cuda"))
def test_first_solver(): torch.linalg.inv(torch.eye(64, device="cuda"))
def test_profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.rand(512, 512, device="cuda").sum().item()
    assert len(profile.events()) > 0
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return judge(tmp_path_factory.mktemp("traced"), _TESTS, "", "--leakcheck-native")


@pytest.mark.parametrize(
    ("name", "size", "word", "library"),
    [("test_array", 64, "array at 0x", "cyruntime."), ("test_allocation", 48, "allocation at 0x", "runtime.")],
)
def test_what_is_left_has_the_library_that_asked_for_it(
    traced: Report, name: str, size: int, word: str, library: str
) -> None:
    judged = subject(traced, name)
    (finding,) = [each for each in judged.findings if each.resource == "driver"]
    assert (judged.outcome, finding.bytes) == ("leak", size * MIB)
    assert word in finding.message
    assert f"asked for by {library}" in finding.message
    assert f"({size}.0 MiB)" in finding.message


@pytest.mark.parametrize(
    "name", ["array_given_back", "allocation_given_back", "tensor_given_back", "first_fft", "first_solver", "profiled"]
)
def test_what_comes_back_and_what_recording_takes_are_no_leak(traced: Report, name: str) -> None:
    judged = subject(traced, f"test_{name}")
    # The workspace that the first product of matrices takes is told, and no leak.
    others = [each.message for each in judged.findings if each.cause != "library-workspace"]
    assert (judged.outcome, others) == ("clean", [])
