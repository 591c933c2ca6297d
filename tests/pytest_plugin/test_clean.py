"""What gives everything back, or is there to stay, is clean under `pytest --leakcheck`: no false alarm.

Each inner run judges many inner tests, since each run loads torch anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.reports.schema import Subject, read

Subjects = dict[str, Subject]


def run(folder: Path, *args: str, **files: str) -> Subjects:
    """What an inner run says of its tests, by name; `files` are the folder's modules."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plugins = ["-p", "lowtide.pytest_plugin.plugin", "-p", "no:cacheprovider"]
    # A leak fails nothing, so that whatever fails is an inner test gone wrong.
    # Whatever ends a little later does so in this time, and nothing else is waited for.
    options = ["--leakcheck", "--leakcheck-report", "report", "--leakcheck-action", "warn", "--leakcheck-settle", "60"]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *plugins, *options, *args]
    # No other plugin, so that a finding is the inner test's own doing.
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {subject.id.rpartition("::")[2]: subject for subject in read(folder / "report").subjects}


def names_of(source: str) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)


def clean(subject: Subject) -> None:
    assert (subject.outcome, subject.findings) == ("clean", ())


# First uses: what is loaded, started or built once and stays.  Each inner test comes first to what it uses.

HEAVY = """
import socket
import threading

import torch

TABLE = torch.arange(1000)
CACHE = {"eye": torch.eye(10)}
READER, WRITER = socket.socketpair()
THREAD = threading.Thread(target=threading.Event().wait, daemon=True)
THREAD.start()
"""

FIRST_USES = """
import torch


def test_first_matmul():
    torch.ones(300, 300) @ torch.ones(300, 300)


def test_first_convolution():
    torch.nn.functional.conv2d(torch.ones(1, 3, 64, 64), torch.ones(8, 3, 3, 3))


def test_first_backward():
    weight = torch.ones(300, 300, requires_grad=True)
    (weight @ weight).relu().sum().backward()
    assert weight.grad is not None


def test_first_decompositions():
    torch.linalg.svd(torch.rand(50, 50))
    torch.fft.fft(torch.rand(1000))


def test_first_random_numbers():
    torch.manual_seed(1)
    torch.randn(1000)
    torch.Generator().manual_seed(1)


def test_import_of_a_library_that_keeps_things():
    import heavy

    assert heavy.TABLE.sum() > 0


def test_import_in_which_frozen_objects_die(tmp_path, monkeypatch):
    import gc, sys

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "frees_some.py").write_text("import sys; sys.frozen_for_a_while.clear()")
    sys.frozen_for_a_while = [[number] for number in range(50)]
    gc.collect()
    gc.freeze()
    import frees_some

    gc.unfreeze()
    del sys.frozen_for_a_while, sys.modules["frees_some"]


def test_freeze_when_a_library_has_made_tensors_before():
    import gc

    gc.collect()
    gc.freeze()
    gc.unfreeze()


def test_import_of_torch_fx():
    import torch.fx

    torch.fx.symbolic_trace(torch.nn.Linear(2, 2))


def test_import_of_torch_distributed():
    import torch.distributed
    import torch.distributed.tensor


def test_import_of_numpy_random():
    import numpy.random

    numpy.random.default_rng(1).random(1000)


def test_import_of_much_of_the_standard_library():
    import asyncio, concurrent.futures, ctypes.util, decimal, email.message, http.client, sqlite3, unittest.mock


def test_first_optimizer():
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()


def test_first_set_num_threads():
    was = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(500, 500) @ torch.ones(500, 500)
    torch.set_num_threads(was)


def test_first_script():
    @torch.jit.script
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    add(torch.ones(3), torch.ones(3))


def test_first_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)


def test_first_functional_transforms():
    torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.ones(5, 3))


def test_first_profiler():
    with torch.profiler.profile() as profile:
        torch.ones(10) + 1
    profile.key_averages()


def test_first_process_of_multiprocessing():
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=print)
    process.start()
    process.join()
    process.close()
    queue.close()


def test_first_shared_memory():
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=4096)
    memory.close()
    memory.unlink()


def test_first_shared_tensor():
    torch.zeros(1000).share_memory_()


def test_first_process_group():
    import tempfile

    import torch.distributed

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, world_size=1, rank=0)
        torch.distributed.all_reduce(torch.ones(10))
        torch.distributed.destroy_process_group()


def test_first_store_over_a_network():
    import socket

    import torch.distributed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, world_size=1, rank=0)
    torch.distributed.destroy_process_group()


def test_first_descriptor_for_another_process():
    import os
    from multiprocessing import reduction

    shared = reduction.DupFd(0)
    os.close(shared.detach())


def test_first_loader_with_workers():
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=5, num_workers=2):
        assert len(batch) == 5


def test_first_compiled_function():
    function = torch.compile(lambda x: (x + 1).sum(), backend="eager")
    function(torch.ones(10))
    torch._dynamo.reset()


def test_first_compiled_module():
    model = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    model(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()


def test_first_thread_that_compiles():
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    with torch._inductor.config.patch(compile_threads=2):
        assert AsyncCompile.pool().submit(len, "ab").result() == 2
"""

# Everyday shapes.

SHAPES = """
import _thread
import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import gc
import json
import logging
import os
import queue
import random
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing
import unittest.mock
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn

NUMBERS, KEPT = {}, []
log = logging.getLogger("inner")


@functools.lru_cache
def square(number):
    return number * number


@functools.lru_cache
def described(function):
    return function.__name__


@functools.lru_cache
def pattern(text):
    return re.compile(text)


class Node:
    def __init__(self):
        self.itself = self
        self.tensor = torch.ones(100)


def test_large_allocation():
    torch.ones(500 << 18)


def test_many_small_allocations():
    [torch.ones(10) for _ in range(20_000)]


def test_large_bytes():
    bytearray(b"1") * (500 << 20)


def test_heap_of_objects():
    [{"number": number} for number in range(200_000)]


def test_lazily_built_table():
    NUMBERS.update((number, str(number)) for number in range(10_000))


def test_cache_of_numbers():
    [square(number) for number in range(200)]


def test_cache_of_strings():
    [pattern(f"a{number}") for number in range(50)]


def test_cache_of_functions():
    described(test_cache_of_numbers)
    described(len)


def test_cache_of_a_local_function():
    def local():
        return 1

    described(local)


def test_caches_of_the_standard_library():
    [re.compile(f"b{number}+") for number in range(600)]
    typing.Dict[int, typing.List[str]]
    json.dumps({"a": [1, 2]})


def test_logging(caplog):
    with caplog.at_level(logging.INFO):
        log.info("of %s", torch.ones(100))
        log.warning("and %s", Node())


def test_log_of_the_teardown(request):
    request.addfinalizer(lambda: log.warning("of %s", torch.ones(100)))


def test_handler_added_and_removed():
    handler = logging.StreamHandler()
    log.addHandler(handler)
    log.warning("of %s", torch.ones(10))
    log.removeHandler(handler)


def test_temporary_files(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["a"].sum() == 100


def test_loaded_from_a_mapped_file(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", mmap=True)["a"].sum() == 100


def test_monkeypatch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)
    monkeypatch.setattr(torch, "ones", lambda *args: torch.zeros(*args))
    monkeypatch.setenv("A", "1")
    torch.ones(3)


def test_mock():
    with unittest.mock.patch("torch.cuda.empty_cache") as empty_cache:
        torch.cuda.empty_cache(torch.ones(10))
    empty_cache.assert_called_once()


def test_mock_of_a_method():
    model = nn.Linear(2, 2)
    with unittest.mock.patch.object(model, "forward", wraps=model.forward) as forward:
        model(torch.ones(1, 2))
    assert forward.call_args is not None


def test_executor():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda size: torch.ones(size).sum().item(), range(10))) == 45


def test_executor_left_to_the_collector():
    pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(torch.ones, 10).result()


def test_executor_left_in_a_cycle():
    node = Node()
    node.pool = concurrent.futures.ThreadPoolExecutor(2)
    node.pool.submit(torch.ones, 10).result()


def test_thread_that_ends_a_little_later():
    threading.Thread(target=time.sleep, args=(0.2,)).start()


def test_thread_of_c_that_asks_for_its_object():
    asked = []
    _thread.start_new_thread(lambda: asked.append(threading.current_thread()), ())
    while not asked:
        time.sleep(0.01)


def test_thread_that_ends_a_little_later_with_a_tensor():
    def wait(tensor):
        time.sleep(0.2)
        tensor.sum()

    threading.Thread(target=wait, args=(torch.ones(100),)).start()


def test_timer_cancelled():
    timer = threading.Timer(60, int)
    timer.start()
    timer.cancel()


def test_process():
    subprocess.run([sys.executable, "-c", ""], check=True, capture_output=True)


def test_process_that_ends_a_little_later():
    subprocess.Popen(["sleep", "0.2"])


def test_process_that_ended_and_nobody_waited_for():
    subprocess.Popen(["true"])
    time.sleep(0.1)


def test_forked_process_that_ends_a_little_later():
    import multiprocessing

    multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.2,)).start()


def test_process_pool():
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(abs, range(-3, 0))) == [3, 2, 1]


def test_asyncio():
    async def wait():
        tensor = torch.ones(10)
        await asyncio.sleep(0.01)
        return tensor.sum()

    async def both():
        return await asyncio.gather(wait(), wait())

    asyncio.run(both())


def test_asyncio_with_threads():
    async def wait():
        return await asyncio.to_thread(torch.ones, 10)

    asyncio.run(wait())


def test_task_cancelled():
    async def main():
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())


def test_sockets():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    for end in (accepted, client, server):
        end.close()


def test_file_left_to_the_collector():
    node = Node()
    node.file = open(os.devnull)


def test_queue():
    waiting = queue.Queue()
    waiting.put(torch.ones(10))
    waiting.get()


def test_deepcopy():
    copy.deepcopy(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)))


def test_training():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 10)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def test_retained_graph():
    weight = torch.ones(100, requires_grad=True)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.autograd.grad((weight**3).sum(), weight, create_graph=True)


def test_hooks_removed():
    model = nn.Linear(4, 4)
    handles = [model.register_forward_hook(lambda *_: None), model.weight.register_hook(lambda grad: grad)]
    model(torch.ones(1, 4)).sum().backward()
    for handle in handles:
        handle.remove()


def test_own_autograd_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            context.kept = x
            return 2 * x

        @staticmethod
        def backward(context, gradient):
            return 2 * gradient

    Double.apply(torch.ones(10, requires_grad=True)).sum().backward()


def test_weak_references():
    tensor = torch.ones(10)
    seen = []
    reference = weakref.ref(tensor, seen.append)
    weakref.finalize(tensor, seen.append, 1)
    KEPT.append(reference)
    del tensor
    assert len(seen) == 2


def test_swapped_tensors():
    first, second = torch.ones(10), torch.zeros(20)
    torch.utils.swap_tensors(first, second)
    assert len(first) == 20


def test_module_moved_by_swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    nn.Linear(4, 4).double()
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_cycles():
    for _ in range(100):
        Node()


def test_cycle_of_modules():
    parent, child = nn.Linear(10, 10), nn.Linear(10, 10)
    parent.child = child
    object.__setattr__(child, "parent", parent)


def test_class_made_here():
    class Local(nn.Module):
        table = torch.ones(100)

    Local()


def test_generator_exhausted():
    assert len(list(torch.ones(size) for size in range(10))) == 10


def test_generator_left_suspended():
    def tensors():
        tensor = torch.ones(10)
        yield tensor
        yield tensor

    next(tensors())


def test_exception_caught():
    def fail():
        tensor = torch.ones(100)
        raise ValueError(tensor)

    try:
        fail()
    except ValueError as error:
        kept = error
    assert kept.__traceback__ is not None


def test_exception_expected():
    def fail():
        tensor = torch.ones(100)
        raise ValueError(tensor)

    with pytest.raises(ValueError) as caught:
        fail()
    assert caught.value.args


def test_exception_in_a_thread_pool():
    def fail():
        tensor = torch.ones(100)
        raise ValueError(tensor)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(fail).exception(), ValueError)


def test_warnings():
    warnings.warn(str(torch.ones(2)))
    with pytest.warns(UserWarning):
        warnings.warn("with a source", source=Node())


def test_captured_by_python(capsys):
    print(torch.ones(10))
    assert "tensor" in capsys.readouterr().out


def test_captured_descriptors(capfd):
    os.write(1, b"written")
    assert capfd.readouterr().out == "written"


def test_skipped_half_way():
    tensor = torch.ones(10)
    pytest.skip("for no reason")


@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    tensor = torch.ones(10)
    assert tensor.sum() == 11


def test_random_seeds():
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    torch.random.fork_rng().__enter__()


def test_modes():
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
        nn.Linear(4, 4)(torch.ones(1, 4))
    with torch.set_grad_enabled(False), torch.device("meta"):
        torch.ones(10)


@pytest.fixture
def doubles():
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(was)


def test_default_dtype_restored_by_a_fixture(doubles):
    assert torch.ones(1).dtype == torch.float64


def test_collector_switched_off_and_on():
    gc.disable()
    [Node() for _ in range(100)]
    gc.enable()


def test_collector_thresholds_restored():
    was = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    [Node() for _ in range(100)]
    gc.set_threshold(*was)


def test_frozen_and_unfrozen():
    model = nn.Linear(10, 10)
    gc.collect()
    gc.freeze()
    model(torch.ones(1, 10))
    gc.unfreeze()


def test_traced():
    torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))(torch.ones(1, 2))


def test_traced_by_the_old_tracer():
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))


def test_without_memory():
    KEPT.append(torch.ones(10, 10, device="meta"))


def test_loader():
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    assert len(list(torch.utils.data.DataLoader(data, batch_size=5, shuffle=True))) == 4


def test_loader_left_half_way():
    data = torch.utils.data.TensorDataset(torch.arange(40.0))
    next(iter(torch.utils.data.DataLoader(data, batch_size=5, num_workers=2)))


def test_native_memory():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(200 << 20)))
    libc.memset(address, 1, ctypes.c_size_t(200 << 20))
    libc.free(address)


def test_cache_of_tensors_cleared():
    cached = functools.cache(torch.ones)
    cached(10)
    cached.cache_clear()


def test_cache_of_tensors_dropped():
    functools.cache(torch.ones)(10)


def test_cache_of_models_in_an_object():
    class Models:
        @functools.cached_property
        def model(self):
            return nn.Linear(10, 10)

    Models().model


def test_parametrization():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model(torch.ones(1, 4))


def test_state_dict_kept_as_numbers():
    KEPT.append({name: value.tolist() for name, value in nn.Linear(2, 2).state_dict().items()})


def test_pickled():
    import pickle

    pickle.loads(pickle.dumps(nn.Linear(2, 2)))


def test_scalar_results_kept():
    KEPT.append(torch.ones(100).sum().item())
    KEPT.append(torch.ones(100).shape)


def test_array_kept_as_a_copy():
    KEPT.append(torch.ones(100).numpy().copy())


def test_old_tensor_changed_in_place():
    BUFFER.fill_(1)
    BUFFER[10:].mul_(2)


BUFFER = torch.zeros(100)
"""


@pytest.fixture(scope="module")
def first_uses(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    # What a library keeps for good is waited for in vain, and that is in two of them.
    settle = ("--leakcheck-settle", "5")
    folder = tmp_path_factory.mktemp("first_uses")
    return run(folder, "test_first_uses.py", *settle, test_first_uses=FIRST_USES, heavy=HEAVY)


@pytest.mark.parametrize("name", names_of(FIRST_USES))
def test_a_first_use_is_clean(first_uses: Subjects, name: str) -> None:
    clean(first_uses[name])


# The same shapes over and over: what happens seldom in one test happens in one of a thousand.

THOUSAND = """
import concurrent.futures
import gc
import os

import pytest
import torch
from torch import nn


class Node:
    def __init__(self):
        self.itself = self
        self.tensor = torch.ones(100)


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.fixture
def held():
    tensor = torch.ones(10)
    yield tensor


def tensors(turn):
    torch.ones(turn + 1) * 2


def cycles(turn):
    [Node() for _ in range(turn % 50)]


def objects(turn):
    [{"turn": turn} for _ in range(500)]


def gradients(turn):
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad is not None


def files(turn):
    os.close(os.open(os.devnull, os.O_RDONLY))


def threads(turn):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(torch.ones, 10).result()


def collected(turn):
    node = Node()
    gc.collect(turn % 2)
    del node


def failed(turn):
    with pytest.raises(ValueError):
        raise ValueError(torch.ones(10))


def modules(turn):
    nn.Linear(4, 4)(torch.ones(1, 4))


def nothing(turn):
    pass


BODIES = [tensors, cycles, objects, gradients, files, threads, collected, failed, modules, nothing]


@pytest.fixture(scope="module")
def made():
    class Service:
        cache = {}

    class Unused:
        cache = {}

    def call(key, kept={}):
        kept[key], call.kept = torch.ones(11), torch.ones(12)

    return Service(), Unused, call


@pytest.mark.parametrize("turn", range(2))
def test_what_it_keeps_belongs_to_what_a_fixture_made(turn, made):
    instance, cls, function = made
    instance.cache[turn] = torch.ones(13)
    cls.cache[turn] = torch.ones(14)
    function(turn)


@pytest.mark.parametrize("turn", range(1000))
def test_turn(turn, model, held):
    BODIES[turn % 10](turn)
    if turn % 3 == 0:
        with torch.no_grad():
            model(torch.ones(1, 8))
"""


@pytest.fixture(scope="module")
def everyday(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """One inner run over each shape once."""
    return run(tmp_path_factory.mktemp("everyday"), "test_shapes.py", test_shapes=SHAPES)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """One inner run over a thousand tests."""
    return run(tmp_path_factory.mktemp("thousand"), "test_thousand.py", test_thousand=THOUSAND)


@pytest.mark.parametrize("name", names_of(SHAPES))
def test_an_everyday_shape_is_clean(everyday: Subjects, name: str) -> None:
    clean(everyday[name])


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(2))
def test_what_lies_under_a_class_that_a_fixture_made_is_no_tests(thousand: Subjects, turn: int) -> None:
    clean(thousand[f"test_what_it_keeps_belongs_to_what_a_fixture_made[{turn}]"])


@pytest.mark.nightly
def test_a_thousand_clean_tests_raise_no_alarm(thousand: Subjects) -> None:
    turns = [subject for name, subject in thousand.items() if name.startswith("test_turn[")]
    assert [subject for subject in turns if subject.findings or subject.outcome != "clean"] == []
    assert len(turns) == 1000
