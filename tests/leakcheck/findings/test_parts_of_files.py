"""Tensors cut out of one storage, as a loader cuts the memory of a file: who holds one of them holds all of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.remedies import prove
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.tensor_findings import tensor_leaks
from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.storages import HeapReading, read_heap
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.heap.births import Births
from lowtide.reports.schema import Finding

KEPT: dict[str, Any] = {}
WEIGHTS = 4
EACH = 64 * 1024 * 4


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    KEPT.clear()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in both formats."""
    folder = tmp_path_factory.mktemp("weights")
    weights = {f"w{place}": torch.full((64, 1024), float(place)) for place in range(WEIGHTS)}
    found = {"safetensors": folder / "weights.safetensors", "torch": folder / "weights.pt"}
    safetensors.save_file(weights, found["safetensors"])
    torch.save(weights, found["torch"])
    return found


def load(files: dict[str, Path], kind: str) -> dict[str, torch.Tensor]:
    if kind == "torch":
        return dict(torch.load(files["torch"], mmap=True))
    return dict(safetensors.load_file(files["safetensors"]))


def left_by(step: Callable[[], object], owners: Sequence[Owner] = ()) -> tuple[HeapReading, Context]:
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark("call")
        step()
        return read_heap(births, Claims(owners), (), ()), Context(born=births.born())
    finally:
        births.stop()


def found_after(step: Callable[[], object]) -> tuple[list[Finding], list[Explanation]]:
    """The findings with what gives them back, and the explanations behind them."""
    heap, context = left_by(step)
    explained = explain_storages({held.key for held in heap.held}, context)
    reported = list(explained.by_key.values())
    return prove(tensor_leaks([heap.held], [Rung.RAW], explained, context), context), reported


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_dict_of_a_loaded_file_holds_the_memory_of_the_file(files: dict[str, Path], kind: str) -> None:
    (finding,), (reported,) = found_after(lambda: KEPT.update(weights=load(files, kind)))
    # The file's header is part of the memory.
    assert WEIGHTS * EACH < finding.bytes < WEIGHTS * EACH + 4096
    assert (reported.verdict, reported.cause) == ("reachable", "module-global")
    assert finding.holder == f"{__name__}.KEPT['weights']"
    assert finding.remedy is not None
    assert finding.remedy.returns_bytes == finding.bytes


@pytest.mark.nightly
def test_one_weight_of_a_file_holds_all_of_it(files: dict[str, Path]) -> None:
    (finding,), _ = found_after(lambda: KEPT.update(one=load(files, "safetensors")["w2"]))
    assert finding.bytes > WEIGHTS * EACH
    assert finding.holder == f"{__name__}.KEPT['one']"


@pytest.mark.nightly
def test_a_model_that_took_over_a_files_memory_is_its_holder(files: dict[str, Path]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for place in range(WEIGHTS):
                self.register_parameter(f"w{place}", torch.nn.Parameter(torch.empty(64, 1024, device="meta")))

    def step() -> None:
        KEPT["model"] = model = Model()
        model.load_state_dict(load(files, "torch"), assign=True)

    (finding,), _ = found_after(step)
    assert finding.holder == f"{__name__}.KEPT['model']"
    assert finding.remedy is not None
    assert (finding.remedy.action, finding.remedy.returns_bytes) == (f"del {__name__}.KEPT['model']", finding.bytes)


@pytest.mark.nightly
def test_every_holder_of_a_part_has_to_let_go(files: dict[str, Path]) -> None:
    def step() -> None:
        weights = load(files, "safetensors")
        KEPT.update({f"kept{place}": [weight] for place, weight in enumerate(weights.values())})

    (finding,), _ = found_after(step)
    assert finding.remedy is not None
    assert finding.remedy.returns_bytes == finding.bytes
    assert KEPT == {}


def test_nothing_is_left_of_a_file_that_was_read_and_dropped(files: dict[str, Path]) -> None:
    heap, _ = left_by(lambda: load(files, "torch") and None)
    assert heap.held == ()
    assert heap.new_on_cpu == 0


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_file_that_a_living_engine_loads_later_is_the_engines(files: dict[str, Path], kind: str) -> None:
    engine: dict[str, Any] = {"weights": None}

    def roots() -> Iterable[object]:
        return [engine]

    heap, _ = left_by(lambda: engine.update(weights=load(files, kind)), [Owner("fixture 'engine'", roots)])
    assert heap.held == ()


def test_memory_of_a_file_is_counted_once(files: dict[str, Path]) -> None:
    heap, _ = left_by(lambda: KEPT.update(load(files, "safetensors")))
    KEPT.clear()
    assert WEIGHTS * EACH < heap.new_on_cpu < WEIGHTS * EACH + 4096
