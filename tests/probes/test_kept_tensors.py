"""What torch has, in a heap that was kept: memory under tensors, what its modules hold, and nothing of its contents."""

from __future__ import annotations

import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.probes.heap.holders import trace
from tests.probes.kept_heaps import SECRET, Attributed, Leak, as_shown, kept, shown

MIB = 1 << 20


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("helper")
    sys.modules["helper"] = made
    yield made
    del sys.modules["helper"]


@pytest.mark.nightly
def test_memory_under_tensors_counts_once_and_for_who_holds_all_of_it(module: Any, tmp_path: Path) -> None:
    whole = torch.zeros(3 * MIB, dtype=torch.uint8)
    module.alone = Attributed([whole[:MIB], whole[MIB:]])
    module.shared = Attributed(torch.zeros(5 * MIB, dtype=torch.uint8))
    module.other = Attributed(module.shared.held)
    del whole
    asked = kept(tmp_path)
    retained = {each.path: each.retained for each in map(asked.alone, asked.find("Attributed").tolist())}
    assert 3 * MIB < retained["helper.alone"] < 3.1 * MIB
    assert retained["helper.shared"] < MIB > retained["helper.other"]
    assert asked.overview().devices["cpu"] >= 8 * MIB
    (tensors,) = {row.holder for row in asked.holders("storage on cpu")} & {"torch.Tensor"}
    assert tensors == "torch.Tensor"


def _in_linear(held: Any) -> object:
    made = torch.nn.Linear(2, 2)
    made.kept = held
    return made


@pytest.mark.nightly
def test_holders_in_modules_of_torch_are_named_as_in_the_living_heap(module: Any, tmp_path: Path) -> None:
    leaks = [Leak(), Leak()]
    module.alone = _in_linear(leaks[0])
    module.parts = torch.nn.Sequential(torch.nn.Identity(), _in_linear(leaks[1]))
    module.tensor = torch.frombuffer(bytearray(SECRET.encode()), dtype=torch.uint8)
    with trace(leaks, thorough=True) as living:
        expected = sorted(shown(living.path(place)) for place in range(len(leaks)))
    asked = kept(tmp_path, *leaks)
    assert sorted(as_shown(asked.path(node)) for node in asked.find(f"{Leak.__module__}.Leak").tolist()) == expected
    with zipfile.ZipFile(tmp_path / "one.heap.npz") as archive:
        assert not any(SECRET.encode() in archive.read(name) for name in archive.namelist())
