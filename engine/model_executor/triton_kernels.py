"""Triton kernels of the decode step: they find the block table through its pointer, stride and size tensors.

Imported only where a kernel is launched: Triton is no dependency of the engine on a CPU.  All sizes are elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns of the block table that one program copies.
_COLUMNS = 128
# Keys that one program looks at together.
_KEYS = 32
# Programs that keep a card busy (132 multiprocessors of an H200, a few each); more parts only cost joining.
_PROGRAMS = 512
_MAX_SPLITS = 16


def gather_rows(
    table_ptrs: torch.Tensor, table_strides: torch.Tensor, table_sizes: torch.Tensor, rows: torch.Tensor, width: int
) -> torch.Tensor:
    """Rows of the block table: int32 [B, width] for rows int64 [B]; entries beyond the table's own width are 0.

    Args:
        table_ptrs: see `BlockTable`, as the next two.
        table_strides: see `table_ptrs`.
        table_sizes: see `table_ptrs`.
        rows: which, on the same device.
        width: blocks per row.
    """
    out = torch.empty((rows.shape[0], width), dtype=torch.int32, device=rows.device)
    grid = (rows.shape[0], triton.cdiv(width, _COLUMNS))
    # A kernel goes to the current device, which is the user's choice and need not be the engine's.
    with torch.cuda.device_of(rows):
        _gather_rows[grid](table_ptrs, table_strides, table_sizes, rows, out, width, COLUMNS=_COLUMNS)
    return out


@triton.jit
def _gather_rows(table_ptrs, table_strides, table_sizes, rows, out, width, COLUMNS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    table = tl.load(table_ptrs).to(tl.pointer_type(tl.int32))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = table + tl.load(rows + index) * tl.load(table_strides)
    blocks = tl.load(row + columns, mask=columns < tl.load(table_sizes), other=0)
    tl.store(out + index * width + columns, blocks, mask=columns < width)


def write_slots(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Puts new keys and values into the KV cache; a token whose slot is negative is written nowhere.

    Args:
        key: [T, num_kv_heads, head_dim], as `value`.
        value: see `key`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], as `value_cache`; contiguous.
        value_cache: see `key_cache`.
        slots: int64 [T], block x block_size + offset.
    """
    width = key[0].numel()
    with torch.cuda.device_of(key):
        _write_slots[(key.shape[0],)](
            key.contiguous(),
            value.contiguous(),
            key_cache,
            value_cache,
            slots,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
        )


@triton.jit
def _write_slots(key, value, key_cache, value_cache, slots, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, PADDED)
    real = columns < WIDTH
    if slot >= 0:
        tl.store(key_cache + slot * WIDTH + columns, tl.load(key + token * WIDTH + columns, mask=real), mask=real)
        tl.store(value_cache + slot * WIDTH + columns, tl.load(value + token * WIDTH + columns, mask=real), mask=real)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table_ptrs: torch.Tensor,
    table_strides: torch.Tensor,
    table_sizes: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Attention of one new token per sequence over all of its keys, straight from the KV blocks, in float32 at
    least.

    The softmax is computed online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), each
    sequence is split into parts that run side by side, and the parts are joined in a second kernel (Dao et al.,
    "Flash-Decoding", 2023). The shapes of all launches depend on the batch size alone, so that a graph can be captured.

    Args:
        query: [B, num_heads, head_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], as `value_cache`; contiguous.
        value_cache: see `key_cache`.
        table_ptrs: see `BlockTable`, as the next two.
        table_strides: see `table_ptrs`.
        table_sizes: see `table_ptrs`.
        rows: int64 [B], of the block table.
        seq_lens: int64 [B], keys of each sequence; for 0 the output is 0.

    Returns:
        [B, num_heads, head_dim] in the query's dtype.
    """
    batch, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    splits = _num_splits(batch * num_heads)
    padded = triton.next_power_of_2(head_dim)
    output = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    partial = torch.empty((batch, num_heads, splits, padded), dtype=wide, device=query.device)
    maxima, sums = torch.empty((2, batch, num_heads, splits), dtype=wide, device=query.device)
    tables = (table_ptrs, table_strides, table_sizes, rows, seq_lens)
    with torch.cuda.device_of(query):
        _attend[(batch, num_heads, splits)](
            query.contiguous(),
            key_cache,
            value_cache,
            *tables,
            partial,
            maxima,
            sums,
            head_dim**-0.5,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED=padded,
            BLOCK_SIZE=block_size,
            KEYS=_KEYS,
            SPLITS=splits,
            WIDE=tl.float64 if wide is torch.float64 else tl.float32,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    start = split * share
    stop = tl.minimum(start + share, length)
    row = tl.load(table_ptrs).to(tl.pointer_type(tl.int32)) + tl.load(rows + sequence) * tl.load(table_strides)
    num_blocks = tl.load(table_sizes)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    dims = tl.arange(0, PADDED)
    real = dims < HEAD_DIM
    at = sequence * NUM_HEADS + head
    asked = tl.load(query + at * HEAD_DIM + dims, mask=real, other=0.0).to(WIDE) * scale
    largest = tl.full((), float("-inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    sum_of_values = tl.zeros((PADDED,), WIDE)
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
        keys = tl.load(key_cache + offsets, mask=mask, other=0.0).to(WIDE)
        scores = tl.where(visible, tl.sum(keys * asked[None, :], axis=1), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_largest)
        shrink = tl.exp(largest - new_largest)
        values = tl.load(value_cache + offsets, mask=mask, other=0.0).to(WIDE)
        sum_of_values = sum_of_values * shrink + tl.sum(values * weights[:, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        largest = new_largest
        first += KEYS
    _store_part(partial, maxima, sums, at * SPLITS + split, PADDED, dims, sum_of_values, largest, total)


@triton.jit
def _store_part(partial, maxima, sums, part, PADDED: tl.constexpr, dims, sum_of_values, largest, total):
    # A part without keys leaves no weight behind, but numbers: uninitialised memory could be NaN.
    tl.store(partial + part * PADDED + dims, sum_of_values)
    tl.store(maxima + part, largest)
    tl.store(sums + part, total)


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
