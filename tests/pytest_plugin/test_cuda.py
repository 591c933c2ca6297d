"""On a card: what a test leaves there is found, and what libraries and torch's cache keep is not a leak."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lowtide.reports.schema import Report, Subject, read

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]

_LEAKS = """
import ctypes, gc, functools
import pytest, torch

KEPT = []

def driver_allocation(size):
    torch.zeros(1, device="cuda")
    cuda, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    return cuda, address

def test_one_byte(): KEPT.append(torch.zeros(1, dtype=torch.uint8, device="cuda"))
@pytest.mark.leakcheck(tolerance=4096)
def test_at_tolerance(): KEPT.append(torch.zeros(4096, dtype=torch.uint8, device="cuda"))
@pytest.mark.leakcheck(tolerance=4095)
def test_over_tolerance(): KEPT.append(torch.zeros(4096, dtype=torch.uint8, device="cuda"))

def test_empty_private_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    del block
    KEPT.append(pool)

BESIDE = []

def test_pools_of_two_holders():
    for owner, size in ((KEPT, 1 << 20), (BESIDE, 30 << 20)):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            block = torch.zeros(size, dtype=torch.uint8, device="cuda")
        del block
        owner.append(pool)

def test_driver_segment():
    driver_allocation(2 << 20)

def limit_of_stacks(size):
    cuda = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")
    before = ctypes.c_size_t()
    assert cuda.cuCtxGetLimit(ctypes.byref(before), 0) == 0
    assert cuda.cuCtxSetLimit(0, ctypes.c_size_t(size or before.value)) == 0
    return before.value

def test_limit(): limit_of_stacks(4096)
def test_limit_given_back(): limit_of_stacks(limit_of_stacks(2048))

ARRAYS = {}

def test_host_array():
    import numpy
    torch.zeros(1, device="cuda")
    ARRAYS["batch"] = numpy.ones(256 << 20, dtype=numpy.uint8)

def cuda_array():
    from cuda.bindings import runtime

    torch.zeros(1, device="cuda")
    kind = runtime.cudaChannelFormatKind.cudaChannelFormatKindFloat
    error, array = runtime.cudaMallocArray(runtime.cudaCreateChannelDesc(32, 32, 32, 32, kind)[1], 4096, 1024, 0)
    assert error == 0
    return runtime, array

def test_cuda_array():
    cuda_array()

def test_cuda_array_given_back():
    runtime, array = cuda_array()
    assert runtime.cudaFreeArray(array)[0] == 0

def test_driver_segment_given_back():
    cuda, address = driver_allocation(2 << 20)
    assert cuda.cuMemFree_v2(address) == 0

def memory_node(trim):
    from cuda.bindings import runtime

    torch.zeros(1, device="cuda")
    nodes = runtime.cudaMemAllocNodeParams()
    nodes.poolProps.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    nodes.poolProps.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    nodes.bytesize = 64 << 20
    _, graph = runtime.cudaGraphCreate(0)
    _, allocated = runtime.cudaGraphAddMemAllocNode(graph, None, 0, nodes)
    assert runtime.cudaGraphAddMemFreeNode(graph, [allocated], 1, nodes.dptr)[0] == 0
    _, ready = runtime.cudaGraphInstantiate(graph, 0)
    _, stream = runtime.cudaStreamCreate()
    assert runtime.cudaGraphLaunch(ready, stream)[0] == 0
    runtime.cudaStreamSynchronize(stream)
    runtime.cudaGraphExecDestroy(ready), runtime.cudaGraphDestroy(graph), runtime.cudaStreamDestroy(stream)
    if trim:
        runtime.cudaDeviceGraphMemTrim(0)

def test_memory_node_given_back(): memory_node(trim=True)
def test_memory_node(): memory_node(trim=False)

SMALL = []

def test_small_segments():
    SMALL.extend(driver_allocation(8 << 10) for _ in range(3))

def test_the_first_small_segment_goes():
    cuda, address = SMALL.pop(0)
    assert cuda.cuMemFree_v2(address) == 0

def test_a_small_segment_in_its_place_given_back():
    cuda, address = driver_allocation(8 << 10)
    assert cuda.cuMemFree_v2(address) == 0

def host_memory(give_out, give_back=None):
    torch.zeros(1, device="cuda")
    cuda, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    # The last argument is that of `cuMemHostAlloc` or of `cuMemAllocManaged`: no flag, or to be seen from everywhere.
    assert cuda[give_out](ctypes.byref(address), ctypes.c_size_t(32 << 20), int("Managed" in give_out)) == 0
    if give_back:
        assert cuda[give_back](address) == 0

def test_page_locked(): host_memory("cuMemHostAlloc")
def test_page_locked_given_back(): host_memory("cuMemHostAlloc", "cuMemFreeHost")
def test_managed(): host_memory("cuMemAllocManaged")
def test_managed_given_back(): host_memory("cuMemAllocManaged", "cuMemFree_v2")

def test_pinned(): KEPT.append(torch.zeros(1 << 20, dtype=torch.uint8).pin_memory())
def test_pinned_given_back(): torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()

@functools.lru_cache(maxsize=None)
def supports(method, name): return name in method.__code__.co_varnames
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, bias=False, device="cuda")
    def forward(self, x): return self.linear(x)
def test_bound_method_cache():
    model = Model()
    assert supports(model.forward, "x")

def test_saved_for_backward():
    x = torch.ones(1 << 18, device="cuda", requires_grad=True)
    KEPT.append((x * 2).exp().sum())

class Session: pass
SESSION = Session()
def test_graph():
    static = torch.zeros(1 << 18, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    del out
    SESSION.graph = graph

def test_process_group(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(8, device="cuda")); torch.cuda.synchronize()
"""

_CLEAN = """
import gc
import unittest.mock
import pytest, torch

def test_context_and_first_kernel():
    assert float(torch.ones(8, device="cuda").sum()) == 8
def test_first_matmul_keeps_a_workspace():
    a = torch.rand(512, 512, device="cuda"); (a @ a).sum().item()
def test_first_half_matmul():
    a = torch.rand(512, 512, device="cuda", dtype=torch.half); (a @ a).sum().item()
def test_first_linear_with_bias():
    torch.nn.functional.gelu(torch.nn.Linear(512, 512, device="cuda")(torch.rand(64, 512, device="cuda"))).sum().item()
def test_first_convolution():
    torch.nn.Conv2d(3, 16, 3, device="cuda")(torch.rand(8, 3, 64, 64, device="cuda")).sum().backward()
def test_first_attention():
    q = torch.rand(2, 8, 128, 64, device="cuda", dtype=torch.half)
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().item()
def test_first_sort_and_random():
    torch.randn(1 << 20, device="cuda").sort().values.cumsum(0)[-1].item()
def test_first_solver():
    a = torch.rand(64, 64, device="cuda"); torch.linalg.inv(a + 64 * torch.eye(64, device="cuda")).sum().item()
def test_first_random_numbers_bring_a_table():
    torch.randint(0, 256, (1,), dtype=torch.uint8, device="cuda"); torch.randn(1, device="cuda").exponential_().item()
def test_a_kernel_brings_a_table_of_4_mib():
    torch.cuda._compile_kernel(
        '__device__ float table[1 << 20];'
        'extern "C" __global__ void fill(float* out) { table[threadIdx.x] = 1; *out = table[0]; }',
        "fill",
    )((1, 1, 1), (32, 1, 1), (torch.zeros(1, device="cuda"),))
    torch.cuda.synchronize()
def test_first_fft():
    torch.fft.fft(torch.rand(1 << 16, device="cuda")).abs().sum().item()
def test_host_array_given_back():
    import numpy
    torch.zeros(1, device="cuda")
    numpy.ones(256 << 20, dtype=numpy.uint8)
def test_allocator_grows():
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
def test_allocator_grows_and_is_emptied():
    torch.empty(6 << 30, dtype=torch.uint8, device="cuda"); torch.cuda.empty_cache()
def test_other_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = torch.rand(1024, 1024, device="cuda"); b = a @ a
    stream.synchronize()
def test_graph_of_its_own():
    static = torch.zeros(1 << 18, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    graph.replay(); torch.cuda.synchronize()
def test_cycle():
    a = [torch.ones(1 << 20, device="cuda")]; a.append(a)
def test_pinned_cache():
    torch.zeros(8 << 20, dtype=torch.uint8).pin_memory().to("cuda", non_blocking=True).sum().item()
def test_training():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    step = torch.optim.AdamW(model.parameters())
    model(torch.rand(32, 256, device="cuda")).sum().backward(); step.step()
@pytest.fixture(scope="module")
def model():
    return torch.nn.Linear(1024, 1024, device="cuda")
def test_shared_model(model): model(torch.rand(4, 1024, device="cuda")).sum().backward()
def test_shared_model_again(model): model(torch.rand(4, 1024, device="cuda")).sum().backward()
def test_engine():
    from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
    with LLMEngine(EngineConfig(model="tiny", device="cuda:0")) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.sleep(level=1)
        engine.wake()
        engine.sleep(level=2)
        engine.wake()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
def test_block_that_waits_for_a_stream():
    stream = torch.cuda.Stream()
    tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    tensor.record_stream(stream)
@pytest.fixture(
    scope="class",
    params=[
        "device_count", "current_device", "is_initialized", "memory_stats_as_nested_dict", "memory_snapshot",
        "host_memory_stats", "get_allocator_backend", "get_device_properties", "synchronize", "empty_cache",
    ],
)
def replaced(request):
    with unittest.mock.patch(f"torch.cuda.{request.param}", return_value=8):
        yield
class TestReplaced:
    def test_first(self, replaced): torch.ones(10, device="cuda")
    def test_second(self, replaced): torch.ones(10, device="cuda")
def test_triton():
    triton = pytest.importorskip("triton")
    torch.compile(lambda x: (x * 2 + 1).relu())(torch.rand(1 << 16, device="cuda")).sum().item()
    torch._dynamo.reset()
def test_process_group(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.all_reduce(torch.ones(8, device="cuda")); torch.cuda.synchronize()
    dist.destroy_process_group()
"""


_OF_OTHERS = """
import sys
import pytest, torch
import torch.multiprocessing

KEPT = []

@pytest.fixture(scope="module")
def on_card(): return torch.ones(8, device="cuda")

def test_the_first_use_of_a_card(on_card): on_card.sum().item()

def test_that_torch_s_compiler_is_not_imported():
    KEPT.extend([torch.ones(8, device="cuda")] if "torch._inductor" in sys.modules else [])

def test_first_use():
    torch.ones(8, device="cuda").sum().item()
    torch.fft.fft(torch.rand(1 << 10, device="cuda")).abs().sum().item()

def test_plans():
    # Of a prime length: its plan has tables.
    torch.fft.fft(torch.rand(1_000_003, device="cuda")).abs().sum().item()

def test_cupys_first_use():
    cupy = pytest.importorskip("cupy")
    cupy.zeros(8, dtype=cupy.uint8) + 1

def test_cupys_pool():
    cupy = pytest.importorskip("cupy")
    cupy.zeros(96 << 20, dtype=cupy.uint8)

def test_cupys_array():
    cupy = pytest.importorskip("cupy")
    KEPT.append(cupy.zeros(32 << 20, dtype=cupy.uint8))

def test_cupys_pages_given_back():
    cupy = pytest.importorskip("cupy")
    cupy.cuda.alloc_pinned_memory(16 << 20)

def test_cupys_pages():
    cupy = pytest.importorskip("cupy")
    KEPT.append(cupy.cuda.alloc_pinned_memory(16 << 20))

def test_cupys_own_pool():
    cupy = pytest.importorskip("cupy")
    KEPT.append(cupy.cuda.MemoryPool())
    with cupy.cuda.using_allocator(KEPT[-1].malloc):
        cupy.ones(48 << 20, dtype=cupy.uint8)

def test_cupys_allocator_put_back():
    cupy = pytest.importorskip("cupy")
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    cupy.cuda.set_allocator(before)

def test_cupys_allocator():
    cupy = pytest.importorskip("cupy")
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)

def test_view_of_cupys_array():
    cupy = pytest.importorskip("cupy")
    KEPT.append(torch.from_dlpack(cupy.ones(96 << 20, dtype=cupy.uint8)))

def test_cupys_view_of_a_tensor():
    cupy = pytest.importorskip("cupy")
    KEPT.append(cupy.from_dlpack(torch.ones(8 << 20, device="cuda"))[1000:].reshape(-1, 8))

def test_cupys_view_of_a_tensor_given_back():
    cupy = pytest.importorskip("cupy")
    cupy.from_dlpack(torch.ones(8 << 20, device="cuda")).sum().item()

def export(tensors, done):
    exported = [torch.ones(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for tensor in exported:
        tensors.put(tensor)
    done.wait()

@pytest.fixture(scope="module")
def exporter():
    context = torch.multiprocessing.get_context("spawn")
    tensors, done = context.Queue(), context.Event()
    process = context.Process(target=export, args=(tensors, done))
    process.start()
    yield tensors
    done.set()
    process.join()

def test_import_given_back(exporter): exporter.get(timeout=300)
def test_import(exporter): KEPT.append(exporter.get(timeout=300))

def test_history_switched_off():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    torch.cuda.memory._record_memory_history(None)

def test_history_left_on(): torch.cuda.memory._record_memory_history(max_entries=1000)

def test_sync_debug_mode(): torch.cuda.set_sync_debug_mode("warn")
"""


# As in a container of its own PID namespace: NVML lists processes by other numbers.
_HIDDEN = """
from lowtide.probes.device.driver.nvml import NvmlDriver
listed = NvmlDriver._listed
NvmlDriver._listed = lambda self, handle: {1_000_000 + pid: held for pid, held in listed(self, handle).items()}
"""


def judge(folder: Path, text: str, hidden: str, *options: str) -> Report:
    (folder / "test_inner.py").write_text(text)
    (folder / "conftest.py").write_text(hidden)
    report = folder / "report"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--leakcheck"]
    command += [f"--leakcheck-report={report}", *options, "test_inner.py"]
    if "lowtide" not in {entry.name for entry in metadata.entry_points(group="pytest11")}:
        command += ["-p", "lowtide.pytest_plugin.plugin"]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1200
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return read(report)


@pytest.fixture(scope="module", params=["", _HIDDEN], ids=["NVML lists it", "NVML does not"])
def hidden(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def leaks(tmp_path_factory: pytest.TempPathFactory, hidden: str) -> Report:
    return judge(tmp_path_factory.mktemp("leaks"), _LEAKS, hidden)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, hidden: str) -> Report:
    return judge(tmp_path_factory.mktemp("clean"), _CLEAN, hidden)


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory, hidden: str) -> Report:
    return judge(tmp_path_factory.mktemp("of_others"), _OF_OTHERS, hidden)


def subject(report: Report, name: str) -> Subject:
    (found,) = [item for item in report.subjects if item.id.endswith(f"::{name}")]
    return found


@pytest.mark.parametrize(
    ("name", "resource", "size"),
    [
        ("test_one_byte", "tensors", 1),
        ("test_over_tolerance", "tensors", 4096),
        ("test_empty_private_pool", "reserved", 2 << 20),
        ("test_driver_segment", "driver", 2 << 20),
        ("test_page_locked", "pinned", 32 << 20),
        ("test_managed", "pinned", 32 << 20),
        ("test_pinned", "tensors", 1 << 20),
        ("test_bound_method_cache", "tensors", 64 * 64 * 4),
    ],
)
def test_a_leak_on_the_card_is_one_finding(leaks: Report, name: str, resource: str, size: int) -> None:
    (finding,) = subject(leaks, name).findings
    assert (finding.resource, finding.bytes) == (resource, size)


def test_an_array_which_the_driver_lists_with_other_ranges_is_found_and_hangs_nothing(
    leaks: Report, hidden: str
) -> None:
    array = subject(leaks, "test_cuda_array")
    # What is in no list is counted by NVML alone.
    found = [] if hidden else [("driver", 64 << 20)]
    assert [(finding.resource, finding.bytes) for finding in array.findings] == found
    assert array.outcome == ("clean" if hidden else "leak")


def test_host_memory_that_the_driver_has_given_out_is_told_with_its_kind(leaks: Report) -> None:
    (locked,), (managed,) = (subject(leaks, name).findings for name in ("test_page_locked", "test_managed"))
    assert locked.message.endswith(f"page-locked memory at {(locked.holder or '').rpartition(' ')[2]}")
    assert "give it back in teardown: cudaFreeHost" in (locked.advice or "")
    assert managed.message.endswith(f"managed memory at {(managed.holder or '').rpartition(' ')[2]}")
    assert "give it back in teardown: cudaFree" in (managed.advice or "")
    assert locked.fingerprint != managed.fingerprint


def test_memory_that_graphs_have_freed_is_told_with_what_trims_it(leaks: Report) -> None:
    found = subject(leaks, "test_memory_node").findings
    assert [(finding.resource, finding.bytes) for finding in found] == [("driver", 64 << 20)]
    (finding,) = found
    assert "its pool for the memory nodes of graphs" in finding.message
    assert finding.remedy is not None
    assert finding.remedy.action == "cuda.bindings.runtime.cudaDeviceGraphMemTrim(0)"


def test_small_allocations_that_the_driver_s_figure_does_not_show_are_blamed_on_no_other_test(leaks: Report) -> None:
    for name in ("test_the_first_small_segment_goes", "test_a_small_segment_in_its_place_given_back"):
        assert subject(leaks, name).findings == ()
    # The first that is looked at in full after these.
    assert len(subject(leaks, "test_page_locked").findings) == 1


def test_a_limit_of_the_card_that_stays_changed_is_a_setting(leaks: Report) -> None:
    (finding,) = [item for item in subject(leaks, "test_limit").findings if item.resource == "globals"]
    assert "the card's cudaLimitStackSize was 1024, is 4096" in finding.message
    assert finding.remedy is not None
    assert finding.remedy.action.startswith("ctypes.CDLL('libcuda.so.1').cuCtxSetLimit(0, ctypes.c_size_t(1024))")


def test_an_array_on_the_host_is_found_below_what_a_card_s_libraries_may_take_there(leaks: Report) -> None:
    (finding,) = subject(leaks, "test_host_array").findings
    assert (finding.resource, finding.holder) == ("host-memory", "test_inner.ARRAYS['batch']")
    # It is a level: what libraries give back meanwhile, up to 8 MiB here, is taken off.
    assert finding.bytes >= 240 << 20


def test_what_another_process_has_exported_is_the_tensor_alone(of_others: Report) -> None:
    (finding,) = subject(of_others, "test_import").findings
    assert (finding.resource, finding.bytes) == ("tensors", 64 << 20)
    assert (finding.holder or "").startswith("test_inner.KEPT[")
    assert subject(of_others, "test_import_given_back").findings == ()


def test_to_look_imports_nothing_into_the_program(of_others: Report) -> None:
    assert subject(of_others, "test_that_torch_s_compiler_is_not_imported").findings == ()


def test_a_history_that_the_program_leaves_on_is_a_setting(of_others: Report) -> None:
    (finding,) = subject(of_others, "test_history_left_on").findings
    assert finding.resource == "globals"
    assert "torch.cuda.memory._record_memory_history was None, is 'all'" in finding.message
    assert subject(of_others, "test_history_switched_off").findings == ()


def test_the_plans_of_cufft_are_no_leak_and_are_said(of_others: Report) -> None:
    plans = subject(of_others, "test_plans")
    assert plans.findings == ()
    said = [line for line in plans.not_measured if "cuFFT" in line.what]
    assert all("torch.backends.cuda.cufft_plan_cache.clear()" in line.why for line in said)


def test_what_cupys_pool_keeps_is_said_and_what_an_array_holds_is_found(of_others: Report) -> None:
    pytest.importorskip("cupy")
    pool = subject(of_others, "test_cupys_pool")
    assert pool.findings == ()
    (line,) = [line for line in pool.not_measured if "cupy's pools on" in line.what]
    assert line.what.startswith("96.0 MiB in cupy's pools on cuda:0, of which ")
    assert "cupy.get_default_memory_pool().free_all_blocks()" in line.why
    (finding,) = subject(of_others, "test_cupys_array").findings
    assert (finding.resource, finding.bytes) == ("driver", 32 << 20)
    assert (finding.holder or "").startswith("test_inner.KEPT[")
    own = subject(of_others, "test_cupys_own_pool")
    assert own.findings == ()
    assert any(line.what.startswith("80.0 MiB in cupy's pools on cuda:0, of which 32.0 ") for line in own.not_measured)


def test_an_allocator_of_cupys_that_stays_is_a_setting(of_others: Report) -> None:
    pytest.importorskip("cupy")
    (finding,) = subject(of_others, "test_cupys_allocator").findings
    assert (finding.resource, finding.cause) == ("globals", "not-restored")
    assert "cupy.cuda.get_allocator() was " in finding.message
    assert subject(of_others, "test_cupys_allocator_put_back").findings == ()


def test_a_debug_mode_of_synchronisation_that_stays_is_a_setting(of_others: Report) -> None:
    (finding,) = subject(of_others, "test_sync_debug_mode").findings
    assert "torch.cuda.get_sync_debug_mode() was 0, is 1" in finding.message
    assert finding.remedy is not None
    assert finding.remedy.action == "torch.cuda.set_sync_debug_mode(0)"


def test_cupys_page_locked_memory_is_found_and_what_its_pool_keeps_is_not(of_others: Report) -> None:
    pytest.importorskip("cupy")
    (finding,) = subject(of_others, "test_cupys_pages").findings
    assert (finding.resource, finding.bytes) == ("pinned", 16 << 20)
    assert (finding.holder or "").startswith("test_inner.KEPT[")
    assert subject(of_others, "test_cupys_pages_given_back").findings == ()


def test_cupys_memory_under_a_tensor_is_the_tensor_s(of_others: Report) -> None:
    pytest.importorskip("cupy")
    (finding,) = subject(of_others, "test_view_of_cupys_array").findings
    assert (finding.resource, finding.bytes) == ("tensors", 96 << 20)


def test_cupys_view_of_a_tensor_is_its_holder(of_others: Report) -> None:
    pytest.importorskip("cupy")
    (finding,) = subject(of_others, "test_cupys_view_of_a_tensor").findings
    assert (finding.resource, finding.bytes) == ("tensors", 32 << 20)
    assert (finding.holder or "").startswith("test_inner.KEPT[")
    assert subject(of_others, "test_cupys_view_of_a_tensor_given_back").findings == ()


@pytest.mark.parametrize(
    "name",
    [
        "test_at_tolerance",
        "test_driver_segment_given_back",
        "test_cuda_array_given_back",
        "test_memory_node_given_back",
        "test_page_locked_given_back",
        "test_managed_given_back",
        "test_pinned_given_back",
        "test_limit_given_back",
    ],
)
def test_what_came_back_is_clean(leaks: Report, name: str) -> None:
    assert subject(leaks, name).findings == ()


def test_a_bound_method_in_a_cache_is_named_with_its_remedy_and_where_it_was_allocated(leaks: Report) -> None:
    (finding,) = subject(leaks, "test_bound_method_cache").findings
    assert finding.cause == "lru-cache"
    assert "supports" in (finding.holder or "")
    assert finding.remedy is not None
    assert finding.remedy.action == "test_inner.supports.cache_clear()"
    assert finding.remedy.returns_bytes == finding.bytes
    assert "Model.__init__" in [frame.function for frame in finding.allocated_at] or "__init__" in [
        frame.function for frame in finding.allocated_at
    ]
    assert not any("_pytest" in frame.file for frame in finding.allocated_at)


def test_what_autograd_saved_is_reported_with_the_node_and_goes_with_the_output(leaks: Report) -> None:
    findings = subject(leaks, "test_saved_for_backward").findings
    assert {finding.verdict for finding in findings} >= {"native-held"}
    held = " ".join(finding.holder or "" for finding in findings)
    assert "AccumulateGrad saved 'variable'" in held
    assert not any(finding.suppressed_by for finding in findings), "a block of a workspace's size that is none"
    assert all(finding.remedy is not None and "KEPT" in finding.remedy.action for finding in findings)
    assert all(finding.remedy is not None and finding.remedy.returns_bytes == finding.bytes for finding in findings)


def test_a_graph_that_stays_keeps_its_pool_and_is_named(leaks: Report) -> None:
    found = subject(leaks, "test_graph")
    assert found.outcome == "leak"
    (pool,) = [finding for finding in found.findings if finding.resource == "reserved"]
    assert (pool.cause, pool.verdict) == ("cuda-graph", "reachable")
    assert pool.holder == "test_inner.SESSION.graph"


def test_an_empty_pool_is_given_back_by_letting_go_of_it(leaks: Report) -> None:
    (finding,) = subject(leaks, "test_empty_private_pool").findings
    assert finding.holder is not None
    assert finding.remedy is not None
    assert finding.remedy.returns_bytes == finding.bytes


def test_pools_of_two_holders_are_two_findings_each_with_its_remedy(leaks: Report) -> None:
    found = subject(leaks, "test_pools_of_two_holders").findings
    assert [(finding.resource, finding.bytes) for finding in found] == [("reserved", 30 << 20), ("reserved", 2 << 20)]
    beside, kept = (finding.holder or "" for finding in found)
    assert beside == "test_inner.BESIDE[0]"
    assert kept.startswith("test_inner.KEPT[")
    assert all(finding.remedy is not None and finding.remedy.returns_bytes == finding.bytes for finding in found)


def test_a_process_group_that_stays_is_destroyed_and_what_that_gave_back_is_measured(leaks: Report) -> None:
    (finding,) = [item for item in subject(leaks, "test_process_group").findings if item.resource == "process-groups"]
    assert finding.remedy is not None
    assert finding.remedy.action == "torch.distributed.destroy_process_group()"
    assert finding.remedy.returns_bytes > 0
    assert finding.changed == ("all process groups are destroyed",)


def test_first_uses_and_caches_are_no_leaks(clean: Report) -> None:
    alarms = {
        item.id: [finding.message for finding in item.findings if finding.suppressed_by is None]
        for item in clean.subjects
    }
    errors = {item.id: item.reason for item in clean.subjects if item.outcome == "error"}
    assert ({name: reported for name, reported in alarms.items() if reported}, errors) == ({}, {})


def test_that_nvml_does_not_list_the_process_leaves_nothing_unjudged(leaks: Report, clean: Report) -> None:
    unmeasured = [missing for item in (*leaks.subjects, *clean.subjects) for missing in item.not_measured]
    assert [missing for missing in unmeasured if missing.what == "driver cuda:0"] == []


def test_what_libraries_keep_is_reported_as_known(clean: Report) -> None:
    known = {
        finding.holder or "": finding.suppressed_by
        for item in clean.subjects
        for finding in item.findings
        if finding.suppressed_by is not None
    }
    assert any(holder.startswith("workspace at ") for holder in known), known
    assert all("shipped_suppressions.toml" in (reason or "") for reason in known.values()), known


def test_torch_s_snapshot_is_kept_after_a_test_that_leaks_on_the_card(tmp_path: Path) -> None:
    snapshots = tmp_path / "report" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "lowtide-of-an-earlier-run.pickle").touch()
    inner = (
        "import torch\nKEPT = []\n"
        "def test_clean(): torch.zeros(1 << 20, device='cuda')\n"
        "def test_leak(): KEPT.append(torch.zeros(1 << 20, device='cuda'))\n"
    )
    judge(tmp_path, inner, "")
    assert [path.name for path in snapshots.iterdir()] == ["lowtide-test_inner.py-test_leak.pickle"]
