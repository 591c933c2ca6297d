"""Decode graphs without a card: how batches are padded, who uses them, what is refused, and what a failure leaves."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.engine import ConfigError, EngineConfig, EngineState, LLMEngine, OutOfMemoryError, SamplingParams
from lowtide.engine.core import EngineCore
from lowtide.engine.model_executor.attention import PagedDecodes
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs, batch_sizes
from lowtide.engine.runner import ModelRunner
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.stages import announced_pools

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 99, dtype=dtype)


class Forward:
    """A model whose hidden states are token ids and positions; remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: PagedDecodes) -> torch.Tensor:
        named = {"rows": metadata.rows, "seq_lens": metadata.seq_lens, "slots": metadata.slot_mapping}
        self.seen.append({name: tensor.tolist() for name, tensor in named.items()})
        return torch.stack((input_ids, positions), dim=1).float()


class Replay:
    """Stands for a captured graph: computes its step whenever it is replayed."""

    def __init__(self, graphs: DecodeGraphs, size: int) -> None:
        # Weakly, as a real graph knows nothing of its owner.
        self.owner = weakref.ref(graphs)
        self.size = size
        self.was_reset = False

    def replay(self) -> None:
        graphs = self.owner()
        assert graphs is not None
        graphs._compute(self.size)

    def reset(self) -> None:
        self.was_reset = True


def capture_all(graphs: DecodeGraphs) -> None:
    for size in graphs.sizes:
        graphs._graphs[size] = Replay(graphs, size)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "_capture_all", capture_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def make(forward: Any, max_batch_size: int = 6) -> DecodeGraphs:
    table = BlockTable(max_batch_size, 4, 16, allocate)
    return DecodeGraphs(
        forward, table, max_batch_size=max_batch_size, hidden_size=2, dtype=torch.float32, allocate=allocate
    )


def run(graphs: DecodeGraphs, count: int) -> torch.Tensor:
    numbers = np.arange(1, count + 1)
    return graphs.run(list(numbers), 10 * numbers, 100 * numbers, list(numbers), list(1000 * numbers))


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_sizes_are_powers_of_two_and_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(largest) == sizes


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (5, 6), (6, 6)])
def test_a_batch_runs_in_the_next_larger_graph_and_padding_reads_and_writes_nothing(count: int, size: int) -> None:
    forward = Forward()
    graphs = make(forward)
    graphs.capture({})
    run(graphs, 6)  # What it leaves in the buffers must not come back as padding.
    hidden = run(graphs, count)
    numbers = list(range(1, count + 1))
    assert hidden.tolist() == [[n, 10 * n] for n in numbers]
    padding = size - count
    assert forward.seen[-1] == {
        "rows": numbers + [0] * padding,
        "seq_lens": [1000 * n for n in numbers] + [0] * padding,
        "slots": [100 * n for n in numbers] + [-1] * padding,
    }


def test_inputs_and_outputs_stay_where_they_are() -> None:
    graphs = make(Forward())
    graphs.capture({})
    assert run(graphs, 3).data_ptr() == run(graphs, 5).data_ptr() == graphs.addresses["decode_graphs.hidden"][0]


def test_addresses_are_plain_numbers_of_the_moment_of_capture() -> None:
    graphs = make(Forward())
    read = torch.zeros(3)
    graphs.capture({"a": read})
    address = read.data_ptr()
    read.set_(torch.ones(5).untyped_storage())
    assert graphs.addresses["a"] == (address, 12)
    assert set(graphs.addresses) == {"a"} | {
        f"decode_graphs.{name}" for name in ("input_ids", "positions", "slot_mapping", "rows", "seq_lens", "hidden")
    }


def test_close_resets_every_graph_and_lets_go_by_reference_count() -> None:
    gc.disable()
    try:
        forward = Forward()
        graphs = make(forward)
        graphs.capture({})
        held = list(graphs._graphs.values())
        gone = [weakref.ref(item) for item in (forward, graphs._inputs, graphs._hidden, graphs._block_table)]
        del forward
        graphs.close()
        graphs.close()
        assert all(graph.was_reset for graph in held)  # type: ignore[attr-defined]
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_a_graph_that_cannot_be_reset_skips_no_other() -> None:
    graphs = make(Forward())
    graphs.capture({})
    held = list(graphs._graphs.values())
    held[-1].reset = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ExceptionGroup, match="the graph for 6 failed"):
        graphs.close()
    assert all(graph.was_reset for graph in held[:-1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (torch.OutOfMemoryError, OutOfMemoryError, "no room to capture CUDA graphs for batches of up to 6"),
        (RuntimeError, RuntimeError, "planted"),
        (KeyboardInterrupt, KeyboardInterrupt, "planted"),
    ],
)
def test_a_failed_capture_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], raised: type[BaseException], said: str
) -> None:
    gone: list[Any] = []

    def fails(graphs: DecodeGraphs) -> None:
        intermediate = torch.zeros(3)
        capture_all(graphs)
        gone.append(weakref.ref(intermediate))
        gone.extend(weakref.ref(graph) for graph in graphs._graphs.values())
        # Made here: one that was made with the parameters would keep this frame after the test.
        raise error("planted")

    monkeypatch.setattr(DecodeGraphs, "_capture_all", fails)
    graphs = make(Forward())
    with pytest.raises(raised, match=said):
        graphs.capture({})
    assert [ref() for ref in gone] == [None] * 5


# --- the runner -----------------------------------------------------------------------------------------------------


def test_steps_that_decode_alone_run_as_graphs_and_no_other(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=64, max_num_batched_tokens=30)
    sizes: list[int] = []

    def run(token_ids: Sequence[int], *_: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return torch.zeros(len(token_ids), loop.model.config.hidden_size)

    loop.runner.decode_graphs = SimpleNamespace(run=run)
    loop.generate(PROMPTS, SamplingParams(max_tokens=4))
    decode_only = [len(s.scheduled) for s in loop.steps if all(item.num_tokens == 1 for item in s.scheduled)]
    assert sizes == decode_only
    assert 0 < len(decode_only) < len(loop.steps)


def test_a_shutdown_closes_the_graphs_and_then_lets_go_of_all_else(make_loop: Callable[..., Any]) -> None:
    loop = make_loop(num_blocks=8)
    graphs = SimpleNamespace(close=lambda: (loop.runner.block_table, 1 / 0))
    loop.runner.decode_graphs = graphs
    table = weakref.ref(loop.runner.block_table.device_table)
    with pytest.raises(ExceptionGroup, match="the CUDA graphs failed") as caught:
        loop.runner.shutdown()
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
    assert (loop.runner.decode_graphs, table()) == (None, None)
    loop.runner.shutdown()


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["check", "create"])
def test_graphs_on_a_cpu_are_refused(call: str) -> None:
    engine = LLMEngine(EngineConfig(cuda_graphs=True))
    with pytest.raises(ConfigError, match=r"^cuda_graphs needs a card, and device is 'cpu'.*$"):
        getattr(engine, call)()
    assert engine.state is EngineState.NEW


def test_graphs_without_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.engine.model_executor.cuda_graphs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs Triton.*pip install \"lowtide\[gpu\]\""):
        LLMEngine(EngineConfig(cuda_graphs=True, device="cuda")).check()


def test_without_graphs_there_are_no_addresses() -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=1 << 20)) as engine:
        assert isinstance(engine._core, EngineCore)
        assert engine._core.worker.graph_addresses() == {}


@pytest.mark.parametrize("fails_in", ["capture", "afterwards"])
def test_a_create_that_fails_at_its_graphs_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fails_in: str) -> None:
    # What a card would do; the configuration is a CPU's.
    monkeypatch.setattr("lowtide.engine.worker.check_cuda_graphs", lambda device: None)
    closed: list[DecodeGraphs] = []
    close = DecodeGraphs.close
    monkeypatch.setattr(DecodeGraphs, "close", lambda self: (closed.append(self), close(self)))
    capture = ModelRunner.capture_graphs

    def fails(self: ModelRunner, *arguments: Any) -> None:
        if fails_in == "afterwards":
            capture(self, *arguments)
        raise RuntimeError("planted")

    engine = LLMEngine(EngineConfig(cuda_graphs=True, kv_cache_bytes=1 << 20))
    gc.collect()
    before = (announced_pools(), sum(survey_storages().sizes.values()))
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "capture_graphs", fails)
        with pytest.raises(RuntimeError, match="planted"):
            engine.create()
    assert len(closed) == (fails_in == "afterwards")
    closed.clear()
    assert (announced_pools(), sum(survey_storages().sizes.values())) == before
    engine.create()
    assert isinstance(engine._core, EngineCore)
    addresses = engine._core.worker.graph_addresses()
    preserved = {name: (t.data_ptr(), t.nbytes) for name, t in engine._core.worker.preserved_tensors().items()}
    assert preserved.items() <= addresses.items()
    engine.shutdown()
    assert len(closed) == 1
    closed.clear()
    assert (announced_pools(), sum(survey_storages().sizes.values())) == before
