"""The block table's pointer tensors: they lead to the table, and whoever loses their contents is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lowtide.engine import EngineError
from lowtide.engine.model_executor.block_table import BlockTable

pytestmark = pytest.mark.nightly

WIDTH = 131


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 99, dtype=dtype)


def make_table() -> BlockTable:
    """Five rows wider than a kernel's tile, every entry different."""
    table = BlockTable(5, WIDTH, 16, allocate)
    for row in range(5):
        table.append(row, range(1000 * row, 1000 * row + WIDTH))
    table.commit()
    return table


def test_the_pointer_tensors_say_where_the_table_lies_and_how_large_it_is() -> None:
    table = make_table()
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in table.pointers.items()} == {
        "table_ptrs": (torch.int64, [table.device_table.data_ptr()]),
        "table_strides": (torch.int64, [WIDTH]),
        "table_sizes": (torch.int32, [WIDTH]),
    }


def test_rows_are_gathered_in_the_order_asked_for() -> None:
    table = make_table()
    gathered = table.gather(torch.tensor([3, 0, 3]))
    assert (gathered.dtype, gathered[:, 0].tolist(), gathered[:, -1].tolist()) == (
        torch.int32,
        [3000, 0, 3000],
        [3130, 130, 3130],
    )


@pytest.mark.parametrize("name", ["table_ptrs", "table_strides", "table_sizes"])
def test_lost_contents_are_reported_in_one_line_and_no_memory_is_read(name: str) -> None:
    table = make_table()
    table.pointers[name].fill_(-1)
    said = r"pointer tensors say address 0x\w+, stride -?\d+, size -?\d+, .* address 0x\w+, .* were lost"
    with pytest.raises(EngineError, match=said) as e:
        table.gather(torch.tensor([0]))
    assert "\n" not in str(e.value)


def test_a_pointer_to_a_table_that_has_moved_is_found() -> None:
    table = make_table()
    table.device_table = table.device_table.clone()
    with pytest.raises(EngineError, match="pointer tensors"):
        table.gather(torch.tensor([0]))


def test_pointer_tensors_that_are_made_anew_lead_to_the_same_table() -> None:
    table = make_table()
    before = table.pointers
    table.create_pointers(allocate)
    assert all(tensor is not before[name] for name, tensor in table.pointers.items())
    assert table.gather(torch.tensor([1]))[0, 0] == 1000


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels")
@pytest.mark.parametrize("interpret", ["1", "0"], ids=["interpreted", "compiled"])
def test_the_kernels_compute_what_torch_does_and_compile_for_a_card(interpret: str) -> None:
    # In a process of its own: Triton decides at its first import whether it interprets.
    script = Path(__file__).with_name("triton_cases.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
