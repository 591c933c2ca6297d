"""An engine whose core has a process of its own: does what the engine in one process does, and leaves no process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from lowtide.engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    EngineState,
    EngineStateError,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
    core_process,
)
from lowtide.engine.core_process import CoreProcess
from lowtide.engine.errors import EngineDeadError
from lowtide.engine.processes import call
from tests.engine import core_extensions
from tests.engine.process_watch import cores, is_running, nothing_stays, ranks
from tests.engine.random_checkpoint import write_random_checkpoint

ALONE = EngineConfig(kv_cache_bytes=1 << 20)
APART = replace(ALONE, engine_process=True)
PROMPTS = ([1, 2, 3], list(range(40)), [7] * 17)
EXTENSIONS = core_extensions.__name__


class Twins:
    """An engine in one process and one whose core is apart; what is asked of both must have one answer."""

    def __init__(self, alone: LLMEngine, apart: LLMEngine) -> None:
        self.alone = alone
        self.apart = apart

    def both(self, call: Callable[[LLMEngine], Any]) -> Any:
        """Makes a call of each engine; what both return."""
        expected = call(self.alone)
        assert call(self.apart) == expected
        assert self.apart.state is self.alone.state
        assert self.apart.memory_mapped() == self.alone.memory_mapped()
        assert self.apart.has_unfinished_requests() == self.alone.has_unfinished_requests()
        return expected

    def both_refuse(self, call: Callable[[LLMEngine], Any], kind: type[Exception]) -> str:
        """Makes a call of each engine that both refuse; the message of both."""
        with pytest.raises(kind) as expected:
            call(self.alone)
        with pytest.raises(kind) as raised:
            call(self.apart)
        assert str(raised.value) == str(expected.value)
        self.both(lambda engine: None)
        return str(raised.value)


@pytest.fixture(scope="module")
def apart() -> Iterator[LLMEngine]:
    with LLMEngine(APART) as engine:
        yield engine


@pytest.fixture
def twins(apart: LLMEngine) -> Iterator[Twins]:
    """Both run as if they were new: with nothing to do, nothing cached, no workspace."""
    if apart.state is EngineState.RUNNING:
        apart.sleep(1, mode="abort")
    apart.wake()
    with LLMEngine(ALONE) as alone:
        yield Twins(alone, apart)


def tokens(engine: LLMEngine, max_tokens: int = 4) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=max_tokens))]


def add(engine: LLMEngine, max_tokens: int = 4) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), request_id=f"r{number}")


def add_one(prompt: list[int], engine: LLMEngine) -> None:
    engine.add_request(prompt, request_id="x")


def stepped(engine: LLMEngine) -> list[list[RequestOutput]]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs.append(engine.step())
    return outputs


# --- the same as in one process -------------------------------------------------------------------------------------


def test_it_generates_the_same_tokens(twins: Twins) -> None:
    generated = twins.both(lambda engine: tokens(engine, 64))
    assert [len(ids) for ids in generated] == [64, 64, 64]


def test_it_draws_the_same_tokens(twins: Twins) -> None:
    drawn = SamplingParams(max_tokens=8, temperature=1.0, top_k=50, top_p=0.9, seed=3)
    twins.both(lambda engine: [output.token_ids for output in engine.generate(PROMPTS, drawn)])


def test_it_steps_alike(twins: Twins) -> None:
    twins.both(add)
    outputs = twins.both(stepped)
    assert [len(step) for step in outputs] == [3, 3, 3, 3]


def test_requests_that_are_aborted_come_back_alike(twins: Twins) -> None:
    twins.both(add)
    twins.both(lambda engine: engine.step())
    (one,) = twins.both(lambda engine: engine.abort("r1"))
    assert (one.request_id, one.finish_reason, len(one.token_ids)) == ("r1", "abort", 1)
    assert len(twins.both(lambda engine: engine.abort(["r0", "r1", "r2", "nobody"]))) == 2


def test_aborting_what_is_no_request_s_name_does_nothing(twins: Twins) -> None:
    twins.both(add)
    unknown: Any = [5, None]
    assert twins.both(lambda engine: engine.abort(unknown)) == []
    assert len(twins.both(stepped)) == 4


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_sleep_returns_the_outputs_of_unfinished_requests(twins: Twins, mode: Any) -> None:
    twins.both(add)
    twins.both(lambda engine: engine.step())
    outputs = twins.both(lambda engine: engine.sleep(mode=mode))
    assert [output.finish_reason for output in outputs] == ["length" if mode == "wait" else "abort"] * 3
    assert twins.apart.state is EngineState.ASLEEP


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes(twins: Twins, level: int) -> None:
    before = twins.both(tokens)
    twins.both(lambda engine: engine.sleep(level))
    assert twins.apart.memory_mapped()["weights"] == twins.apart.memory_mapped()["kv_cache"] == 0
    twins.both(lambda engine: engine.wake())
    assert twins.apart.memory_mapped()["weights"] > 0
    assert twins.both(tokens) == before


def test_it_wakes_in_parts(twins: Twins) -> None:
    before = twins.both(tokens)
    twins.both(lambda engine: engine.sleep(2))
    twins.both(lambda engine: engine.wake("weights"))
    assert twins.apart.state is EngineState.ASLEEP
    assert twins.apart.memory_mapped()["kv_cache"] == 0
    twins.both(lambda engine: engine.reload_weights())
    twins.both(lambda engine: engine.wake(["kv_cache"]))
    assert twins.both(tokens) == before


def test_reloaded_weights_forget_what_was_cached(twins: Twins) -> None:
    before = twins.both(tokens)
    assert twins.both(lambda engine: engine.kv_cache_usage()).evictable > 0
    twins.both(lambda engine: engine.reload_weights())
    assert twins.both(lambda engine: engine.kv_cache_usage()).evictable == 0
    assert twins.both(tokens) == before


def test_the_prefix_cache_is_reset_when_no_request_holds_blocks(twins: Twins) -> None:
    twins.both(add)
    twins.both(lambda engine: engine.step())
    assert twins.both(lambda engine: engine.kv_cache_usage()).held > 0
    assert twins.both(lambda engine: engine.reset_prefix_cache()) is False
    twins.both(stepped)
    assert twins.both(lambda engine: engine.reset_prefix_cache()) is True
    assert twins.both(lambda engine: engine.kv_cache_usage()).evictable == 0


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_call_in_the_wrong_state_is_refused_alike(twins: Twins) -> None:
    twins.both_refuse(lambda engine: engine.wake(), EngineStateError)
    twins.both_refuse(lambda engine: engine.create(), EngineStateError)
    twins.both(lambda engine: engine.sleep())
    twins.both_refuse(lambda engine: engine.step(), EngineStateError)
    twins.both_refuse(lambda engine: engine.reload_weights(), EngineStateError)


def test_a_request_that_can_never_be_served_or_has_an_id_in_use_is_refused_alike(twins: Twins) -> None:
    for prompt in ([], [10**6], [-1], [1] * 5000):
        twins.both_refuse(functools.partial(add_one, prompt), RequestError)
        assert not twins.apart.has_unfinished_requests(), prompt
    twins.both(add)
    said = twins.both_refuse(lambda engine: engine.add_request([1], request_id="r1"), RequestError)
    assert "'r1' is in use" in said


NEVER_SENT: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (list(numpy.arange(3)), {}, "numpy.int64"),
    ([1.5], {}, "Expected `int`, got `float`"),
    ([2**70], {}, "Integer value out of range|can't serialize ints"),
    ([1], {"max_tokens": 4.0}, "Expected `int`, got `float` - at `"),
)


def test_a_request_that_cannot_be_sent_is_refused_and_the_core_goes_on(twins: Twins) -> None:
    before = tokens(twins.apart)
    for prompt, params, said in NEVER_SENT:
        refused = rf"request 'x' cannot be sent to the engine core \(pid \d+\): .*{said}"
        with pytest.raises(RequestError, match=refused):
            twins.apart.add_request(prompt, SamplingParams(**params), request_id="x")
        assert tokens(twins.apart) == before, said


def test_an_error_says_in_which_process_it_was_raised(twins: Twins) -> None:
    (core,) = cores()
    with pytest.raises(RequestError) as raised:
        twins.apart.add_request([10**6])
    where, trace = raised.value.__notes__
    assert where == f"raised in the engine core (pid {core.pid})"
    assert "in add_request" in trace


SETTINGS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 3},
    "length": {"max_model_len": 10**6},
    "graphs": {"cuda_graphs": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_cannot_work_is_refused_before_a_process_starts(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_process, "ChildProcess", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ConfigError):
        LLMEngine(replace(APART, **SETTINGS[setting])).create()


# --- processes ------------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_a_shutdown_and_a_second_one_does_nothing() -> None:
    with nothing_stays(at_least=1):
        engine = LLMEngine(APART)
        before = set(cores())
        engine.create()
        (core,) = set(cores()) - before
        assert core.name() in ("lowtide::Engine", "lowtide::EngineCore")
        engine.shutdown()
        assert engine.state is EngineState.CLOSED
        assert not core.is_running()
        engine.shutdown()
        assert engine.memory_mapped() == {}
        with pytest.raises(EngineStateError, match="closed"):
            engine.wake()


def test_a_new_engine_is_shut_down_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "ChildProcess", lambda *_: pytest.fail("a process was started"))
    engine = LLMEngine(APART)
    engine.shutdown()
    assert engine.state is EngineState.CLOSED


def test_a_fork_of_the_engine_s_process_cannot_use_the_core_and_leaves_it_alone(twins: Twins) -> None:
    before = tokens(twins.apart)
    for is_shut_down in (False, True):
        fork = os.fork()
        if fork == 0:
            try:
                if is_shut_down:
                    twins.apart.shutdown()
                    os._exit(0)
                twins.apart.kv_cache_usage()
            except EngineDeadError as error:
                os._exit(0 if "of which this is a fork" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(fork, 0)[1] == 0, is_shut_down
        assert tokens(twins.apart) == before


def write_checkpoint(folder: Path) -> EngineConfig:
    """A checkpoint of random weights, and the settings of an engine of it."""
    return replace(APART, model=str(write_random_checkpoint(folder)))


@pytest.mark.nightly
def test_a_create_that_fails_in_the_core_leaves_no_process_and_can_be_made_again(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    # The engine's own process has looked at the file already.
    engine = LLMEngine(replace(config, process_extensions=(f"{EXTENSIONS}:removing={weights}",)))
    with nothing_stays(at_least=1):
        with pytest.raises(CheckpointError, match="safetensors") as raised:
            engine.create()
        assert raised.value.__notes__[0].startswith("raised in the engine core (pid ")
        assert engine.state is EngineState.NEW
        assert engine.memory_mapped() == {}
    engine.config = config
    weights.write_bytes(content)
    engine.create()
    assert engine.generate([[1, 2, 3]])
    engine.shutdown()


# --- extensions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [pytest.param(1, 1, id="core"), pytest.param(2, 3, id="core and ranks", marks=pytest.mark.nightly)],
)
def test_extensions_are_entered_in_each_process_before_anything_is_created_and_left_after_all(
    size: int, count: int, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    before = set(cores())
    config = replace(APART, tensor_parallel_size=size, process_extensions=(f"{EXTENSIONS}:recorded={record}",))
    with LLMEngine(config):
        (core,) = set(cores()) - before
        processes = [core, *ranks(core)]
        assert len(processes) == count
        lines = record.read_text().splitlines()
        assert sorted(lines) == sorted(f"{process.pid} entered after 0" for process in processes)
        assert lines[0].startswith(f"{core.pid} ")
    ends = record.read_text().splitlines()[count:]
    assert sorted(ends) == sorted(f"{process.pid} left with 0" for process in processes)
    assert not any(is_running(process) for process in processes)


@pytest.mark.parametrize(
    "name", ["nowhere.at.all:f=1", f"{EXTENSIONS}:nothing=1", ":f", ".relative:f", f"{EXTENSIONS}:POINTS=1"]
)
def test_an_extension_that_cannot_be_loaded_is_named_in_one_line(name: str) -> None:
    from lowtide.engine.processes import entered

    with pytest.raises(ConfigError, match="name it as module:function=argument") as raised, entered((name,)):
        pass
    assert repr(name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_core_with_an_extension_that_cannot_be_loaded_is_not_created() -> None:
    error = CoreProcess().answer(call("create", replace(APART, process_extensions=("nowhere:f=1",)))).error
    assert error is not None
    assert (error.name, error.message.splitlines()) == ("ConfigError", [error.message])


def test_a_create_that_fails_leaves_its_extensions(tmp_path: Path) -> None:
    record = tmp_path / "record"
    config = replace(APART, model="/nowhere", process_extensions=(f"{EXTENSIONS}:recorded={record}",))
    process = CoreProcess()
    assert process.answer(call("create", config)).error is not None
    assert [line.split()[1] for line in record.read_text().splitlines()] == ["entered", "left"]
