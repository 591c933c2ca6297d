"""What the objects on a path say of themselves, and what a path is called."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import enum
import functools
import gc
import io
import logging
import queue
import re
import socket
import sys
import threading
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import prometheus_client
import pytest
import torch

from lowtide.leakcheck.explaining.cut import Names
from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.explaining.path_reading import marks
from tests.leakcheck.explaining.test_cuts import Others
from tests.waiting import HANG_S


class Closable:
    """Can be closed, and remembers that it was, or says what state it is in."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def close(self) -> None: ...


class Stoppable(Closable):
    """Inherits what ends it."""


class Endless:
    """Says what a `Closable` says, but nothing can end it."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("_closed",)

    def __init__(self, closed: bool) -> None:
        self._closed = closed

    def close(self) -> None: ...


class State(enum.Enum):
    RUNNING = enum.auto()
    ASLEEP = enum.auto()
    CLOSED = enum.auto()
    SHUT_DOWN = enum.auto()
    NEW = enum.auto()


def mark_of(item: object, **known: Any) -> object:
    """What is said of one object alone."""
    return marks([item], **known)[0]


# --- what has ended -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["closed", "_closed", "_is_closed", "is_closed", "_shutdown", "is_shutdown"])
def test_what_says_that_it_is_closed_should_be_gone(flag: str) -> None:
    assert mark_of(Closable(**{flag: True})) == "holding"
    assert mark_of(Closable(**{flag: False})) is None


def test_a_method_that_ends_it_may_be_inherited() -> None:
    assert mark_of(Stoppable(_closed=True)) == "holding"
    assert mark_of(Stoppable(_closed=False)) is None


def test_only_true_itself_says_that_something_is_closed() -> None:
    assert mark_of(Closable(_closed=1)) is None
    assert mark_of(Closable(_shutdown=threading.Event())) is None


def test_what_nothing_can_end_says_nothing_by_a_name_alone() -> None:
    assert mark_of(Endless(_closed=True)) is None
    assert mark_of(Endless(state="closed")) is None


@pytest.mark.parametrize("method", ["close", "shutdown", "stop", "terminate", "destroy"])
def test_each_way_to_end_something_is_known(method: str) -> None:
    ended = type("Thing", (), {method: lambda self: None, "_closed": True})()
    assert mark_of(ended) == "holding"


def test_a_flag_of_the_class_counts_until_the_instance_says_otherwise() -> None:
    class Connection:
        closed = True

        def close(self) -> None: ...

    open_one: Any = Connection()
    open_one.closed = False
    assert mark_of(Connection()) == "holding"
    assert mark_of(open_one) is None


def test_a_flag_may_lie_in_a_slot() -> None:
    assert mark_of(Slotted(closed=True)) == "holding"
    assert mark_of(Slotted(closed=False)) is None
    assert mark_of(object.__new__(Slotted)) is None


@pytest.mark.parametrize("name", ["state", "_state", "status", "_status"])
def test_a_state_in_words_tells_what_has_ended(name: str) -> None:
    assert mark_of(Closable(**{name: "closed"})) == "holding"
    assert mark_of(Closable(**{name: "TERMINATED"})) == "holding"
    assert mark_of(Closable(**{name: "new"})) is None


@pytest.mark.parametrize("state", [State.CLOSED, State.SHUT_DOWN])
def test_a_state_by_an_enumeration_tells_what_has_ended(state: State) -> None:
    assert mark_of(Closable(state=state)) == "holding"


def test_a_state_that_is_neither_ended_nor_running_says_nothing() -> None:
    assert mark_of(Closable(state=State.NEW), living=True) is None


def test_an_executor_that_was_shut_down_should_be_gone() -> None:
    executor = concurrent.futures.ThreadPoolExecutor(1)
    assert mark_of(executor) is None
    executor.shutdown()
    assert mark_of(executor) == "holding"


def test_a_closed_socket_should_be_gone() -> None:
    connection = socket.socket()
    try:
        assert mark_of(connection) is None
    finally:
        connection.close()
    assert mark_of(connection) == "holding"


@pytest.mark.parametrize("layer", ["text", "buffered", "raw", "in memory"])
def test_a_closed_file_should_be_gone(layer: str) -> None:
    with open(__file__, encoding="utf-8") as text, io.BytesIO() as memory:  # noqa: PTH123
        buffered: Any = text.buffer
        file = {"text": text, "buffered": buffered, "raw": buffered.raw, "in memory": memory}[layer]
        assert mark_of(file) is None
    assert mark_of(file) == "holding"


def test_a_closed_event_loop_should_be_gone() -> None:
    loop = asyncio.new_event_loop()
    assert mark_of(loop) is None
    loop.close()
    assert mark_of(loop) == "holding"


@contextlib.contextmanager
def running_thread() -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(20,))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_has_ended_should_be_gone() -> None:
    with running_thread() as thread:
        assert mark_of(thread) is None
    assert mark_of(thread) == "holding"


def test_a_thread_that_was_never_started_says_nothing() -> None:
    assert mark_of(threading.Thread()) is None


def test_a_thread_is_compared_by_identity() -> None:
    class Own(threading.Thread):
        def __eq__(self, other: object) -> bool:
            raise ForeignError

        __hash__ = threading.Thread.__hash__

    stop = threading.Event()
    thread = Own(target=stop.wait, args=(20,))
    thread.start()
    try:
        assert mark_of(thread) is None
    finally:
        stop.set()
        thread.join()
    assert mark_of(thread) == "holding"


def test_a_subclass_of_a_thread_is_a_thread() -> None:
    timer = threading.Timer(0, int)
    timer.start()
    timer.join()
    assert mark_of(timer) == "holding"


# --- what has not ended yet -----------------------------------------------------------------------------------------


def test_a_future_without_a_result_is_pending() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert mark_of(future) == "pending"
    future.set_running_or_notify_cancel()
    assert mark_of(future) == "pending"
    future.set_result(1)
    assert mark_of(future) is None


def test_a_cancelled_or_failed_future_is_done() -> None:
    cancelled: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    cancelled.cancel()
    failed.set_exception(ValueError())
    assert marks([cancelled, failed]) == [None, None]


def test_a_future_of_asyncio_is_pending_until_it_is_done() -> None:
    loop = asyncio.new_event_loop()
    try:
        future: asyncio.Future[int] = loop.create_future()
        assert mark_of(future) == "pending"
        future.set_result(1)
        assert mark_of(future) is None
    finally:
        loop.close()


def test_a_task_is_a_future_too() -> None:
    async def wait(event: asyncio.Event) -> None:
        await event.wait()

    async def look() -> list[object]:
        event = asyncio.Event()
        task = asyncio.create_task(wait(event))
        await asyncio.sleep(0)
        before = mark_of(task)
        event.set()
        await task
        return [before, mark_of(task)]

    assert asyncio.run(look()) == ["pending", None]


def test_a_collective_operation_is_pending_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        done = False

        def is_completed(self) -> bool:
            return self.done

    distributed = sys.modules["torch.distributed"]
    monkeypatch.setattr(distributed, "Work", Work, raising=False)
    work = Work()
    assert mark_of(work) == "pending"
    work.done = True
    assert mark_of(work) is None


# --- no foreign code ------------------------------------------------------------------------------------------------


class ForeignError(Exception): ...


def raising(*_: object) -> Any:
    raise ForeignError


class HostileMeta(type):
    __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = __getattr__ = __repr__ = raising
    __module__ = property(raising)


class Hostile(metaclass=HostileMeta):
    """Raises whatever it is asked; says that it is closed in its own attributes."""

    __eq__ = __hash__ = __repr__ = __bool__ = __len__ = __iter__ = raising
    __getattr__ = __getattribute__ = raising
    __class__ = __dict__ = property(raising)
    closed = status = property(raising)

    def close(self) -> None: ...


def hostile(**attributes: object) -> object:
    made = object.__new__(Hostile)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def test_no_code_of_the_object_runs() -> None:
    assert mark_of(hostile()) is None
    assert mark_of(hostile(_closed=True)) == "holding"
    assert mark_of(hostile(_state="running"), living=True) == "innocent"
    assert mark_of(hostile(_closed=True), hollow=True) == "innocent"


@pytest.mark.parametrize("name", ["_closed", "state"])
def test_no_code_of_what_an_attribute_holds_runs(name: str) -> None:
    assert mark_of(Closable(**{name: hostile()})) is None


def test_no_property_runs() -> None:
    class Lazy:
        _closed = property(raising)
        state = property(raising)

        def close(self) -> None: ...

    assert mark_of(Lazy()) is None


@pytest.mark.parametrize("base", [concurrent.futures.Future, threading.Thread, asyncio.Future])
def test_no_code_of_a_subclass_of_what_is_known_runs(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def done(self) -> bool:
            raise ForeignError

        is_alive = running = cancelled = done

        def __eq__(self, other: object) -> bool:
            raise ForeignError

        __hash__ = base.__hash__

    loop = asyncio.new_event_loop()
    try:
        own = Own(loop=loop) if base is asyncio.Future else Own()
        assert mark_of(own) == (None if base is threading.Thread else "pending")
    finally:
        loop.close()


class OwnStream(io.RawIOBase):
    """A stream of the program's own, asked for more than it says."""

    silent = True

    @property
    def closed(self) -> bool:
        if not self.silent:
            raise ForeignError
        return False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return 0


@pytest.mark.parametrize("wrap", [io.BufferedReader, lambda raw: io.TextIOWrapper(io.BufferedReader(raw))])
def test_no_code_of_what_a_file_reads_from_runs(wrap: Any) -> None:
    stream = OwnStream()
    file = wrap(stream)
    stream.silent = False
    try:
        assert mark_of(file) is None
    finally:
        stream.silent = True
        # In this order: from Python 3.13 on a reader that is finalized after its stream complains of it.
        file.detach()


def test_an_instance_is_left_as_it_was() -> None:
    class Connection:
        def __init__(self) -> None:
            self._closed = True

        def close(self) -> None: ...

    connection = Connection()
    before = list(map(id, gc.get_referents(connection)))
    assert mark_of(connection) == "holding"
    assert list(map(id, gc.get_referents(connection))) == before


# --- what the caller knows ------------------------------------------------------------------------------------------


def test_what_was_there_before_is_innocent_by_its_identity() -> None:
    there, equal = [1], [1]
    assert marks([there, equal], innocent={id(there)}) == ["innocent", None]


def test_what_is_closed_is_not_innocent_although_it_was_there_before() -> None:
    closed, still_open = Closable(_closed=True), Closable(_closed=False)
    assert marks([closed, still_open], innocent={id(closed), id(still_open)}) == ["holding", "innocent"]


def test_what_is_pending_is_innocent_if_it_was_there_before() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    assert mark_of(future, innocent={id(future)}) == "innocent"


def test_a_plain_dict_that_something_innocent_holds_is_innocent_where_ages_are_known() -> None:
    # The collector knows of an empty dict only from its first entry on.
    there, table, own = Endless(), {"a": 1}, type("Own", (dict,), {})()
    known: dict[str, Any] = {"innocent": {id(there)}, "ages_known": True}
    assert marks([table], **known) == ["innocent"]
    assert marks([there, table], **known) == ["innocent", "innocent"]
    assert marks([there, own], **known) == ["innocent", None]
    assert marks([Endless(), table], **known) == [None, None]
    assert marks([there, Endless(), table], **known) == ["innocent", None, None]
    assert marks([there, table], innocent={id(there)}) == ["innocent", None]


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        collections.deque,
        lambda tables: {"request": tables[0]},
        lambda tables: collections.defaultdict(dict, {"request": tables[0]}),
        lambda tables: collections.OrderedDict({"request": tables[0]}),
    ],
)
def test_a_plain_dict_among_the_entries_of_a_container_is_as_old_as_it_seems(container: Callable[[Any], Any]) -> None:
    table = {"logits": Endless()}
    there = container([table])
    known: dict[str, Any] = {"ages_known": True}
    assert marks([there, table], innocent={id(there)}, **known) == ["innocent", None]
    assert marks([there, table], innocent={id(there), id(table)}, **known) == ["innocent", "innocent"]


@pytest.mark.parametrize("state", ["running", "asleep", "READY", State.RUNNING, State.ASLEEP])
def test_an_engine_that_runs_is_meant_to_live_where_engines_are(state: object) -> None:
    engine = Closable(state=state)
    assert mark_of(engine, living=True) == "innocent"
    assert mark_of(engine) is None


def test_a_flag_goes_before_a_state() -> None:
    assert mark_of(Closable(_closed=True, state="running"), living=True) == "holding"


def test_the_modules_of_a_running_engine_are_meant_to_live_with_it() -> None:
    engine, runner, layer = Closable(state="running"), Endless(), torch.nn.Linear(1, 1)
    assert marks([engine, runner, layer, layer], living=True) == ["innocent", None, "innocent", "innocent"]
    assert marks([engine, runner, layer, layer]) == [None, None, None, None]


def test_a_module_before_the_engine_or_without_one_is_not_the_engines() -> None:
    engine, layer = Closable(state="running"), torch.nn.Linear(1, 1)
    assert marks([layer, engine], living=True) == [None, "innocent"]
    assert marks([layer], living=True) == [None]
    assert marks([Closable(state="closed"), layer], living=True) == ["holding", None]


def test_an_engine_that_was_there_before_owns_its_modules_only_if_it_runs() -> None:
    engine, layer = Closable(), torch.nn.Linear(1, 1)
    assert marks([engine, layer], innocent={id(engine)}, living=True) == ["innocent", None]


def test_the_closed_parts_of_an_engine_that_was_shut_down_may_be_there_and_should_be_empty() -> None:
    part, plain = Closable(_closed=True), Endless()
    assert marks([part, plain], hollow=True) == ["innocent", None]
    assert marks([part, plain]) == ["holding", None]


# --- what a path says then ------------------------------------------------------------------------------------------


@pytest.fixture
def helper() -> Iterator[Any]:
    module = type(sys)("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


def suspects(thing: object, **known: Any) -> list[tuple[str, bool, str | None]]:
    (reported,) = explain([thing], **known)
    return [(hop.edge, hop.suspect, hop.mark) for hop in reported.path]


def test_nothing_behind_what_should_be_gone_is_a_suspect(helper: Any) -> None:
    helper.POOL = Closable(_closed=True, buffers=[[torch.zeros(1)]])
    assert suspects(helper.POOL.buffers[0][0]) == [
        ("helper", False, None),
        (".POOL", True, "holding"),
        (".buffers", False, None),
        ("[0]", False, None),
        ("[0]", False, None),
    ]


def test_everything_behind_what_is_open_is_a_suspect(helper: Any) -> None:
    helper.POOL = Closable(_closed=False, buffers=[[torch.zeros(1)]])
    assert [suspect for _, suspect, _ in suspects(helper.POOL.buffers[0][0])] == [False, True, True, True, True]


def test_what_is_closed_ends_the_suspects_although_it_was_there_before(helper: Any) -> None:
    helper.POOL = Closable(_closed=True, buffers=[torch.zeros(1)])
    found = suspects(helper.POOL.buffers[0], innocent={id(helper.POOL)})
    assert [(edge, suspect) for edge, suspect, _ in found] == [
        ("helper", False),
        (".POOL", True),
        (".buffers", False),
        ("[0]", False),
    ]


def test_what_work_in_flight_holds_is_in_flight(helper: Any) -> None:
    helper.PENDING = [concurrent.futures.Future()]
    helper.PENDING[0].batch = torch.zeros(1)
    (reported,) = explain([helper.PENDING[0].batch])
    assert reported.verdict == "in-flight"
    assert [hop.mark for hop in reported.path] == [None] * 4
    helper.PENDING[0].set_result(None)
    (reported,) = explain([helper.PENDING[0].batch])
    assert reported.verdict == "reachable"


def test_a_running_engine_leaves_only_its_own_leak_suspect(helper: Any) -> None:
    helper.ENGINE = Closable(state="running", model=torch.nn.Linear(1, 1))
    helper.ENGINE.model.log = [torch.zeros(1)]
    (reported,) = explain([helper.ENGINE.model.log[0]], living=True)
    assert reported.suspects[0] == "helper.ENGINE.model .log"
    (reported,) = explain([helper.ENGINE.model.log[0]])
    assert reported.suspects[0] == "helper .ENGINE"


def test_a_function_is_no_older_than_its_cells() -> None:
    """Of what is known of a leak when the program is over, the second of two functions with one cell is not."""
    kept = [object()]

    def first() -> object:
        return kept

    def second() -> object:
        return kept

    hooks = {"first": first, "second": second}
    (cell,) = first.__closure__ or ()
    assert marks([hooks, second, kept], innocent={id(hooks), id(second), id(cell)}, ages_known=True)[1] == "innocent"
    assert marks([hooks, second, kept], innocent={id(hooks), id(second)}, ages_known=True)[1] is None
    older = Others(first, cell, kept, kept[0])
    (reported,) = explain([kept], innocent=older, names=Names(older), roots=[("hooks", hooks)])
    assert id(cell) in reported.new


Put = Callable[[Any, Any], object]
SHAPES: dict[str, tuple[str, Put]] = {}


class Thing:
    """What leaks."""

    def on(self, *args: object) -> None:
        """A callback."""


def held_by(name: str) -> Callable[[Put], Put]:
    """Registers a function that lets something of the module `helper` hold a thing; `name` is what that is called."""

    def register(put: Put) -> Put:
        SHAPES[put.__name__] = (name, put)
        return put

    return register


@held_by("helper.SHARED.forward.__self__")
def patched_method(helper: Any, thing: Any) -> None:
    helper.SHARED = torch.nn.Linear(1, 1)
    helper.SHARED.forward = thing.on


@held_by("helper.PARAMETER._backward_hooks[0].__self__")
def hook_of_a_parameter(helper: Any, thing: Any) -> None:
    helper.PARAMETER = torch.nn.Parameter(torch.ones(1))
    helper.PARAMETER.register_hook(thing.on)


@held_by("helper.ACCUMULATED._post_accumulate_grad_hooks[0].__self__")
def hook_after_the_gradient(helper: Any, thing: Any) -> None:
    helper.ACCUMULATED = torch.nn.Parameter(torch.ones(1))
    helper.ACCUMULATED.register_post_accumulate_grad_hook(thing.on)


@held_by("helper.BUSY._work_queue (queued item)")
def backlog_of_an_executor(helper: Any, thing: Any) -> Callable[[], None]:
    started, release = threading.Event(), threading.Event()
    helper.BUSY = ThreadPoolExecutor(1)

    def work() -> None:
        started.set()
        release.wait(HANG_S)

    helper.BUSY.submit(work)
    started.wait(HANG_S)
    helper.BUSY.submit(id, thing)

    def end() -> None:
        release.set()
        helper.BUSY.shutdown()

    return end


@held_by("helper.QUEUE (queued item)")
def queue_in_c(helper: Any, thing: Any) -> None:
    helper.QUEUE = queue.SimpleQueue()
    helper.QUEUE.put(("request", thing))


@held_by("helper.TASK.get_coro() f_locals['thing']")
def variable_of_a_task(helper: Any, thing: Any) -> Callable[[], None]:
    loop = asyncio.new_event_loop()

    async def serve(thing: object) -> None:
        await asyncio.sleep(3600)
        del thing

    async def start() -> None:
        helper.TASK = asyncio.ensure_future(serve(thing))
        await asyncio.sleep(0)

    loop.run_until_complete(start())

    def end() -> None:
        helper.TASK.cancel()
        loop.run_until_complete(asyncio.gather(helper.TASK, return_exceptions=True))
        loop.close()

    return end


@held_by("helper.ANSWERED._result['answer']")
def result_of_a_future(helper: Any, thing: Any) -> Callable[[], None]:
    return future(helper, "ANSWERED", lambda made: made.set_result({"answer": thing}))


@held_by("helper.AWAITED._callbacks[1][0].__self__")
def later_callback_of_a_future(helper: Any, thing: Any) -> Callable[[], None]:
    def add(made: asyncio.Future[Any]) -> None:
        made.add_done_callback(print)
        made.add_done_callback(thing.on)

    return future(helper, "AWAITED", add)


def future(helper: Any, name: str, use: Callable[[asyncio.Future[Any]], object]) -> Callable[[], None]:
    loop = asyncio.new_event_loop()
    made = loop.create_future()
    use(made)
    setattr(helper, name, made)
    return loop.close


@held_by("helper.SERVICE.__class__.cache['a']")
def attribute_of_the_class_of_an_instance(helper: Any, thing: Any) -> None:
    helper.SERVICE = type("Service", (), {"cache": {"a": thing}})()


@held_by("queue.Queue.kept['a']")
def attribute_of_a_class_of_pythons_library(helper: Any, thing: Any) -> Callable[[], None]:
    helper.PUBLIC_QUEUE = queue.Queue()
    setattr(queue.Queue, "kept", {"a": thing})  # noqa: B010
    return lambda: delattr(queue.Queue, "kept")


@held_by("helper.CONFIG.layer_0[0]")
def attribute_that_no_code_names(helper: Any, thing: Any) -> None:
    helper.CONFIG = Thing()
    setattr(helper.CONFIG, "".join(["lay", "er_", "0"]), [thing])


@held_by("helper.ITERATOR (inside list_iterator)")
def iterator_over_a_list(helper: Any, thing: Any) -> None:
    helper.ITERATOR = iter([None, thing])


@held_by("helper.MAPPED (inside map)")
def function_of_a_map(helper: Any, thing: Any) -> None:
    helper.MAPPED = map(thing.on, [1])


@held_by("helper.WEAK.data[<weakref to helper.Key>]")
def value_of_a_weak_dict(helper: Any, thing: Any) -> None:
    helper.KEY = type("Key", (), {"__module__": "helper"})()
    helper.WEAK = weakref.WeakKeyDictionary({helper.KEY: thing})


@held_by("helper.TYPES[<class helper.Model>]")
def value_under_a_class(helper: Any, thing: Any) -> None:
    helper.TYPES = {type("Model", (), {"__module__": "helper"}): thing}


@held_by("helper.MOCK.call_args[0][0]")
def argument_of_a_mocks_call(helper: Any, thing: Any) -> None:
    helper.MOCK = unittest.mock.MagicMock()
    helper.MOCK(thing)


@held_by("helper.PATCHED.engine.infer.return_value")
def result_of_a_mock(helper: Any, thing: Any) -> None:
    helper.PATCHED = unittest.mock.Mock()
    helper.PATCHED.engine.infer.return_value = thing


@held_by("logging.getLogger('lowtide.test.names').handlers[0]")
def handler_of_a_logger(helper: Any, thing: Any) -> Callable[[], None]:
    logger = logging.getLogger("lowtide.test.names")
    logger.addHandler(thing)

    def put_back() -> None:
        logger.removeHandler(thing)
        # It is no `logging.Handler`: a level that is set has loggers looked at.
        logger.setLevel(logging.NOTSET)

    return put_back


@held_by("helper.LOGGER.filters[0].__self__")
def filter_of_a_logger_that_has_a_name_here(helper: Any, thing: Any) -> Callable[[], None]:
    helper.LOGGER = logging.getLogger("lowtide.test.other_names")
    helper.LOGGER.addFilter(thing.on)
    return helper.LOGGER.filters.clear  # type: ignore[no-any-return]


@held_by("metric 'lowtide_tokens'._metrics['long']")
def label_of_a_metric(helper: Any, thing: Any) -> None:
    helper.METRICS = [prometheus_client.Counter("lowtide_tokens", "By length.", ["length"], registry=None)]
    helper.METRICS[0]._metrics["long"] = thing


@held_by("helper.NAMED[0]._metrics['long']")
def entry_of_what_is_no_metric(helper: Any, thing: Any) -> None:
    helper.NAMED = [types.SimpleNamespace(_name="lowtide_tokens", _metrics={"long": thing})]


@held_by("weakref.finalize(<set>, Thing.on).func.__self__")
def callback_of_a_finalizer(helper: Any, thing: Any) -> Callable[[], object]:
    helper.FINALIZED = set[int]()
    return weakref.finalize(helper.FINALIZED, thing.on).detach


@held_by("sys.modules['helper-plugin'].KEPT[0]")
def module_under_a_name_that_is_no_name(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper-plugin", "helper-plugin")


@held_by("sys.modules['helper_gone.part'].KEPT[0]")
def module_without_its_package(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper_gone.part", "helper_gone.part")


@held_by("helper_own_name.KEPT[0]")
def module_under_several_names(helper: Any, thing: Any) -> Callable[[], object]:
    return module(thing, "helper_own_name", "helper.alias", "helper_own_name")


def module(thing: object, own: str, *names: str) -> Callable[[], object]:
    made = types.ModuleType(own)
    made.KEPT = [thing]  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(names, made))

    def end() -> None:
        for name in names:
            del sys.modules[name]

    return end


@held_by("helper.PARTIAL.keywords['engine']")
def argument_of_a_partial(helper: Any, thing: Any) -> None:
    helper.PARTIAL = functools.partial(print, engine=thing)


@held_by("helper.CONTEXT['lowtide_test_names']")
def variable_of_a_context(helper: Any, thing: Any) -> None:
    from contextvars import ContextVar

    variable: ContextVar[object] = ContextVar("lowtide_test_names")
    helper.CONTEXT = copy_context()
    helper.CONTEXT.run(variable.set, thing)


# What pytest calls its own is told by the module that its class is from.


def of_pytest(name: str, **attributes: object) -> Any:
    made = type(name, (), {"__module__": "_pytest.made_up"})()
    vars(made).update(attributes)
    return made


@held_by("fixture 'served'.sessions[0]")
def value_of_a_fixture(helper: Any, thing: Any) -> None:
    served = types.SimpleNamespace(sessions=[thing])
    helper.loader = types.SimpleNamespace(session=of_pytest("Session", items=[None]))
    helper.loader.session.items.append(of_pytest("Function", funcargs={"served": served}))


@held_by("fixture 'alone'")
def fixture_that_is_the_leak(helper: Any, thing: Any) -> None:
    helper.alone = types.SimpleNamespace(item=of_pytest("Function", funcargs={"alone": thing}))


@held_by("fixture 'cached'.model")
def value_of_a_fixture_for_its_scope(helper: Any, thing: Any) -> None:
    cached = (types.SimpleNamespace(model=thing), None, None)
    helper.definitions = {"cached": (of_pytest("FixtureDef", argname="cached", cached_result=cached),)}


@held_by("fixture 'yielding' f_locals['model']")
def variable_of_a_fixture_that_yields(helper: Any, thing: Any) -> None:
    def yielding(model: object) -> Iterator[int]:
        yield 1
        del model

    generator = yielding(thing)
    next(generator)
    finalizers = [functools.partial(print, None, generator)]
    helper.yielding = [of_pytest("FixtureDef", argname="yielding", _finalizers=finalizers)]


@held_by("test parameter 'model'[0]")
def parameter_of_a_test(helper: Any, thing: Any) -> None:
    helper.callspec = of_pytest("CallSpec2", params={"model": [thing]})


@held_by("helper.PLUGIN.funcargs['served']")
def funcargs_of_somebody_else(helper: Any, thing: Any) -> None:
    helper.PLUGIN = types.SimpleNamespace(funcargs={"served": thing})


@pytest.fixture(scope="module")
def reported() -> Iterator[dict[str, Explanation]]:
    helper: Any = types.ModuleType("helper")
    sys.modules["helper"] = helper
    things = [Thing() for _ in SHAPES]
    ends = [put(helper, thing) for (_, put), thing in zip(SHAPES.values(), things, strict=True)]
    found = explain(things, ignore={id(things)})
    yield dict(zip(SHAPES, found, strict=True))
    for end in ends:
        if callable(end):
            end()
    del sys.modules["helper"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_holder_has_a_name_that_a_person_can_use(shape: str, reported: dict[str, Explanation]) -> None:
    # torch numbers all hooks of a process.
    assert re.sub(r"_hooks\[\d+\]", "_hooks[0]", reported[shape].holder) == SHAPES[shape][0]


def test_no_path_leads_through_the_insides_of_the_test_runner(reported: dict[str, Explanation]) -> None:
    shown = [reported[shape].path for shape in SHAPES if SHAPES[shape][0].startswith(("fixture", "test parameter"))]
    assert len(shown) == 5
    assert all(not hop.type.startswith("_pytest") for path in shown for hop in path)
    assert [path[0].edge for path in shown] == [
        "fixture 'served'",
        "fixture 'alone'",
        "fixture 'cached'",
        "fixture 'yielding'",
        "test parameter 'model'",
    ]


def test_what_is_shown_has_the_suspects_and_what_they_retain_beside_the_right_hops(
    reported: dict[str, Explanation],
) -> None:
    for explanation in reported.values():
        assert any(hop.suspect for hop in explanation.path[1:])
        assert len(explanation.freed) <= len(explanation.path)
    # The first hop behind the fixture, and what would be free without it: the thing at its place.
    place = list(SHAPES).index("value_of_a_fixture")
    fixture = reported["value_of_a_fixture"]
    assert [hop.edge for hop in fixture.path] == ["fixture 'served'", ".sessions", "[0]"]
    assert fixture.freed[1:] == (frozenset({place}), frozenset({place}))


def test_a_fingerprint_does_not_depend_on_the_plugin_at_which_a_path_begins(reported: dict[str, Explanation]) -> None:
    assert reported["value_of_a_fixture"].suspects[0] == "fixture 'served' .sessions"


def test_what_has_no_expression_is_cut_in_words_only(reported: dict[str, Explanation]) -> None:
    nameless = {
        shape for shape, (name, _) in SHAPES.items() if name.startswith(("fixture", "test parameter", "weakref"))
    }
    cuts = {shape: cut for shape in nameless if (cut := reported[shape].cut) is not None}
    assert {shape for shape, cut in cuts.items() if cut.is_code} == set()


def test_what_the_test_runner_itself_keeps_is_not_cut(reported: dict[str, Explanation]) -> None:
    assert reported["fixture_that_is_the_leak"].cut is None


def test_a_logger_that_logging_keeps_by_its_name_stays() -> None:
    kept, own = logging.getLogger(f"{__name__}.kept"), logging.Logger("own")
    assert marks([kept, kept.handlers]) == ["innocent", None]
    assert marks([own, own.handlers]) == [None, None]
