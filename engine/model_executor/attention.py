"""Paged attention through torch's SDPA: new keys and values go into KV blocks and are gathered from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtide.engine.config import ModelConfig
from lowtide.engine.device_allocator.arena import WorkspaceViews
from lowtide.engine.model_executor.block_table import BlockTable

MAX_GATHERED_TOKENS = 65_536
"""Padded tokens that one decode batch gathers at most, unless a single sequence is longer: bounds the workspace."""


def workspace_bytes(model: ModelConfig, max_num_seqs: int, max_model_len: int) -> int:
    """Return the bytes that one micro-batch's workspace is asked for at most, before alignment: keys and values."""
    tokens = min(max_num_seqs * max_model_len, max(MAX_GATHERED_TOKENS, max_model_len))
    return 2 * tokens * model.num_kv_heads * model.head_dim * model.torch_dtype.itemsize


@dataclass(frozen=True)
class DecodeBatch:
    """Sequences with one new token each, `start` to `stop` in the micro-batch, padded to the longest.

    Attributes:
        slots: int64 [(stop - start) * longest], where each key lies in the KV cache. Padding repeats the sequence's
            last slot: garbage could be NaN, and NaN comes through a mask.
        bias: [stop - start, 1, 1, longest], 0 or -inf, added to the scores; None when nothing is padded.
    """

    start: int
    stop: int
    slots: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """One sequence with several new tokens, `start` to `stop` in the micro-batch, after a context in the KV cache.

    `slots` (int64 [context + new]) and `bias` ([new, context + new]) as in `DecodeBatch`; None without a context.
    """

    start: int
    stop: int
    slots: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """What every layer must know of a micro-batch; `slot_mapping` is int64 [T], where each new token goes."""

    slot_mapping: torch.Tensor
    decodes: tuple[DecodeBatch, ...]
    prefills: tuple[PrefillChunk, ...]


@dataclass(frozen=True)
class PagedDecodes:
    """Sequences with one new token each, described by tensors on a card alone: nothing of it is a shape.

    So a CUDA graph can be captured over it; what the tensors hold when the graph runs is what is computed.  All are
    int64 [B], lengths those after the step.  Padding has length 0 and slot -1, which is written nowhere: every slot of
    the cache may belong to somebody, free blocks too, whose contents are found by their hash.
    """

    block_table: BlockTable
    rows: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor


StepMetadata: TypeAlias = "AttentionMetadata | PagedDecodes"
"""What the attention of every layer must know, in one of its two forms."""


def build_attention_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> AttentionMetadata:
    """Prepare, once per step, what all layers share.

    Sequences with one new token come first, the longest of them at the front; `seq_lens` are those after the step, and
    `block_tables` int32 [B, blocks per sequence].
    """
    device = block_tables.device
    num_decodes = sum(length == 1 for length in query_lens)
    lengths = torch.tensor(seq_lens, dtype=torch.int64, device=device)
    decodes = []
    for start, stop in split_decodes(seq_lens[:num_decodes]):
        positions = torch.arange(seq_lens[start], device=device).unsqueeze(0)
        ends = lengths[start:stop].unsqueeze(1)
        slots = _slots(block_tables[start:stop], torch.minimum(positions, ends - 1), block_size)
        padded = seq_lens[stop - 1] < seq_lens[start]
        bias = _bias(positions < ends, dtype)[:, None, None, :] if padded else None
        decodes.append(DecodeBatch(start, stop, slots.flatten(), bias))
    prefills = []
    stop = num_decodes
    for row in range(num_decodes, len(query_lens)):
        start, stop = stop, stop + query_lens[row]
        if query_lens[row] == seq_lens[row]:
            prefills.append(PrefillChunk(start, stop, None, None))
            continue
        keys = torch.arange(seq_lens[row], device=device)
        slots = _slots(block_tables[row : row + 1], keys.unsqueeze(0), block_size)
        bias = _bias(keys <= keys[-query_lens[row] :].unsqueeze(1), dtype)
        prefills.append(PrefillChunk(start, stop, slots.flatten(), bias))
    return AttentionMetadata(slot_mapping, tuple(decodes), tuple(prefills))


def split_decodes(seq_lens: Sequence[int], limit: int = MAX_GATHERED_TOKENS) -> list[tuple[int, int]]:
    """Ranges of sequences, longest first, that are padded and gathered together: at most `limit` tokens, or one."""
    ranges = []
    start = 0
    while start < len(seq_lens):
        stop = min(len(seq_lens), start + max(1, limit // seq_lens[start]))
        ranges.append((start, stop))
        start = stop
    return ranges


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    workspace: WorkspaceViews,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences, whose keys and values are in the cache.

    Grouped heads cost no copies and need no special kernel: query heads that share a key head are laid out as rows of
    one query (decode) or as a batch over keys with stride 0 (prefill).  Queries are [T, num_heads, head_dim] as what is
    returned, keys and values [T, num_kv_heads, head_dim], the caches [num_blocks, block_size, num_kv_heads, head_dim].
    """
    if isinstance(metadata, PagedDecodes):
        from lowtide.engine.model_executor.triton_kernels import decode_attention

        pointers = metadata.block_table.pointers.values()
        return decode_attention(query, key_cache, value_cache, pointers, metadata.rows, metadata.seq_lens)
    key_slots, value_slots = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    output = query.new_empty(query.shape)
    for decode in metadata.decodes:
        count = decode.stop - decode.start
        keys, values = (
            gathered.view(count, -1, num_kv_heads, head_dim).transpose(1, 2)
            for gathered in _gather(key_slots, value_slots, decode.slots, workspace)
        )
        queries = query[decode.start : decode.stop].reshape(count, num_kv_heads, group, head_dim)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=decode.bias)
        output[decode.start : decode.stop] = attended.reshape(count, num_heads, head_dim)
    for prefill in metadata.prefills:
        new = slice(prefill.start, prefill.stop)
        if prefill.slots is None:
            keys, values = key[new], value[new]
        else:
            keys, values = _gather(key_slots, value_slots, prefill.slots, workspace)
        attended = scaled_dot_product_attention(
            query[new].reshape(-1, num_kv_heads, group, head_dim).permute(2, 1, 0, 3),
            keys.transpose(0, 1).expand(group, -1, -1, -1),
            values.transpose(0, 1).expand(group, -1, -1, -1),
            attn_mask=prefill.bias,
            is_causal=prefill.bias is None,
        )
        output[new] = attended.permute(2, 1, 0, 3).reshape(-1, num_heads, head_dim)
    return output


def _gather(
    key_slots: torch.Tensor, value_slots: torch.Tensor, slots: torch.Tensor, workspace: WorkspaceViews
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [len(slots), num_kv_heads, head_dim] from the cache, in workspace memory."""
    shape = (slots.shape[0], *key_slots.shape[1:])
    keys, values = workspace.get((shape, key_slots.dtype), (shape, value_slots.dtype))
    torch.index_select(key_slots, 0, slots, out=keys)
    torch.index_select(value_slots, 0, slots, out=values)
    return keys, values


def _slots(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slot (block x block_size + offset) of positions [B, L] under block tables [B, blocks], int64."""
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive form of a mask: made once per step, where SDPA would turn a boolean one into this in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
