"""Which leaks of one test have one cause: what the backend of a process group opens, and arrays behind a finding."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import msgspec
import numpy as np
import pytest

from lowtide.leakcheck.findings import causes as causes_of
from lowtide.leakcheck.findings import tensor_findings
from lowtide.leakcheck.findings.causes import (
    CommonCause,
    Leak,
    by_cause,
    holder_of_new,
    of_library,
    with_causes,
    with_holders,
)
from lowtide.leakcheck.findings.item_findings import ItemLeak, only
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.tensor_findings import TensorLeak, with_free_beside
from lowtide.leakcheck.judging.filled_caches import CachedItem
from lowtide.leakcheck.resources.files import SharedMemory
from lowtide.leakcheck.resources.settings import ABSENT, SettingChange
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.process_files import children_of, numbered_descriptors
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.objects.foreign import thread_key
from lowtide.reports.schema import Finding, Hop, ResourceName
from lowtide.reports.statement import StatedFinding, Statement, restated
from tests.waiting import HANG_S, wait_until


def leak(resource: ResourceName, *names: str, size: int = 0) -> ItemLeak:
    finding = StatedFinding(
        resource=resource,
        cause="unknown",
        bytes=size,
        count=len(names) or 1,
        device="",
        stage="call",
        statement=Statement(unit=resource.replace("-", " "), is_since=True, things=names),
        fingerprint=resource,
    )
    return ItemLeak(finding, resource, dict.fromkeys(names, 1), 0)


def reported(*leaks: ItemLeak) -> list[list[str]]:
    """The resources of each finding with those of its parts."""
    drafts, causes = with_causes(leaks, Context())
    findings = [draft.finding for draft in drafts]
    merged = by_cause(findings, {id(finding): cause for finding, cause in zip(findings, causes, strict=True)})
    return [[finding.resource, *(part.resource for part in finding.parts)] for finding in merged]


def test_what_was_joined_before_keeps_its_parts_where_it_is_joined_again() -> None:
    threads, sockets, child = (leak(kind, kind).finding for kind in ("threads", "file-descriptors", "processes"))
    one = msgspec.structs.replace(threads, parts=(leak("temporary-files", "f").finding,))
    other = msgspec.structs.replace(child, parts=(sockets,))
    cause = CommonCause("one engine")
    (merged,) = by_cause((one, other), {id(one): cause, id(other): cause})
    parts = [part.resource for part in merged.parts]
    assert sorted([merged.resource, *parts]) == ["file-descriptors", "processes", "temporary-files", "threads"]
    assert not any(part.parts for part in merged.parts)


OPENED: list[Any] = []


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The names of the descriptors of two sockets that a list holds, and of an epoll that only a frame does."""
    sockets = socket.socketpair()
    lonely = select.epoll()
    OPENED.extend(sockets)
    numbers = [*(each.fileno() for each in sockets), lonely.fileno()]
    yield [f"{number} -> {Path(f'/proc/self/fd/{number}').readlink()}" for number in numbers]
    OPENED.clear()
    lonely.close()
    for each in sockets:
        each.close()


def test_what_lives_left_stays_one_finding_with_its_holders(opened: list[str]) -> None:
    told = with_holders(leak("file-descriptors", *opened[:2]), Context())
    assert told.message.endswith(f"; held by {__name__}.OPENED")
    assert (told.holder, told.fingerprint) == (f"{__name__}.OPENED", "file-descriptors")
    assert told.advice == f"call close() of each that {__name__}.OPENED holds in teardown"
    some = with_holders(leak("file-descriptors", *opened), Context())
    assert some.message.endswith(f"; 2 of them held by {__name__}.OPENED")


def test_threads_that_do_several_things_each_say_what_they_run_and_what_ends_them() -> None:
    queue, waits = multiprocessing.get_context("spawn").Queue(), threading.Event()
    queue.put("fed")
    waiting = threading.Thread(target=waits.wait, name="waiting", daemon=True)
    waiting.start()
    try:
        running = [each for each in threading.enumerate() if each.name in ("QueueFeederThread", "waiting")]
        told = with_holders(leak("threads", *map(thread_key, running)), Context())
    finally:
        waits.set()
        queue.close()
        queue.join_thread()
        waiting.join()
    assert len(running) == 2
    assert "; QueueFeederThread: it runs multiprocessing.queues.Queue._feed (queues.py:" in told.message
    assert "; waiting: it runs threading.Event.wait (threading.py:" in told.message
    assert told.advice is not None
    assert "call close() of the multiprocessing.queues.Queue in teardown" in told.advice
    assert "set() in teardown" in told.advice or "call its set() at the end" in told.advice


def test_a_part_of_several_things_is_advised_for_itself() -> None:
    both = leak("shared-memory", "psm_1f0a93bc", "sem.mp-k2jf8s_d")
    advice = SharedMemory().advice([*both.names])
    assert "'/dev/shm/psm_1f0a93bc') (and 1 more)" in advice
    whole = msgspec.structs.replace(both, finding=restated(both.finding, {"advice": advice}))
    part = only(whole, {"sem.mp-k2jf8s_d": 1}).finding
    assert part.advice is not None
    assert part.advice.endswith("now: os.unlink('/dev/shm/sem.mp-k2jf8s_d')")


def descriptor(number: int) -> str:
    return f"{number} -> {Path(f'/proc/self/fd/{number}').readlink()}"


def test_a_librarys_object_that_has_descriptors_to_itself_is_named_in_their_stead(tmp_path: Path) -> None:
    """A file with its layers; a handler with its stream, which its end closes; a loop with its selector and sockets."""
    with (tmp_path / "log").open("a") as log, (tmp_path / "data").open("wb") as data:
        handler = logging.FileHandler(tmp_path / "handled")
        loop = asyncio.new_event_loop()
        opened = {"log": [log], "data": [data], "handler": [handler.stream], "loop": objects_of_loop(loop)}
        context = Context(roots=[("engine", SimpleNamespace(log=log, data=data, handler=handler, loop=loop))])
        try:
            for name, files in opened.items():
                told = with_holders(leak("file-descriptors", *(descriptor(each.fileno()) for each in files)), context)
                assert (told.holder, told.advice) == (f"engine.{name}", f"call engine.{name}.close() in teardown")
                # What was known as of an unknown cause stays so, but where that is asked for.
                assert told.cause == "unknown"
            opened_log = leak("file-descriptors", descriptor(log.fileno()))
            assert with_holders(opened_log, context, with_cause=True).cause != "unknown"
        finally:
            handler.close()
            loop.close()


def objects_of_loop(loop: Any) -> list[Any]:
    """What an event loop opens: an epoll, and two ends of a pair of sockets."""
    return [loop._selector, loop._ssock, loop._csock]


def test_a_handler_that_was_added_is_one_cause_with_its_file(tmp_path: Path) -> None:
    logger, handler = logging.getLogger("tests.causes"), logging.FileHandler(tmp_path / "log")
    logger.addHandler(handler)
    try:
        opened = leak("file-descriptors", f"{handler.stream.fileno()} -> {tmp_path / 'log'}")
        for of, told in (handler, [["file-descriptors", "globals"]]), (OPENED, [["file-descriptors"], ["globals"]]):
            change = SettingChange(f"handler of logger at {id(of):#x}", ABSENT, "there")
            assert reported(opened, msgspec.structs.replace(leak("globals", "handler"), changes=(change,))) == told
    finally:
        logger.removeHandler(handler)
        handler.close()


def test_a_part_that_the_program_can_name_is_not_its_owners() -> None:
    """To end the process closes no pipe of it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        context = Context(roots=[("engine", SimpleNamespace(tool=process))])
        told = with_holders(leak("file-descriptors", descriptor(process.stdin.fileno())), context)
    assert (told.holder, told.advice) == ("engine.tool.stdin", "call engine.tool.stdin.close() in teardown")


def test_where_no_call_ends_each_of_several_holders_each_has_its_own_advice() -> None:
    """No code can be made of `gc.callbacks[3]` that ends what it leads to."""
    log = CommonCause(1, "engine.log", path("engine", ".log"), "call engine.log.close() in teardown", ending="close()")
    called = CommonCause(2, "gc.callbacks[3]", path("gc", ".callbacks", "[3]"), "let go of gc.callbacks[3] in teardown")
    facts = causes_of._facts_of({("threads", "a"): log, ("threads", "b"): called}, 2)
    assert facts is not None
    assert facts.advice == "call engine.log.close() in teardown; let go of gc.callbacks[3] in teardown"


def test_of_several_holders_the_first_are_named_with_what_ends_each(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        files = {f"file_{turn}": stack.enter_context((tmp_path / f"{turn}").open("w")) for turn in range(5)}
        context = Context(roots=[("engine", SimpleNamespace(**files))])
        told = with_holders(leak("file-descriptors", *(descriptor(each.fileno()) for each in files.values())), context)
    assert told.advice is not None
    assert told.advice.startswith("end each in teardown: engine.file_")
    assert (told.advice.count(".close()"), told.advice.endswith(" and 2 more")) == (3, True)
    assert told.message.count("engine.file_") == 3


class Forgetful:
    """An engine whose `close` ends a part of what it has."""

    def __init__(self) -> None:
        self.tool = subprocess.Popen(["sleep", "600"])
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        self.reader, self.writer = os.pipe()

    def close(self) -> None:
        self.memory.close()

    def end(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory.unlink()
        os.close(self.reader)
        os.close(self.writer)
        self.tool.kill()
        self.tool.wait()


@pytest.fixture
def forgetful() -> Iterator[Forgetful]:
    engine = Forgetful()
    OPENED.append(engine)
    yield engine
    OPENED.clear()
    engine.end()


def test_what_an_engines_close_forgets_is_advised_by_its_own_call(forgetful: Forgetful) -> None:
    (cause,) = causes_of._causes_by_name({("processes", "1"): forgetful.tool}, Context()).values()
    kept = f"{__name__}.OPENED[0]"
    assert cause.advice == f"call {kept}.tool.terminate() in teardown: {__name__}.Forgetful.close() does not end it"


def test_what_it_ends_is_advised_by_its_close(forgetful: Forgetful) -> None:
    name = ("file-descriptors", descriptor(forgetful.memory._fd))
    (cause,) = causes_of._causes_by_name({name: forgetful.memory}, Context()).values()
    assert cause.advice == f"call {__name__}.OPENED[0].close() in teardown"


def test_shared_memory_that_is_only_closed_is_to_be_unlinked(forgetful: Forgetful) -> None:
    named = ("shared-memory", forgetful.memory.name)
    both = {named: forgetful.memory, ("file-descriptors", descriptor(forgetful.memory._fd)): forgetful.memory}
    kept, idle = f"{__name__}.OPENED[0].memory", f": {__name__}.Forgetful.close() does not end it"
    (cause,) = causes_of._causes_by_name({named: forgetful.memory}, Context()).values()
    assert cause.advice == f"call {kept}.unlink() in teardown{idle}"
    causes = causes_of._causes_by_name(both, Context()).values()
    assert {each.advice for each in causes} == {f"call {kept}.close() and {kept}.unlink() in teardown{idle}"}


MODEL = SimpleNamespace(_forward_hooks={})


def advice_where_a_hook_holds_it(engine: Forgetful, resource: str, name: str, item: Any) -> str:
    """Return what to do about a thing that an engine has which a hook alone holds, of a model that was there before."""
    OPENED.clear()
    MODEL._forward_hooks[0] = hook = lambda: engine
    new = [hook, *(hook.__closure__ or ()), engine, vars(engine), item]
    context = Context(born=frozenset(map(id, new)))
    new.clear()
    (cause,) = causes_of._causes_by_name({(resource, name): item}, context).values()
    MODEL._forward_hooks.clear()
    return cause.advice


def test_what_outlives_its_holder_is_advised_by_its_own_call_though_a_hook_holds_it(forgetful: Forgetful) -> None:
    advice = advice_where_a_hook_holds_it(forgetful, "shared-memory", forgetful.memory.name, forgetful.memory)
    end = "call unlink() of the multiprocessing.shared_memory.SharedMemory in teardown"
    assert advice == f"{end}: {__name__}.Forgetful.close() does not end it"


def test_what_goes_with_its_holder_is_advised_by_the_end_of_the_hook(forgetful: Forgetful) -> None:
    with tempfile.TemporaryFile() as file:
        forgetful.file = file  # type: ignore[attr-defined]
        advice = advice_where_a_hook_holds_it(forgetful, "file-descriptors", descriptor(file.fileno()), file)
        del forgetful.file  # type: ignore[attr-defined]
    assert advice.startswith("the hook is still registered")


def test_of_several_that_are_forgotten_each_has_its_call(forgetful: Forgetful) -> None:
    owners = {("processes", "1"): forgetful.tool, ("shared-memory", "psm_1"): forgetful.memory}
    causes = causes_of._causes_by_name(owners, Context()).values()
    (advice,) = {each.advice for each in causes}
    assert advice.startswith(f"with it = {__name__}.OPENED[0], call it.")
    assert "it.tool.terminate()" in advice
    assert "it.memory.unlink()" in advice
    assert advice.endswith(f" in teardown: {__name__}.Forgetful.close() ends none of these")


def test_descriptors_that_it_forgets_are_closed_by_their_numbers(forgetful: Forgetful) -> None:
    named = ("file-descriptors", descriptor(forgetful.reader))
    other = ("file-descriptors", descriptor(forgetful.writer))
    kept = f"{__name__}.OPENED[0]"
    idle = f": {__name__}.Forgetful.close() does not end it"
    forgetful.memory.close()
    forgetful.memory.unlink()
    forgetful.memory = None  # type: ignore[assignment]
    advice = {
        cause.advice for cause in causes_of._causes_by_name({named: forgetful, other: forgetful}, Context()).values()
    }
    assert advice == {f"call os.close({kept}.reader), os.close({kept}.writer) in teardown{idle}"}


class Receiver:
    """Its thread holds it, and with it the socket."""

    def __init__(self, own: socket.socket) -> None:
        self.own = own
        self.thread = threading.Thread(target=self.receive, daemon=True)
        self.thread.start()

    def receive(self) -> None:
        self.own.recv(1)


def test_what_a_running_thread_has_is_held_by_what_the_program_can_end() -> None:
    own, others = socket.socketpair()
    name = f"{own.fileno()} -> {Path(f'/proc/self/fd/{own.fileno()}').readlink()}"
    receiver = Receiver(own)
    OPENED.append(receiver)
    del own
    try:
        assert with_holders(leak("file-descriptors", name), Context()).holder == f"{__name__}.OPENED"
    finally:
        OPENED.clear()
        others.close()
        receiver.thread.join()
        receiver.own.close()


def test_what_nothing_of_the_program_holds_has_no_holder(opened: list[str]) -> None:
    left = leak("file-descriptors", opened[2])
    found = with_holders(left, Context())
    assert (found.holder, found.path, found.message) == (None, (), left.finding.message)
    assert found.advice is not None
    assert found.advice.startswith("no Python code was seen to open it: ")


def test_what_a_path_leads_to_may_have_been_opened_by_code_that_nobody_looks_at() -> None:
    left = leak("file-descriptors", "990004 -> /tmp/model.safetensors")
    assert with_holders(left, Context()) == left.finding


GROUPS = ("0", "1")
OF_GROUPS = ("990001 -> socket:[1]", "990002 -> anon_inode:[eventpoll]", "990003 -> pipe:[2]")


def test_what_a_backend_opens_belongs_to_its_process_groups() -> None:
    assert reported(leak("file-descriptors", *OF_GROUPS), leak("process-groups", *GROUPS)) == [
        ["process-groups", "file-descriptors"]
    ]


def test_where_a_group_may_have_opened_it_no_other_object_of_a_library_is_looked_for(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes_of, "of_library", lambda context: OPENED[0])
    assert reported(leak("file-descriptors", *OF_GROUPS), leak("process-groups", *GROUPS)) == [
        ["process-groups", "file-descriptors"]
    ]
    _, (cause,) = with_causes([leak("file-descriptors", *OF_GROUPS)], Context())
    assert cause is not None
    assert cause.holder.endswith(".OPENED[0]")


def test_a_file_beside_process_groups_is_a_leak_of_its_own() -> None:
    beside = leak("file-descriptors", *OF_GROUPS, "990004 -> /etc/hostname")
    assert reported(beside, leak("process-groups", *GROUPS)) == [
        ["process-groups", "file-descriptors"],
        ["file-descriptors"],
    ]
    drafts, _ = with_causes([beside, leak("process-groups", *GROUPS)], Context())
    messages = [draft.finding.message for draft in drafts if isinstance(draft, ItemLeak)]
    assert "1 file descriptor still open, since call: 990004 -> /etc/hostname" in messages


def test_without_process_groups_descriptors_stay_as_they_are() -> None:
    assert reported(leak("file-descriptors", *OF_GROUPS), leak("threads", "gone (1)")) == [
        ["file-descriptors"],
        ["threads"],
    ]


@contextmanager
def holding(held: object) -> Iterator[str]:
    """A thread that holds something, as the counters name it."""
    started, release = threading.Event(), threading.Event()

    def work(array: object) -> None:
        started.set()
        release.wait(HANG_S)

    thread = threading.Thread(target=work, args=(held,), name="holding")
    thread.start()
    started.wait(HANG_S)
    try:
        yield f"holding ({thread.ident})"
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(
    ("size", "resources"),
    [
        (100_000, [["threads", "host-memory"]]),
        # Half of it is somebody else's.
        (50_000, [["threads"], ["host-memory"]]),
    ],
)
@pytest.mark.parametrize("make", [lambda size: np.ones(size, np.uint8), lambda size: {"a": [["x" * size]]}])
def test_host_memory_that_lies_behind_another_finding_is_part_of_that(
    make: Callable[[int], object], size: int, resources: list[list[str]]
) -> None:
    with holding(make(size)) as name:
        assert reported(leak("threads", name), leak("host-memory", size=100_000)) == resources


class Application:
    """It has an array and, beside that, an object that is known by its bound method."""

    def __init__(self, size: int) -> None:
        self.table = np.ones(size, np.uint8)
        self.parts = [Part()]


class Part:
    pass


@pytest.mark.parametrize("maxsize", [8, None])
@pytest.mark.parametrize(
    ("leaked", "resources"),
    [
        (0, [["lru-cache", "host-memory"]]),
        # The entry that leads to this one has little memory; another one has, and was there before.
        (1, [["lru-cache"], ["host-memory"]]),
    ],
)
def test_what_hangs_on_a_cache_entry_is_part_of_the_finding_about_it(
    maxsize: int | None, leaked: int, resources: list[list[str]]
) -> None:
    cache = functools.lru_cache(maxsize)(lambda application, *_: None)
    applications = [Application(100_000), Application(1_000)]
    for application in applications:
        cache(application, "of a key of two")
    part = applications[leaked].parts[0]
    kept = msgspec.structs.replace(
        leak("lru-cache", "part"), cached={"part": CachedItem(weakref.ref(cache), "cache", id(part))}
    )
    assert reported(kept, leak("host-memory", size=100_000)) == resources


CARD = "cuda:0"
SITE = "/opt/lib/site-packages/torch/cuda/graphs.py"
STATE = (StackFrame(SITE, 115, "capture_begin"), StackFrame(SITE, 257, "__enter__"), StackFrame("/w/e.py", 9, "run"))
COMPILED = (StackFrame("/opt/lib/site-packages/torch/_functorch/w.py", 409, "__torch_dispatch__"), *STATE)
OWN = (StackFrame("/w/e.py", 9, "run"), *STATE)
STATIC = (StackFrame(SITE, 640, "make_graphed_callables"), StackFrame("/w/e.py", 9, "run"))
STACKS = {0x1000: STATE, 0x1200: STATE, 0x2000: OWN, 0x3000: COMPILED, 0x4000: STATIC}


def path(*hops: str) -> tuple[Hop, ...]:
    """`edge:type`, all of them suspect but the first."""
    parts = [hop.rpartition(":") for hop in hops]
    return tuple(Hop(type=kind, edge=edge, suspect=turn > 0) for turn, (edge, _, kind) in enumerate(parts))


def on_card(resource: ResourceName, key: str, cause: Any, names: dict[str, int], way: tuple[Hop, ...] = ()) -> ItemLeak:
    size = sum(names.values())
    finding = Finding(
        resource=resource,
        cause=cause,
        bytes=size,
        count=1,
        device=CARD,
        stage="call",
        message=f"{size} B of something on {CARD} still held after call: {', '.join(names)}",
        fingerprint=f"{key} {cause}",
        verdict="native-held" if cause == "native" else None,
        path=way,
    )
    return ItemLeak(finding, key, names, 0)


def kept(cause: Any, addresses: tuple[int, ...], way: tuple[Hop, ...] = (), device: str = CARD) -> TensorLeak:
    leaked = on_card("tensors", "tensors", cause, {"tensor": 64}, way).finding
    leaked = msgspec.structs.replace(leaked, device=device, fingerprint=f"tensors {cause} {addresses}")
    return TensorLeak(leaked, {(device, address): 8 for address in addresses}, {})


def grouped(*leaks: Leak) -> list[list[str]]:
    """The resources and causes of each finding with those of its parts."""
    context = Context(stacks=lambda device, addresses: {at: STACKS[at] for at in addresses if at in STACKS})
    drafts, causes = with_causes(leaks, context)
    findings = [draft.finding for draft in drafts]
    merged = by_cause(findings, {id(finding): cause for finding, cause in zip(findings, causes, strict=True)})
    return [[f"{part.resource} {part.cause} {part.bytes}" for part in (finding, *finding.parts)] for finding in merged]


MANAGER = ("finalize:object", ".func:method", ".__self__:torch.Container", ".tree_manager:torch.Manager")
POOL = on_card(
    "reserved", f"reserved {CARD}", "cuda-graph", {"pool (0, 1), segment at 0x9": 80}, path(*MANAGER, ".graph:g")
)


def blocks(*addresses: int) -> ItemLeak:
    return on_card("tensors", f"native {CARD}", "native", {f"block at {at:#x}": 512 for at in addresses})


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is alive."""
    monkeypatch.setattr(causes_of, "any_graph_alive", lambda: True)


def test_the_state_of_a_graph_s_random_numbers_is_part_of_the_finding_about_it(graph: None) -> None:
    assert grouped(blocks(0x1000, 0x1200), POOL) == [["reserved cuda-graph 80", "tensors native 1024"]]
    held = kept("cuda-graph", (0x5000,), path("m:module", ".KEEP:dict", "['g']:torch.cuda.graphs.CUDAGraph"))
    assert grouped(kept("native", (0x3000,)), held) == [["tensors cuda-graph 64", "tensors native 64"]]


def test_other_memory_of_native_code_is_a_leak_of_its_own(graph: None) -> None:
    assert grouped(blocks(0x1000, 0x2000, 0x4000, 0x6000), POOL) == [
        ["reserved cuda-graph 80", "tensors native 512"],
        ["tensors native 1536"],
    ]
    assert grouped(kept("native", (0x3000, 0x2000)), POOL) == [["tensors native 64"], ["reserved cuda-graph 80"]]


def test_without_a_finding_about_a_graph_there_is_nothing_to_be_part_of(graph: None) -> None:
    assert grouped(blocks(0x1000, 0x1200)) == [["tensors native 1024"]]
    other = on_card("reserved", f"reserved {CARD}", "allocator-cache", {"pool (0, 2), segment at 0x9": 80})
    assert grouped(blocks(0x1000), other) == [["tensors native 512"], ["reserved allocator-cache 80"]]


def test_without_a_graph_that_is_alive_it_is_a_leak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes_of, "any_graph_alive", lambda: False)
    assert grouped(blocks(0x1000), POOL) == [["tensors native 512"], ["reserved cuda-graph 80"]]


def test_a_pool_and_the_tensors_of_one_manager_are_one_finding_with_the_state_of_its_graphs(graph: None) -> None:
    held = kept(
        "cuda-graph", (0x5000,), path(*MANAGER, "._current_node:torch.Node", ".inputs:list", "[0]:torch.Tensor")
    )
    assert grouped(held, kept("native", (0x3000,)), POOL) == [
        ["tensors cuda-graph 64", "reserved cuda-graph 80", "tensors native 64"]
    ]


@pytest.mark.parametrize(
    "way",
    [
        ("test:module", ".KEEP:dict", "['x']:torch.Tensor"),
        ("finalize:object", ".func:dict", "[0]:torch.Tensor"),
        (),
    ],
)
def test_tensors_that_another_thing_holds_are_no_part_of_the_pool(graph: None, way: tuple[str, ...]) -> None:
    assert grouped(kept("cuda-graph", (0x5000,), path(*way)), POOL) == [
        ["tensors cuda-graph 64"],
        ["reserved cuda-graph 80"],
    ]


def test_two_entries_of_a_container_are_two_leaks(graph: None) -> None:
    way = ("m:module", ".CACHE:dict")
    pool = on_card("reserved", POOL.key, "cuda-graph", POOL.names, path(*way, "['g']:torch.cuda.graphs.CUDAGraph"))
    held = kept("cuda-graph", (0x5000,), path(*way, "['x']:torch.Tensor"))
    assert grouped(held, pool) == [["tensors cuda-graph 64"], ["reserved cuda-graph 80"]]


def test_a_leak_on_a_card_says_what_more_its_segments_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[list[int]]]] = []

    def free(index: int, groups: list[list[int]]) -> list[int]:
        asked.append((index, groups))
        return [65 << 20, 1 << 20][: len(groups)]

    monkeypatch.setattr(tensor_findings, "free_beside", free)
    leaks = [kept("module-global", (0x10, 0x20)), kept("lru-cache", (0x30,)), kept("unknown", (0x40,), device="cpu")]
    reported = with_free_beside(leaks)
    ends = [leak.finding.message.partition("; ")[2] for leak in reported]
    assert ends == ["65.0 MiB more stay reserved in its segments", "", ""]
    assert asked == [(int(CARD.partition(":")[2]), [[0x10, 0x20], [0x30]])]
    assert [leak.sizes for leak in reported] == [leak.sizes for leak in leaks]


class Spooling:
    """What each of its threads has opened lies in one list."""

    def __init__(self) -> None:
        self.spools: list[Any] = []
        self.end = threading.Event()

    def answer(self) -> None:
        self.spools.append(tempfile.TemporaryFile())  # noqa: SIM115
        self.end.wait()


@contextmanager
def answering(server: Spooling, count: int) -> Iterator[None]:
    threads = [threading.Thread(target=server.answer, name=f"request-{number}") for number in range(count)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.spools) == count)
    yield
    server.end.set()
    for thread in threads:
        thread.join()
    for spool in server.spools:
        spool.close()


def test_new_descriptors_are_told_by_the_container_that_has_most_of_them() -> None:
    known = numbered_descriptors(os.getpid()).keys()
    with answering(server := Spooling(), 8), tempfile.TemporaryFile():
        facts = holder_of_new("file-descriptors", known)
        assert facts is not None
        assert facts.note.holder.startswith("Spooling.spools of thread 'request-"), facts.note
        # The thread that has come last may still have its own in a variable.
        assert (facts.note.text[2:], facts.path[-1].edge) == (" of them held by ", ".spools")
    del server


def test_new_descriptors_of_shared_memory_are_told_by_the_variable_that_has_it() -> None:
    known = numbered_descriptors(os.getpid()).keys()
    sent = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(4)]
    imports = []
    for each in sent:
        bucket = shared_memory.SharedMemory(each.name)
        imports.append(bucket)
        each.close()
    facts = holder_of_new("file-descriptors", known)
    for each in imports:
        each.close()
        each.unlink()
    assert facts is not None
    # The last one is in a variable, too.
    assert facts.note.text in (" held by ", " 3 of them held by ")
    function = test_new_descriptors_of_shared_memory_are_told_by_the_variable_that_has_it.__name__
    assert facts.note.holder.startswith(f"local 'imports' of {function}() in test_causes.py:")


def test_of_those_of_which_most_have_no_holder_it_is_not_said_who_has_the_others() -> None:
    known = numbered_descriptors(os.getpid()).keys()
    planted = [os.eventfd(0) for _ in range(4)]
    with tempfile.TemporaryFile() as LOGS.access, tempfile.TemporaryFile() as LOGS.errors:
        facts = holder_of_new("file-descriptors", known)
        LOGS.access, LOGS.errors = LOGS.access.close(), LOGS.errors.close()
    for number in planted:
        os.close(number)
    assert facts is None


@pytest.mark.parametrize("keeps", [True, False])
def test_new_children_are_told_by_the_container_that_has_most_of_them(keeps: bool) -> None:
    known = children_of(os.getpid())
    command, workers = [sys.executable, "-S", "-c", "input()"], list[subprocess.Popen[bytes]]()
    for _ in range(3):
        workers.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    facts = holder_of_new("processes", known if keeps else children_of(os.getpid()))
    for worker in workers:
        worker.communicate(b"\n")
    if keeps:
        assert facts is not None
        function = test_new_children_are_told_by_the_container_that_has_most_of_them.__name__
        assert facts.note.holder.startswith(f"local 'workers' of {function}() in test_causes.py:")
    else:
        assert facts is None


LOGS = SimpleNamespace(access=None, errors=None)


def test_those_that_lie_in_no_container_are_told_by_who_holds_each() -> None:
    known = numbered_descriptors(os.getpid()).keys()
    with tempfile.TemporaryFile() as LOGS.access, tempfile.TemporaryFile() as LOGS.errors:
        facts = holder_of_new("file-descriptors", known)
        LOGS.access, LOGS.errors = LOGS.access.close(), LOGS.errors.close()
    assert facts is not None
    assert facts.note.holder == f"{__name__}.LOGS"


def test_where_nothing_leaks_on_a_card_no_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_findings, "free_beside", None)
    leaks = [kept("unknown", (0x40,), device="cpu")]
    assert with_free_beside(leaks) == leaks


@contextmanager
def waiting_threads(count: int) -> Iterator[list[threading.Thread]]:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=f"request-{number}") for number in range(count)]
    for thread in threads:
        thread.start()
    yield threads
    end.set()
    for thread in threads:
        thread.join()


RUNNING: list[threading.Thread] = []


@pytest.mark.parametrize(("kept", "said"), [(False, ""), (True, f", held by {__name__}.RUNNING")])
def test_new_threads_are_told_by_what_they_run_and_not_as_their_own_holders(*, kept: bool, said: str) -> None:
    known = {thread.native_id or 0 for thread in threading.enumerate()}
    with waiting_threads(4) as threads:
        RUNNING.extend(threads if kept else ())
        threads.clear()
        facts = holder_of_new("threads", known)
        RUNNING.clear()
    assert facts is not None
    note = facts.note
    assert (
        f"{note.text}{note.holder}"
        == f" all are called 'request-*' and run threading.Event.wait (threading.py:{LINE}){said}"
    )
    assert holder_of_new("threads", {*known, *(thread.native_id or 0 for thread in threading.enumerate())}) is None


def test_of_several_holders_that_of_most_things_is_told_first() -> None:
    held = [CommonCause(key=name, holder=name) for name in ("FIRST", "MANY", "MANY", "LAST")]
    facts = causes_of._facts_of({("file-descriptors", str(number)): each for number, each in enumerate(held)}, 4)
    assert facts is not None
    assert (facts.note.text, facts.note.holder, facts.note.rest) == (" held by ", "MANY", ", FIRST, LAST")


LINE = threading.Event.wait.__code__.co_firstlineno


def test_an_object_of_a_library_is_looked_for_again_though_the_walk_was_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def first_holders(context: Context, found: list[object]) -> list[None]:
        """Need the walk made again, as for what is in none, and find no holder."""
        context.walk.close()
        asked.append(found)
        return [None] * len(found)

    monkeypatch.setattr(Context, "first_holders", first_holders)
    with lmdb.open(str(tmp_path)) as environment:
        kept = [environment]
        assert of_library(Context(born={id(kept)}, walk=SharedWalk())) is None
    assert [kept[0] in found for found in asked] == [True, True]
