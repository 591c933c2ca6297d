"""Whose `close()` was told to end a thing, and whose has nothing to do with it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest

from lowtide.leakcheck.explaining.endings import leaves_alone, leaves_running


class Part:
    def stop(self) -> None:
        pass


def stop_it(engine: Any) -> None:
    engine.part.stop()


def stop_all() -> None:
    pass


REGISTERED: list[Any] = []
NUMBER = 990_001


class Engine:
    """Has a part that should be stopped, and a number of a descriptor that should be closed."""

    def __init__(self) -> None:
        self.part, self.number = Part(), NUMBER
        self.model: Part | None = Part()
        self.parts, self.lock, self.replies = {"only": self.part}, threading.Lock(), queue.SimpleQueue[None]()
        self.settings: dict[str, Any] = {"of": self}

    def forgets(self) -> None:
        self.model = None

    def forgets_with_a_lock(self) -> None:
        with self.lock, contextlib.suppress(ValueError):
            self._release(each for each in [1, 2])

    def _release(self, numbers: Any) -> None:
        self.model = self.settings.get("of") if [*numbers] else None

    def stops(self) -> None:
        self.part.stop()

    def stops_within(self) -> None:
        self._stop()

    def _stop(self) -> None:
        for each in self.parts.values():
            each.stop()

    def hands_itself_on(self) -> None:
        stop_it(self)

    def hands_itself_to_a_builtin(self) -> None:
        vars(self)["part"].stop()

    def finds_it_by_name(self) -> None:
        for name in ("part",):
            getattr(self, name).stop()

    def calls_the_programs_function(self) -> None:
        stop_all()

    def reads_the_programs_global(self) -> None:
        REGISTERED.clear()

    def ends_all_of_its_kind(self) -> None:
        for each in multiprocessing.active_children():
            each.terminate()

    def tells_another_thread(self) -> None:
        self.replies.put(None)

    def kills_by_number(self) -> None:
        os.kill(self.number, signal.SIGTERM)

    def stops_in_a_function_of_its_own(self) -> Callable[[], None]:
        return lambda: self.part.stop()

    def closes(self) -> None:
        os.close(self.number)

    wrapped = functools.partialmethod(stops)


class Derived(Engine):
    def forgets(self) -> None:
        super().forgets()

    def stops_within(self) -> None:
        super().stops()


@pytest.mark.parametrize("cls", [Engine, Derived])
@pytest.mark.parametrize("call", ["forgets()", "forgets_with_a_lock()", "closes()"])
def test_a_call_that_leads_nowhere_near_a_thing_leaves_it_alone(cls: type[Engine], call: str) -> None:
    engine = cls()
    assert leaves_alone(engine, call, [engine.part])


@pytest.mark.parametrize("cls", [Engine, Derived])
@pytest.mark.parametrize(
    "call",
    [
        *("stops()", "stops_within()", "hands_itself_on()", "finds_it_by_name()", "calls_the_programs_function()"),
        *("reads_the_programs_global()", "ends_all_of_its_kind()", "tells_another_thread()", "kills_by_number()"),
        *("stops_in_a_function_of_its_own()", "wrapped()", "there_is_none()", "hands_itself_to_a_builtin()"),
    ],
)
def test_a_call_that_may_end_it_does_not(cls: type[Engine], call: str) -> None:
    engine = cls()
    assert not leaves_alone(engine, call, [engine.part])


def test_a_call_of_the_objects_own_is_not_read() -> None:
    engine: Any = Engine()
    engine.forgets = lambda: None
    assert not leaves_alone(engine, "forgets()", [engine.part])


def test_a_descriptor_is_closed_by_whoever_names_the_number() -> None:
    assert leaves_alone(Engine(), "forgets()", [NUMBER])
    assert not leaves_alone(Engine(), "closes()", [NUMBER])


def test_where_a_name_is_needed_a_call_without_it_ends_nothing() -> None:
    engine = Engine()
    assert leaves_alone(engine, "stops()", [engine.part], needs="unlink")
    assert not leaves_alone(engine, "stops()", [engine.part], needs="stop")


def test_a_librarys_call_is_not_read() -> None:
    assert not leaves_alone(threading.Timer(1, stop_all), "cancel()", [])


class Running:
    """Its thread is to end when it is told to, by a flag or an event."""

    def __init__(self) -> None:
        self.goes_on, self.event = True, threading.Event()
        self.model: Part | None = Part()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        REGISTERED.append(self.goes_on)
        while self.goes_on and not self.event.wait(1):
            pass

    def forgets(self) -> None:
        self.model = None

    def lowers_the_flag(self) -> None:
        self.goes_on = False

    def sets_the_event(self) -> None:
        self.event.set()

    def joins(self) -> None:
        self.thread.join()


@pytest.mark.parametrize(
    ("call", "is_idle"),
    [("forgets()", True), ("lowers_the_flag()", False), ("sets_the_event()", False), ("joins()", False)],
)
def test_a_thread_is_ended_by_what_it_looks_at(call: str, *, is_idle: bool) -> None:
    running = Running()
    assert leaves_running(running, call, running.thread, running.run) is is_idle


def test_of_a_method_that_an_object_alone_has_nobody_can_tell() -> None:
    engine: Any = Engine()
    engine.stop_it = MethodType(stop_it, engine)
    assert not leaves_alone(engine, "stop_it()", [engine.part])
    assert not leaves_running(engine, "forgets()", threading.current_thread(), engine.stop_it)
