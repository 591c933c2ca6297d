"""Triton's kernels against plain torch, run as a script: on a card, or in Triton's interpreter on a CPU.

The interpreter is asked for by `TRITON_INTERPRET=1`, before the first import of Triton. Without it and without a card,
the kernels are only compiled: the interpreter takes what the compiler does not.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from lowtide.engine.core import EngineCore
from lowtide.engine.model_executor import fused_ops, triton_kernels
from lowtide.engine.model_executor.block_table import BlockTable
from lowtide.engine.model_executor.cuda_graphs import DecodeGraphs
from lowtide.engine.model_executor.triton_kernels import decode_attention, gather_rows


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 12345, dtype=dtype)


def check_gather() -> None:
    table = BlockTable(5, 131, 16, poisoned)
    table.device_table.copy_(torch.randint(0, 1000, (5, 131)))
    rows = torch.tensor([3, 0, 3, 4])
    gathered = gather_rows(table.pointers.values(), rows, 131)
    assert torch.equal(gathered, table.device_table[rows])
    # The tensors are really followed: other values give other rows.
    table.pointers["table_sizes"].fill_(70)
    table.pointers["table_ptrs"].add_(4)
    gathered = gather_rows(table.pointers.values(), rows, 131)
    assert torch.equal(gathered[:, :70], table.device_table[rows, 1:71])
    assert not gathered[:, 70:].any()
    table.pointers["table_strides"].zero_()
    gathered = gather_rows(table.pointers.values(), rows, 131)
    assert torch.equal(gathered[:, :70], table.device_table[:1, 1:71].expand(4, -1))


def by_kernels_and_torch(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """What Triton's kernels and plain torch make of the same."""
    with patch.object(fused_ops, "has_kernels", lambda tensor: True):
        of_kernels = compute()
    with patch.object(fused_ops, "has_kernels", lambda tensor: False):
        return of_kernels, compute()


def assert_close(of_kernels: Any, of_torch: Any, dtype: torch.dtype) -> None:
    # Where the order of a sum differs, a number may be rounded to its neighbour, twice.
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(of_kernels, of_torch, rtol=tolerance, atol=tolerance)


def check_row(dtype: torch.dtype) -> None:
    """One row by the kernel, with a bias and without; several rows are torch's."""
    weight, bias = torch.randn(7, 2500, dtype=dtype) / 50, torch.randn(7, dtype=dtype)
    for x, added in ((torch.randn(1, 2500, dtype=dtype), bias), (torch.randn(1, 2500, dtype=dtype), None)):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        with patch.object(fused_ops, "has_kernels", lambda tensor: True):
            assert_close(fused_ops.linear(x, weight, added), exact.to(dtype), dtype)
    rows = torch.randn(2, 2500, dtype=dtype)
    with patch.object(triton_kernels, "multiply_row", lambda *_: None):
        assert_close(*by_kernels_and_torch(lambda: fused_ops.linear(rows, weight, bias)), dtype)


def check_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 80, dtype=dtype)
    weight = torch.randn(80, dtype=dtype)
    for stream in (None, residual):
        copies = functools.partial(lambda stream: None if stream is None else stream.clone(), stream)
        found = by_kernels_and_torch(lambda copies=copies: fused_ops.add_rms_norm(x.clone(), copies(), weight, 2**-10))
        assert_close(*found, dtype)
    assert_close(found[0][1], x + residual, dtype)


def check_rotation(dtype: torch.dtype) -> None:
    """Queries and keys are turned, values are not, and a token without a slot is written nowhere."""
    num_heads, num_kv_heads, head_dim = 4, 2, 20
    projected = torch.randn(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    rotation = torch.randn(4, head_dim, dtype=dtype)
    slots = torch.tensor([13, 3, 0, 19])

    def turned(slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        caches = torch.full((2, 5, 4, num_kv_heads, head_dim), 7.0, dtype=dtype)
        return *fused_ops.rotate_and_cache(projected.clone(), rotation, *caches, slots), *caches

    of_kernels, of_torch = by_kernels_and_torch(lambda: turned(slots))
    assert_close(of_kernels, of_torch, dtype)
    with patch.object(fused_ops, "has_kernels", lambda tensor: True):
        *_, keys, values = turned(torch.tensor([13, -1, 0, -1]))
    for cache, whole in ((keys, of_torch[3]), (values, of_torch[4])):
        expected = torch.full_like(whole, 7.0)
        expected.flatten(0, 1)[[13, 0]] = whole.flatten(0, 1)[[13, 0]]
        assert_close(cache, expected, dtype)


def check_silu(dtype: torch.dtype) -> None:
    gate_and_up = 4 * torch.randn(3, 2 * 1500, dtype=dtype)
    assert_close(*by_kernels_and_torch(lambda: fused_ops.silu_and_mul(gate_and_up)), dtype)


def check_attention(
    lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Sequences of these lengths over shuffled blocks; what was never written is NaN, and so is what follows a row."""
    blocks_per_seq = max(1, -(-max(lengths) // block_size))
    table = BlockTable(len(lengths) + 1, blocks_per_seq, block_size, poisoned)
    table.device_table.fill_(2**31 - 1)
    num_blocks = blocks_per_seq * len(lengths)
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    query = torch.randn(len(lengths), num_heads, head_dim, dtype=dtype)
    rows = torch.randperm(len(lengths) + 1)[: len(lengths)]
    free = torch.randperm(num_blocks).tolist()
    expected = []
    for index, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        table.device_table[rows[index], : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = torch.tensor([blocks[at // block_size] * block_size + at % block_size for at in range(length)]).long()
        keys, values = torch.randn(2, length, num_kv_heads, head_dim, dtype=dtype)
        caches[0].flatten(0, 1)[slots], caches[1].flatten(0, 1)[slots] = keys, values
        keys, values = (each.double().repeat_interleave(num_heads // num_kv_heads, 1) for each in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query[index].double(), keys) * head_dim**-0.5
        expected.append(
            torch.einsum("hl,lhd->hd", scores.softmax(-1), values) if length else torch.zeros(num_heads, head_dim)
        )
    attended = decode_attention(query, *caches, table.pointers.values(), rows, torch.tensor(lengths))
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(attended.double(), torch.stack(expected).double(), rtol=tolerance, atol=tolerance)


def capture_nothing(graphs: DecodeGraphs) -> None:
    """In place of a capture, which needs a card: a graph computes its step whenever it is replayed."""
    for size in graphs.sizes:
        replay = functools.partial(graphs._compute, size)
        graphs._graphs[size] = SimpleNamespace(replay=replay, reset=lambda: None)  # type: ignore[assignment]


def check_graphs() -> None:
    """A mixed batch in padded static buffers gives the tokens of the eager step, and padding harms nobody's blocks."""
    prompts = [[1, 2, 3], list(range(100, 140)), [7] * 16]
    params = [SamplingParams(max_tokens=count) for count in (3, 2, 4)]
    config = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=6, poison_pages=True)
    DecodeGraphs._capture_all = capture_nothing  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda device=None: None
    # Fewer programs: the interpreter takes a millisecond for each.
    triton_kernels._MAX_SPLITS = 1
    with LLMEngine(config) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    with LLMEngine(config) as engine, patch.object(fused_ops, "has_kernels", lambda tensor: True):
        assert isinstance(engine._core, EngineCore)
        worker = engine._core.worker
        worker.model_runner.capture_graphs(config, worker.memory.arena("runtime").allocate)
        graphs = worker.model_runner.decode_graphs
        assert graphs is not None
        sizes: list[int] = []
        compute = graphs._compute
        for size, graph in graphs._graphs.items():
            graph.replay = lambda size=size: (sizes.append(size), compute(size))
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        assert sizes == [4, 2, 1]
        # The second time the prefixes are found in the cache: what padding wrote there would be read.
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        addresses = worker.graph_addresses()
        for name, tensor in worker.preserved_tensors().items():
            assert addresses[name] == (tensor.data_ptr(), tensor.nbytes), name
        worker.model_runner.block_table.create_pointers(worker.memory.arena("runtime").allocate)
        assert addresses == worker.graph_addresses()
        moved = worker.preserved_tensors()["block_table.table_ptrs"].data_ptr()
        assert addresses["block_table.table_ptrs"][0] != moved


def check_compile() -> None:
    """Every kernel compiles for an H100; torch's dtype of an argument is that of its name."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes: dict[str, Any] = {
        "COLUMNS": 128,
        "WIDTH": 80,
        "HEAD_DIM": 20,
        "PADDED": 128,
        "NUM_HEADS": 8,
        "GROUP": 3,
        "PADDED_GROUP": 16,
        "NUM_KV_HEADS": 4,
        "HALF": 10,
        "FEATURES": 1024,
        "ADDS": True,
        "WEIGHTS": 2048,
        "BIASED": True,
    }
    sizes |= {"BLOCK_SIZE": 5, "KEYS": 32, "SPLITS": 16, "WIDE": triton.language.float32}
    known = {
        "table_sizes": "*i32",
        "out": "*i32",
        "width": "i32",
        "query_stride": "i32",
        "scale": "fp32",
        "eps": "fp32",
    }
    known |= dict.fromkeys(("table_ptrs", "table_strides", "rows", "slots", "seq_lens"), "*i64")
    known |= dict.fromkeys(("partial", "maxima", "sums"), "*fp32")
    for name in (
        "_gather_rows",
        "_multiply_row",
        "_add_rms_norm",
        "_rotate_and_cache",
        "_silu_and_mul",
        "_attend",
        "_join",
    ):
        kernel = getattr(triton_kernels, name)
        signature = {each: "constexpr" if each in sizes else known.get(each, "*bf16") for each in kernel.arg_names}
        constants = {(at,): sizes[each] for at, each in enumerate(kernel.arg_names) if each in sizes}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        check_compile()
        sys.exit()
    torch.set_default_device("cpu" if interpreted else "cuda")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    check_gather()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check_row(dtype)
        check_norm(dtype)
        check_rotation(dtype)
        check_silu(dtype)
    check_attention([1, 0, 33, 70, 16, 15], 4, 2, 16, 16, torch.float32)
    check_attention([200, 7], 6, 2, 20, 5, torch.float32)
    # The interpreter multiplies matrices of bfloat16 as if they were integers.
    half = torch.float16 if interpreted else torch.bfloat16
    check_attention([40, 0, 3], 3, 3, 8, 16, half)
    check_attention([90, 2], 9, 3, 16, 16, half)
    check_attention([0], 8, 1, 64, 32, torch.float32)
    check_attention([40, 0, 3], 4, 2, 16, 16, torch.float64)
    if interpreted:
        check_graphs()
    else:
        check_attention([3000, 1, 0, 777], 32, 8, 128, 16, torch.bfloat16)
        check_attention([5000] * 40, 8, 4, 64, 16, torch.float32)
