"""`pytest --leakcheck` judges what tests leave in other processes, where their own agents name it."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

WORKER = """
import functools, os, signal

KEPT = []

def keeps_bytes(size):
    KEPT.append(bytearray(size))

def keeps_tensor(size):
    import torch
    KEPT.append(torch.ones(size, dtype=torch.uint8))

def keeps_the_last(size):
    import torch
    KEPT[:] = [torch.ones(size, dtype=torch.uint8)]

def keeps_in_a_module_of_its_own(size):
    import cache, torch
    cache.KEPT.append(torch.ones(size, dtype=torch.uint8))

@functools.lru_cache
def cached(size, turn):
    import torch
    return torch.ones(size, dtype=torch.uint8)

def keeps_in_a_cache(size):
    cached(size, len(KEPT))
    KEPT.append(None)

def stops(size):
    if size:
        os.kill(os.getpid(), signal.SIGSTOP)

def remembers_each(size):
    import torch
    KEPT.append(bytes(2000 + len(KEPT)))

def remembers_some(size):
    import torch
    KEPT.append(bytes(2000 + len(KEPT)))
    del KEPT[:-3]

def keeps_natively(size):
    import ctypes
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    ctypes.memset(malloc(size), 1, size)

def keeps_sockets(size):
    import socket
    KEPT.append(socket.socketpair())

def keeps_the_last_sockets(size):
    keeps_sockets(size)
    for each in KEPT.pop(0) if KEPT[1:] else ():
        each.close()

def keeps_a_thread(size):
    import threading
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    KEPT.append((thread, ends))

def keeps_the_last_thread(size):
    keeps_a_thread(size)
    thread, ends = KEPT.pop(0) if KEPT[1:] else (None, None)
    if thread is not None:
        ends.set()
        thread.join()

def keeps_a_child(size):
    import subprocess
    KEPT.append(subprocess.Popen(["true"]))

def keeps_the_last_child(size):
    keeps_a_child(size)
    if KEPT[1:]:
        KEPT.pop(0).wait()

def fills_a_pool(size):
    if len(KEPT) < 4:
        keeps_sockets(size)

def keeps_shared_memory(size):
    from multiprocessing.shared_memory import SharedMemory
    bucket = SharedMemory(create=True, size=1 << 20)
    KEPT.append(SharedMemory(bucket.name))
    bucket.close()
    bucket.unlink()

def keeps_the_last_shared_memory(size):
    keeps_shared_memory(size)
    for each in KEPT[:-1]:
        each.close()
    del KEPT[:-1]

def gives_back(size):
    import torch
    return int(torch.ones(size, dtype=torch.uint8).sum())
"""

UNDER_A_FIXTURE = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import worker

@pytest.fixture(scope="module")
def engine():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("{method}")) as pool:
        pool.submit(worker.gives_back, 1 << 20).result()
        yield pool

@pytest.mark.parametrize("turn", range(5))
def test_infer(engine, turn):
    engine.submit(worker.{function}, 8 << 20).result()
"""

ENDED_BY_ANOTHER = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import worker

@pytest.fixture(scope="session")
def cluster():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(worker.gives_back, 1 << 20).result()
        yield pool

@pytest.fixture(scope="module")
def engine(cluster):
    yield cluster
    cluster.shutdown()

@pytest.mark.parametrize("turn", range(6))
def test_infer(engine, turn):
    engine.submit(worker.{function}, 8 << 20).result()
"""

STOPPED = """
import multiprocessing, os, signal, time
from concurrent.futures import ProcessPoolExecutor

import pytest
import worker

@pytest.fixture(scope="module")
def engine():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(worker.gives_back, 64 << 20).result()
        yield pool
        for pid in pool._processes:
            os.kill(pid, signal.SIGCONT)

@pytest.mark.parametrize("turn", range(6))
def test_infer(engine, turn):
    if turn == 4:
        engine.submit(worker.stops, 1)
        time.sleep(0.5)
"""

MARKED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import worker
from lowtide import stage

def test_life():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with stage("create"):
            pool.submit(worker.gives_back, 1 << 20).result()
        for _ in range(4):
            with stage("infer"):
                pool.submit(worker.{function}, 8 << 20).result()
        with stage("sleep(1)"):
            pool.submit(worker.stops, 0).result()
"""

LOOP = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import worker
from lowtide import stage

@pytest.mark.parametrize("call", ["keeps_tensor", "keeps_the_last", "keeps_natively"])
def test_loop(call):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with stage("create"):
            pool.submit(worker.gives_back, 1 << 20).result()
        for _ in range(6):
            with stage("infer"):
                pool.submit(getattr(worker, call), 8 << 20).result()
            with stage("sleep(1)"):
                pool.submit(worker.stops, 0).result()
            with stage("train"):
                pass
            with stage("wake"):
                pool.submit(worker.stops, 0).result()
"""

RL_LOOP_ELSEWHERE = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import worker

class Engine:
    def __init__(self, of_infer, of_update):
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.of_infer, self.of_update = of_infer, of_update
        self.pool.submit(worker.gives_back, 1 << 20).result()

    def call(self, name):
        self.pool.submit(getattr(worker, name), 1).result()

    def infer(self):
        self.call(self.of_infer)

    def update(self):
        self.call(self.of_update)

    def rest(self):
        self.call("gives_back")

    def close(self):
        self.pool.shutdown()

@pytest.mark.parametrize("stage", ["infer", "update_weights"])
@pytest.mark.parametrize("call", [
    "keeps_sockets", "keeps_the_last_sockets", "fills_a_pool", "keeps_a_thread", "keeps_the_last_thread"
])
def test_loop(leakcheck, call, stage):
    calls = (call, "gives_back") if stage == "infer" else ("gives_back", call)
    engine = leakcheck.engine(
        Engine(*calls), infer="infer", sleep="rest", wake="rest", update_weights="update", shutdown="close"
    )
    for _ in range(9):
        engine.infer()
        engine.rest()
        engine.update()
    engine.close()
"""

IN_A_LIFE = """
from multiprocessing import get_context

from lowtide import stage

def core(pipe, keeps):
    import torch
    kept = []
    while pipe.recv():
        kept.append(torch.ones(2048, dtype=torch.uint8))
        if not keeps:
            del kept[:-1]
        pipe.send("done")

class Engine:
    def __init__(self, keeps):
        self.pipe, other = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(target=core, args=(other, keeps), name="EngineCore")
        self.process.start()

    def infer(self):
        self.pipe.send(True)
        self.pipe.recv()

    def close(self):
        self.pipe.send(False)
        self.process.join()

def test_marked():
    engine = Engine({keeps})
    for _ in range(6):
        with stage("infer"):
            engine.infer()
    engine.close()

def test_watched(leakcheck):
    engine = leakcheck.engine(Engine({keeps}), infer="infer", shutdown="close")
    for _ in range(6):
        engine.infer()
    engine.close()
"""

OF_NOBODY = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import worker

POOL = None
if multiprocessing.current_process().name == "MainProcess":
    POOL = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    POOL.submit(worker.gives_back, 1 << 20).result()

def test_first():
    POOL.submit(worker.{function}, {size} << 20).result()

def test_second():
    POOL.submit(worker.gives_back, 8 << 20).result()
"""


def ran(run_inner: RunInner, test: str, *options: str) -> InnerRun:
    return run_inner({"worker.py": WORKER, "test_it.py": test}, *options)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_tensors_that_grow_in_a_fixtures_process_are_named(run_inner: RunInner, method: str) -> None:
    run = ran(run_inner, UNDER_A_FIXTURE.format(method=method, function="keeps_tensor"))
    assert run.blamed == ["module fixture 'engine' (test_it.py)"]
    (finding,) = run.subject("module fixture 'engine'").findings
    assert (finding.resource, finding.cause, finding.trend) == ("tensors", "module-global", "growth")
    assert "+8.0 MiB in each of 5 tests" in finding.message
    assert finding.holder == "worker.KEPT"
    assert finding.process is not None
    assert f"pid {finding.process.pid} " in finding.message


@pytest.mark.parametrize(("function", "holders"), [("keeps_tensor", ["worker.KEPT"]), ("keeps_the_last", [])])
def test_what_grew_in_one_that_another_fixture_has_ended_is_its_owners(
    run_inner: RunInner, function: str, holders: list[str]
) -> None:
    run = ran(run_inner, ENDED_BY_ANOTHER.format(function=function))
    assert run.blamed == ["session fixture 'cluster' (test_it.py)"] * len(holders)
    found = [finding for subject in run.report.subjects for finding in subject.findings]
    assert [finding.holder for finding in found] == holders


def test_a_cache_that_grows_there_is_cleared_there_at_the_end(run_inner: RunInner) -> None:
    test = UNDER_A_FIXTURE.format(method="spawn", function="keeps_in_a_cache")
    run = ran(run_inner, test)
    (finding,) = run.subject("module fixture 'engine'").findings
    assert (finding.resource, finding.cause) == ("tensors", "lru-cache")
    assert finding.remedy is not None
    assert (finding.remedy.action, finding.remedy.returns_bytes) == ("worker.cached.cache_clear()", 40 << 20)
    run = ran(run_inner, test, "--leakcheck-remedies=off")
    (finding,) = run.subject("module fixture 'engine'").findings
    assert finding.remedy is None


def test_bytes_that_grow_there_are_named_by_their_size(run_inner: RunInner) -> None:
    run = ran(run_inner, UNDER_A_FIXTURE.format(method="spawn", function="keeps_bytes"))
    (finding,) = run.subject("module fixture 'engine'").findings
    assert (finding.resource, finding.cause, finding.trend) == ("host-memory", "module-global", "growth")
    assert "bytearray held by worker.KEPT" in finding.message


@pytest.mark.parametrize("function", ["gives_back", "keeps_the_last"])
def test_a_process_that_does_not_grow_is_clean(run_inner: RunInner, function: str) -> None:
    run = ran(run_inner, UNDER_A_FIXTURE.format(method="spawn", function=function))
    assert run.blamed == []
    # Before, too few tests have used it to show growth.
    assert run.subject("test_it.py::test_infer[2]").outcome == "unsupported"
    assert all(run.is_clean(f"test_it.py::test_infer[{turn}]") for turn in (3, 4))


@pytest.mark.parametrize(("function", "size"), [("keeps_tensor", 8), ("keeps_bytes", 160)])
def test_what_a_test_leaves_in_a_process_of_nobodys_is_its_leak(run_inner: RunInner, function: str, size: int) -> None:
    run = ran(run_inner, OF_NOBODY.format(function=function, size=size))
    assert run.blamed == ["test_it.py::test_first"]
    (finding,) = run.subject("test_it.py::test_first").findings
    assert (finding.holder or "").startswith("worker.KEPT")


def test_what_it_gives_back_is_none(run_inner: RunInner) -> None:
    run = ran(run_inner, OF_NOBODY.format(function="gives_back", size=8))
    assert run.is_clean("test_it.py::test_first")


def test_the_pipes_of_a_process_that_a_fixtures_pool_starts_later_are_the_fixtures(run_inner: RunInner) -> None:
    test = UNDER_A_FIXTURE.format(method="spawn", function="gives_back")
    run = ran(run_inner, test.replace("        pool.submit(worker.gives_back, 1 << 20).result()\n", ""))
    assert run.blamed == []


def test_a_module_that_a_later_test_imports_is_no_excuse(run_inner: RunInner) -> None:
    test = UNDER_A_FIXTURE.format(method="spawn", function="keeps_in_a_module_of_its_own")
    run = run_inner({"worker.py": WORKER, "cache.py": "KEPT = []", "test_it.py": test})
    (finding,) = run.subject("module fixture 'engine'").findings
    assert finding.holder == "cache.KEPT"
    # The test that imported it may have filled it once.
    assert "+8.0 MiB in each of 4 of 5 tests" in finding.message


def test_a_process_that_does_not_answer_is_not_judged_however_often_it_was_used(run_inner: RunInner) -> None:
    run = ran(run_inner, STOPPED)
    assert run.is_clean("test_it.py::test_infer[3]")
    subject = run.subject("test_it.py::test_infer[5]")
    assert subject.outcome == "unsupported"
    assert "did not answer within 5 s: it is stopped" in subject.reason


@pytest.mark.parametrize("function", ["keeps_tensor", "gives_back"])
def test_a_test_that_marks_its_stages_is_judged_as_a_life(run_inner: RunInner, function: str) -> None:
    run = ran(run_inner, MARKED.format(function=function))
    if function == "gives_back":
        assert run.is_clean("test_it.py::test_life")
        return
    (finding,) = run.subject("test_it.py::test_life").findings
    assert (finding.resource, finding.stage, finding.bytes) == ("tensors", "infer", 32 << 20)
    assert finding.holder == "worker.KEPT"


def test_an_engine_that_sleeps_between_all_its_inferences_is_judged_by_the_turns_of_the_loop(
    run_inner: RunInner,
) -> None:
    run = run_inner({"worker.py": WORKER, "test_inner.py": LOOP})
    (tensors,) = run.subject("test_inner.py::test_loop[keeps_tensor]").findings
    assert (tensors.resource, tensors.holder) == ("tensors", "worker.KEPT")
    assert tensors.bytes >= 6 * (8 << 20)
    (native,) = run.subject("test_inner.py::test_loop[keeps_natively]").findings
    assert (native.resource, native.trend, native.count) == ("host-memory", "growth", 4)
    assert native.bytes == pytest.approx(4 * (8 << 20), rel=0.05)
    twin = run.subject("test_inner.py::test_loop[keeps_the_last]")
    assert [each.message for each in twin.findings if each.resource != "tensors"] == []


def test_descriptors_and_threads_that_each_turn_of_a_loop_leaves_are_told_with_their_holder(
    run_inner: RunInner,
) -> None:
    run = run_inner({"worker.py": WORKER, "test_it.py": RL_LOOP_ELSEWHERE})
    told = {"keeps_sockets": ("file-descriptors", "2 file descriptors"), "keeps_a_thread": ("threads", "1 thread")}
    stages = ("infer", "update_weights")
    assert run.blamed == [f"test_it.py::test_loop[{call}-{stage}]" for call in told for stage in stages]
    for call, (resource, amount) in told.items():
        for stage in stages:
            (finding,) = run.subject(f"test_it.py::test_loop[{call}-{stage}]").findings
            assert (finding.resource, finding.stage, finding.trend) == (resource, stage, "growth")
            assert finding.holder == "worker.KEPT"
            assert finding.process is not None
            assert finding.message.startswith(f"{finding.process.text}: {amount} more with each {stage}, ")


IN_NINE_TESTS = UNDER_A_FIXTURE.replace("range(5)", "range(9)")


@pytest.mark.parametrize(
    ("function", "resource", "said"),
    [
        ("keeps_sockets", "file-descriptors", "+2 file descriptors in each of 8 tests"),
        ("keeps_a_thread", "threads", "+1 thread in each of 8 tests"),
        ("keeps_a_child", "processes", "+1 child process in each of 8 tests"),
        ("keeps_shared_memory", "shared-memory", "shared memory that it maps +1.0 MiB in each of 8 tests"),
    ],
)
def test_what_the_kernel_lists_of_a_fixtures_process_is_told_where_it_grows_with_its_holder(
    run_inner: RunInner, function: str, resource: str, said: str
) -> None:
    run = ran(run_inner, IN_NINE_TESTS.format(method="spawn", function=function))
    (finding,) = run.subject("module fixture 'engine'").findings
    assert (finding.resource, finding.trend) == (resource, "growth")
    assert f"): {said}" in finding.message
    assert "held by worker.KEPT" in finding.message


@pytest.mark.parametrize(
    "function",
    [
        "keeps_the_last_sockets",
        "keeps_the_last_thread",
        "keeps_the_last_child",
        "keeps_the_last_shared_memory",
        "fills_a_pool",
    ],
)
def test_what_comes_and_goes_there_or_fills_a_pool_is_none(run_inner: RunInner, function: str) -> None:
    assert ran(run_inner, IN_NINE_TESTS.format(method="spawn", function=function)).blamed == []


def test_without_agents_it_is_not_judged(run_inner: RunInner) -> None:
    test = UNDER_A_FIXTURE.format(method="spawn", function="keeps_tensor")
    run = ran(run_inner, test, "--leakcheck-processes=off")
    subject = run.subject("test_it.py::test_infer[3]")
    assert subject.outcome == "unsupported"
    assert "memory of pid" in subject.reason


def test_tensors_that_grow_by_2_kb_an_inference_are_a_leak_of_the_life_though_its_process_ends(
    run_inner: RunInner,
) -> None:
    run = run_inner({"test_it.py": IN_A_LIFE.replace("{keeps}", "True")})
    for name in ("test_marked", "test_watched"):
        (finding,) = run.subject(f"test_it.py::{name}").findings
        assert (finding.resource, finding.trend, finding.stage) == ("tensors", "growth", "infer")
        assert "EngineCore): tensors on cpu grow by 2.0 KiB with each infer" in finding.message
        assert finding.holder is not None
        assert "local 'kept' of core()" in finding.holder


def test_what_it_keeps_of_the_last_inference_is_none(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": IN_A_LIFE.replace("{keeps}", "False")})
    assert all(run.is_clean(f"test_it.py::{name}") for name in ("test_marked", "test_watched"))


IN_PROCESS = """
import torch

class Engine:
    def __init__(self, keeps):
        self.keeps, self.kept = keeps, []

    def infer(self):
        made = torch.ones(2048, dtype=torch.uint8)
        if self.keeps == "each":
            self.kept.append(made)
        if self.keeps == "the last":
            self.kept = [made]
        return made

    def close(self):
        self.kept = []

def live(leakcheck, keeps, shutdown="close"):
    engine, results = leakcheck.engine(Engine(keeps), infer="infer", shutdown=shutdown), []
    for _ in range(6):
        results.append(engine.infer())
    engine.close()

def test_each(leakcheck):
    live(leakcheck, "each")

def test_each_without_a_marked_end(leakcheck):
    live(leakcheck, "each", None)

def test_the_last(leakcheck):
    live(leakcheck, "the last")

def test_nothing(leakcheck):
    live(leakcheck, "nothing")

ENGINES = []

def test_an_engine_that_stays(leakcheck):
    ENGINES.append(Engine("each"))
    engine = leakcheck.engine(ENGINES[0], infer="infer")
    for _ in range(6):
        engine.infer()
"""


RL_LOOP = """
import mmap
import multiprocessing
import os

import pytest
import torch

class Engine:
    def __init__(self, keeps):
        self.keeps, self.kept = keeps, []

    def load(self):
        bucket = torch.ones(2048, dtype=torch.uint8)
        if self.keeps == "tensors":
            self.kept.append(bucket)
        elif self.keeps == "the last":
            self.kept = [bucket]
        elif self.keeps == "descriptors":
            self.kept.append(os.memfd_create("bucket"))
        elif self.keeps == "mappings":
            self.kept.append(self.mapping())
        elif self.keeps == "the next mapping before the last goes":
            self.kept = [self.mapping()]
        elif self.keeps == "the first two":
            if len(self.kept) < 2:
                self.kept.append(self.mapping())
        elif self.keeps == "shared tensors":
            self.kept.append(bucket.share_memory_())
        elif self.keeps == "pipes":
            self.kept.append(multiprocessing.Pipe())
        elif self.keeps == "a pool of four" and len(self.kept) < 4:
            self.kept.append(bucket)

    def mapping(self):
        file = os.memfd_create("bucket")
        os.ftruncate(file, 4096)
        try:
            return mmap.mmap(file, 4096)
        finally:
            os.close(file)

    def rest(self):
        pass

    def close(self):
        for each in self.kept:
            if isinstance(each, int):
                os.close(each)
            elif isinstance(each, tuple):
                for end in each:
                    end.close()
        self.kept = []

@pytest.mark.parametrize(("keeps", "end"), [
    ("nothing", None), ("the last", "close"), ("the next mapping before the last goes", None),
    ("the first two", "close"), ("a pool of four", "close"), ("tensors", "close"),
    ("descriptors", None), ("mappings", "close"), ("shared tensors", "close"), ("pipes", "close"),
])
def test_loop(leakcheck, keeps, end):
    engine = leakcheck.engine(Engine(keeps), update_weights="load", sleep="rest", shutdown=end)
    for _ in range(6):
        engine.load()
        engine.rest()
    engine.close()
"""


def test_what_each_update_of_weights_leaves_is_growth_with_whatever_between_two(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": RL_LOOP})
    ends = {"tensors": "close", "descriptors": None, "mappings": "close", "shared tensors": "close", "pipes": "close"}
    assert run.blamed == [f"test_it.py::test_loop[{keeps}-{end}]" for keeps, end in ends.items()]
    (tensors,) = run.subject("test_it.py::test_loop[tensors-close]").findings
    assert (tensors.stage, tensors.holder) == ("update_weights", "engine.kept")
    assert tensors.message.startswith("tensors on cpu grow by 2.0 KiB with each update_weights")
    (shared,) = run.subject("test_it.py::test_loop[shared tensors-close]").findings
    assert (shared.resource, shared.holder) == ("tensors", "engine.kept")
    (pipes,) = run.subject("test_it.py::test_loop[pipes-close]").findings
    assert (pipes.count, pipes.cause, pipes.holder) == (10, "instance-attribute", "engine.kept")
    assert "; made in Engine.load, test_it.py:" in pipes.message
    for keeps, resource, size, said in (
        ("descriptors", "file-descriptors", 0, "5 file descriptors more, which 5 calls of update_weights in a row"),
        (
            "mappings",
            "shared-memory",
            20480,
            "5 mappings of shared memory more, which 5 calls of update_weights in a row",
        ),
    ):
        (finding,) = run.subject(f"test_it.py::test_loop[{keeps}-{ends[keeps]}]").findings
        assert (finding.resource, finding.stage, finding.trend) == (resource, "update_weights", "growth")
        assert (finding.bytes, finding.message.startswith(said)) == (size, True)
        assert "/memfd:bucket" in finding.message


def test_what_an_engine_in_the_tests_process_adds_with_each_inference_is_growth(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": IN_PROCESS})
    stays = "test_it.py::test_an_engine_that_stays"
    assert run.blamed == ["test_it.py::test_each", "test_it.py::test_each_without_a_marked_end", stays]
    # What is left of it says all.
    (left,) = run.subject(stays).findings
    assert (left.resource, left.count) == ("tensors", 6)
    for name in ("test_each", "test_each_without_a_marked_end"):
        (finding,) = run.subject(f"test_it.py::{name}").findings
        assert (finding.resource, finding.holder, finding.count) == ("tensors", "engine.kept", 5)
        assert finding.message.startswith("tensors on cpu grow by 2.0 KiB with each infer")


def many_tests(function: str) -> str:
    return UNDER_A_FIXTURE.format(method="spawn", function=function).replace("range(5)", "range(14)")


def test_a_container_that_grows_in_a_fixtures_process_is_named(run_inner: RunInner) -> None:
    run = ran(run_inner, many_tests("remembers_each"))
    assert run.blamed == ["module fixture 'engine' (test_it.py)"]
    (finding,) = run.subject("module fixture 'engine'").findings
    assert (finding.resource, finding.holder, finding.trend) == ("host-memory", "worker.KEPT", "growth")
    assert finding.process is not None
    assert finding.message.startswith(f"{finding.process.text}: worker.KEPT takes 1 item (2.0 KiB) in each of ")


def test_one_that_is_bounded_is_clean(run_inner: RunInner) -> None:
    assert ran(run_inner, many_tests("remembers_some")).blamed == []


def test_large_things_in_a_container_there_are_told_once(run_inner: RunInner) -> None:
    run = ran(run_inner, many_tests("keeps_bytes"))
    (finding,) = run.subject("module fixture 'engine'").findings
    assert finding.holder == "worker.KEPT"


MANY_INFERENCES = IN_A_LIFE.replace("range(6)", "range(20)").replace(
    "torch.ones(2048, dtype=torch.uint8)", "bytes(2000 + len(kept))"
)


def test_a_container_that_grows_with_each_inference_is_named(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": MANY_INFERENCES.replace("{keeps}", "True")})
    for name in ("test_marked", "test_watched"):
        (finding,) = run.subject(f"test_it.py::{name}").findings
        assert (finding.resource, finding.trend, finding.stage) == ("host-memory", "growth", "inferences")
        assert "EngineCore): thread 'MainThread', local 'kept' of core()" in finding.message


def test_its_twin_that_keeps_the_last_one_is_clean(run_inner: RunInner) -> None:
    run = run_inner({"test_it.py": MANY_INFERENCES.replace("{keeps}", "False")})
    assert run.blamed == []
