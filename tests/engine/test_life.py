"""The engine's life: four states, what each allows, and failures that leave everything as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lowtide.engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    EngineState,
    EngineStateError,
    LLMEngine,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from lowtide.engine.device_allocator.memory import EngineMemory, HostBuffer
from lowtide.engine.pages import Lease, Part
from lowtide.engine.pages.cpu import CpuPages
from lowtide.engine.worker import Worker
from lowtide.probes import stages
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.stages import announced_pools
from tests.engine.random_checkpoint import write_random_checkpoint

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
PARAMS = SamplingParams(max_tokens=8)
MIB = 1 << 20


class BrokenError(Exception):
    """What a planted failure raises."""


class FaultyPages(CpuPages):
    """CPU pages whose n-th operation from now on fails, once."""

    def __init__(self) -> None:
        super().__init__()
        self.countdown: dict[str, int] = {}
        self.calls: list[str] = []

    def _hit(self, name: str) -> None:
        self.calls.append(name)
        if name in self.countdown:
            self.countdown[name] -= 1
            if self.countdown[name] == 0:
                del self.countdown[name]
                raise BrokenError(name)

    def reserve(self, size: int) -> Lease:
        self._hit("reserve")
        return super().reserve(size)

    def map(self, lease: Lease, offset: int, size: int) -> Part:
        self._hit("map")
        return super().map(lease, offset, size)

    def unmap(self, lease: Lease, part: Part) -> None:
        self._hit("unmap")
        super().unmap(lease, part)

    def synchronize(self) -> None:
        self._hit("synchronize")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> FaultyPages:
    pages = FaultyPages()
    monkeypatch.setattr("lowtide.engine.worker.open_backend", lambda device: pages)
    # Several parts per arena, so that a failure can come half-way through one.
    monkeypatch.setattr("lowtide.engine.device_allocator.arena.PART_BYTES", MIB)
    return pages


@pytest.fixture
def engine(pages: FaultyPages) -> Iterator[LLMEngine]:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    yield engine
    pages.countdown.clear()
    engine.shutdown()


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def footprint() -> tuple[Any, ...]:
    """Everything that a failed call must leave as it was."""
    process = psutil.Process()
    return (
        [(pool.kind, pool.tag, pool.mapped) for pool in announced_pools()],
        sum(survey_storages().sizes.values()),
        threading.active_count(),
        process.num_fds(),
    )


# --- states ---------------------------------------------------------------------------------------------------------


def test_a_whole_life(engine: LLMEngine) -> None:
    assert engine.state is EngineState.NEW
    engine.create()
    assert engine.state is EngineState.RUNNING
    before = tokens(engine)
    engine.sleep(1)
    assert engine.state is EngineState.ASLEEP
    engine.wake()
    assert engine.state is EngineState.RUNNING
    assert tokens(engine) == before
    engine.shutdown()
    assert engine.state is EngineState.CLOSED


CALLS: dict[str, Callable[[LLMEngine], object]] = {
    "create": lambda engine: engine.create(),
    "generate": lambda engine: engine.generate(PROMPTS, PARAMS),
    "add_request": lambda engine: engine.add_request([1, 2]),
    "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort("x"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake(),
    "reload_weights": lambda engine: engine.reload_weights(),
    "update_weights": lambda engine: engine.update_weights({}),
}
REACH: dict[str, Sequence[str]] = {
    "new": (),
    "running": ("create",),
    "asleep": ("create", "sleep"),
    "closed": ("create", "shutdown"),
}
LEGAL = {
    "new": {"create"},
    "running": {
        "generate",
        "add_request",
        "step",
        "abort",
        "reset_prefix_cache",
        "reload_weights",
        "update_weights",
        "sleep",
    },
    "asleep": {"wake"},
    "closed": set(),
}


@pytest.mark.parametrize(("state", "call"), [(s, c) for s in REACH for c in CALLS if c not in LEGAL[s]])
def test_an_illegal_call_names_the_state_and_changes_nothing(engine: LLMEngine, state: str, call: str) -> None:
    for step in REACH[state]:
        getattr(engine, step)()
    before = footprint()
    with pytest.raises(EngineStateError) as caught:
        CALLS[call](engine)
    assert caught.value.state == state
    assert set(caught.value.allowed) == LEGAL[state] | {"shutdown"}
    assert f"{call} is not allowed while the engine is {state}" in str(caught.value)
    assert engine.state.value == state
    assert footprint() == before


@pytest.mark.parametrize("state", list(REACH))
def test_shutdown_is_legal_in_every_state_and_twice(pages: FaultyPages, state: str) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    for step in REACH[state]:
        getattr(engine, step)()
    engine.shutdown()
    engine.shutdown()
    assert engine.state is EngineState.CLOSED
    assert footprint() == before


@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_by_reference_count_alone(pages: FaultyPages, level: int) -> None:
    gc.collect()
    gc.disable()
    try:
        before = footprint()
        engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB, num_micro_batches=2))
        engine.create()
        tokens(engine)
        engine.sleep(level)
        engine.wake()
        tokens(engine)
        engine.shutdown()
        assert footprint() == before
    finally:
        gc.enable()


def test_an_engine_is_a_context_manager(pages: FaultyPages) -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB)) as engine:
        assert tokens(engine)
    assert engine.state is EngineState.CLOSED


# --- sleep and wake -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_only_the_runtime_arena_is_mapped(engine: LLMEngine, level: int) -> None:
    engine.create()
    running = engine.memory_mapped()
    tokens(engine)
    engine.sleep(level)
    assert engine.memory_mapped() == {"weights": 0, "kv_cache": 0, "workspace": 0, "runtime": running["runtime"]}
    engine.wake()
    assert engine.memory_mapped() == running


def test_only_level_1_keeps_weights_on_the_host(engine: LLMEngine) -> None:
    def on_host() -> int:
        return sum(pool.mapped for pool in announced_pools() if pool.tag == "sleeping weights")

    engine.create()
    engine.sleep(1)
    assert on_host() >= engine._core.worker.memory.arena("weights").used  # type: ignore[union-attr]
    engine.wake()
    engine.sleep(2)
    assert on_host() == 0


@pytest.mark.parametrize("keep", [True, False])
def test_the_host_copy_is_kept_for_the_next_sleep_if_wanted(pages: FaultyPages, keep: bool) -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB, keep_host_copy=keep)) as engine:
        engine.sleep(1)
        engine.wake()
        assert any(pool.tag == "sleeping weights" for pool in announced_pools()) is keep
        before = tokens(engine)
        engine.sleep(1)
        engine.wake()
        assert tokens(engine) == before


def test_a_wake_that_is_interrupted_when_it_gives_the_host_copy_back_is_undone(
    pages: FaultyPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HostBuffer.close

    def close(self: HostBuffer) -> None:
        if self.tag == "sleeping weights":
            monkeypatch.setattr(HostBuffer, "close", real)
            raise KeyboardInterrupt
        real(self)

    with LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB, keep_host_copy=False)) as engine:
        before = tokens(engine)
        engine.sleep(1)
        asleep = engine.memory_mapped()
        monkeypatch.setattr(HostBuffer, "close", close)
        with pytest.raises(KeyboardInterrupt):
            engine.wake()
        assert engine.state is EngineState.ASLEEP
        assert engine.memory_mapped() == asleep
        engine.wake()
        assert tokens(engine) == before
        assert not any(pool.tag == "sleeping weights" for pool in announced_pools())


def test_new_weights_written_while_awake_survive_the_next_sleep(engine: LLMEngine) -> None:
    engine.create()
    engine.sleep(1)
    engine.wake(["weights"])
    model = engine._core.worker.model_runner.model  # type: ignore[union-attr]
    with torch.no_grad():
        model.model.norm.weight.fill_(1.25)
    engine.wake(["kv_cache"])
    engine.sleep(1)
    engine.wake()
    assert model.model.norm.weight.eq(1.25).all()


def test_partial_wakes_and_what_they_allow(engine: LLMEngine) -> None:
    engine.create()
    engine.sleep(1)
    engine.wake("weights")
    assert engine.state is EngineState.ASLEEP
    mapped = engine.memory_mapped()
    assert mapped["weights"] > 0
    assert mapped["kv_cache"] == 0
    with pytest.raises(EngineStateError, match=r"'weights' is awake already.*allowed now: wake\('kv_cache'\)"):
        engine.wake(["weights"])
    with pytest.raises(
        EngineStateError,
        match=r"sleep is not allowed.*allowed now: wake\('kv_cache'\), reload_weights, update_weights, shutdown",
    ):
        engine.sleep()
    engine.wake()
    assert engine.state is EngineState.RUNNING
    assert tokens(engine)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.wake(["wheights"]), "there is no tag 'wheights'"),
        (lambda engine: engine.wake([]), "wake was given no tag"),
    ],
)
def test_a_bad_wake_changes_nothing(engine: LLMEngine, call: Callable[[LLMEngine], None], message: str) -> None:
    engine.create()
    engine.sleep()
    before = footprint()
    with pytest.raises(ConfigError, match=message):
        call(engine)
    assert footprint() == before
    engine.wake()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.sleep(3), "sleep level 3 does not exist"),
        (lambda engine: engine.sleep(1, mode="now"), "sleep mode 'now' does not exist"),
    ],
)
def test_a_bad_sleep_changes_nothing(engine: LLMEngine, call: Callable[[LLMEngine], None], message: str) -> None:
    engine.create()
    before = footprint()
    with pytest.raises(ConfigError, match=message):
        call(engine)
    assert engine.state is EngineState.RUNNING
    assert footprint() == before


def test_sleep_waits_for_requests_and_returns_their_outputs(engine: LLMEngine) -> None:
    engine.create()
    whole = tokens(engine)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()
    outputs = {output.request_id: output for output in engine.sleep(1, mode="wait")}
    assert [outputs[request_id].token_ids for request_id in ids] == whole
    engine.wake()
    assert not engine.has_unfinished_requests()


def test_sleep_aborts_requests_and_returns_what_they_had(engine: LLMEngine) -> None:
    engine.create()
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    (output,) = engine.sleep(2, mode="abort")
    assert (output.request_id, output.finish_reason, len(output.token_ids)) == (request_id, "abort", 1)
    engine.wake()
    assert engine.kv_cache_usage().held == 0


def test_no_prefix_of_before_the_sleep_is_hit_after_it(engine: LLMEngine) -> None:
    engine.create()
    tokens(engine)
    assert engine.generate([PROMPTS[1]], PARAMS)[0].num_cached_tokens > 0
    engine.sleep()
    engine.wake()
    assert engine.generate([PROMPTS[1]], PARAMS)[0].num_cached_tokens == 0


# --- failures -------------------------------------------------------------------------------------------------------


def fault_points(pages: FaultyPages, call: Callable[[], object]) -> dict[str, int]:
    """How often each operation of the backend is done by `call`."""
    pages.calls.clear()
    call()
    return {name: pages.calls.count(name) for name in set(pages.calls)}


def test_create_rolls_back_wherever_it_fails_and_can_be_tried_again(pages: FaultyPages) -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    points = fault_points(pages, engine.create)
    expected = tokens(engine)
    engine.shutdown()
    assert points["map"] >= 8
    assert points["reserve"] == 4
    for name, count in points.items():
        for turn in range(1, count + 1):
            engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
            before = footprint()
            pages.countdown = {name: turn}
            with pytest.raises(BrokenError, match=name) as caught:
                engine.create()
            # The exception is still held, and with it the frames that it came through.
            assert caught.value.__traceback__ is not None
            assert footprint() == before, (name, turn)
            assert engine.state is EngineState.NEW
            engine.create()
            assert tokens(engine) == expected
            engine.shutdown()
            assert footprint() == before


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_rolls_back_wherever_it_fails_and_can_be_tried_again(pages: FaultyPages, level: int) -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()
    expected = tokens(engine)
    points = fault_points(pages, lambda: engine.sleep(level))
    engine.wake()
    assert points["unmap"] >= 8
    for name, count in points.items():
        for turn in range(1, count + 1):
            tokens(engine)
            mapped = engine.memory_mapped()
            pages.countdown = {name: turn}
            with pytest.raises(BrokenError, match=name):
                engine.sleep(level)
            assert engine.state is EngineState.RUNNING
            now = engine.memory_mapped()
            assert {tag: now[tag] for tag in ("weights", "kv_cache", "runtime")} == {
                tag: mapped[tag] for tag in ("weights", "kv_cache", "runtime")
            }, (name, turn)
            assert tokens(engine) == expected
            engine.sleep(level)
            engine.wake()
            assert tokens(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]], ids=["all", "weights", "kv_cache"])
def test_wake_rolls_back_wherever_it_fails_and_can_be_tried_again(
    pages: FaultyPages, level: int, tags: list[str] | None
) -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()
    expected = tokens(engine)
    engine.sleep(level)
    points = fault_points(pages, lambda: engine.wake(tags))
    if tags is not None:
        engine.wake()
    assert points["map"] >= 4
    for name, count in points.items():
        for turn in range(1, count + 1):
            engine.sleep(level)
            before = footprint()
            pages.countdown = {name: turn}
            with pytest.raises(BrokenError, match=name):
                engine.wake(tags)
            assert engine.state is EngineState.ASLEEP
            assert footprint() == before, (name, turn)
            engine.wake()
            assert tokens(engine) == expected
    engine.shutdown()


def no_host_memory(*args: object) -> None:
    raise OutOfMemoryError("no host memory")


def test_a_failed_save_leaves_the_engine_running(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create()
    expected = tokens(engine)
    before = footprint()
    with monkeypatch.context() as patched:
        patched.setattr("lowtide.engine.device_allocator.memory._copy_on_host", no_host_memory)
        with pytest.raises(OutOfMemoryError, match="no host memory"):
            engine.sleep(1)
    assert engine.state is EngineState.RUNNING
    assert footprint() == before
    assert tokens(engine) == expected


def test_outputs_finished_by_a_sleep_that_then_failed_come_out_of_the_next_step(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create()
    ids = {engine.add_request(prompt, PARAMS) for prompt in PROMPTS}
    with monkeypatch.context() as patched:
        patched.setattr("lowtide.engine.device_allocator.memory._copy_on_host", no_host_memory)
        with pytest.raises(OutOfMemoryError):
            engine.sleep(1, mode="wait")
    assert engine.has_unfinished_requests()
    assert {output.request_id for output in engine.step() if output.finished} == ids
    assert not engine.has_unfinished_requests()


def test_a_shutdown_leaves_no_output_to_be_reported(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create()
    engine.add_request(PROMPTS[0], PARAMS)
    monkeypatch.setattr("lowtide.engine.device_allocator.memory._copy_on_host", no_host_memory)
    with pytest.raises(OutOfMemoryError):
        engine.sleep(1, mode="wait")
    assert engine.has_unfinished_requests()
    engine.shutdown()
    assert not engine.has_unfinished_requests()


def test_level_2_refuses_to_drop_weights_that_cannot_be_loaded_again(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "model")
    with LLMEngine(EngineConfig(model=str(folder), num_blocks=64)) as engine:
        expected = tokens(engine)
        (folder / "model.safetensors").rename(folder / "moved")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            engine.sleep(2)
        assert engine.state is EngineState.RUNNING
        assert tokens(engine) == expected


def test_a_sleep_keeps_the_weights_in_host_memory_unless_it_is_told_not_to(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "model")
    with LLMEngine(EngineConfig(model=str(folder), num_blocks=64)) as engine:
        expected = tokens(engine)
        (folder / "model.safetensors").rename(folder / "moved")
        engine.sleep()
        engine.wake()
        assert tokens(engine) == expected


def test_a_checkpoint_that_is_gone_at_wake_leaves_the_engine_asleep(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "model")
    with LLMEngine(EngineConfig(model=str(folder), num_blocks=64)) as engine:
        expected = tokens(engine)
        engine.sleep(2)
        before = footprint()
        (folder / "model.safetensors").rename(folder / "moved")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            engine.wake()
        assert engine.state is EngineState.ASLEEP
        assert footprint() == before
        (folder / "moved").rename(folder / "model.safetensors")
        engine.wake()
        assert tokens(engine) == expected


def test_a_bad_checkpoint_takes_no_memory(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(model=str(folder)))
    for call in (engine.check, engine.create):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            call()
        assert footprint() == before
    assert engine.state is EngineState.NEW


def test_a_step_that_fails_can_be_made_again(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create()
    expected = tokens(engine)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    finished: dict[str, tuple[int, ...]] = {}
    turn = 0
    while engine.has_unfinished_requests():
        turn += 1
        if turn % 3 == 0:
            with monkeypatch.context() as patched:
                patched.setattr("lowtide.engine.model_executor.model.LlamaMLP.forward", _broken_forward)
                with pytest.raises(BrokenError):
                    engine.step()
        finished |= {output.request_id: output.token_ids for output in engine.step() if output.finished}
    assert [finished[request_id] for request_id in ids] == expected


def _broken_forward(self: object, x: torch.Tensor) -> torch.Tensor:
    scratch = x.repeat(100, 1)
    raise BrokenError(f"forward of {scratch.shape}")


def test_a_failed_generate_leaves_no_request_and_no_tensor_in_the_traceback(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create()
    expected = tokens(engine)
    before = footprint()
    monkeypatch.setattr("lowtide.engine.model_executor.model.LlamaMLP.forward", _broken_forward)
    with pytest.raises(BrokenError) as caught:
        engine.generate(PROMPTS, PARAMS)
    assert caught.value.__traceback__ is not None
    assert footprint() == before
    monkeypatch.undo()
    assert not engine.has_unfinished_requests()
    assert engine.kv_cache_usage().held == 0
    del expected


def test_a_prompt_that_can_never_run_starts_none(engine: LLMEngine) -> None:
    engine.create()
    with pytest.raises(RequestError, match="vocabulary"):
        engine.generate([[1, 2], [99_999]], PARAMS)
    assert not engine.has_unfinished_requests()
    with pytest.raises(RequestError, match="2 prompts came with 1 sampling parameters"):
        engine.generate([[1], [2]], [PARAMS])
    with pytest.raises(RequestError, match="1 prompts came with 2 sampling parameters"):
        engine.generate([[1]], [PARAMS, PARAMS])
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: give prompts as token ids"):
        engine.generate(["hello"], PARAMS)


def test_generate_does_not_step_requests_of_others(engine: LLMEngine) -> None:
    engine.create()
    engine.add_request([1, 2, 3], PARAMS)
    with pytest.raises(EngineStateError, match="requests of add_request are unfinished"):
        engine.generate([[1]], PARAMS)


@pytest.mark.parametrize("end", ["finish", "abort", "sleep"])
def test_a_request_id_can_be_used_again(pages: FaultyPages, end: str) -> None:
    with LLMEngine(EngineConfig(num_blocks=10, enable_prefix_caching=False)) as engine:
        expected = engine.generate([PROMPTS[1]], PARAMS)[0].token_ids
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1 if end == "finish" else 5), request_id="again")
        engine.step()
        if end == "finish":
            assert not engine.has_unfinished_requests()
        elif end == "abort":
            engine.abort("again")
        else:
            engine.sleep(1, mode="abort")
            engine.wake()
        # Takes so many blocks that the new request gets the old one's among its own, but not in the same place.
        engine.add_request([9] * 100, PARAMS)
        engine.add_request(PROMPTS[1], PARAMS, request_id="again")
        finished: dict[str, tuple[int, ...]] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output.token_ids for output in engine.step() if output.finished}
        assert finished["again"] == expected


def test_when_undoing_a_failed_sleep_fails_too_the_engine_is_asleep_and_can_be_woken(pages: FaultyPages) -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB)) as engine:
        expected = tokens(engine)
        pages.countdown = {"unmap": 6, "map": 2}
        with pytest.raises(BrokenError, match=r"^unmap") as caught:
            engine.sleep(1)
        assert any("waking it again failed too" in note for note in caught.value.__notes__)  # type: ignore[attr-defined]
        assert engine.state is EngineState.ASLEEP
        engine.wake()
        assert tokens(engine) == expected


# --- teardown -------------------------------------------------------------------------------------------------------


def test_a_teardown_step_that_raises_skips_none_and_all_errors_come_out(
    pages: FaultyPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()
    tokens(engine)
    from lowtide.engine.device_allocator.memory import TransferRing

    real_close = TransferRing.close

    broken = [True, False]

    def close(self: TransferRing) -> None:
        real_close(self)
        if broken.pop(0):
            raise BrokenError("ring")

    def abort(self: object) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransferRing, "close", close)
    monkeypatch.setattr("lowtide.engine.core.EngineCore.abort", abort)
    with pytest.raises(BaseException) as caught:
        engine.shutdown()
    outer = caught.value
    assert "the requests, the worker failed" in str(outer)
    interrupt, worker = outer.exceptions  # type: ignore[attr-defined]
    assert isinstance(interrupt, KeyboardInterrupt)
    assert [str(error) for error in worker.exceptions] == ["ring"]
    assert engine.state is EngineState.CLOSED
    assert footprint() == before
    # What has failed is tried again, until nothing does.
    monkeypatch.undo()
    monkeypatch.setattr(TransferRing, "close", close)
    engine.shutdown()
    assert broken == []
    engine.shutdown()


def test_a_shutdown_that_was_interrupted_is_done_by_the_next(pages: FaultyPages) -> None:
    gc.collect()
    before = footprint()
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()

    class Interrupting:
        def stage_entered(self, stage: stages.EnteredStage) -> None:
            raise KeyboardInterrupt

        def stage_left(self, stage: stages.EnteredStage, error: BaseException | None) -> None:
            pass

    with stages.listening(Interrupting()), pytest.raises(KeyboardInterrupt):
        engine.shutdown()
    engine.shutdown()
    assert footprint() == before


def test_a_shutdown_after_one_that_was_complete_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()
    done: list[Worker] = []
    real = Worker.shutdown

    def shutdown(self: Worker) -> None:
        done.append(self)
        real(self)

    monkeypatch.setattr(Worker, "shutdown", shutdown)
    engine.shutdown()
    engine.shutdown()
    assert len(done) == 1


def test_an_error_while_rolling_back_is_noted_on_the_first(pages: FaultyPages) -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    pages.countdown = {"map": 9, "unmap": 1}
    with pytest.raises(BrokenError, match=r"^map") as caught:
        engine.create()
    assert any("BrokenError('unmap')" in note for note in caught.value.__notes__)  # type: ignore[attr-defined]


def test_memory_that_fails_half_way_gives_back_what_it_had(pages: FaultyPages) -> None:
    gc.collect()
    pages.countdown = {"reserve": 3}
    with pytest.raises(BrokenError) as caught:
        EngineMemory(pages, weights=MIB, kv_cache=MIB, workspace=MIB, num_micro_batches=1)
    assert caught.value.__traceback__ is not None
    assert announced_pools() == ()


def test_frames_of_the_caller_keep_their_locals(engine: LLMEngine, pages: FaultyPages) -> None:
    def of_the_caller() -> None:
        kept = [1, 2, 3]
        raise ValueError(kept)

    try:
        of_the_caller()
    except ValueError as error:
        pages.countdown = {"reserve": 1}
        with pytest.raises(BrokenError):
            engine.create()
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert trace.tb_next.tb_frame.f_locals["kept"] == [1, 2, 3]


# --- stages ---------------------------------------------------------------------------------------------------------


def test_the_life_is_marked_with_stages(engine: LLMEngine) -> None:
    heard: list[tuple[str, ...]] = []

    class Listener:
        def stage_entered(self, stage: stages.EnteredStage) -> None:
            heard.append(stage.path)

        def stage_left(self, stage: stages.EnteredStage, error: BaseException | None) -> None:
            pass

    with stages.listening(Listener()):
        engine.create()
        tokens(engine)
        # A workspace grows as often as a longer context makes it.
        first = heard.index(("infer", "grow_workspace"))
        heard[:] = [path for place, path in enumerate(heard) if place <= first or path[-1] != "grow_workspace"]
        engine.sleep()
        engine.wake()
        engine.shutdown()
    assert heard == [
        ("create",),
        ("create", "load_weights"),
        ("create", "allocate_kv_cache"),
        ("infer",),
        ("infer", "grow_workspace"),
        ("sleep",),
        ("wake",),
        ("shutdown",),
    ]
