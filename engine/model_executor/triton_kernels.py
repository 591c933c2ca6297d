"""Triton's kernels: those of `fused_ops`, and the attention of decoding.

Imported only where a kernel is launched: Triton is no dependency of the engine on a CPU.  All sizes are elements.  A
kernel runs on the current device: who calls it has made that the tensors' own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

# Columns of the block table that one program copies.
_COLUMNS = 128
# Outputs of the gate that one program computes.
_FEATURES = 1024
# Weights of one output that one program multiplies together.
_WEIGHTS = 2048
# Keys that one program looks at together.
_KEYS = 32
# Rows and columns of the smallest matrices that tensor cores multiply.
_SMALLEST_PRODUCT = 16
# Programs that keep a card busy (132 multiprocessors of an H200, a few each); more parts only cost joining.
_PROGRAMS = 512
_MAX_SPLITS = 16


def gather_rows(pointers: Iterable[torch.Tensor], rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of the block table: int32 [B, width] for rows int64 [B]; entries beyond the table's own width are 0."""
    out = torch.empty((rows.shape[0], width), dtype=torch.int32, device=rows.device)
    grid = (rows.shape[0], triton.cdiv(width, _COLUMNS))
    _gather_rows[grid](*pointers, rows, out, width, COLUMNS=_COLUMNS)
    return out


@triton.jit
def _gather_rows(table_ptrs, table_strides, table_sizes, rows, out, width, COLUMNS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    table = tl.load(table_ptrs).to(tl.pointer_type(tl.int32))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = table + tl.load(rows + index) * tl.load(table_strides)
    blocks = tl.load(row + columns, mask=columns < tl.load(table_sizes), other=0)
    tl.store(out + index * width + columns, blocks, mask=columns < width)


def multiply_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `fused_ops.linear`; x is one row."""
    product = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _multiply_row[(weight.shape[0],)](
        x,
        weight,
        weight if bias is None else bias,
        product,
        WIDTH=weight.shape[1],
        WEIGHTS=_WEIGHTS,
        BIASED=bias is not None,
        WIDE=_wide(x.dtype),
        num_warps=8,
    )
    return product


@triton.jit
def _multiply_row(
    x,
    weight,
    bias,
    product,
    WIDTH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIASED: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WEIGHTS)
    sums = tl.zeros((WEIGHTS,), WIDE)
    for first in range(0, WIDTH, WEIGHTS):
        real = first + columns < WIDTH
        # Each weight is read once: it should not drive what is read again out of the cache.
        weights = tl.load(weight + row * WIDTH + first + columns, mask=real, other=0.0, eviction_policy="evict_first")
        sums += weights.to(WIDE) * tl.load(x + first + columns, mask=real, other=0.0).to(WIDE)
    total = tl.sum(sums, axis=0)
    if BIASED:
        total += tl.load(bias + row).to(WIDE)
    tl.store(product + row, total.to(product.dtype.element_ty))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fused_ops.add_rms_norm`; the sum is written over `residual`."""
    width = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else residual
    _add_rms_norm[(x.shape[0],)](
        x,
        total,
        weight,
        normed,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADDS=residual is not None,
        WIDE=_wide(x.dtype),
        num_warps=8,
    )
    return normed, total


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, PADDED)
    real = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    total = tl.load(x + at, mask=real, other=0.0)
    if ADDS:
        # Rounded, as a sum that is a tensor of its own.
        total = (total.to(WIDE) + tl.load(residual + at, mask=real, other=0.0).to(WIDE)).to(x.dtype.element_ty)
        tl.store(residual + at, total, mask=real)
    wide = total.to(WIDE)
    scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    rounded = scaled.to(x.dtype.element_ty).to(WIDE)
    factors = tl.load(weight + columns, mask=real, other=0.0).to(WIDE)
    tl.store(normed + at, (rounded * factors).to(x.dtype.element_ty), mask=real)


def rotate_and_cache(
    projected: torch.Tensor,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `fused_ops.rotate_and_cache`; queries and keys are turned where they lie."""
    count, heads, head_dim = projected.shape
    num_kv_heads = key_cache.shape[2]
    _rotate_and_cache[(count, heads)](
        projected,
        rotation,
        key_cache,
        value_cache,
        slots,
        NUM_HEADS=heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(head_dim // 2),
        WIDE=_wide(projected.dtype),
        num_warps=1,
    )


@triton.jit
def _rotate_and_cache(
    projected,
    rotation,
    key_cache,
    value_cache,
    slots,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED)
    real = dims < HALF
    at = projected + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + dims
    first = tl.load(at, mask=real, other=0.0)
    second = tl.load(at + HALF, mask=real, other=0.0)
    kind = projected.dtype.element_ty
    if head < NUM_HEADS + NUM_KV_HEADS:
        cosines = tl.load(rotation + token * (2 * HALF) + dims, mask=real, other=0.0).to(WIDE)
        sines = tl.load(rotation + token * (2 * HALF) + HALF + dims, mask=real, other=0.0).to(WIDE)
        # Each product is rounded, as tensors of their own are.
        one, other = (first.to(WIDE) * cosines).to(kind), (second.to(WIDE) * sines).to(kind)
        two, another = (second.to(WIDE) * cosines).to(kind), (first.to(WIDE) * sines).to(kind)
        first = (one.to(WIDE) - other.to(WIDE)).to(kind)
        second = (two.to(WIDE) + another.to(WIDE)).to(kind)
        tl.store(at, first, mask=real)
        tl.store(at + HALF, second, mask=real)
    slot = tl.load(slots + token)
    if slot >= 0:
        if head >= NUM_HEADS + NUM_KV_HEADS:
            _store_head(value_cache, slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS, HALF, dims, first, second)
        elif head >= NUM_HEADS:
            _store_head(key_cache, slot * NUM_KV_HEADS + head - NUM_HEADS, HALF, dims, first, second)


@triton.jit
def _store_head(cache, index, HALF: tl.constexpr, dims, first, second):
    at = cache + index * (2 * HALF) + dims
    tl.store(at, first, mask=dims < HALF)
    tl.store(at + HALF, second, mask=dims < HALF)


def silu_and_mul(gate_and_up: torch.Tensor) -> torch.Tensor:
    """See `fused_ops.silu_and_mul`."""
    width = gate_and_up.shape[-1] // 2
    product = gate_and_up.new_empty((gate_and_up.shape[0], width))
    grid = (gate_and_up.shape[0], triton.cdiv(width, _FEATURES))
    _silu_and_mul[grid](gate_and_up, product, WIDTH=width, FEATURES=_FEATURES, WIDE=_wide(product.dtype))
    return product


@triton.jit
def _silu_and_mul(gate_and_up, product, WIDTH: tl.constexpr, FEATURES: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    real = columns < WIDTH
    at = gate_and_up + token * 2 * WIDTH + columns
    gate = tl.load(at, mask=real, other=0.0).to(WIDE)
    up = tl.load(at + WIDTH, mask=real, other=0.0).to(WIDE)
    kind = product.dtype.element_ty
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind).to(WIDE)
    tl.store(product + token * WIDTH + columns, (opened * up).to(kind), mask=real)


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype is torch.float64 else tl.float32


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pointers: Iterable[torch.Tensor],
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Attention of one new token per sequence over all of its keys, straight from the KV blocks, in float32 at
    least.

    The softmax is computed online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), each
    sequence is split into parts that run side by side, and the parts are joined in a second kernel (Dao et al.,
    "Flash-Decoding", 2023). The shapes of all launches depend on the batch size alone, so that a graph can be captured.

    Queries, and what is returned, are [B, num_heads, head_dim]; caches as in `rotate_and_cache`, and `pointers` as in
    `BlockTable`; `rows` and `seq_lens` int64 [B], and for 0 keys the output is 0.
    """
    batch, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    splits = _num_splits(batch * num_kv_heads)
    padded, padded_group = (max(_SMALLEST_PRODUCT, triton.next_power_of_2(size)) for size in (head_dim, group))
    output = query.new_empty(query.shape)
    wide = torch.promote_types(query.dtype, torch.float32)
    partial = torch.empty((batch, num_heads, splits, padded), dtype=wide, device=query.device)
    maxima, sums = torch.empty((2, batch, num_heads, splits), dtype=wide, device=query.device)
    _attend[(batch, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        *pointers,
        rows,
        seq_lens,
        partial,
        maxima,
        sums,
        head_dim**-0.5,
        query.stride(0),
        GROUP=group,
        PADDED_GROUP=padded_group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED=padded,
        BLOCK_SIZE=block_size,
        KEYS=_KEYS,
        SPLITS=splits,
        WIDE=_wide(query.dtype),
    )
    _join[(batch * num_heads,)](partial, maxima, sums, output, HEAD_DIM=head_dim, PADDED=padded, SPLITS=splits)
    return output


def _num_splits(programs: int) -> int:
    """Parts of a sequence, a power of two: as many as make `_PROGRAMS` out of what runs side by side anyway."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * programs <= _PROGRAMS:
        splits *= 2
    return splits


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    table_ptrs,
    table_strides,
    table_sizes,
    rows,
    seq_lens,
    partial,
    maxima,
    sums,
    scale,
    query_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend with all query heads of one key head, so that keys and values are read once."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    start = split * share
    stop = tl.minimum(start + share, length)
    row = tl.load(table_ptrs).to(tl.pointer_type(tl.int32)) + tl.load(rows + sequence) * tl.load(table_strides)
    num_blocks = tl.load(table_sizes)
    dims = tl.arange(0, PADDED)
    real = dims < HEAD_DIM
    member = tl.arange(0, PADDED_GROUP)
    heads = kv_head * GROUP + member
    lanes = (member < GROUP)[:, None] & real[None, :]
    asked = tl.load(query + sequence * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=lanes, other=0.0)
    largest = tl.full((PADDED_GROUP,), float("-inf"), WIDE)
    total = tl.zeros((PADDED_GROUP,), WIDE)
    sum_of_values = tl.zeros((PADDED_GROUP, PADDED), WIDE)
    first = start
    # Not `range`: Triton's interpreter cannot count by what it has loaded under numpy 2.4 and later.
    while first < stop:
        positions = first + tl.arange(0, KEYS)
        block_index = positions // BLOCK_SIZE
        visible = (positions < stop) & (block_index < num_blocks)
        blocks = tl.load(row + block_index, mask=visible, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        mask = visible[:, None] & real[None, :]
        keys = tl.load(key_cache + offsets, mask=mask, other=0.0)
        values = tl.load(value_cache + offsets, mask=mask, other=0.0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee").to(WIDE) * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        weighed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        sum_of_values = sum_of_values * shrink[:, None] + weighed.to(WIDE)
        total = total * shrink + tl.sum(weights, axis=1)
        largest = new_largest
        first += KEYS
    # A part without keys leaves no weight behind, but numbers: uninitialised memory could be NaN.
    parts = (sequence * (NUM_KV_HEADS * GROUP) + heads) * SPLITS + split
    tl.store(partial + parts[:, None] * PADDED + dims[None, :], sum_of_values, mask=(member < GROUP)[:, None])
    tl.store(maxima + parts, largest, mask=member < GROUP)
    tl.store(sums + parts, total, mask=member < GROUP)


@triton.jit
def _join(
    partial,
    maxima,
    sums,
    output,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    parts = at * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED)
    of_parts = tl.load(maxima + parts)
    # Finite, because padding has no key at all: a difference of infinities would be NaN.
    largest = tl.maximum(tl.max(of_parts, axis=0), -3e38)
    weights = tl.exp(of_parts - largest)
    total = tl.sum(tl.load(sums + parts) * weights, axis=0)
    values = tl.load(partial + parts[:, None] * PADDED + dims[None, :])
    attended = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(output + at * HEAD_DIM + dims, attended.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
