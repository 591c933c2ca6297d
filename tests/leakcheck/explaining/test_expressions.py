"""A class is found by its type's name whatever else lies on the way, and told with the call that ends it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.pool
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest

from lowtide.leakcheck.explaining.expressions import class_named, ending_of, ends_part, on
from tests.waiting import HANG_S


class Hostile:
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise AssertionError("the program's code ran")


class Outer:
    class Inner:
        def stop(self) -> None: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("program_of_endings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(Outer=Outer, number=5, hostile=Hostile())
    return module


def test_a_class_is_found_by_its_name(program: ModuleType) -> None:
    assert class_named("program_of_endings.Outer.Inner") is Outer.Inner
    assert ending_of(class_named("program_of_endings.Outer.Inner")) == "stop()"


@pytest.mark.parametrize("name", ["number.<locals>.Engine", "hostile.<locals>.Engine", "absent.Engine", "number", ""])
def test_what_is_no_class_is_none(program: ModuleType, name: str) -> None:
    assert class_named(f"program_of_endings.{name}") is None
    assert class_named(name) is None


class Runner:
    def __init__(self) -> None:
        self.sites: list[Outer.Inner] = []

    async def shutdown(self) -> None:
        self.sites.clear()

    async def cleanup(self) -> None:
        for site in self.sites:
            site.stop()
        await self.shutdown()


class Server:
    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        self.running = Runner()

    def release(self, whole: bool) -> None:
        self.running.shutdown()
        self.close()


class Circle:
    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self.stop()


class OfOthers:
    def stop(self) -> None: ...

    def cleanup(self) -> None:
        for inner in [Outer.Inner()]:
            inner.stop()


class Plain:
    def cleanup(self) -> None: ...


@pytest.mark.parametrize(
    ("cls", "ending"),
    [
        (Runner, "await cleanup()"),
        (Server, "close()"),
        (Circle, "stop()"),
        (OfOthers, "stop()"),
        (Plain, "cleanup()"),
        (Hostile, ""),
    ],
)
def test_of_several_endings_the_one_that_calls_the_others_is_told(cls: type, ending: str) -> None:
    assert ending_of(cls) == ending


def test_of_a_process_that_was_joined_only_its_pipes_are_left_to_close() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(HANG_S,))
    process.start()
    assert ending_of(type(process), process) == "terminate()"
    process.terminate()
    process.join()
    assert ending_of(type(process), process) == "close()"


def test_the_libraries_endings_are_as_their_documentation_says() -> None:
    assert ending_of(multiprocessing.pool.Pool) == "terminate()"
    assert ending_of(ThreadPoolExecutor) == "shutdown()"
    assert ending_of(TemporaryDirectory) == "cleanup()"
    assert ending_of(subprocess.Popen) == "terminate()"
    assert ending_of(socket.socket) == "close()"
    assert ending_of(SharedMemory) == "unlink()"
    assert ending_of(asyncio.base_events.Server) == "close()"
    assert ending_of(logging.FileHandler) == "close()"


def test_what_opens_a_lock_is_no_end_of_its_semaphore() -> None:
    context = multiprocessing.get_context("spawn")
    for lock in (context.Lock(), context.Semaphore(), context.Condition(), context.Value("i", 1)):
        assert ending_of(type(lock), lock) == ""
    assert ending_of(memoryview) == "release()"


def test_a_loop_that_runs_is_stopped_before_it_is_closed() -> None:
    loop = asyncio.new_event_loop()
    try:
        assert ending_of(type(loop), loop) == "close()"

        async def running() -> str:
            return on("engine.loop", ending_of(type(loop), loop))

        told = loop.run_until_complete(running())
    finally:
        loop.close()
    assert told == "engine.loop.call_soon_threadsafe(engine.loop.stop), join its thread and close() it"


@pytest.mark.parametrize(
    ("cls", "name", "is_ended"),
    [
        (logging.FileHandler, "stream", True),
        (logging.StreamHandler, "stream", False),
        (subprocess.Popen, "stdin", False),
        (None, "stream", False),
    ],
)
def test_what_its_end_has_to_do_with_is_a_part(cls: type | None, name: str, *, is_ended: bool) -> None:
    assert ends_part(cls, name) is is_ended
