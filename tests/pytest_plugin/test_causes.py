"""One cause is one finding, with what else it left as parts; a second leak beside it stays a finding of its own."""

from __future__ import annotations

import sys

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

KEPT = """
import threading

POOLS, GROUPS, LOSSES, THREADS, SHARED, SOCKETS, ENGINES = [], [], [], [], [], [], []
TIMERS, QUEUES, WORKERS, CONNECTIONS, ENDS, SERVERS, OWNERS = [], [], [], {}, [], [], {}
FINALIZED = []
RELEASE = threading.Event()
"""

CASES = """
import asyncio, functools, multiprocessing, os, queue, signal, socket, socketserver, sys, threading, weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import kept
import pytest
import torch

# Python 3.12 and later warn of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FORK = multiprocessing.get_context("fork")


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def keep_a_pool():
    pool = ProcessPoolExecutor(1, mp_context=FORK)
    assert pool.submit(abs, -1).result() == 1
    kept.POOLS.append(pool)


def test_pool():
    keep_a_pool()


def test_pool_of_multiprocessing():
    kept.POOLS.append(FORK.Pool(1))


def test_pool_and_a_thread():
    keep_a_pool()
    waiting = threading.Event()
    kept.THREADS.append(waiting)
    threading.Thread(target=waiting.wait, name="unrelated", daemon=True).start()


def test_pool_and_a_descriptor():
    keep_a_pool()
    kept.SHARED.append(open(os.devnull))


def test_socket():
    kept.SOCKETS.append(socket.socket())


class Client:
    pass


def test_socket_that_a_finalizer_closes():
    kept.FINALIZED.append(Client())
    weakref.finalize(kept.FINALIZED[-1], socket.socket().close)


def test_socket_that_a_finalizer_has_closed():
    weakref.finalize(Client(), socket.socket().close)


def test_socket_and_a_bare_descriptor():
    kept.SOCKETS.append(socket.socket())
    os.dup(kept.SOCKETS[0].fileno())


def test_socket_that_is_closed():
    with socket.socket():
        pass


def test_two_pools():
    keep_a_pool()
    keep_a_pool()


def test_pool_that_is_ended():
    keep_a_pool()
    kept.POOLS.pop().shutdown()


def test_shared_tensor():
    kept.SHARED.append(torch.ones(1000).share_memory_())


def test_loss():
    weight = torch.ones(100, requires_grad=True)
    kept.LOSSES.append((weight * torch.ones(100)).exp().sum())


def test_two_losses():
    for _ in range(2):
        weight = torch.ones(100, requires_grad=True)
        kept.LOSSES.append((weight * torch.ones(100)).exp().sum())


def test_loss_and_another_tensor():
    weight = torch.ones(100, requires_grad=True)
    kept.LOSSES += [(weight * torch.ones(100)).exp().sum(), torch.ones(1000)]


def test_loss_without_its_graph():
    weight = torch.ones(100, requires_grad=True)
    kept.LOSSES.append((weight * torch.ones(100)).exp().sum().detach())


def test_thread_with_a_tensor():
    waiting = threading.Event()
    kept.THREADS.append(waiting)
    threading.Thread(target=lambda kv: waiting.wait(), args=(torch.ones(1000),), name="worker", daemon=True).start()


def consume(waiting):
    while waiting.get() is not None:
        pass


class Connection:
    def __init__(self):
        self.waiting = queue.Queue()
        threading.Thread(target=self.work, daemon=True).start()
        kept.ENDS.append(functools.partial(self.waiting.put, None))

    def work(self):
        consume(self.waiting)

    async def close(self):
        self.waiting.put(None)


class Worker(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.waiting = threading.Event()
        kept.ENDS.append(self.waiting.set)

    def run(self):
        self.waiting.wait()

    def stop(self):
        self.waiting.set()


def test_threads_of_a_pool():
    kept.POOLS.append(ThreadPoolExecutor(2))
    for _ in range(5):
        kept.POOLS[-1].submit(kept.RELEASE.wait, 60)


def test_threads_of_a_pool_that_is_dropped():
    pool = ThreadPoolExecutor(1)
    pool.submit(kept.RELEASE.wait, 60)


def test_timer():
    kept.TIMERS.append(threading.Timer(600, print))
    kept.TIMERS[0].daemon = True
    kept.TIMERS[0].start()


def test_timer_that_is_dropped():
    timer = threading.Timer(600, print)
    timer.start()


def test_timer_that_is_cancelled():
    timer = threading.Timer(600, print)
    timer.start()
    timer.cancel()


def test_consumer():
    waiting = queue.Queue()
    kept.QUEUES.append(waiting)
    threading.Thread(target=consume, args=(waiting,), daemon=True).start()


def test_connection():
    kept.CONNECTIONS["a"] = Connection()


def test_connection_that_is_dropped():
    Connection()


def test_worker():
    kept.WORKERS.append(Worker())
    kept.WORKERS[0].start()


def test_threads_that_do_different_things():
    Connection()
    Connection()
    Worker().start()


def test_function():
    threading.Thread(target=kept.RELEASE.wait, args=(600,), daemon=True).start()


class Engine:
    def __init__(self):
        self.weights = torch.ones(1000)

    def serve(self):
        kept.RELEASE.wait()

    def close(self):
        pass


def test_thread_of_an_object_with_tensors():
    threading.Thread(target=Engine().serve, daemon=True).start()


def wait_with(tensor, begun):
    begun.set()
    kept.RELEASE.wait()


def test_thread_with_a_tensor_in_a_variable():
    begun = threading.Event()
    threading.Thread(target=lambda: wait_with(torch.ones(1 << 18), begun), name="batcher", daemon=True).start()
    begun.wait()


class Served(Engine):
    def __init__(self):
        super().__init__()
        self.socket = socket.socket()
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, name="serving", daemon=True).start()


def keep_an_engine():
    kept.ENGINES.append(Served())


@pytest.fixture
def engine():
    keep_an_engine()


@pytest.fixture(scope="class")
def engine_of_a_class():
    keep_an_engine()


def test_engine():
    keep_an_engine()


def test_engine_of_a_fixture(engine):
    pass


def test_engine_of_a_fixture_and_of_the_test(engine):
    keep_an_engine()


class TestEngine:
    def test_engine_of_a_class(self, engine_of_a_class):
        pass


def test_tensor_and_descriptor_in_one_list():
    kept.SHARED += [torch.ones(300), open(os.devnull)]


def test_server():
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept.SERVERS.append(server)


class Owner:
    def __init__(self):
        self.socket = socket.socket()


def test_sockets_of_one_maker():
    for turn in range(7):
        kept.OWNERS[f"owner {turn}"] = Owner()


def test_sockets_of_one_maker_and_several_holders():
    kept.LOSSES.append(Owner())
    kept.OWNERS["beside"] = Owner()


def test_sockets_of_two_makers():
    kept.OWNERS["first"], kept.OWNERS["second"] = Owner(), Owner()
    kept.OWNERS["second"].socket.close()
    kept.OWNERS["second"].socket = socket.socket()


class Nameless(threading.Thread):
    @property
    def name(self):
        raise RuntimeError("the program's own code ran")

    @property
    def ident(self):
        raise RuntimeError("the program's own code ran")

    def __getattr__(self, name):
        raise RuntimeError("the program's own code ran")

    def run(self):
        kept.RELEASE.wait()


def test_thread_that_cannot_be_asked_its_name():
    Nameless(daemon=True).start()


def test_event_loop():
    asyncio.set_event_loop(asyncio.new_event_loop())


class Net(torch.nn.Module):
    pass


@functools.lru_cache
def table(net):
    return torch.ones(1000)


@functools.lru_cache
def other(net):
    return 1


def test_cache():
    table(Net())


def test_two_caches():
    table(Net())
    other(Net())


def test_handler_with_a_tensor():
    held = torch.ones(300)
    signal.signal(signal.SIGUSR2, lambda *heard: held)


def test_hook_with_a_tensor():
    held = torch.ones(300)
    torch.autograd.graph.saved_tensors_hooks(lambda saved: (held, saved), lambda packed: packed[1]).__enter__()


def test_mode_with_a_tensor():
    mode = Mode()
    mode.held = torch.ones(300)
    mode.__enter__()


def test_handler_and_another_tensor():
    signal.signal(signal.SIGUSR1, lambda *heard: None)
    kept.LOSSES.append(torch.ones(300))


def test_two_settings_and_a_tensor():
    held = torch.ones(300)
    signal.signal(signal.SIGHUP, lambda *heard: held)
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)


def make_groups():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [dist.new_group([0]) for _ in range(3)]


def test_groups_that_are_destroyed():
    make_groups()
    torch.distributed.destroy_process_group()


def test_groups():
    kept.GROUPS += make_groups()


def test_ends_what_others_left():
    kept.RELEASE.set()
    asyncio.get_event_loop().close()
    for waiting in kept.THREADS:
        waiting.set()
    for end in kept.ENDS:
        end()
    for engine in kept.ENGINES:
        engine.ended.set()
    for server in kept.SERVERS:
        server.shutdown()
    for thread in threading.enumerate():
        if type(thread) is threading.Timer and thread not in kept.TIMERS:
            thread.cancel()
    for pool in kept.POOLS:
        pool.terminate() if hasattr(pool, "terminate") else pool.shutdown()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"kept.py": KEPT, "test_causes.py": CASES})


def found(run: InnerRun, name: str) -> list[list[str]]:
    """The resources of each finding of a test, that of the finding itself first, then those of its parts."""
    findings = run.subject(f"test_causes.py::{name}").findings
    return [[finding.resource, *(part.resource for part in finding.parts)] for finding in findings]


POOL = ["processes", "threads", "file-descriptors"]


@pytest.mark.parametrize(
    ("name", "resources"),
    [
        ("test_pool", [POOL]),
        ("test_pool_of_multiprocessing", [POOL]),
        ("test_pool_and_a_thread", [POOL, ["threads"]]),
        ("test_pool_and_a_descriptor", [POOL, ["file-descriptors"]]),
        ("test_two_pools", [POOL, POOL]),
        ("test_pool_that_is_ended", []),
        ("test_shared_tensor", [["tensors", "file-descriptors"]]),
        ("test_loss", [["tensors", "tensors"]]),
        # What is held by one expression has one fingerprint, and is one finding anyway.
        ("test_two_losses", [["tensors", "tensors"]]),
        # The finding of the list's own tensors has one that is no loss.
        ("test_loss_and_another_tensor", [["tensors"], ["tensors"]]),
        ("test_loss_without_its_graph", [["tensors"]]),
        ("test_thread_with_a_tensor", [["tensors", "threads"]]),
        ("test_groups_that_are_destroyed", []),
        ("test_timer_that_is_cancelled", []),
        ("test_threads_that_do_different_things", [["threads"], ["threads"]]),
        ("test_cache", [["tensors", "lru-cache"]]),
        ("test_thread_of_an_object_with_tensors", [["tensors", "threads"]]),
        ("test_thread_with_a_tensor_in_a_variable", [["tensors", "threads"]]),
        ("test_thread_that_cannot_be_asked_its_name", [["threads"]]),
        ("test_server", [["threads", "file-descriptors"]]),
        ("test_sockets_of_one_maker", [["file-descriptors"]]),
        ("test_sockets_of_one_maker_and_several_holders", [["file-descriptors"]]),
        ("test_sockets_of_two_makers", [["file-descriptors"], ["file-descriptors"]]),
        ("test_socket_that_a_finalizer_closes", [["file-descriptors"]]),
        ("test_socket_that_a_finalizer_has_closed", []),
        ("test_two_caches", [["tensors", "lru-cache"], ["lru-cache"]]),
        ("test_handler_with_a_tensor", [["tensors", "globals"]]),
        ("test_hook_with_a_tensor", [["tensors", "globals"]]),
        ("test_mode_with_a_tensor", [["tensors", "globals"]]),
        ("test_handler_and_another_tensor", [["globals"], ["tensors"]]),
        # The finding of several settings tells what each was.
        ("test_two_settings_and_a_tensor", [["globals"], ["tensors"]]),
    ],
)
def test_what_one_cause_left_is_one_finding_and_what_another_left_is_not(
    name: str, resources: list[list[str]], run: InnerRun
) -> None:
    assert found(run, name) == resources


def test_the_finding_of_what_a_setting_holds_says_how_to_put_it_back(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_handler_with_a_tensor").findings
    assert finding.holder == "signal.getsignal(signal.SIGUSR2), closure cell 'held'"
    assert finding.advice == "signal.signal(signal.SIGUSR2, signal.SIG_DFL)"


def test_the_finding_names_the_pool_and_how_to_end_it(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_pool").findings
    assert finding.holder == "kept.POOLS[0]"
    assert finding.advice == "call kept.POOLS[0].shutdown() in teardown"
    assert [hop.edge for hop in finding.path] == ["kept", ".POOLS", "[0]"]
    assert "; call kept.POOLS[0].shutdown() in teardown" in run.out


def test_a_descriptor_names_who_holds_its_object_and_how_to_close_that(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_socket").findings
    told = (finding.resource, finding.cause, finding.holder)
    assert told == ("file-descriptors", "module-global", "kept.SOCKETS[0]")
    assert finding.advice == "call kept.SOCKETS[0].close() in teardown"
    (waits,) = run.subject("test_causes.py::test_socket_that_a_finalizer_closes").findings
    assert waits.holder == "weakref.finalize(<test_causes.Client>, socket.close)"
    assert waits.advice == f"call detach() of {waits.holder} when what it is for is over"
    # What holds one of the two is not said of both.
    held, bare = run.subject("test_causes.py::test_socket_and_a_bare_descriptor").findings
    assert (held.count, held.cause, held.holder.startswith("kept.SOCKETS[")) == (1, "module-global", True)
    assert (bare.count, bare.cause) == (1, "unknown")
    assert "kept" not in bare.holder
    assert run.subject("test_causes.py::test_socket_that_is_closed").findings == ()


def test_each_of_the_two_names_only_its_own(run: InnerRun) -> None:
    pool, other = run.subject("test_causes.py::test_pool_and_a_descriptor").findings
    assert "/dev/null" in other.message
    assert "pipe" not in other.message
    assert all("/dev/null" not in part.message for part in pool.parts)
    assert other.count == 1
    _, thread = run.subject("test_causes.py::test_pool_and_a_thread").findings
    assert "1 thread still running, since call: unrelated" in thread.message


def test_a_fingerprint_is_that_of_the_resource_whatever_else_the_cause_left(run: InnerRun) -> None:
    (alone,) = run.subject("test_causes.py::test_pool").findings
    beside, _ = run.subject("test_causes.py::test_pool_and_a_descriptor").findings
    assert alone.fingerprint == beside.fingerprint
    assert [part.resource for part in alone.parts] == [part.resource for part in beside.parts]


def test_a_loss_is_to_be_detached_and_what_lets_go_of_it_is_tried_all_the_same(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_loss").findings
    assert finding.cause == "autograd"
    assert finding.advice is not None
    assert finding.advice.startswith("detach it before it is kept: kept.LOSSES[0]")
    assert finding.remedy is not None
    assert [part.remedy is not None for part in finding.parts] == [True]


def test_all_process_groups_are_ended_by_one_call(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_groups").findings
    assert finding.count == 4
    assert finding.remedy is not None
    assert finding.remedy.action == "torch.distributed.destroy_process_group()"
    assert finding.changed == ("all process groups are destroyed",)
    assert "; made in init_process_group, distributed_c10d.py:" in finding.message
    assert ", called in make_groups, test_causes.py:" in finding.message


HELD = [
    ("test_threads_of_a_pool", "kept.POOLS[-1]", "kept.POOLS[-1].shutdown()"),
    ("test_timer", "kept.TIMERS[0]", "kept.TIMERS[0].cancel()"),
    ("test_consumer", "kept.QUEUES[0]", "kept.QUEUES[0].put(None)"),
    ("test_connection", "kept.CONNECTIONS['a']", "await kept.CONNECTIONS['a'].close()"),
    ("test_worker", "kept.WORKERS[0]", "kept.WORKERS[0].stop()"),
]


@pytest.mark.parametrize(("name", "holder", "call"), HELD)
def test_threads_name_what_the_program_keeps_of_them_and_its_own_call(
    name: str, holder: str, call: str, run: InnerRun
) -> None:
    (finding,) = run.subject(f"test_causes.py::{name}").findings
    holder = holder.replace("[-1]", f"[{(finding.holder or '')[-2]}]")
    call = call.replace("kept.POOLS[-1]", holder)
    assert finding.holder == holder
    assert [hop.suspect for hop in finding.path] == [False, False, True]
    assert (finding.advice or "") == f"call {call} in teardown"
    assert f", held by {holder}; " in run.out
    assert f", started in {STARTED.get(name, name)}, test_causes.py:" in finding.message


STARTED = {"test_connection": "Connection.__init__" if sys.version_info >= (3, 11) else "__init__"}


@pytest.mark.parametrize(
    ("name", "runs", "advice"),
    [
        (
            "test_threads_of_a_pool_that_is_dropped",
            "tasks of a concurrent.futures.thread.ThreadPoolExecutor",
            "keep the concurrent.futures.thread.ThreadPoolExecutor, and call its shutdown() at the end, or use it in",
        ),
        (
            "test_timer_that_is_dropped",
            "a threading.Timer of builtins.print",
            "keep the threading.Timer, and call its cancel() at the end",
        ),
        (
            "test_connection_that_is_dropped",
            "test_causes.Connection.work (test_causes.py:",
            "keep the test_causes.Connection, and await its close() at the end",
        ),
        ("test_function", "threading.Event.wait (threading.py:", "call kept.RELEASE.set() in teardown"),
    ],
)
def test_threads_say_what_they_run_and_what_to_change(name: str, runs: str, advice: str, run: InnerRun) -> None:
    (finding,) = run.subject(f"test_causes.py::{name}").findings
    assert f"; it runs {runs}" in finding.message
    assert advice in (finding.advice or "")


def test_what_ends_a_timer_is_tried_at_the_end(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_timer").findings
    assert finding.remedy is not None
    assert finding.remedy.action == "kept.TIMERS[0].cancel()"
    assert finding.changed == ("kept.TIMERS[0] is cancelled",)


def test_one_cache_is_emptied_once(run: InnerRun) -> None:
    first, second = run.subject("test_causes.py::test_two_caches").findings
    assert [reported.remedy and reported.remedy.action for reported in (first, *first.parts, second)] == [
        *["test_causes.table.cache_clear()"] * 2,
        "test_causes.other.cache_clear()",
    ]


def test_what_a_thread_keeps_is_let_go_of_by_the_thread_s_owner(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_thread_of_an_object_with_tensors").findings
    assert finding.advice is not None
    assert finding.advice.startswith("let test_causes.Engine.close() end the thread: make test_causes.Engine.serve (")


def test_an_event_loop_that_was_set_is_called_by_what_gives_it(run: InnerRun) -> None:
    (finding,) = run.subject("test_causes.py::test_event_loop").findings
    assert finding.holder == "asyncio.get_event_loop()"
    assert finding.advice == "call asyncio.get_event_loop().close() in teardown"


ENGINE = ["tensors", "threads", "file-descriptors"]


@pytest.mark.parametrize("name", ["test_engine", "test_engine_of_a_fixture"])
def test_what_a_kept_engine_has_open_is_a_part_of_its_tensors(run: InnerRun, name: str) -> None:
    assert found(run, name) == [ENGINE]


def test_so_it_is_of_a_fixture_at_its_end(run: InnerRun) -> None:
    (finding,) = run.subject("class fixture 'engine_of_a_class'").findings
    assert [finding.resource, *(part.resource for part in finding.parts)] == ENGINE
    assert finding.holder is not None
    assert finding.holder.startswith("kept.ENGINES[")


def test_one_cause_has_one_fingerprint_in_every_phase_and_scope(run: InnerRun) -> None:
    names = ["test_engine", "test_engine_of_a_fixture", "test_engine_of_a_fixture_and_of_the_test"]
    subjects = [run.subject(f"test_causes.py::{name}") for name in names]
    subjects.append(run.subject("class fixture 'engine_of_a_class'"))
    assert len({finding.fingerprint for subject in subjects for finding in subject.findings}) == 1
    lines = [line for line in run.out.splitlines() if line.startswith("LEAK ") and "kept.ENGINES" in line]
    assert len(lines) == 1


def test_two_things_in_one_list_that_is_meant_to_live_are_two_findings(run: InnerRun) -> None:
    assert sorted(found(run, "test_tensor_and_descriptor_in_one_list")) == [["file-descriptors"], ["tensors"]]


def test_sockets_of_one_maker_name_it_and_what_holds_them(run: InnerRun) -> None:
    (of_one,) = run.subject("test_causes.py::test_sockets_of_one_maker").findings
    assert (of_one.count, of_one.holder) == (7, "kept.OWNERS")
    assert "; made in Owner.__init__, test_causes.py:" in of_one.message
    (of_several,) = run.subject("test_causes.py::test_sockets_of_one_maker_and_several_holders").findings
    assert of_several.count == 2
    assert of_several.holder is not None
    assert of_several.holder.endswith(" (and 1 more)")


STARTS = """
import os, subprocess, threading

KEPT = []
# It ends soon after this process.
WAITING = ["tail", f"--pid={os.getpid()}", "--sleep-interval=0.05", "-f", "/dev/null"]

class Feeder:
    def __init__(self):
        self.started = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        self.started.wait()

    def work(self):
        while True:
            self.child = subprocess.Popen(WAITING)
            self.started.set()
            self.child.wait()

class Pool(Feeder):
    def close(self):
        self.child.kill()
        self.thread.join()

def test_thread_that_starts_processes():
    KEPT.append(Feeder())

def test_object_that_ends_both():
    KEPT.append(Pool())
"""


def test_a_thread_that_would_start_the_processes_again_comes_before_them_but_not_before_what_ends_both(
    run_inner: RunInner,
) -> None:
    run = run_inner({"test_starts.py": STARTS})
    (alone,) = run.subject("test_starts.py::test_thread_that_starts_processes").findings
    assert [alone.resource, *(part.resource for part in alone.parts)] == ["threads", "processes"]
    assert (alone.advice or "").startswith("let test_starts.Feeder.work ")
    (ended,) = run.subject("test_starts.py::test_object_that_ends_both").findings
    assert [ended.resource, *(part.resource for part in ended.parts)] == ["processes", "threads"]
    assert ended.advice == "call test_starts.KEPT[1].close() in teardown"
