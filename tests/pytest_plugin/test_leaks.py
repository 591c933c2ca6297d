"""Leaks of every resource, through every holder, under `pytest --leakcheck`; and each one's twin that gives it back.

One inner run judges many inner tests at once, since each run loads torch anew, and most holders leak in one inner test,
since each leaking test costs a walk of the heap. A case is the body of a leak and, for its twin, what takes it back.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowtide.reports.schema import Finding, Subject, read

Subjects = dict[str, Subject]


@dataclass(frozen=True)
class Case:
    """Something that leaks, and what must be said of it.

    Attributes:
        name: its inner test's, without `test_`; its twin's ends in `_given_back`.
        leak: the body.
        undo: what the twin does besides.
        cause: the finding's.
        holder: part of the finding's holder.
        bytes: the finding's; 0 for tensors: one of the size that its turn gives it.
        count: the finding's.
    """

    name: str
    leak: str
    undo: str
    cause: str
    holder: str = ""
    bytes: int = 0
    count: int = 1

    def __str__(self) -> str:
        return self.name


def leaking(case: Case) -> str:
    return f"def leak_{case.name}():\n{textwrap.indent(case.leak, '    ')}\n\n\n"


def twin(case: Case) -> str:
    body = textwrap.indent(f"{case.leak}\n{case.undo}", "    ")
    return f"def test_{case.name}_given_back():\n{body}\n\n\n"


def all_at_once(cases: Sequence[Case], name: str) -> str:
    """The twins, and one inner test that leaks in every way, tensors of another size in each."""
    calls = "".join(f"    SIZE = {own_size(case, cases)}\n    leak_{case.name}()\n" for case in cases)
    together = f"def test_{name}():\n    global SIZE\n{calls}    SIZE = 1024\n\n\n"
    return "".join(leaking(case) + twin(case) for case in cases) + together


def own_size(case: Case, cases: Sequence[Case]) -> int:
    return case.bytes or 2001 + cases.index(case)


def run(folder: Path, *args: str, **files: str) -> Subjects:
    """What an inner run says of its tests, by name; `files` are the folder's modules."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plugins = ["-p", "lowtide.pytest_plugin.plugin", "-p", "no:cacheprovider"]
    options = ["--leakcheck", "--leakcheck-report", "report", "--leakcheck-settle", "0.2"]
    # A leak fails nothing, so that whatever fails is an inner test gone wrong.
    options += ["--leakcheck-action", "warn"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options, *args]
    command += [f"{name}.py" for name in files if name != "conftest"]
    # No other plugin, so that a finding is the inner test's own doing.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {subject.id.rpartition("::")[2]: subject for subject in read(folder / "report").subjects}


def of(subject: Subject, resource: str = "tensors") -> Finding:
    """The one finding of a resource."""
    (finding,) = all_of(subject, resource)
    return finding


def all_of(subject: Subject, resource: str) -> list[Finding]:
    """The findings of a resource."""
    return [finding for finding in subject.findings if finding.resource == resource]


PRELUDE = """
import asyncio, atexit, collections, concurrent.futures, contextvars, copy, ctypes, dataclasses, functools, gc
import mmap, multiprocessing, os, select, signal, socket, subprocess, sys, tempfile, threading, time, types, weakref
from multiprocessing import shared_memory
import numpy
import pytest
import torch
from torch import nn
import lowtide
from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages

SIZE = 1024


def make(size=None):
    return torch.zeros(size or SIZE, dtype=torch.uint8)
"""

# Tensors, by who holds them.

HOLDERS_PRELUDE = (
    PRELUDE
    + """
TABLE, ROWS, SEEN, QUEUE, CALLS = {}, [], set(), collections.deque(), []
LOCAL = threading.local()
POOL = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pool")
POOL.submit(int).result()
CONTEXT = contextvars.ContextVar("CONTEXT")
# Until Python 3.10 it is that of the package `exceptiongroup`, which pytest imports.
EXCEPTHOOK = sys.excepthook


class Registry:
    shared = None

    def __init__(self):
        self.held = None


class Slotted:
    __slots__ = ("held",)


REGISTRY, SLOTTED = Registry(), Slotted()


def remember(value, kept=[]):
    kept.append(value)


def make_counter():
    kept = []

    def count(value):
        kept.append(value)

    return count


count = make_counter()


@functools.lru_cache
def by_key(tensor):
    return 1


@functools.lru_cache
def by_value(make):
    return make()


@functools.lru_cache
def supports(method):
    return True


@functools.cache
def wrapped(function):
    return True


class Model:
    def __init__(self):
        self.weight = make()

    def forward(self):
        return self.weight

    @functools.lru_cache
    def described(self):
        return 1


class Lazy:
    @functools.cached_property
    def table(self):
        return make()


LAZY = Lazy()
NETWORK = nn.Linear(2, 2, bias=False)
WEIGHT = nn.Parameter(torch.ones(256))


def wait_with(tensor, ready, done):
    ready.set()
    done.wait()


def suspended():
    tensor = make()
    yield 1
    tensor.sum()
"""
)

HOLDERS = (
    Case("plain_global", "global PLAIN\nPLAIN = make()", "PLAIN = None", "module-global", "test_holders.PLAIN"),
    Case("entry_of_a_dict", "TABLE['a'] = make()", "del TABLE['a']", "module-global", "test_holders.TABLE['a']"),
    Case("entry_of_a_list", "ROWS.append(make())", "ROWS.clear()", "module-global", "test_holders.ROWS[0]"),
    Case(
        "deep_in_containers",
        "TABLE['deep'] = {'rows': [(1, make())]}",
        "del TABLE['deep']",
        "module-global",
        "test_holders.TABLE['deep']['rows'][0][1]",
    ),
    Case("member_of_a_set", "SEEN.add(make())", "SEEN.clear()", "module-global", "test_holders.SEEN"),
    Case("entry_of_a_deque", "QUEUE.append(make())", "QUEUE.clear()", "module-global", "test_holders.QUEUE"),
    Case("new_object", "global NEW\nNEW = Model()", "NEW = None", "module-global", "test_holders.NEW.weight"),
    Case(
        "attribute_of_a_long_lived_object",
        "REGISTRY.held = make()",
        "REGISTRY.held = None",
        "instance-attribute",
        "test_holders.REGISTRY.held",
    ),
    Case(
        "slot_of_a_long_lived_object",
        "SLOTTED.held = make()",
        "SLOTTED.held = None",
        "instance-attribute",
        "test_holders.SLOTTED.held",
    ),
    Case(
        "cached_property_of_a_long_lived_object",
        "LAZY.table",
        "del LAZY.table",
        "instance-attribute",
        "test_holders.LAZY.table",
    ),
    Case(
        "class_attribute",
        "Registry.shared = make()",
        "Registry.shared = None",
        "class-attribute",
        "test_holders.Registry.shared",
    ),
    Case("closure", "count(make())", "count.__closure__[0].cell_contents.clear()", "closure", "test_holders.count"),
    Case(
        "default_argument", "remember(make())", "remember.__defaults__[0].clear()", "closure", "test_holders.remember"
    ),
    Case(
        "registered_callback",
        "tensor = make()\nCALLS.append(lambda: tensor)",
        "CALLS.clear()",
        "closure",
        "test_holders.CALLS[0]",
    ),
    Case(
        "function_attribute",
        "make.last = make()",
        "del make.last",
        "instance-attribute",
        "test_holders.make.last",
    ),
    Case(
        "running_thread",
        "global DONE\nready, DONE = threading.Event(), threading.Event()\n"
        "thread = threading.Thread(target=wait_with, args=(make(), ready, DONE), name='worker', daemon=True)\n"
        "thread.start()\nready.wait()",
        "DONE.set()\nthread.join()",
        "thread",
        "worker",
    ),
    Case(
        "suspended_generator",
        "global GENERATOR\nGENERATOR = suspended()\nnext(GENERATOR)",
        "GENERATOR = None",
        "module-global",
        "test_holders.GENERATOR",
    ),
    Case("thread_local", "LOCAL.held = make()", "del LOCAL.held", "thread", "test_holders.LOCAL.held"),
    Case(
        "thread_local_of_another_thread",
        "POOL.submit(lambda: setattr(LOCAL, 'other', make())).result()",
        "POOL.submit(lambda: delattr(LOCAL, 'other')).result()",
        "thread",
        "test_holders.LOCAL.other",
    ),
    Case("context_variable", "token = CONTEXT.set(make())", "CONTEXT.reset(token)", "thread", "CONTEXT"),
    Case("lru_cache_key", "by_key(make())", "by_key.cache_clear()", "lru-cache", "test_holders.by_key (lru_cache key"),
    Case(
        "lru_cache_value",
        "by_value(make)",
        "by_value.cache_clear()",
        "lru-cache",
        "test_holders.by_value (lru_cache",
    ),
    Case(
        "bound_method_in_lru_cache",
        "supports(Model().forward)",
        "supports.cache_clear()",
        "lru-cache",
        "test_holders.supports (lru_cache key",
    ),
    Case(
        "partial_of_a_bound_method_in_lru_cache",
        "wrapped(functools.partial(Model().forward))",
        "wrapped.cache_clear()",
        "lru-cache",
        "test_holders.wrapped (lru_cache key",
    ),
    Case(
        "self_in_a_methods_lru_cache",
        "Model().described()",
        "Model.described.cache_clear()",
        "lru-cache",
        "test_holders.Model.described (lru_cache key",
    ),
    Case(
        "exception_with_its_frames",
        "global ERROR\ntry:\n    tensor = make()\n    raise ValueError\nexcept ValueError as error:\n    ERROR = error",
        "ERROR = None\ndel tensor",
        "module-global",
        "test_holders.ERROR",
    ),
    Case(
        "arguments_of_a_finalizer",
        "finalizer = weakref.finalize(REGISTRY, len, make())",
        "finalizer.detach()",
        "class-attribute",
        "finalize",
    ),
    Case(
        "excepthook",
        "tensor = make()\nsys.excepthook = lambda *_: tensor",
        "sys.excepthook = EXCEPTHOOK",
        "closure",
        "sys.excepthook, closure cell 'tensor'",
    ),
    Case(
        "module_made_at_run_time",
        "made = types.ModuleType('made')\nmade.held = make()\nsys.modules['made'] = made",
        "del sys.modules['made']",
        "module-global",
        "made.held",
    ),
    Case(
        "forward_hook_of_a_long_lived_module",
        "tensor = make()\nhandle = NETWORK.register_forward_hook(lambda *_: tensor)",
        "handle.remove()",
        "closure",
        "test_holders.NETWORK._forward_hooks",
    ),
    Case(
        "buffer_of_a_long_lived_module",
        "NETWORK.register_buffer('table', make())",
        "del NETWORK.table",
        "instance-attribute",
        "test_holders.NETWORK.table",
    ),
    Case(
        "gradient_of_a_long_lived_parameter",
        "(WEIGHT * 2).sum().backward()\nassert WEIGHT.grad is not None",
        "WEIGHT.grad = None",
        "instance-attribute",
        "test_holders.WEIGHT.grad",
        bytes=1024,
    ),
    Case(
        "fx_module",
        "global TRACED\nmodel = nn.Linear(16, 8, bias=False)\nTRACED = torch.fx.symbolic_trace(nn.Sequential(model))",
        "TRACED = None",
        "compiled-code",
        "test_holders.TRACED",
        bytes=512,
    ),
    Case(
        "numpy_array_over_a_tensor",
        "global ARRAY\nARRAY = make().numpy()",
        "ARRAY = None",
        "module-global",
        "ARRAY.base",
    ),
    Case(
        "running_function",
        "frame = sys._getframe()\n"
        "while 'conftest.py' not in frame.f_code.co_filename:\n    frame = frame.f_back\n"
        "kept = frame.f_locals['kept']\nkept.append(make())\ndel frame",
        "kept.clear()",
        "frame",
        "pytest_runtestloop() in conftest",
    ),
    Case(
        "worker_thread_made_it",
        "thread = threading.Thread(target=lambda: TABLE.update(worker=make()))\nthread.start()\nthread.join()",
        "TABLE.clear()",
        "module-global",
        "test_holders.TABLE['worker']",
    ),
)

LOOP = """
import _pytest.main
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    kept = []
    return _pytest.main.pytest_runtestloop(session)
"""

# A loss kept with its graph: what autograd saved is held from C++ only.
GRAPH = """
def test_loss_with_its_graph():
    global LOSS
    parameter = nn.Parameter(torch.ones(10, 30))
    inputs = torch.ones(30, 5)
    hidden = parameter @ inputs
    LOSS = (hidden * hidden).sum()


def test_loss_with_its_graph_given_back():
    test_loss_with_its_graph()
    global LOSS
    LOSS = LOSS.item()


def test_graph_that_ends_in_itself():
    weight = torch.ones(10, requires_grad=True)
    weight.loss = (weight * 2).sum()


"""

# Tensors, by what kind of memory is under them; each is an attribute of `Kinds`, under its case's name.

KINDS_PRELUDE = (
    PRELUDE
    + """
KEPT = {}
OLD = torch.zeros(4096, dtype=torch.uint8)
GROWING = torch.zeros(16, dtype=torch.uint8)


class Kinds:
    pass


class Subclass(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError
"""
)


def kind(name: str, expression: str, size: int, count: int = 1) -> Case:
    return Case(
        name, f"Kinds.{name} = {expression}", f"del Kinds.{name}", "class-attribute", f"Kinds.{name}", size, count
    )


KINDS = (
    kind("one_byte", "torch.zeros(1, dtype=torch.uint8)", 1),
    kind("bools", "torch.zeros(7, dtype=torch.bool)", 7),
    kind("complex_numbers", "torch.zeros(8, dtype=torch.complex64)", 64),
    kind("parameter", "nn.Parameter(torch.zeros(10))", 40),
    kind("subclass", "torch.zeros(11).as_subclass(Subclass)", 44),
    kind("wrapper_subclass", "Wrapper(torch.zeros(12))", 48),
    kind("part_of_a_large_storage", "torch.zeros(1000)[10:20]", 4000),
    kind("empty_view", "torch.zeros(1001)[:0]", 4004),
    kind("expanded", "torch.zeros(13).expand(100, 13)", 52),
    kind("storage_object", "torch.UntypedStorage(1003)", 1003),
    kind("storage_of_a_tensor", "torch.zeros(1005, dtype=torch.uint8).untyped_storage()", 1005),
    kind("two_views_of_one_storage", "(lambda tensor: [tensor[:5], tensor[5:]])(torch.zeros(15))", 60),
    kind("two_tensors", "[torch.zeros(17), torch.zeros(17)]", 136, count=2),
    kind("sparse", "torch.sparse_coo_tensor([[0, 2, 4]], [1.0, 2.0, 3.0], (9,))", 36, count=2),
    kind(
        "sparse_rows",
        "torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2))",
        24 + 16 + 8,
        count=3,
    ),
    kind("quantised", "torch.quantize_per_tensor(torch.zeros(18), 0.1, 0, torch.quint8)", 18),
    kind("numpy_array_under_it", "torch.from_numpy(numpy.zeros(19))", 152),
    kind("file_under_it", "torch.from_file('weights.bin', shared=True, size=2000, dtype=torch.uint8)", 2000),
    kind("shared_memory_under_it", "torch.zeros(2100, dtype=torch.uint8).share_memory_()", 2100),
    kind("nested", "torch.nested.nested_tensor([torch.zeros(20), torch.zeros(22)])", 168),
    kind("deep_copy", "copy.deepcopy(nn.Parameter(torch.zeros(23)))", 92),
    kind("frozen_dataclass", "dataclasses.make_dataclass('Batch', ['ids'], frozen=True)(torch.zeros(25))", 100),
    kind("inference_tensor", "torch.inference_mode()(lambda: torch.zeros(26))()", 104),
    kind("of_a_vmap", "torch.vmap(lambda row: row * 2)(torch.zeros(3, 9))", 108),
    kind("cloned", "OLD[:117].clone()", 117),
)

KINDS_CLEAN = """
def test_tensors_without_memory_of_their_own():
    KEPT["view"] = OLD[1:]
    KEPT["detached"] = OLD.detach()
    KEPT["array"] = OLD.numpy()
    KEPT["storage"] = OLD.untyped_storage()
    KEPT["empty"] = torch.empty(0)
    KEPT["meta"] = torch.empty(1000, device="meta")


def test_a_weak_reference():
    KEPT["weak"] = weakref.ref(make())


NETWORK = nn.Linear(2, 2)


def test_a_tensor_that_cannot_be_read():
    KEPT["mkldnn"] = torch.ones(8).to_mkldnn()


def test_a_tensor_that_cannot_be_read_given_back():
    KEPT["again"] = torch.ones(8).to_mkldnn()
    del KEPT["again"]
"""

# Tensors, by when they are made.

MOMENTS = (
    PRELUDE
    + """
KEPT, LATER = [], []


def test_collector_at_work():
    gc.disable()
    KEPT.append(make(110))
    gc.enable()
    KEPT.append(make(120))
    gc.collect()
    KEPT.append(make(130))
    gc.collect(1)
    LATER.append([[] for _ in range(100_000)])
    KEPT.append(make(140))
    LATER.append([[] for _ in range(100_000)])
    LATER.clear()
    KEPT.append(make(150))


def test_many_tensors():
    KEPT.append([make(16) for _ in range(1_000)])


def test_many_tensors_dropped():
    for _ in range(5_000):
        make(16)


def test_frozen_and_unfrozen_after_it():
    KEPT.append(make())
    gc.freeze()
    gc.unfreeze()


def test_collected_frozen_and_unfrozen_after_it():
    KEPT.append(make())
    gc.collect()
    gc.freeze()
    gc.unfreeze()


def test_made_while_frozen():
    gc.freeze()
    KEPT.append(make())
    gc.collect()
    gc.unfreeze()


class Node:
    pass


def test_frozen_garbage():
    node = Node()
    node.itself, node.held = node, make()
    gc.freeze()


def test_garbage():
    node = Node()
    node.itself, node.held = node, make()


def test_frozen_and_unfrozen():
    gc.freeze()
    make()
    gc.unfreeze()


@pytest.fixture
def held_by_the_fixture():
    tensor = make()
    yield tensor
    del tensor


def test_fixture_that_holds_its_tensor(held_by_the_fixture):
    pass


@pytest.fixture
def made_around():
    KEPT.append(make(600))
    yield
    KEPT.append(make(700))


@pytest.mark.usefixtures("made_around")
def test_stages():
    with lowtide.stage("create"):
        KEPT.append(make(100))
        with lowtide.stage("load_weights"):
            KEPT.append(make(200))
        KEPT.append(make(300))
    KEPT.append(make(500))


class Box:
    tensor = None


@pytest.fixture(scope="module")
def box():
    box = Box()
    box.tensor = make()
    box.address = id(box.tensor)
    yield box


MEMORY = bytearray(3000)


@pytest.fixture(scope="module")
def large_box():
    box = Box()
    box.tensor = torch.frombuffer(MEMORY, dtype=torch.uint8)
    yield box


def test_a_wider_fixture(large_box):
    pass


def test_takes_the_memory_of_a_wider_fixture(large_box):
    large_box.tensor = None
    KEPT.append(torch.frombuffer(MEMORY, dtype=torch.uint8))


@pytest.fixture(scope="module")
def of_the_module():
    return Box()


def test_keeps_in_a_class_of_the_module(of_the_module):
    type(of_the_module).tensor = make(70)


def test_clean_after_a_leak():
    Box.tensor = None
    make()


def test_frees_what_another_leaked():
    KEPT.clear()
    globals().pop("ERROR", None)


def test_three_holders():
    global FIRST, SECOND, THIRD
    FIRST, SECOND = make(10), make(20)
    KEPT.extend(make(30) for _ in range(4))
    THIRD = SECOND


def test_tensor_and_thread_and_descriptor():
    global THREAD, READER
    KEPT.append(make(50))
    THREAD = threading.Timer(600, int)
    THREAD.daemon = True
    THREAD.start()
    READER = os.open("/dev/null", os.O_RDONLY)


@pytest.mark.leakcheck(tolerance=4096)
def test_marker_at_the_tolerance():
    KEPT.append(make(4096))


@pytest.mark.leakcheck(tolerance="4KiB")
def test_marker_above_the_tolerance():
    KEPT.append([make(2048), make(2049)])


@pytest.mark.leakcheck(tolerance="1GiB")
def test_marker_for_bytes_and_a_thread():
    timer = threading.Timer(600, int)
    timer.daemon = True
    timer.start()
    HELD.append(timer)


HELD = []


def shared(size):
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=size)
    memory.close()
    HELD.append(memory)


@pytest.mark.leakcheck(tolerance=8192)
def test_marker_at_the_tolerance_in_shared_memory():
    shared(8192)


@pytest.mark.leakcheck(tolerance=8191)
def test_marker_above_the_tolerance_in_shared_memory():
    shared(8192)


def test_last():
    for held in HELD:
        getattr(held, "unlink", held.cancel if hasattr(held, "cancel") else int)()
"""
)

# Everything else.

RESOURCES_PRELUDE = (
    PRELUDE
    + """
KEPT, ENDINGS = [], []
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
HUGE = 300 << 20


@atexit.register
def end():
    for ending in ENDINGS:
        ending()


@functools.lru_cache
def supports(module):
    return True


@functools.lru_cache
def cached(method):
    return True


class Plain:
    def method(self):
        pass


def wait_forever(name):
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name, daemon=True)
    thread.start()
    return thread, done


def patched(place, name):
    was = getattr(place, name)
    setattr(place, name, lambda *args: None)
    return was


def group():
    import torch.distributed

    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=1, rank=0)
"""
)


def other(name: str, leak: str, undo: str, reported: str, size: int = 0) -> Case:
    """A leak of something that is no tensor; `reported` is in the finding's message."""
    return Case(name, leak, undo, cause="", holder=reported, bytes=size)


RESOURCES = {
    "lru-cache": (
        other("module_in_lru_cache", "supports(nn.ReLU())", "supports.cache_clear()", "ReLU"),
        other("bound_object_in_lru_cache", "cached(Plain().method)", "cached.cache_clear()", "Plain"),
    ),
    "threads": (
        other("thread", "thread, done = wait_forever('waiting')", "done.set()\nthread.join()", "waiting ("),
        other(
            "timer",
            "timer = threading.Timer(600, int)\ntimer.name, timer.daemon = 'timer', True\ntimer.start()",
            "timer.cancel()\ntimer.join()",
            "timer (",
        ),
        other(
            "executor",
            "pool = concurrent.futures.ThreadPoolExecutor(3, 'pool')\nKEPT.append(pool)\npool.submit(int).result()",
            "KEPT.remove(pool)\npool.shutdown()",
            "pool_0 (",
        ),
    ),
    "processes": (
        other(
            "subprocess",
            "child = subprocess.Popen(['sleep', '600'])\nENDINGS.append(child.kill)",
            "ENDINGS.remove(child.kill)\nchild.kill()\nchild.wait()",
            "",
        ),
        other(
            "forked_process",
            "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
            "child.start()\nKEPT.append(child)",
            "KEPT.remove(child)\nchild.kill()\nchild.join()\nchild.close()",
            "",
        ),
    ),
    "file-descriptors": (
        other(
            "file", "file = open(__file__)\nKEPT.append(file)", "KEPT.remove(file)\nfile.close()", "test_resources.py"
        ),
        other(
            "descriptor",
            "number = os.open('/dev/zero', os.O_RDONLY)",
            "os.close(number)",
            "/dev/zero",
        ),
        other("socket", "end = socket.socket()\nKEPT.append(end)", "KEPT.remove(end)\nend.close()", "socket:["),
        other("pipe", "reader, writer = os.pipe()", "os.close(reader)\nos.close(writer)", "pipe:["),
        other("epoll", "poll = select.epoll()\nKEPT.append(poll)", "KEPT.remove(poll)\npoll.close()", "[eventpoll]"),
        other(
            "event_loop",
            "loop = asyncio.new_event_loop()\nKEPT.append(loop)",
            "KEPT.remove(loop)\nloop.close()",
            "socket:[",
        ),
        other(
            "mapped_file",
            "file = tempfile.TemporaryFile()\nfile.truncate(4096)\nview = mmap.mmap(file.fileno(), 4096)\n"
            "file.close()\nKEPT.append(view)",
            "KEPT.remove(view)\nview.close()",
            "(deleted)",
        ),
    ),
    "shared-memory": (
        other(
            "shared_memory_never_unlinked",
            "memory = shared_memory.SharedMemory(create=True, size=8192)\nmemory.close()\n"
            "ENDINGS.append(memory.unlink)",
            "ENDINGS.remove(memory.unlink)\nmemory.unlink()",
            "psm_",
            size=8192,
        ),
        other(
            "shared_memory_mapped",
            "memory = shared_memory.SharedMemory(create=True, size=12288)\nKEPT.append(memory)\n"
            "ENDINGS.append(memory.unlink)",
            "KEPT.remove(memory)\nENDINGS.remove(memory.unlink)\nmemory.unlink()\nmemory.close()",
            "psm_",
            size=12288,
        ),
        other(
            "semaphore",
            "lock = multiprocessing.get_context('spawn').Lock()\nKEPT.append(lock)",
            "KEPT.remove(lock)",
            "sem.mp-",
            size=32,
        ),
    ),
    "process-groups": (other("process_group", "group()", "torch.distributed.destroy_process_group()", ": 0"),),
    "arena": (
        other(
            "arena",
            "arena = Arena('kv_cache', 1 << 20, CpuPages())\narena.map_to(1 << 20)\nKEPT.append(arena)",
            "KEPT.remove(arena)\narena.close()",
            "kv_cache at 0x",
            size=1 << 20,
        ),
    ),
    "gc-frozen": (other("frozen", "gc.freeze()", "gc.unfreeze()", "frozen objects"),),
    "host-memory": (
        other("bytearray", "KEPT.append(bytearray(b'1') * HUGE)", "KEPT.pop()", ""),
        other(
            "native_memory",
            "address = LIBC.malloc(ctypes.c_size_t(HUGE))\n"
            "LIBC.memset(ctypes.c_void_p(address), 1, ctypes.c_size_t(HUGE))",
            "LIBC.free(ctypes.c_void_p(address))",
            "",
        ),
    ),
    # Last, since what they leave changes what the tests after them do.
    "globals": (
        other(
            "default_dtype",
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)",
            "torch.get_default_dtype() was torch.float32, is torch.float64",
        ),
        other(
            "default_device",
            "torch.set_default_device('meta')",
            "torch.set_default_device(None)",
            "torch.get_default_device() was cpu, is meta",
        ),
        other(
            "collector_thresholds",
            "was = gc.get_threshold()\ngc.set_threshold(5000)",
            "gc.set_threshold(*was)",
            # By Python's version: (700, 10, 10), (2000, 10, 0).
            "), is (5000, 10, 10)",
        ),
        other("collector_off", "gc.disable()", "gc.enable()", "gc.isenabled() was True, is False"),
        other(
            "synchronize_patched",
            "was = patched(torch.accelerator, 'synchronize')",
            "torch.accelerator.synchronize = was",
            "torch.accelerator.synchronize was replaced",
        ),
        other(
            "empty_cache_patched",
            "was = patched(torch.cuda, 'empty_cache')",
            "torch.cuda.empty_cache = was",
            "torch.cuda.empty_cache was replaced",
        ),
    ),
}
RESOURCE_CASES = [(resource, case) for resource, cases in RESOURCES.items() for case in cases]


@pytest.fixture(scope="module")
def leaks(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """One inner run over all the groups of cases."""
    return run(
        tmp_path_factory.mktemp("leaks"),
        conftest=LOOP,
        test_holders=HOLDERS_PRELUDE + all_at_once(HOLDERS, "holders") + GRAPH,
        test_kinds=KINDS_PRELUDE + all_at_once(KINDS, "kinds") + KINDS_CLEAN,
        test_moments=MOMENTS,
        test_resources=RESOURCES_PRELUDE
        + "".join(all_at_once(group, name.replace("-", "_")) for name, group in RESOURCES.items()),
    )


@pytest.mark.parametrize("case", HOLDERS, ids=str)
def test_every_holder_is_found_and_named(leaks: Subjects, case: Case) -> None:
    finding = with_bytes(leaks["test_holders"], own_size(case, HOLDERS))
    assert (finding.count, finding.cause, finding.stage, finding.device) == (1, case.cause, "call", "cpu")
    assert case.holder in (finding.holder or "")


def with_bytes(subject: Subject, size: int) -> Finding:
    """The one tensor finding of a size."""
    (finding,) = [finding for finding in subject.findings if (finding.resource, finding.bytes) == ("tensors", size)]
    return finding


def test_each_holder_is_a_finding_of_its_own(leaks: Subjects) -> None:
    found = [finding for finding in leaks["test_holders"].findings if finding.resource == "tensors"]
    assert len(found) == len(HOLDERS)


def test_what_autograd_saved_for_a_kept_loss_is_found(leaks: Subjects) -> None:
    (finding,) = leaks["test_loss_with_its_graph"].findings
    found = {reported.cause: (reported.bytes, reported.count) for reported in (finding, *finding.parts)}
    assert found == {"autograd": (1200 + 600 + 200, 3), "module-global": (4, 1)}


def test_a_cycle_through_autograd_that_no_collector_sees_is_found(leaks: Subjects) -> None:
    finding = of(leaks["test_graph_that_ends_in_itself"])
    assert (finding.bytes, finding.count) == (44, 2)
    assert "a cycle through C++" in (finding.holder or "")


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_kind_of_tensor_counts_with_its_exact_bytes(leaks: Subjects, case: Case) -> None:
    found = [found for found in leaks["test_kinds"].findings if re.search(rf"{case.holder}\b", found.holder or "")]
    assert (sum(item.bytes for item in found), sum(item.count for item in found)) == (case.bytes, case.count)
    assert {finding.stage for finding in found} == {"call"}


def test_a_tensor_whose_memory_cannot_be_read_is_found_all_the_same(leaks: Subjects) -> None:
    finding = of(leaks["test_a_tensor_that_cannot_be_read"])
    assert (finding.count, finding.bytes) == (1, 0)
    assert "cannot be read" in finding.message
    assert (finding.holder or "").endswith("KEPT['mkldnn']")


@pytest.mark.parametrize(
    "name",
    [
        "test_tensors_without_memory_of_their_own",
        "test_a_weak_reference",
        "test_a_tensor_that_cannot_be_read_given_back",
        "test_loss_with_its_graph_given_back",
    ],
)
def test_what_holds_no_new_memory_is_clean(leaks: Subjects, name: str) -> None:
    clean(leaks[name])


def clean(subject: Subject) -> None:
    assert (subject.outcome, subject.findings) == ("clean", ())


@pytest.mark.parametrize("case", [*HOLDERS, *KINDS, *(case for _, case in RESOURCE_CASES)], ids=str)
def test_what_is_given_back_is_clean(leaks: Subjects, case: Case) -> None:
    clean(leaks[f"test_{case.name}_given_back"])


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("test_many_tensors", 16_000, 1_000),
        ("test_frozen_and_unfrozen_after_it", 1024, 1),
        ("test_collected_frozen_and_unfrozen_after_it", 1024, 1),
        ("test_made_while_frozen", 1024, 1),
        ("test_takes_the_memory_of_a_wider_fixture", 3000, 1),
        ("test_keeps_in_a_class_of_the_module", 70, 1),
    ],
)
def test_a_tensor_is_found_whatever_else_happens(leaks: Subjects, name: str, size: int, count: int) -> None:
    finding = of(leaks[name])
    assert (finding.bytes, finding.count, finding.stage) == (size, count, "call")


def test_garbage_that_was_frozen_comes_back_by_unfreezing(leaks: Subjects) -> None:
    finding = of(leaks["test_frozen_garbage"])
    assert (finding.bytes, finding.count, finding.cause) == (1024, 1, "frozen-garbage")
    assert finding.verdict == "frozen-garbage"
    assert finding.remedy is not None
    assert (finding.remedy.action, finding.remedy.returns_bytes) == ("gc.unfreeze(); gc.collect()", 1024)


@pytest.mark.parametrize(
    ("size", "stage"),
    [(100 + 300, "create"), (200, "create/load_weights"), (500 + 600 + 700, "teardown")],
)
def test_a_leak_says_in_which_stage_it_appeared(leaks: Subjects, size: int, stage: str) -> None:
    assert with_bytes(leaks["test_stages"], size).stage == stage


def test_one_cause_in_several_phases_is_one_finding_that_names_them(leaks: Subjects) -> None:
    message = with_bytes(leaks["test_stages"], 500 + 600 + 700).message
    assert "since teardown (" in message
    assert "; some of it since setup, call)" in message


@pytest.mark.parametrize(
    "name",
    [
        "test_many_tensors_dropped",
        "test_garbage",
        "test_frozen_and_unfrozen",
        "test_fixture_that_holds_its_tensor",
        "test_a_wider_fixture",
        "test_clean_after_a_leak",
        "test_frees_what_another_leaked",
        "test_marker_at_the_tolerance",
        "test_marker_at_the_tolerance_in_shared_memory",
        "test_last",
    ],
)
def test_what_leaves_nothing_or_no_more_than_it_may_is_clean(leaks: Subjects, name: str) -> None:
    clean(leaks[name])


@pytest.mark.parametrize(
    ("name", "resource", "size"),
    [
        ("test_marker_above_the_tolerance", "tensors", 4097),
        ("test_marker_above_the_tolerance_in_shared_memory", "shared-memory", 8192),
        ("test_marker_for_bytes_and_a_thread", "threads", 0),
    ],
)
def test_a_byte_above_the_marker_s_tolerance_is_a_leak(leaks: Subjects, name: str, resource: str, size: int) -> None:
    assert sum(finding.bytes for finding in leaks[name].findings if finding.resource == resource) == size
    assert leaks[name].outcome == "leak"


def test_a_tensor_is_found_whatever_the_collector_does(leaks: Subjects) -> None:
    finding = of(leaks["test_collector_at_work"])
    assert (finding.bytes, finding.count, finding.stage) == (110 + 120 + 130 + 140 + 150, 5, "call")


def test_holders_are_findings_of_their_own_and_one_holder_is_one(leaks: Subjects) -> None:
    found = {finding.holder: (finding.bytes, finding.count) for finding in leaks["test_three_holders"].findings}
    assert found["test_moments.FIRST"] == (10, 1)
    assert found["test_moments.SECOND"] == (20, 1)
    assert sorted(found.values()) == [(10, 1), (20, 1), (120, 4)]


def test_resources_are_findings_of_their_own(leaks: Subjects) -> None:
    findings = leaks["test_tensor_and_thread_and_descriptor"].findings
    assert sorted(finding.resource for finding in findings) == ["file-descriptors", "tensors", "threads"]


@pytest.mark.parametrize(
    ("resource", "case"), [pytest.param(resource, case, id=case.name) for resource, case in RESOURCE_CASES]
)
def test_every_other_leak_is_reported(leaks: Subjects, resource: str, case: Case) -> None:
    found = all_of(leaks[f"test_{resource.replace('-', '_')}"], resource)
    # Threads that do different things, and two caches, are different causes.
    assert any(case.holder in finding.message for finding in found)


@pytest.mark.parametrize(
    ("resource", "cause", "size", "count"),
    [
        ("lru-cache", "lru-cache", 0, 2),
        ("threads", "thread", 0, 3),
        ("processes", "module-global", 0, 2),
        ("file-descriptors", "module-global, unknown", 0, 10),
        ("shared-memory", "module-global", 8192 + 12288 + 32, 3),
        ("process-groups", "not-restored", 0, 1),
        ("arena", "unknown", 1 << 20, 1),
        ("globals", "not-restored", 0, 6),
    ],
)
def test_every_resource_is_counted(leaks: Subjects, resource: str, cause: str, size: int, count: int) -> None:
    found = all_of(leaks[f"test_{resource.replace('-', '_')}"], resource)
    assert {finding.cause for finding in found} == {*cause.split(", ")}
    assert [sum(finding.bytes for finding in found), sum(finding.count for finding in found)] == [size, count]


@pytest.mark.parametrize("resource", RESOURCES)
def test_every_resource_says_in_which_stage_it_appeared(leaks: Subjects, resource: str) -> None:
    assert {finding.stage for finding in all_of(leaks[f"test_{resource.replace('-', '_')}"], resource)} == {"call"}


def test_host_memory_is_reported_roughly(leaks: Subjects) -> None:
    # What earlier tests left free in the heap is used first.
    assert 550 << 20 <= of(leaks["test_host_memory"], "host-memory").bytes <= 610 << 20


def test_of_what_was_frozen_all_is_counted_and_unfreezing_proposed(leaks: Subjects) -> None:
    finding = of(leaks["test_gc_frozen"], "gc-frozen")
    assert finding.count > 10_000
    assert finding.cause == "not-restored"
    assert finding.remedy is not None
    assert finding.remedy.action.startswith("gc.unfreeze()")


# The command line's tolerance, which goes before the marker's.

TOLERANCE = (
    PRELUDE
    + """
KEPT = []


def test_at_the_tolerance():
    KEPT.append(make(4096))


def test_above_the_tolerance():
    KEPT.append(make(4097))


@pytest.mark.leakcheck(tolerance="1MiB")
def test_above_the_tolerance_with_a_marker_that_allows_it():
    KEPT.append(make(4097))


@pytest.mark.leakcheck(tolerance=0)
def test_at_the_tolerance_with_a_marker_that_forbids_it():
    KEPT.append(make(4096))


def shared(size):
    memory = shared_memory.SharedMemory(create=True, size=size)
    memory.close()
    atexit.register(memory.unlink)


def test_shared_memory_at_the_tolerance():
    shared(4096)


def test_shared_memory_above_the_tolerance():
    shared(4097)


def test_arena_at_the_tolerance():
    arena = Arena("kv_cache", 4096, CpuPages())
    arena.map_to(4096)
    KEPT.append(arena)


def test_arena_above_the_tolerance():
    arena = Arena("kv_cache", 8192, CpuPages())
    arena.map_to(8192)
    KEPT.append(arena)
"""
)


@pytest.fixture(scope="module")
def tolerance(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return run(tmp_path_factory.mktemp("tolerance"), "--leakcheck-tolerance", "4KiB", test_tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "test_at_the_tolerance",
        "test_at_the_tolerance_with_a_marker_that_forbids_it",
        "test_shared_memory_at_the_tolerance",
        "test_arena_at_the_tolerance",
    ],
)
def test_as_much_as_the_command_line_allows_is_clean(tolerance: Subjects, name: str) -> None:
    clean(tolerance[name])


@pytest.mark.parametrize(
    ("name", "resource", "size"),
    [
        ("test_above_the_tolerance", "tensors", 4097),
        ("test_above_the_tolerance_with_a_marker_that_allows_it", "tensors", 4097),
        ("test_shared_memory_above_the_tolerance", "shared-memory", 4097),
        ("test_arena_above_the_tolerance", "arena", 8192),
    ],
)
def test_more_than_the_command_line_allows_is_a_leak(tolerance: Subjects, name: str, resource: str, size: int) -> None:
    assert of(tolerance[name], resource).bytes == size


# A program that froze its heap and switched the collector off before the first test.

FROZEN_HEAP = """
import gc

import torch

gc.freeze()
gc.disable()
"""

IN_A_FROZEN_HEAP = (
    PRELUDE
    + """
KEPT = []
BEFORE = [make()]
gc.freeze()
YOUNG = [make()]


class Node:
    pass


def test_leak():
    KEPT.append(make())


def test_clean():
    make()


def test_garbage():
    node = Node()
    node.itself, node.held = node, make()


def test_leak_then_collected():
    KEPT.append(make())
    gc.collect()


def test_frozen_again():
    KEPT.append(make())
    gc.freeze()


def test_takes_a_frozen_one_s_place():
    BEFORE[0] = make(900)


def test_gives_a_frozen_one_up():
    BEFORE.clear()
"""
)


@pytest.fixture(scope="module")
def frozen_heap(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return run(tmp_path_factory.mktemp("frozen"), conftest=FROZEN_HEAP, test_frozen_heap=IN_A_FROZEN_HEAP)


@pytest.mark.parametrize(
    ("name", "size", "holder"),
    [
        ("test_leak", 1024, "test_frozen_heap.KEPT"),
        ("test_leak_then_collected", 1024, "test_frozen_heap.KEPT"),
        ("test_frozen_again", 1024, "test_frozen_heap.KEPT"),
        ("test_takes_a_frozen_one_s_place", 900, "test_frozen_heap.BEFORE[0]"),
    ],
)
def test_a_leak_in_a_frozen_heap_is_found(frozen_heap: Subjects, name: str, size: int, holder: str) -> None:
    finding = of(frozen_heap[name])
    assert (finding.bytes, finding.count, finding.stage) == (size, 1, "call")
    assert holder in (finding.holder or "")


@pytest.mark.parametrize("name", ["test_clean", "test_garbage", "test_gives_a_frozen_one_up"])
def test_what_leaves_nothing_in_a_frozen_heap_is_clean(frozen_heap: Subjects, name: str) -> None:
    clean(frozen_heap[name])
