"""Ranks that fail or are killed at every stage: our error within seconds, all ranks alike after it, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lowtide.engine import EngineConfig, EngineState, LLMEngine, OutOfMemoryError, SamplingParams, processes
from lowtide.engine.errors import EngineDeadError
from tests.engine.core_extensions import Stops
from tests.engine.failing_rank import failing
from tests.engine.process_watch import LIMIT_S, files_of, killed_during, left_of, nothing_stays, ranks
from tests.engine.test_update_weights import weights

pytestmark = pytest.mark.nightly

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

CONFIG = EngineConfig(kv_cache_bytes=1 << 20, tensor_parallel_size=2)
PROMPTS = ([1, 2, 3], list(range(40)))


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8))]


STAGES: dict[str, tuple[Callable[[LLMEngine], object], Callable[[LLMEngine], object]]] = {
    "infer": (lambda engine: None, tokens),
    "sleep": (lambda engine: None, lambda engine: engine.sleep(1)),
    "asleep, then wake": (lambda engine: engine.sleep(2), lambda engine: engine.wake()),
    "awake again": (lambda engine: (engine.sleep(1), engine.wake()), tokens),
    "reload": (lambda engine: None, lambda engine: engine.reload_weights()),
    "shutdown": (lambda engine: None, lambda engine: engine.shutdown()),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_killed_in_a_call_ends_it_with_our_error(stage: str, rank: int) -> None:
    before, call = STAGES[stage]
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        tokens(engine)
        before(engine)
        assert killed_during(ranks()[rank], f"lowtide::Worker_TP{rank}", lambda: call(engine)) < LIMIT_S
        assert ranks() == []
        if stage != "shutdown":
            state = EngineState.ASLEEP if stage.startswith("asleep") else EngineState.RUNNING
            assert engine.state is state
            assert engine.memory_mapped() == {}
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                call(engine)
        engine.shutdown()
        assert engine.state is EngineState.CLOSED


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_rank_that_is_killed_between_calls(asleep: bool, rank: int) -> None:
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        if asleep:
            engine.sleep(1)
        ranks()[rank].kill()
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"Worker_TP{rank} .* killed by SIGKILL"):
            engine.wake() if asleep else tokens(engine)
        assert time.monotonic() - start < LIMIT_S
        engine.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after_s", [0.05, 0.6, 1.2])
def test_a_rank_that_is_killed_while_it_is_created(rank: int, after_s: float, tmp_path: Path) -> None:
    stops = Stops(tmp_path / "stops")
    # However fast the machine is, no create has ended before.
    stops.arm("fill", "stays")
    with nothing_stays():
        engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))

        def kill() -> None:
            while len(ranks()) < 2:
                time.sleep(0.01)
            time.sleep(after_s)
            victim = ranks()[rank]
            victim.suspend()
            time.sleep(0.3)
            victim.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match=f"Worker_TP{rank} .* has ended"):
            engine.create()
        killer.join()
        assert engine.state is EngineState.NEW
        assert ranks() == []
        engine.shutdown()


def test_a_rank_that_is_killed_while_another_one_works_is_missed_at_once(tmp_path: Path) -> None:
    stops = Stops(tmp_path / "stops")
    stops.arm("fill", "stays")
    killed: list[float] = []

    def kill() -> None:
        stopped = stops.wait_for("fill")
        # The other one has done its part by then, and is waited for no more.
        time.sleep(0.5)
        (other,) = (rank for rank in ranks() if rank.pid != stopped)
        killed.append(time.monotonic())
        other.kill()

    with nothing_stays():
        engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            engine.create()
        assert time.monotonic() - killed[0] < LIMIT_S
        killer.join()
        engine.shutdown()


CLIENT = """
import sys
from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
engine = LLMEngine(EngineConfig(kv_cache_bytes=4 << 20, tensor_parallel_size=2))
engine.create()
if sys.argv[1] == "asleep":
    engine.sleep(1)
print("ready", flush=True)
if sys.argv[1] == "infer":
    engine.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=200, ignore_eos=True))
sys.stdin.read()
"""


@pytest.mark.parametrize("stage", ["create", "infer", "infer, waiting", "asleep"])
def test_ranks_end_when_their_engine_is_killed(stage: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        if stage == "create":
            children: list[psutil.Process] = []
            while len(children) < 2:
                children = ranks(psutil.Process(client.pid))
        else:
            assert client.stdout.readline() == "ready\n"
            children = ranks(psutil.Process(client.pid))
        files = set().union(*map(files_of, children))
        time.sleep(0.2)
        if stage == "infer, waiting":
            children[1].suspend()
            time.sleep(0.2)
        client.send_signal(signal.SIGKILL)
        if stage == "infer, waiting":
            # It waits in a collective, and must not wait for ever.
            children[0].wait(LIMIT_S)
            children[1].resume()
        _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert len(children) == 2
    assert not alive
    assert left_of(files) == []


CALLS: dict[str, tuple[Callable[[LLMEngine], object], Callable[[LLMEngine], object]]] = {
    "prepare_sleep": (lambda engine: None, lambda engine: engine.sleep(1)),
    "sleep": (lambda engine: None, lambda engine: engine.sleep(2)),
    "begin_wake": (lambda engine: engine.sleep(1), lambda engine: engine.wake()),
    "end_wake": (lambda engine: engine.sleep(1), lambda engine: engine.wake()),
    "begin_reload": (lambda engine: None, lambda engine: engine.reload_weights()),
    "begin_update": (lambda engine: None, lambda engine: engine.update_weights(weights(0))),
    "load_bucket": (lambda engine: None, lambda engine: engine.update_weights(weights(0))),
}


@pytest.mark.parametrize("order", CALLS)
def test_what_one_rank_cannot_do_is_undone_on_the_other_and_can_be_done_again(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, call = CALLS[order]
    failing(1, order, monkeypatch, once_in=tmp_path / "failed", before=True)
    with LLMEngine(EngineConfig(kv_cache_bytes=1 << 20, tensor_parallel_size=2, poison_pages=True)) as engine:
        expected = tokens(engine)
        before(engine)
        state, mapped = engine.state, engine.memory_mapped()
        with pytest.raises(OutOfMemoryError, match="no room, as it was asked for") as raised:
            call(engine)
        assert any(note.startswith("raised in rank 1 of 2 (pid") for note in raised.value.__notes__)
        assert engine.state is state
        assert {**engine.memory_mapped(), "workspace": 0} == {**mapped, "workspace": 0}
        call(engine)
        if engine.state is EngineState.ASLEEP:
            engine.wake()
        assert tokens(engine) == expected


@pytest.mark.parametrize("before", [False, True], ids=["after its part", "before its part"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_rank_fails_can_be_made_again(
    rank: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(rank, "execute_model", monkeypatch, once_in=tmp_path / "failed", before=before)
    with LLMEngine(CONFIG) as engine:
        with pytest.raises(OutOfMemoryError, match="no room") as raised:
            tokens(engine)
        assert any(f"raised in rank {rank} of 2" in note for note in raised.value.__notes__)
        others = [note for note in raised.value.__notes__ if "failed too: CollectiveError" in note]
        assert [f"rank {1 - rank} of 2" in note for note in others] == [True] * before
        again = tokens(engine)
        engine.sleep(2)
        engine.wake()
        assert tokens(engine) == again
    with LLMEngine(EngineConfig(kv_cache_bytes=1 << 20)) as single:
        assert tokens(single) == again


def test_a_rank_that_waits_for_one_that_failed_and_cannot_be_broken_off_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(0, "execute_model", monkeypatch, once_in=tmp_path / "failed", before=True, as_nccl=True)
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        start = time.monotonic()
        with pytest.raises(OutOfMemoryError, match="no room") as raised:
            tokens(engine)
        assert time.monotonic() - start < LIMIT_S
        assert "rank 1 of 2" in raised.value.__notes__[-1]
        assert "did not answer within 5 s after rank 0 of 2" in raised.value.__notes__[-1]
        with pytest.raises(EngineDeadError, match="all ranks were killed: shut the engine down and create another"):
            tokens(engine)
        engine.shutdown()


def test_a_rank_that_cannot_be_created_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(1, "create", monkeypatch, once_in=tmp_path / "failed", before=True)
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        start = time.monotonic()
        with pytest.raises(OutOfMemoryError, match="no room"):
            engine.create()
        assert time.monotonic() - start < LIMIT_S
        assert ranks() == []
        engine.create()
        assert len(tokens(engine)) == 2
        engine.shutdown()


@contextmanager
def interrupted(rank: int, *, comes_back: bool = True) -> Iterator[None]:
    """Ctrl-C while the engine waits for a rank, which goes on half a second later, or not at all."""
    victim = ranks()[rank]
    victim.suspend()
    timers = [threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))]
    if comes_back:
        timers.append(threading.Timer(0.8, victim.resume))
    wait = processes._wait

    # Not sooner: a checker's questions to a stopped process take seconds.
    def wait_and_interrupt(*args: Any) -> Any:
        for timer in timers:
            if timer.ident is None:
                timer.start()
        return wait(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processes, "_wait", wait_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield
    for timer in timers:
        timer.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_waits_for_the_ranks_and_the_engine_goes_on(rank: int) -> None:
    with LLMEngine(CONFIG) as engine:
        expected = tokens(engine)
        with interrupted(rank):
            tokens(engine)
        assert tokens(engine) == expected
        with interrupted(rank):
            engine.sleep(2)
        assert engine.state is EngineState.RUNNING
        assert tokens(engine) == expected
        engine.sleep(1)
        with interrupted(rank):
            engine.wake()
        assert engine.state is EngineState.ASLEEP
        assert engine.memory_mapped()["weights"] == engine.memory_mapped()["kv_cache"] == 0
        engine.wake()
        assert tokens(engine) == expected


def test_a_rank_that_does_not_come_back_after_an_interrupt_is_killed() -> None:
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        with interrupted(1, comes_back=False):
            tokens(engine)
        with pytest.raises(EngineDeadError, match="did not answer within 5 s after an interrupt, and all ranks were"):
            tokens(engine)
        engine.shutdown()


def test_a_rank_that_answers_something_else_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        monkeypatch.setattr("lowtide.engine.processes.Answer", int)
        with pytest.raises(EngineDeadError, match="sent a message that does not belong here"):
            engine.sleep(1)
        engine.shutdown()


def test_errors_of_a_shutdown_come_out_and_the_ranks_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(1, "shutdown", monkeypatch, once_in=tmp_path / "failed")
    with nothing_stays():
        engine = LLMEngine(CONFIG)
        engine.create()
        with pytest.raises(ExceptionGroup, match="the worker failed"):
            engine.shutdown()
        assert ranks() == []
        engine.shutdown()
