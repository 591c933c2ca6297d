"""The kernels in Triton; the same values as `plain`. Importing this loads Triton.

Floor on one H200: a plain read (torch's sum) of 100 GB takes 23.1 ms, which leaves its multiprocessors some 50
instructions per 64-bit word. The fingerprint takes 13 (loading, two keys, two products, a share of the mixing), the
search 8: both wait for memory, and take 22.2 and 21.8 ms (`benchmarks/oracles.py`). Nothing is allocated but the
results and the ranges' table.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lowtide.probes.kernels import definition, plain
from lowtide.probes.kernels.definition import (
    GEOMETRY,
    WORD,
    Geometry,
    Hits,
    RangeTable,
    aligned_part,
    contiguous,
    finish_all,
    key,
)
from lowtide.probes.kernels.plain import as_bytes

_CHAIN = tl.constexpr(definition.CHAIN)
_GOLDEN = tl.constexpr(definition.GOLDEN)
_MIX_FIRST = tl.constexpr(definition.MIX_FIRST)
_MIX_SECOND = tl.constexpr(definition.MIX_SECOND)
_LOW_HALF = tl.constexpr((1 << 32) - 1)

# Programs per multiprocessor: enough loads in flight, few enough atomics at the end.
_PROGRAMS = 4
_WARPS = 4
_UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _mix(value):  # type: ignore[no-untyped-def]
    """`definition.mix` of each."""
    value = (value ^ (value >> 30)) * _MIX_FIRST
    value = (value ^ (value >> 27)) * _MIX_SECOND
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["units", "first", "sections"])  # type: ignore[untyped-decorator,misc,unused-ignore]
def _hash(  # type: ignore[no-untyped-def]
    data,
    units,
    first,
    sections,
    sums,
    UNIT: tl.constexpr,  # noqa: N803 - Triton's custom for what is known when it compiles
    WHOLE: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    ROUNDS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
):
    """Add the mixed states of the lanes of some sections, `first` and those after it, to the two `sums`.

    `data` has `units` numbers of UNIT bytes; KEYS has the first and the second key of each round. WHOLE sections lie
    wholly inside and are read without a mask.
    """
    lanes = tl.arange(0, LANES)
    first_sum = tl.zeros([LANES], tl.uint64)
    second_sum = tl.zeros([LANES], tl.uint64)
    for step in range(tl.program_id(0), sections, tl.num_programs(0)):
        section = tl.cast(first, tl.int64) + step
        first_state = tl.zeros([LANES], tl.uint64)
        second_state = tl.zeros([LANES], tl.uint64)
        for turn in tl.static_range(ROUNDS):
            index = section * (LANES * ROUNDS) + turn * LANES + lanes
            if UNIT == 8 and WHOLE:
                word = tl.load(data + index)
            else:
                word = tl.zeros([LANES], tl.uint64)
                for part in tl.static_range(8 // UNIT):
                    place = index * (8 // UNIT) + part
                    read = tl.load(data + place) if WHOLE else tl.load(data + place, mask=place < units, other=0)
                    word |= read.to(tl.uint64) << (8 * UNIT * part)
            keyed = word ^ KEYS[2 * turn]
            first_state += (keyed & _LOW_HALF) * (keyed >> 32)
            keyed = word ^ KEYS[2 * turn + 1]
            second_state += (keyed & _LOW_HALF) * (keyed >> 32)
        lane = (section * LANES + lanes).to(tl.uint64)
        mixed = _mix(first_state + lane * _GOLDEN)
        first_sum += mixed
        second_sum += _mix(second_state + mixed * _CHAIN)
    tl.atomic_add(sums, tl.sum(first_sum).to(tl.int64))
    tl.atomic_add(sums + 1, tl.sum(second_sum).to(tl.int64))


@triton.jit(  # type: ignore[untyped-decorator,misc,unused-ignore]
    do_not_specialize=["words", "first", "sections", "skipped", "tensor", "low", "span", "ranges", "levels", "room"]
)
def _search(  # type: ignore[no-untyped-def]
    data,
    words,
    first,
    sections,
    skipped,
    tensor,
    low,
    span,
    table,
    ranges,
    levels,
    counts,
    cursor,
    found,
    room,
    MISALIGNMENT: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    ROUNDS: tl.constexpr,  # noqa: N803
):
    """Count the words of some sections that lie in the ranges, and list the aligned ones as far as there is `room`.

    `data` has `words` 64-bit numbers and begins `skipped` bytes into its tensor, which is number `tensor`; `table`
    holds the starts, then the stops of the `ranges`, which a search in so many `levels` distinguishes. A row of `found`
    is the tensor's number, the byte offset, and the value; `cursor` counts the rows, written or not.
    """
    lanes = tl.arange(0, LANES)
    for step in range(tl.program_id(0), sections, tl.num_programs(0)):
        start = (tl.cast(first, tl.int64) + step) * (LANES * ROUNDS)
        near = tl.zeros([LANES], tl.int1)
        for turn in tl.static_range(ROUNDS):
            index = start + turn * LANES + lanes
            word = tl.load(data + index) if WHOLE else tl.load(data + index, mask=index < words, other=0)
            near |= (word - low) < span
        if tl.max(near.to(tl.int32)) > 0:  # rare: read again, from the cache, with the whole search
            for again in range(ROUNDS):
                place = start + again * LANES + lanes
                address = tl.load(data + place, mask=place < words, other=0)
                below = tl.zeros([LANES], tl.int32)  # ranges that start at or before the word
                for level in range(levels):
                    further = below + (1 << (levels - 1 - level))
                    begins = tl.load(table + further - 1, mask=further <= ranges, other=0).to(tl.uint64)
                    below = tl.where((further <= ranges) & (begins <= address), further, below)
                ends = tl.load(table + ranges + below - 1, mask=below > 0, other=0).to(tl.uint64)
                inside = (below > 0) & (address < ends)
                whole = inside & ((address & MISALIGNMENT) == 0)
                hits = tl.sum(whole.to(tl.int32))
                touched = tl.sum(inside.to(tl.int32))
                if touched > 0:
                    tl.atomic_add(counts, hits.to(tl.int64))
                    tl.atomic_add(counts + 1, (touched - hits).to(tl.int64))
                    row = tl.atomic_add(cursor, hits.to(tl.int64)) + tl.cumsum(whole.to(tl.int32), 0) - 1
                    kept = whole & (row < room)
                    tl.store(found + row * 3, tl.zeros([LANES], tl.int64) + tensor, mask=kept)
                    tl.store(found + row * 3 + 1, place * 8 + skipped, mask=kept)
                    tl.store(found + row * 3 + 2, address.to(tl.int64), mask=kept)


def fingerprints(tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    """Return the fingerprint by `definition` of each of some readable tensors on one device; wait for it once."""
    return finish_all(fingerprint_sums(tensors, device), (tensor.nbytes for tensor in tensors))


def fingerprint_sums(
    tensors: Sequence[torch.Tensor], device: torch.device, geometry: Geometry = GEOMETRY
) -> list[tuple[int, int]]:
    """Return the two sums that `definition.finish` takes, of readable tensors on one device; wait for it once.

    Runs on the current stream. Reads 16 bytes at a time where the tensor begins at a multiple of 16; one that does not
    begin at a multiple of 8 is read in the largest units that fit its address, which is slower.
    """
    with _on(device):
        sums = torch.zeros((len(tensors), 2), dtype=torch.int64, device=device)
        for row, tensor in zip(sums, map(contiguous, tensors), strict=True):
            whole, rest = divmod(tensor.nbytes, geometry.section)
            address = tensor.data_ptr()
            if whole:
                _launch_hash(tensor, math.gcd(address, WORD), 0, whole, row, geometry, whole=True)
            if rest:
                unit = math.gcd(address, tensor.nbytes, WORD)
                _launch_hash(tensor, unit, whole, 1, row, geometry, whole=False)
        mask = (1 << 64) - 1
        return [(first & mask, second & mask) for first, second in sums.tolist()]


def _launch_hash(
    tensor: torch.Tensor, unit: int, first: int, sections: int, sums: torch.Tensor, geometry: Geometry, *, whole: bool
) -> None:
    kernel: Any = _hash
    kernel[(_programs(tensor.device, sections),)](
        triton.reinterpret(tensor, _UNITS[unit]),
        tensor.nbytes // unit,
        first,
        sections,
        sums,
        UNIT=unit,
        WHOLE=whole,
        LANES=geometry.lanes,
        ROUNDS=geometry.rounds,
        KEYS=tuple(key(which, turn) for turn in range(geometry.rounds) for which in (0, 1)),
        num_warps=_WARPS,
    )


def find_words(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    table: RangeTable,
    listed: int,
    room: int = 8192,
    geometry: Geometry = GEOMETRY,
) -> list[Hits]:
    """Return the words of readable tensors on one device that are addresses in the ranges of `table`.

    Args:
        tensors: on `device`.
        device: theirs.
        table: the ranges.
        listed: how many hits of a tensor are listed, those with the smallest offsets.
        room: how many hits of all tensors the kernel can list; beyond it the plain version lists, at a tenth of the
            speed.
        geometry: how the kernel divides its work; no part of the result.

    Runs on the current stream. Waits for the device when the ranges go there and, where the room suffices, once more.
    """
    with _on(device):
        ranges = torch.tensor([*table.starts, *table.stops], dtype=torch.int64, device=device)
        results = torch.zeros(2 * len(tensors) + 1 + 3 * room, dtype=torch.int64, device=device)
        rows = results[2 * len(tensors) :]
        sizes = [
            _launch_search(tensor, number, table, ranges, results[2 * number :], rows, geometry)
            for number, tensor in enumerate(map(contiguous, tensors))
        ]
        read = results.cpu()
    counts = read[: 2 * len(tensors)].view(-1, 2).tolist()
    listed_rows = read[2 * len(tensors) + 1 :].view(-1, 3)[: min(room, int(read[2 * len(tensors)]))].tolist()
    by_tensor: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, offset, value in listed_rows:
        by_tensor[number].append((offset, value))
    hits = []
    for number, (aligned, unaligned) in enumerate(counts):
        places = sorted(by_tensor[number])
        if len(places) < aligned:  # which of them found room was a matter of luck
            hits += plain.find_words([tensors[number]], device, table, listed)
        else:
            hits.append(Hits(sizes[number], aligned, unaligned, tuple(places[:listed])))
    return hits


def _launch_search(
    tensor: torch.Tensor,
    number: int,
    table: RangeTable,
    ranges: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    geometry: Geometry,
) -> int:
    """Search a tensor, and return how many words it has.

    Args:
        tensor: contiguous.
        number: it is in the rows.
        table: the ranges to look for.
        ranges: their starts, then their stops, on the device.
        counts: begins with the two numbers that are raised: aligned hits, and others.
        rows: how many hits there are, then three numbers for each that has room.
        geometry: how the kernel divides its work.
    """
    kernel: Any = _search
    size = geometry.lanes * geometry.rounds
    skipped, words = aligned_part(tensor)
    data = triton.reinterpret(as_bytes(tensor)[skipped:], tl.uint64)
    for first, sections in ((0, words // size), (words // size, int(words % size > 0))):
        if sections:
            kernel[(_programs(tensor.device, sections),)](
                data,
                words,
                first,
                sections,
                skipped,
                number,
                table.low,
                table.high - table.low,
                ranges,
                len(table.starts),
                len(table.starts).bit_length(),
                counts,
                rows,
                rows[1:],
                (len(rows) - 1) // 3,
                MISALIGNMENT=table.misalignment,
                WHOLE=first == 0 and words >= size,
                LANES=geometry.lanes,
                ROUNDS=geometry.rounds,
                num_warps=_WARPS,
            )
    return words


def _programs(device: torch.device, sections: int) -> int:
    """Return how many programs share the sections."""
    if device.type != "cuda":
        return min(sections, 2)  # Triton's interpreter runs one after the other
    return min(sections, _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a card the current one: that is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
