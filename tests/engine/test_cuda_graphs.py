"""CUDA graphs of the decode step on a card: the same tokens over every sleep, and all memory back afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine import EngineConfig, EngineState, LLMEngine, OutOfMemoryError, SamplingParams
from lowtide.engine.core import EngineCore
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs
from lowtide.engine.worker import Worker
from lowtide.probes.device.driver import find_driver

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card; torch sees none"),
]

MIB = 1 << 20
PROMPTS = [[1, 2, 3], list(range(100, 140)), [7] * 16, list(range(300)), [9]]
# They end one after the other, so that every batch size from five down to one is decoded.
PARAMS = [SamplingParams(max_tokens=count) for count in (40, 30, 50, 20, 10)]
SETTINGS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 6, "kv_cache_bytes": 16 * MIB, "poison_pages": True}


def make(**settings: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(**{**SETTINGS, "cuda_graphs": True, **settings}))


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def worker_of(engine: LLMEngine) -> Worker:
    assert isinstance(engine._core, EngineCore)
    return engine._core.worker


@pytest.fixture
def expected() -> list[tuple[int, ...]]:
    """What the eager step generates."""
    with make(cuda_graphs=False) as engine:
        return tokens(engine)


@pytest.fixture
def memory() -> Iterator[Any]:
    """Bytes that torch has allocated and reserved, and that the driver counts, once libraries are warm."""
    for cuda_graphs in (False, True):
        with make(cuda_graphs=cuda_graphs) as engine:
            tokens(engine)
    gc.collect()
    torch.cuda.empty_cache()
    driver = find_driver()

    def read() -> tuple[int, int, int]:
        held = driver.read(0).process_bytes
        assert held is not None
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), held

    yield read
    driver.close()


def pool_bytes() -> int:
    """Bytes in torch's private pools, which are those of graphs."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0))


def test_tokens_equal_those_of_the_eager_step_over_every_sleep(expected: list[tuple[int, ...]]) -> None:
    with make() as engine:
        for level in (None, 1, 2, 1):
            if level is not None:
                engine.sleep(level)
                engine.wake()
            assert tokens(engine) == expected
        # And with their prefixes found in the cache, which padding must not have touched.
        assert tokens(engine) == expected


def test_each_batch_runs_in_the_next_larger_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[torch.cuda.CUDAGraph] = []
    with make() as engine:
        graphs = worker_of(engine).model_runner.decode_graphs
        assert graphs is not None
        assert graphs.sizes == (1, 2, 4, 6)
        size_of = {id(graph): size for size, graph in graphs._graphs.items()}
        replay = torch.cuda.CUDAGraph.replay
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replayed.append(self), replay(self))[1])
        tokens(engine)
        sizes = [size_of[id(graph)] for graph in replayed]
        replayed.clear()
    assert list(dict.fromkeys(sizes)) == [6, 4, 2, 1]


def test_in_bfloat16_the_batch_decides_rounding_and_nothing_else() -> None:
    params = SamplingParams(max_tokens=8)
    with make(dtype="bfloat16", cuda_graphs=False) as engine:
        eager = [output.token_ids[:2] for output in engine.generate(PROMPTS, params)]
    with make(dtype="bfloat16") as engine:
        assert [output.token_ids[:2] for output in engine.generate(PROMPTS, params)] == eager


def test_two_engines_do_not_disturb_each_other(expected: list[tuple[int, ...]]) -> None:
    with make() as first, make() as second:
        for _ in range(2):
            assert tokens(first) == expected
            assert tokens(second) == expected
        second.shutdown()
        assert tokens(first) == expected


def test_a_graph_needs_no_library_workspace_from_outside_its_pool(expected: list[tuple[int, ...]]) -> None:
    with make() as engine:
        assert tokens(engine) == expected
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filler = torch.full((64 * MIB,), 0xA5, dtype=torch.uint8, device="cuda")
        assert tokens(engine) == expected
        assert (filler == 0xA5).all()


def test_memory_is_back_after_shutdown_by_reference_count_alone(memory: Any) -> None:
    before = memory()
    gc.disable()
    try:
        engine = make()
        engine.create()
        tokens(engine)
        engine.sleep(1)
        engine.wake()
        tokens(engine)
        engine.shutdown()
        assert memory() == before
        assert pool_bytes() == 0
    finally:
        gc.enable()


def test_the_graphs_pool_stays_while_the_engine_sleeps(memory: Any) -> None:
    with make() as engine:
        awake = pool_bytes()
        engine.sleep(2)
        assert 0 < pool_bytes() == awake
        # Mostly cuBLAS's workspace.
        assert awake < 128 * MIB


@pytest.mark.parametrize("error", [RuntimeError("planted"), torch.OutOfMemoryError("planted")])
@pytest.mark.parametrize("nth", [2, 6])
def test_a_failed_capture_takes_nothing_and_can_be_tried_again(
    memory: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, nth: int
) -> None:
    before = memory()
    compute = DecodeGraphs._compute
    calls = iter(range(100))

    def fails(self: DecodeGraphs, size: int) -> None:
        compute(self, size)
        if next(calls) == nth:
            raise error

    engine = make()
    with monkeypatch.context() as patch:
        patch.setattr(DecodeGraphs, "_compute", fails)
        with pytest.raises((RuntimeError, OutOfMemoryError), match=r"planted|no room to capture CUDA graphs"):
            engine.create()
    assert engine.state is EngineState.NEW
    after = memory()
    # A capture takes cuBLAS's workspaces out of torch's list, and nothing has asked for one since.
    assert all(now <= then for now, then in zip(after, before, strict=True))
    assert pool_bytes() == 0
    engine.create()
    tokens(engine)
    engine.shutdown()
    assert memory() == before


def test_a_card_without_room_for_the_graphs_says_what_to_lower(memory: Any) -> None:
    engine = make(max_num_seqs=64)
    held = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    # Enough for what comes before, not for a workspace of cuBLAS.
    torch.cuda.set_per_process_memory_fraction((held + 8 * MIB) / total)
    try:
        with pytest.raises(OutOfMemoryError, match=r"no room to capture CUDA graphs .*: lower max_num_seqs"):
            engine.create()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.state is EngineState.NEW
    assert pool_bytes() == 0
    with engine:
        tokens(engine)


def test_addresses_are_those_of_the_capture_and_stay_true(expected: list[tuple[int, ...]]) -> None:
    with make() as engine:
        worker = worker_of(engine)
        recorded = worker.graph_addresses()
        engine.sleep(2)
        engine.wake()
        for name, tensor in worker.preserved_tensors().items():
            assert recorded[name] == (tensor.data_ptr(), tensor.nbytes), name
        assert {"decode_graphs.input_ids", "decode_graphs.hidden", "kv_cache.3.values"} <= set(recorded)


def test_a_graph_goes_on_reading_the_pointer_tensors_of_its_capture(expected: list[tuple[int, ...]]) -> None:
    with make() as engine:
        worker = worker_of(engine)
        table = worker.model_runner.block_table
        old = table.pointers["table_sizes"]
        table.create_pointers(worker.memory.arena("runtime").allocate)
        assert worker.graph_addresses()["block_table.table_sizes"] == (old.data_ptr(), old.nbytes)
        assert tokens(engine) == expected
        old.zero_()
        assert tokens(engine) != expected


def test_the_kernels_compute_what_torch_does() -> None:
    script = Path(__file__).with_name("triton_cases.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
