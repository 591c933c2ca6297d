"""Pending tasks of asyncio: those that nothing can wake are told from those that something may still wake."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import pytest

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.resources import threads as asyncio_tasks
from lowtide.leakcheck.resources.threads import AsyncioTasks
from lowtide.probes.device.driver import NoDriver

KEPT: list[Any] = []

Make = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    KEPT.clear()


def start(loop: asyncio.AbstractEventLoop, *makes: Make) -> list[str]:
    """Start tasks and let each come to where it waits; return which of them nothing can wake, by their coroutines."""

    async def run() -> None:
        KEPT.extend(asyncio.ensure_future(make()) for make in makes)
        for _ in range(3):
            await asyncio.sleep(0)

    resource = AsyncioTasks()
    before = resource.read()
    loop.run_until_complete(run())
    gc.collect()
    new = resource.read().keys() - before.keys()
    return sorted(resource.identity(name).text.partition(" in ")[0] for name in new - set(resource.staying(new)))


async def consumer(queue: asyncio.Queue[int]) -> None:
    while True:
        await queue.get()


async def waits(event: asyncio.Event) -> None:
    await event.wait()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def gathers() -> None:
    await asyncio.gather(forever(), forever())


async def awaits(task: asyncio.Task[Any]) -> None:
    await task


async def sleeps() -> None:
    await asyncio.sleep(3600)


async def gathers_one_that_sleeps() -> None:
    await asyncio.gather(forever(), sleeps())


async def wakes(event: asyncio.Event) -> None:
    await asyncio.sleep(3600)
    event.set()


async def two_consumers() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    KEPT.extend(asyncio.ensure_future(consumer(queue)) for _ in range(2))


STUCK: list[tuple[Make, list[str]]] = [
    (lambda: consumer(asyncio.Queue()), ["consumer()"]),
    (lambda: waits(asyncio.Event()), ["waits()"]),
    (forever, ["forever()"]),
    (two_consumers, ["consumer()", "consumer()"]),
]


@pytest.mark.parametrize(("make", "stuck"), STUCK)
def test_nothing_can_wake_what_waits_for_what_only_it_knows(
    loop: asyncio.AbstractEventLoop, make: Make, stuck: list[str]
) -> None:
    assert start(loop, make) == stuck


def test_those_that_only_wait_for_each_other_are_all_stuck(loop: asyncio.AbstractEventLoop) -> None:
    assert start(loop, gathers) == ["forever()", "forever()", "gathers()"]


def test_one_that_awaits_a_stuck_task_is_stuck(loop: asyncio.AbstractEventLoop) -> None:
    assert start(loop, lambda: awaits(asyncio.ensure_future(forever()))) == ["awaits()", "forever()"]


def test_a_timer_wakes(loop: asyncio.AbstractEventLoop) -> None:
    assert start(loop, sleeps) == []


def test_one_that_may_be_woken_wakes_those_that_wait_for_it(loop: asyncio.AbstractEventLoop) -> None:
    assert start(loop, gathers_one_that_sleeps) == ["forever()"]
    event = asyncio.Event()
    makes: list[Make] = [lambda: waits(event), lambda: wakes(event)]
    assert start(loop, *makes) == []


def test_many_that_a_timer_wakes_are_looked_at_together(loop: asyncio.AbstractEventLoop) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio_tasks, "_wakers", lambda *_: pytest.fail("one was looked at by itself"))
        assert start(loop, *[sleeps] * 500) == []


def test_what_is_not_looked_at_in_time_is_no_leak(loop: asyncio.AbstractEventLoop) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio_tasks, "_BUDGET_S", 0.0)
        assert start(loop, forever) == []
    assert start(loop, forever) == ["forever()"]


def test_a_descriptor_wakes(loop: asyncio.AbstractEventLoop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert start(loop, lambda: loop.sock_recv(ours, 1)) == []
        theirs.send(b"x")
        loop.run_until_complete(asyncio.sleep(0.01))


def test_a_thread_wakes(loop: asyncio.AbstractEventLoop) -> None:
    goes_on = threading.Event()

    async def in_a_thread() -> None:
        await loop.run_in_executor(None, goes_on.wait)

    try:
        assert start(loop, in_a_thread) == []
    finally:
        goes_on.set()


QUEUES: list[asyncio.Queue[int]] = []


def test_whoever_reaches_the_queue_may_wake(loop: asyncio.AbstractEventLoop) -> None:
    QUEUES.append(asyncio.Queue())
    assert start(loop, lambda: consumer(QUEUES[0])) == []
    # A variable of a function that runs.
    queue: asyncio.Queue[int] = asyncio.Queue()
    assert start(loop, lambda: consumer(queue)) == []
    assert queue.empty()
    QUEUES.clear()


def test_a_loop_that_is_closed_wakes_none() -> None:
    loop = asyncio.new_event_loop()
    resource = AsyncioTasks()
    try:
        assert start(loop, sleeps) == []
        (name,) = (name for name, task in resource.objects(resource.read()).items() if task is KEPT[-1])
        assert set(resource.staying([name])) == {name}
    finally:
        loop.close()
    # At once, though what it awaits is the same as a moment before.
    assert set(resource.staying([name])) == set()
    KEPT.pop()._log_destroy_pending = False


def test_what_has_ended_meanwhile_is_no_leak(loop: asyncio.AbstractEventLoop) -> None:
    resource = AsyncioTasks()
    assert set(resource.staying(["Task-1: gone.coroutine() at gone.py:1 (0x10)"])) != set()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11 each coroutine has a frame")
def test_reading_makes_no_frame_that_a_coroutine_would_keep(loop: asyncio.AbstractEventLoop) -> None:
    coroutine = sleeps()

    async def run() -> None:
        KEPT.append(asyncio.ensure_future(coroutine))
        await asyncio.sleep(0)

    loop.run_until_complete(run())
    assert any("sleeps()" in name for name in AsyncioTasks().read())
    assert FrameType not in map(type, gc.get_referents(coroutine))


def test_many_holders_are_taken_to_wake(loop: asyncio.AbstractEventLoop) -> None:
    async def among_many() -> None:
        future = asyncio.get_running_loop().create_future()
        around: list[Any] = [[future] for _ in range(1000)]
        await future
        around.clear()

    assert start(loop, among_many) == []


@pytest.mark.parametrize(("make", "count"), [(forever, 1), (sleeps, 0)])
def test_a_life_is_judged_by_what_it_leaves(loop: asyncio.AbstractEventLoop, make: Make, count: int) -> None:
    class Starts:
        def create(self) -> None:
            start(loop, make)

        def infer(self) -> list[list[int]]:
            return [[1]]

        def shutdown(self) -> None: ...

    engine: Any = Starts
    script = ("create", "infer", "shutdown")
    run = LifecycleRun("small", engine, device="cpu", driver=NoDriver("a test"), cycles=2, script=script)
    # Of two lives that leave one each, there is one finding.
    found = [each for each in run.run().findings if each.resource == "asyncio-tasks"]
    assert [(each.count, each.stage) for each in found] == [(2, "shutdown")] * count
    assert all(f"held by {__name__}.KEPT" in each.message for each in found)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("Task-7: app.serve() at /app.py:3 (0x7f00)", "app.serve() in app.py"),
        ("poller: app.serve() at /app.py:3 (0x7f00)", "app.serve() in app.py poller"),
        ("poller-12: app.serve() at /app.py:3 (0x7f00)", "app.serve() in app.py poller-*"),
    ],
)
def test_a_fingerprint_names_the_coroutine_and_a_name_that_was_given(name: str, identity: str) -> None:
    assert (AsyncioTasks().identity(name).text, AsyncioTasks().describe(name)) == (identity, name.rpartition(" (")[0])
