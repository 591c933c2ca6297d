"""Which tensors of a worker must keep their contents over a sleep, and that they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.config import PRESETS
from lowtide.engine.core import EngineCore
from lowtide.engine.model_executor.weights import parameter_shapes
from lowtide.engine.worker import Worker
from lowtide.probes.stages import announced_preserved

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB, poison_pages=True)) as engine:
        yield engine


def worker_of(engine: LLMEngine) -> Worker:
    assert isinstance(engine._core, EngineCore)
    return engine._core.worker


def test_weights_rope_table_and_block_table_pointers_are_named(engine: LLMEngine) -> None:
    assert set(worker_of(engine).preserved_tensors()) == {
        *parameter_shapes(PRESETS["tiny"]),
        "rotary.table",
        "block_table.table_ptrs",
        "block_table.table_strides",
        "block_table.table_sizes",
    }


@pytest.mark.parametrize("level", [1, 2])
def test_contents_and_addresses_survive_a_sleep(engine: LLMEngine, level: int) -> None:
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    before = {name: (t.data_ptr(), t.clone()) for name, t in worker_of(engine).preserved_tensors().items()}
    engine.sleep(level)
    engine.wake()
    for name, tensor in worker_of(engine).preserved_tensors().items():
        address, contents = before[name]
        assert tensor.data_ptr() == address, name
        assert torch.equal(tensor, contents), name


def test_pointer_tensors_lie_in_memory_that_no_sleep_drops(engine: LLMEngine) -> None:
    engine.sleep(2)
    for name, tensor in worker_of(engine).model_runner.block_table.pointers.items():
        assert tensor.any(), name


def test_the_kv_caches_arena_has_addresses_for_small_tables_beside_it(engine: LLMEngine) -> None:
    arena = worker_of(engine).memory.arena("kv_cache")
    assert arena.mapped == 4 * MIB
    arena.allocate((16,), torch.int64)
    assert 4 * MIB < arena.mapped < 5 * MIB


def test_a_living_engine_announces_what_must_survive_and_a_closed_one_does_not() -> None:
    engine = LLMEngine(EngineConfig(kv_cache_bytes=4 * MIB))
    engine.create()
    worker = worker_of(engine)
    assert worker.preserved_tensors().keys() == announced_preserved().tensors.keys()
    engine.shutdown()
    # The object lives on; nobody may read its tensors any more.
    assert worker is not None
    assert announced_preserved().tensors == {}
