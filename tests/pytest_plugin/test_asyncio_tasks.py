"""Tasks that nothing can wake are a leak with its holder, others none; and things with objects are told by holder."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

TASKS = """
import asyncio
import socket
import threading

import pytest

KEPT = set()
QUEUE = None
GOES_ON = threading.Event()
LIST, OTHER = [], []


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture(scope="module")
def server(loop):
    start(loop, lambda: consumer(asyncio.Queue()))


async def consumer(queue):
    while True:
        await queue.get()


async def sleeper():
    await asyncio.sleep(3600)


async def in_a_thread():
    await asyncio.get_running_loop().run_in_executor(None, GOES_ON.wait)


async def pair():
    future = asyncio.get_running_loop().create_future()

    async def inner():
        await future

    task = asyncio.ensure_future(inner())
    KEPT.add(task)
    await asyncio.gather(task)


def start(loop, make):
    async def run():
        KEPT.add(asyncio.ensure_future(make()))
        await asyncio.sleep(0)

    loop.run_until_complete(run())


def test_first(loop):
    loop.run_until_complete(asyncio.sleep(0))


def test_of_a_fixture(server): ...


@pytest.fixture(scope="module")
def tasks(loop):
    tasks = []
    yield tasks
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))


def test_into_a_fixture(loop, tasks):
    async def run():
        tasks.append(asyncio.ensure_future(consumer(asyncio.Queue())))
        await asyncio.sleep(0)

    loop.run_until_complete(run())


def test_stuck(loop):
    start(loop, lambda: consumer(asyncio.Queue()))


def test_pair(loop):
    start(loop, pair)


def test_timer(loop):
    start(loop, sleeper)


def test_queue_of_the_module(loop):
    global QUEUE
    QUEUE = asyncio.Queue()
    start(loop, lambda: consumer(QUEUE))


def test_thread(loop):
    start(loop, in_a_thread)


def test_thread_goes_on(loop):
    GOES_ON.set()
    loop.run_until_complete(loop.shutdown_default_executor())


def test_garbage(loop):
    async def run():
        asyncio.ensure_future(consumer(asyncio.Queue()))
        await asyncio.sleep(0)

    loop.run_until_complete(run())


def test_asyncio_run():
    async def run():
        asyncio.ensure_future(consumer(asyncio.Queue()))
        await asyncio.sleep(0)

    asyncio.run(run())


def test_closed():
    loop = asyncio.new_event_loop()
    start(loop, sleeper)
    loop.close()


def test_two_of_one():
    LIST.extend((socket.socket(), socket.socket()))


def test_one_of_each():
    LIST.append(socket.socket())
    OTHER.append(socket.socket())
"""

HOLDERS = {
    "test_stuck": [("asyncio-tasks", 1, "test_inner.KEPT {…}")],
    "test_pair": [("asyncio-tasks", 2, "test_inner.KEPT")],
    "test_closed": [("asyncio-tasks", 1, "test_inner.KEPT {…}")],
    "test_two_of_one": [("file-descriptors", 2, "test_inner.LIST")],
    "test_one_of_each": [
        ("file-descriptors", 1, "test_inner.LIST[2]"),
        ("file-descriptors", 1, "test_inner.OTHER[0]"),
    ],
}
CLEAN = (
    "first",
    "of_a_fixture",
    "into_a_fixture",
    "timer",
    "queue_of_the_module",
    "thread",
    "thread_goes_on",
    "garbage",
    "asyncio_run",
)


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": TASKS}, "-W", "ignore")


@pytest.mark.parametrize("test", HOLDERS)
def test_what_is_left_is_told_by_who_holds_it(run: InnerRun, test: str) -> None:
    found = run.subject(f"test_inner.py::{test}").findings
    assert [(each.resource, each.count, each.holder) for each in found] == HOLDERS[test]


def test_a_task_is_told_with_its_coroutine_and_how_it_ends(run: InnerRun) -> None:
    (finding,) = run.subject("test_inner.py::test_stuck").findings
    assert "1 asyncio task that nothing can wake still pending" in finding.message
    assert "consumer() at " in finding.message
    assert finding.advice == "nothing can wake it: cancel() it and await it in teardown, before the loop is closed"


@pytest.mark.parametrize("name", CLEAN)
def test_what_may_be_woken_or_is_garbage_is_clean(run: InnerRun, name: str) -> None:
    assert run.is_clean(f"test_inner.py::test_{name}")


@pytest.mark.nightly
def test_two_runs_give_a_task_one_fingerprint(run: InnerRun, run_inner: RunInner) -> None:
    marks = [each.fingerprint for each in run.subject("test_inner.py::test_stuck").findings]
    again = run_inner({"test_inner.py": TASKS}, "-W", "ignore", "-k", "first or stuck or pair")
    assert [each.fingerprint for each in again.subject("test_inner.py::test_stuck").findings] == marks
