"""Processes of an engine that are killed at every stage: our error within seconds, and nothing of the engine left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lowtide.engine import EngineConfig, EngineState, LLMEngine, SamplingParams
from lowtide.engine.errors import EngineDeadError
from tests.engine import core_extensions
from tests.engine.core_extensions import Stops
from tests.engine.process_watch import LIMIT_S, Watch, cores, killed_during, nothing_stays, ranks

pytestmark = pytest.mark.nightly

CONFIG = EngineConfig(kv_cache_bytes=1 << 20, engine_process=True)
PROMPTS = ([1, 2, 3], list(range(40)))
ROOT = Path(__file__).parents[2]


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8))]


def victim_of(name: str) -> tuple[psutil.Process, str]:
    """The process that a test kills, and its name in errors."""
    (core,) = cores()
    if name.startswith("core"):
        return core, "lowtide::EngineCore"
    return ranks(core)[int(name[-1])], f"lowtide::Worker_TP{name[-1]}"


STAGES: dict[str, tuple[Callable[[LLMEngine], object], Callable[[LLMEngine], object]]] = {
    "infer": (lambda engine: None, tokens),
    "step": (lambda engine: engine.add_request([1, 2]), lambda engine: engine.step()),
    "sleep": (lambda engine: None, lambda engine: engine.sleep(1)),
    "asleep, then wake": (lambda engine: engine.sleep(2), lambda engine: engine.wake()),
    "reload": (lambda engine: None, lambda engine: engine.reload_weights()),
    "shutdown": (lambda engine: None, lambda engine: engine.shutdown()),
}
SIZES = {"core": 1, "core of ranks": 2, "rank 0": 2, "rank 1": 2}


@pytest.mark.parametrize("victim", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_process_that_is_killed_in_a_call_ends_it_with_our_error(stage: str, victim: str) -> None:
    before, call = STAGES[stage]
    with nothing_stays(at_least=2 * SIZES[victim] - 1, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, tensor_parallel_size=SIZES[victim]))
        engine.create()
        tokens(engine)
        before(engine)
        process, name = victim_of(victim)
        assert killed_during(process, name, lambda: call(engine)) < LIMIT_S
        if stage != "shutdown":
            assert engine.state is (EngineState.ASLEEP if stage.startswith("asleep") else EngineState.RUNNING)
            assert engine.memory_mapped() == {}
            with pytest.raises(EngineDeadError, match="has ended: killed by SIGKILL"):
                call(engine)
        engine.shutdown()
        assert engine.state is EngineState.CLOSED


WORK: dict[str, tuple[str, Callable[[LLMEngine], object], Callable[[LLMEngine], object]]] = {
    "infer": ("execute", lambda engine: None, tokens),
    "sleep": ("drop", lambda engine: None, lambda engine: engine.sleep(1)),
    "wake": ("restore", lambda engine: engine.sleep(1), lambda engine: engine.wake()),
    "reload": ("fill", lambda engine: None, lambda engine: engine.reload_weights()),
}


@pytest.mark.parametrize("stage", WORK)
def test_an_engine_whose_core_is_killed_at_work_keeps_its_state(stage: str, tmp_path: Path) -> None:
    point, before, call = WORK[stage]
    stops = Stops(tmp_path / "stops")
    killed: list[float] = []

    def kill() -> None:
        victim = stops.wait_for(point)
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    with nothing_stays(at_least=1, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, process_extensions=(stops.extension,)))
        engine.create()
        before(engine)
        state = engine.state
        stops.arm(point, "stays")
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match=r"EngineCore \(pid \d+\) has ended: killed by SIGKILL"):
            call(engine)
        assert time.monotonic() - killed[0] < LIMIT_S
        killer.join()
        assert engine.state is state
        engine.shutdown()


def test_a_core_that_is_killed_is_missed_though_a_fork_of_it_holds_its_connection(tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    extension = f"{core_extensions.__name__}:forked={fork}"
    with nothing_stays(at_least=2, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, process_extensions=(extension,)))
        engine.create()
        process, name = victim_of("core")
        try:
            assert killed_during(process, name, lambda: tokens(engine)) < LIMIT_S
        finally:
            os.kill(int(fork.read_text()), signal.SIGKILL)
        engine.shutdown()


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("victim", SIZES)
def test_a_process_that_is_killed_between_calls_fails_the_next_one(victim: str, asleep: bool) -> None:
    with nothing_stays(at_least=2 * SIZES[victim] - 1, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, tensor_parallel_size=SIZES[victim]))
        engine.create()
        if asleep:
            engine.sleep(1)
        process, name = victim_of(victim)
        process.kill()
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=rf"{name} \(pid {process.pid}\) has ended: killed by SIGKILL"):
            engine.wake() if asleep else tokens(engine)
        assert time.monotonic() - start < LIMIT_S
        engine.shutdown()


@pytest.mark.parametrize("when", ["as it starts", "in its worker"])
@pytest.mark.parametrize("victim", SIZES)
def test_a_process_that_is_killed_while_it_is_created(victim: str, when: str, tmp_path: Path) -> None:
    size = SIZES[victim]
    stops = Stops(tmp_path / "stops")
    if when == "in its worker":
        stops.arm("fill", "stays")
    killed: list[float] = []

    def kill() -> None:
        if when == "in its worker":
            stops.wait_for("fill")
        while not cores() or (size > 1 and victim != "core" and len(ranks(cores()[0])) < size):
            time.sleep(0.01)
        # It imports torch now.
        time.sleep(0.2)
        killed.append(time.monotonic())
        victim_of(victim)[0].kill()

    with nothing_stays(at_least=1 if victim == "core" else 3, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, tensor_parallel_size=size, process_extensions=(stops.extension,)))
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineDeadError, match="has ended"):
            engine.create()
        assert time.monotonic() - killed[0] < LIMIT_S
        killer.join()
        assert engine.state is EngineState.NEW
        assert engine.memory_mapped() == {}
        assert cores() == []
        engine.shutdown()


def test_an_engine_that_nobody_has_any_more_ends_its_processes() -> None:
    with nothing_stays(at_least=3, within_s=LIMIT_S):
        engine = LLMEngine(replace(CONFIG, tensor_parallel_size=2))
        engine.create()
        (core,) = cores()
        processes = [core, *ranks(core)]
        del engine
        _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
        assert not alive


# --- the engine's own process ---------------------------------------------------------------------------------------

CLIENT = """
import sys
from pathlib import Path
from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from tests.engine.core_extensions import Stops

stage, size, folder = sys.argv[1:]
stops = Stops(Path(folder))
engine = LLMEngine(EngineConfig(
    kv_cache_bytes=1 << 20, engine_process=True, tensor_parallel_size=int(size), process_extensions=(stops.extension,)
))
points = {"create": "fill", "infer": "execute", "sleep": "drop", "wake": "restore", "reload": "fill"}
calls = {
    "infer": lambda: engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4)),
    "sleep": lambda: engine.sleep(1),
    "wake": lambda: engine.wake(),
    "reload": lambda: engine.reload_weights(),
    "shutdown": lambda: engine.shutdown(),
}
if stage == "create":
    stops.arm("fill", "stays")
print("ready", flush=True)
engine.create()
if stage in ("asleep", "wake"):
    engine.sleep(1)
if stage in calls:
    stops.arm(points.get(stage, stage), "stays")
    calls[stage]()
print(stage, flush=True)
sys.stdin.read()
"""
POINTS = {
    "create": "fill",
    "infer": "execute",
    "sleep": "drop",
    "wake": "restore",
    "reload": "fill",
    "shutdown": "shutdown",
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize("stage", ["start", *POINTS, "asleep"])
def test_all_processes_end_with_the_one_that_has_the_engine(
    stage: str, number: signal.Signals, size: int, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    stops = Stops(tmp_path / "stops")
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, stage, str(size), str(stops.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(own), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    ) as client:
        assert client.stdout is not None
        process = psutil.Process(client.pid)
        with Watch(process) as watch:
            assert client.stdout.readline() == "ready\n"
            if stage in POINTS:
                stops.wait_for(POINTS[stage])
            elif stage == "asleep":
                assert client.stdout.readline() == "asleep\n"
            else:
                while not cores(process):
                    time.sleep(0.01)
            watch.look()
        client.send_signal(number)
        assert client.wait() == -number
    assert len(watch.seen) >= (1 if stage == "start" else 2 * size - 1)
    watch.assert_nothing_stays(LIMIT_S)
    assert list(own.iterdir()) == []


TERMINAL = """
import sys
import time
from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
engine = LLMEngine(EngineConfig(kv_cache_bytes=1 << 20, engine_process=True, tensor_parallel_size=2))
def tokens(count):
    return engine.generate([[1, 2, 3]], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids
try:
    engine.create()
except KeyboardInterrupt:
    print("not created", flush=True)
    sys.exit()
before = tokens(8)
try:
    print("ready", flush=True)
    while sys.argv[1] == "infer":
        tokens(64)
    time.sleep(600)
except KeyboardInterrupt:
    assert tokens(8) == before
engine.shutdown()
print("done", flush=True)
"""


@pytest.mark.parametrize("when", ["core", "ranks", "infer", "idle"])
def test_ctrl_c_of_a_terminal_reaches_every_process_and_ends_the_call_alone(when: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL, when],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        process = psutil.Process(program.pid)
        with Watch(process) as watch:
            if when in ("infer", "idle"):
                assert program.stdout.readline() == "ready\n"
            else:
                while not cores(process) or (when == "ranks" and len(ranks(cores(process)[0])) < 2):
                    time.sleep(0.01)
            # In the middle of a step, of nothing, or of a process's imports.
            time.sleep(0.2)
            os.killpg(program.pid, signal.SIGINT)
            assert program.stdout.read() == ("done\n" if when in ("infer", "idle") else "not created\n")
            # No process has printed a traceback.
            assert program.stderr.read() == ""
        assert program.wait() == 0
    assert len(watch.seen) >= (1 if when == "core" else 3)
    watch.assert_nothing_stays(LIMIT_S)
