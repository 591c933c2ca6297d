"""Ctrl-C in an engine whose core has a process of its own: the core rolls back, or has finished; it is never torn."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from lowtide.engine import (
    EngineConfig,
    EngineState,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
    core_process,
)
from lowtide.engine.core_process import CoreClient
from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes import Connection, HeldInterrupt
from tests.engine.core_extensions import SO_LONG_S, Stops
from tests.engine.process_watch import LIMIT_S, cores, is_running, nothing_stays

pytestmark = pytest.mark.nightly

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

CONFIG = EngineConfig(kv_cache_bytes=1 << 20, engine_process=True)
PROMPTS = ([1, 2, 3], list(range(40)))


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8))]


def mapped(engine: LLMEngine) -> dict[str, int]:
    """What the engine holds, but for the workspace, which comes and goes with steps."""
    return {**engine.memory_mapped(), "workspace": 0}


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens of the engine in one process."""
    with LLMEngine(replace(CONFIG, engine_process=False)) as engine:
        return tokens(engine)


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Stops:
    return Stops(tmp_path_factory.mktemp("stops"))


@pytest.fixture(scope="module")
def created(stops: Stops) -> Iterator[LLMEngine]:
    with LLMEngine(replace(CONFIG, process_extensions=(stops.extension,))) as engine:
        yield engine


@pytest.fixture
def engine(created: LLMEngine, expected: list[tuple[int, ...]]) -> Iterator[LLMEngine]:
    """It runs; whatever a test did to it, it goes on with the right tokens."""
    yield created
    if created.state is EngineState.ASLEEP:
        created.wake()
    assert tokens(created) == expected


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def interrupted_at(stops: Stops, point: str, how: str = "ends") -> Iterator[None]:
    """Ctrl-C when the core has come to a point; the block raises it."""
    stops.arm(point, how)

    def wait_and_interrupt() -> None:
        stops.wait_for(point)
        interrupt()

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


CALLS: dict[str, tuple[str, Callable[[LLMEngine], object], Callable[[LLMEngine], object]]] = {
    "generate": ("execute", lambda engine: None, tokens),
    "sleep": ("drop", lambda engine: None, lambda engine: engine.sleep(1)),
    "sleep level 2": ("drop", lambda engine: None, lambda engine: engine.sleep(2)),
    "wake": ("restore", lambda engine: engine.sleep(1), lambda engine: engine.wake()),
    "wake from level 2": ("fill", lambda engine: engine.sleep(2), lambda engine: engine.wake()),
    "reload": ("fill", lambda engine: None, lambda engine: engine.reload_weights()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_changes_nothing_and_can_be_made_again(engine: LLMEngine, stops: Stops, name: str) -> None:
    point, before, call = CALLS[name]
    before(engine)
    state, memory = engine.state, mapped(engine)
    with interrupted_at(stops, point):
        call(engine)
    assert engine.state is state
    assert mapped(engine) == memory
    assert not engine.has_unfinished_requests()
    call(engine)


def test_an_interrupted_create_leaves_no_process_and_can_be_made_again(
    stops: Stops, expected: list[tuple[int, ...]]
) -> None:
    engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))
    with nothing_stays(at_least=1):
        with interrupted_at(stops, "fill"):
            engine.create()
        assert engine.state is EngineState.NEW
        assert engine.memory_mapped() == {}
    with engine:
        assert tokens(engine) == expected


def test_an_interrupt_while_the_process_starts_ends_the_create() -> None:
    engine = LLMEngine(CONFIG)
    others = set(cores())

    def wait_and_interrupt() -> None:
        while set(cores()) <= others:
            time.sleep(0.01)
        # It imports torch now.
        time.sleep(0.2)
        interrupt()

    thread = threading.Thread(target=wait_and_interrupt)
    with nothing_stays(at_least=1):
        thread.start()
        # Not `EngineDeadError`, as a process that it ends would give.
        with pytest.raises(KeyboardInterrupt) as raised:
            engine.create()
        thread.join()
        # The core itself has raised it, instead of creating everything first.
        assert raised.value.__notes__[0].startswith("raised in the engine core (pid ")
        assert engine.state is EngineState.NEW


def test_an_interrupted_shutdown_is_done_all_the_same(stops: Stops) -> None:
    with nothing_stays(at_least=1):
        engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))
        engine.create()
        stops.arm("shutdown")
        thread = threading.Thread(target=lambda: (stops.wait_for("shutdown"), interrupt()))
        thread.start()
        with pytest.raises(BaseExceptionGroup) as raised:
            engine.shutdown()
        thread.join()
        assert raised.value.subgroup(KeyboardInterrupt) is not None
        assert engine.state is EngineState.CLOSED
        engine.shutdown()


# --- interrupts that come late --------------------------------------------------------------------------------------


def interrupting(monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
    """Ctrl-C around one of the client's own calls of its connection, once."""
    call = getattr(Connection, name)

    def call_once(self: Connection, *args: Any) -> Any:
        monkeypatch.setattr(Connection, name, call)
        if not after:
            interrupt()
        result = call(self, *args)
        if after:
            interrupt()
        return result

    monkeypatch.setattr(Connection, name, call_once)


@pytest.mark.parametrize("when", ["while it finishes", "as its answer comes"])
def test_a_late_interrupt_is_raised_and_loses_no_output(
    engine: LLMEngine, stops: Stops, expected: list[tuple[int, ...]], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1), request_id="one")
    if when == "while it finishes":
        with interrupted_at(stops, "execute", "finishes"):
            engine.step()
    else:
        interrupting(monkeypatch, "receive", after=True)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert output.finished
    assert output.token_ids == expected[0][:1]
    assert not engine.has_unfinished_requests()


def test_a_late_interrupt_ends_a_generation_before_the_next_step(
    engine: LLMEngine, stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    step = CoreClient.step

    def counted(self: CoreClient) -> list[RequestOutput]:
        steps.append(step(self))
        return steps[-1]

    monkeypatch.setattr(CoreClient, "step", counted)
    with interrupted_at(stops, "execute", "finishes"):
        tokens(engine)
    assert len(steps) == 1
    assert not engine.has_unfinished_requests()
    assert engine.kv_cache_usage().held == 0


def test_a_late_interrupt_does_not_keep_a_generation_that_fails_from_being_given_up(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, "receive", after=True)
    with pytest.raises(RequestError, match="empty prompt"):
        engine.generate([[1, 2, 3], []])
    assert not engine.has_unfinished_requests()
    with pytest.raises(KeyboardInterrupt):
        tokens(engine)


def test_a_sleep_that_had_finished_is_one(engine: LLMEngine, stops: Stops) -> None:
    with interrupted_at(stops, "drop", "finishes"):
        engine.sleep(1)
    assert engine.state is EngineState.ASLEEP
    assert engine.memory_mapped()["weights"] == 0


def test_a_late_interrupt_of_a_call_that_failed_is_raised_from_its_error(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, "receive", after=True)
    with pytest.raises(KeyboardInterrupt) as raised:
        engine.add_request([10**6])
    assert "the vocabulary has" in str(raised.value.__cause__)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_while_an_order_is_sent_tears_nothing(
    engine: LLMEngine, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, "send", after=after)
    with pytest.raises(KeyboardInterrupt):
        tokens(engine)


def test_an_interrupt_of_a_core_that_does_nothing_does_nothing(
    engine: LLMEngine, expected: list[tuple[int, ...]]
) -> None:
    assert isinstance(engine._core, CoreClient)
    os.kill(engine._core.process.pid, signal.SIGINT)
    time.sleep(0.1)
    assert tokens(engine) == expected


# --- other threads, other handlers ----------------------------------------------------------------------------------


def test_another_thread_than_the_main_one_drives_an_engine(engine: LLMEngine, expected: list[tuple[int, ...]]) -> None:
    generated = []
    thread = threading.Thread(target=lambda: generated.append(tokens(engine)))
    thread.start()
    thread.join()
    assert generated == [expected]


def test_a_handler_of_the_program_s_own_is_called_and_the_call_goes_on(
    engine: LLMEngine, stops: Stops, expected: list[tuple[int, ...]]
) -> None:
    calls: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        # The core goes on only now.
        os.kill(stops.wait_for("execute"), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    try:
        stops.arm("execute", "finishes")
        thread = threading.Thread(target=lambda: (stops.wait_for("execute"), interrupt()))
        thread.start()
        assert tokens(engine) == expected
        thread.join()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_an_interrupt_that_another_thread_received_breaks_the_wait_off() -> None:
    # What the kernel may do with a signal to the process, when this thread has just had another one.
    thread = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    start = time.monotonic()
    thread.start()
    with HeldInterrupt() as held, pytest.raises(KeyboardInterrupt):
        held.waiting(lambda end: time.sleep(max(0.0, end - time.monotonic())), start + SO_LONG_S)
    assert time.monotonic() - start < LIMIT_S
    thread.join()


# --- a core that does not react -------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no answer in time", "a second interrupt"])
def test_a_core_that_does_not_react_is_killed(stops: Stops, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "INTERRUPT_S", 0.3 if why == "no answer in time" else SO_LONG_S)
    others = set(cores())
    with nothing_stays(at_least=1):
        engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))
        engine.create()
        (core,) = set(cores()) - others
        second = threading.Timer(0.5, interrupt)
        start = time.monotonic()
        with interrupted_at(stops, "execute", "stays"):
            if why == "a second interrupt":
                threading.Thread(target=lambda: (stops.wait_for("execute"), second.start())).start()
            tokens(engine)
        assert time.monotonic() - start < LIMIT_S
        assert not is_running(core)
        for call in (tokens, lambda engine: engine.sleep(1), lambda engine: engine.kv_cache_usage()):
            with pytest.raises(EngineDeadError, match=rf"the engine core \(pid {core.pid}\) was killed: "):
                call(engine)
        assert engine.state is EngineState.RUNNING
        assert engine.memory_mapped() == {}
        engine.shutdown()
        assert engine.state is EngineState.CLOSED
