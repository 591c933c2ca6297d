"""Device words that point into memory that is gone, and captured buffers that are no longer where a graph reads them.

A scan reads every 64-bit word of some tensors and cannot know which of them are pointers. A word that is an address in
the given ranges by chance has no reason to be aligned; a pointer to an allocation, or to a row or a page in one, is a
multiple of 16. And a buffer that holds pointers holds small numbers and other pointers beside them, not noise. So, per
tensor, with what it shows itself:

- `aligned` words are multiples of 16 in the ranges, `unaligned` ones lie there and are not;
- `noise` words are neither small (an upper half of zeros, or of ones) nor a possible pointer (below 2^47, a multiple
  of 16); `even` ones of those are multiples of 16;
- by chance one expects
  `MARGIN * (noise + 1) * bytes of the ranges / 16 / 2^64 + unaligned * (even + 1) / (noise - even + 1)`
  aligned words: what uniform noise would give, and 64 times that, for data in which the bytes that make an address
  small are zero eight times as often, twice; and what the unaligned words in the ranges show about data that is denser
  just there;
- the aligned words are reported as pointers if so many have a chance (Poisson) under one in a million. Else they are
  counted as `by_chance`, with their places: doubtful, and never dropped.

With 130 GiB of ranges, one pointer is enough in a buffer of any size with up to some thirty noise words; 64 GiB of
uniform noise has four aligned words in the ranges, and far fewer than the twenty that it takes in one tensor.

Blind spots: one or a few pointers inside a large buffer of noise (packed into quantized weights) are doubtful; so are
pointers that are not multiples of 16 (to an element of a row of odd width), which only count as `unaligned`; pointers
that are not at multiples of 8 bytes, cut in two halves, compressed or relative to a base are not seen at all. A buffer
of a few dozen words that has mostly bytes 0x00 and 0x7f may be taken for one with a pointer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from lowtide.probes.kernels import search_version, working_memory
from lowtide.probes.kernels.definition import Hits, RangeTable, UnreadableTensorError, check_readable
from lowtide.probes.memory.ranges import Range, merge
from lowtide.probes.memory.tensors import plain_tensors

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: what vector loads, and so all that kernels are given, are aligned to
MARGIN = 64
DOUBT = 1e-6
_ADDRESSES = 1 << 64


class PointerScanError(ValueError):
    """Ranges or options that cannot be scanned for; the message names the first bad one and says what to do."""


class LabelledRange(msgspec.Struct, frozen=True):
    """Memory from `start` up to, and without, `stop`; `label` says what it is or was."""

    start: int
    stop: int
    label: str


class PointerHit(msgspec.Struct, frozen=True):
    """One word that is an address in a range.

    Attributes:
        tensor: the name of the tensor that holds the word.
        offset: bytes from its first element; for a tensor whose elements are not in memory in their logical order, from
            that of a copy in which they are.
        value: the address.
        label: the range's.
    """

    tensor: str
    offset: int
    value: int
    label: str


class TensorPointers(msgspec.Struct, frozen=True):
    """One tensor that holds words which are addresses in the ranges.

    Attributes:
        name: of the tensor.
        aligned: how many words are addresses in the ranges, and aligned as pointers are.
        unaligned: how many are addresses in the ranges, and not aligned.
        noise: how many are neither small numbers nor possible pointers.
        expected: aligned words that chance alone would give, with the margin.
        by_chance: whether so many may be chance; else they are pointers.
        hits: the first of the aligned ones.
    """

    name: str
    aligned: int
    unaligned: int
    noise: int
    expected: float
    by_chance: bool
    hits: tuple[PointerHit, ...]


class PointerReading(msgspec.Struct, frozen=True):
    """What a scan found.

    Attributes:
        tensors: those with words in the ranges, sorted by name.
    """

    tensors: tuple[TensorPointers, ...]

    @property
    def pointers(self) -> tuple[TensorPointers, ...]:
        """Tensors that hold pointers into the ranges."""
        return tuple(tensor for tensor in self.tensors if not tensor.by_chance)

    @property
    def by_chance(self) -> tuple[TensorPointers, ...]:
        """Tensors with words in the ranges that may be there by chance."""
        return tuple(tensor for tensor in self.tensors if tensor.by_chance)


def find_pointers(
    tensors: Mapping[str, torch.Tensor],
    ranges: Sequence[LabelledRange],
    *,
    integers_only: bool = False,
    alignment: int = ALIGNMENT,
    listed: int = 64,
) -> PointerReading:
    """Read every word of some tensors and reports those that point into the ranges.

    Args:
        tensors: what to read. Words at multiples of 8 that lie wholly inside are read; a tensor whose elements are not
            in memory in their logical order is copied first, one after the other.
        ranges: where pointers should no longer lead, as `gone_since` gives them: sorted, apart from one another.
        integers_only: whether to leave floating point and complex tensors out.
        alignment: bytes; what is not a multiple of it is no pointer (a power of two, at least 2).
        listed: hits that are listed per tensor; all are counted.

    Reads what the work queued on the current stream leaves. Waits for a device when the ranges go there and when the
    results come back, and again for each tensor that has hits. Nothing that this allocates stays; the first call on a
    card compiles kernels (`contents.take_fingerprints`).

    Raises:
        PointerScanError: ranges that overlap, are out of order or empty; an alignment that is no power of two.
    """
    table = _table(ranges, alignment)
    if table is None or not tensors:
        return PointerReading(())
    import torch

    found: list[TensorPointers] = []
    with plain_tensors(torch):
        by_device: dict[torch.device, list[str]] = defaultdict(list)
        for name, tensor in sorted(tensors.items()):
            if _is_read(tensor, integers_only=integers_only):
                by_device[tensor.device].append(name)
        for device, names in by_device.items():
            with working_memory(device):
                for name, hits in zip(
                    names, search_version(device)([tensors[name] for name in names], device, table, listed), strict=True
                ):
                    if hits.aligned or hits.unaligned:
                        found.append(_judged(name, tensors[name], hits, ranges, table))
    return PointerReading(tuple(sorted(found, key=lambda tensor: tensor.name)))


def _table(ranges: Sequence[LabelledRange], alignment: int) -> RangeTable | None:
    """Return the ranges as the kernels take them; None if there are none."""
    if alignment < 2 or alignment & (alignment - 1):
        raise PointerScanError(f"pointers cannot be multiples of {alignment}; give a power of two, at least 2")
    for part in ranges:
        if not 1 <= part.start < part.stop <= 1 << 63:
            raise PointerScanError(
                f"{part.label!r} is no range of addresses ({part.start:#x} to {part.stop:#x}); leave empty ones out"
            )
    for left, right in pairwise(ranges):
        if left.stop > right.start:
            raise PointerScanError(
                f"{left.label!r} ends at {left.stop:#x}, after {right.label!r} begins at {right.start:#x}; sort the "
                "ranges and cut what they share (gone_since does both)"
            )
    if not ranges:
        return None
    return RangeTable(tuple(part.start for part in ranges), tuple(part.stop for part in ranges), alignment - 1)


def _is_read(tensor: torch.Tensor, *, integers_only: bool) -> bool:
    if integers_only and (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        check_readable(tensor)
    except UnreadableTensorError:
        return False
    return True


def _judged(
    name: str, tensor: torch.Tensor, hits: Hits, ranges: Sequence[LabelledRange], table: RangeTable
) -> TensorPointers:
    from lowtide.probes.kernels.plain import count_noise

    noise, even = count_noise(tensor, table.misalignment)
    bytes_in_ranges = sum(table.stops) - sum(table.starts)
    expected = expected_by_chance(noise, even, hits.unaligned, bytes_in_ranges, table.misalignment + 1)
    return TensorPointers(
        name,
        aligned=hits.aligned,
        unaligned=hits.unaligned,
        noise=noise,
        expected=expected,
        by_chance=chance_of(hits.aligned, expected) > DOUBT,
        hits=tuple(
            PointerHit(name, offset, value, ranges[bisect_right(table.starts, value) - 1].label)
            for offset, value in hits.listed
        ),
    )


def expected_by_chance(
    noise: int, even: int, unaligned: int, bytes_in_ranges: int, alignment: int = ALIGNMENT
) -> float:
    """Aligned words in the ranges that a tensor without pointers would have, at most; the module says why.

    Args:
        noise: its words that are neither small numbers nor possible pointers.
        even: those of them that are aligned.
        unaligned: its words that are addresses in the ranges, and not aligned.
        bytes_in_ranges: of all ranges.
        alignment: bytes.
    """
    uniform = (noise + 1) * bytes_in_ranges / alignment / _ADDRESSES
    return MARGIN * uniform + unaligned * (even + 1) / (noise - even + 1)


def chance_of(count: int, expected: float) -> float:
    """Return the chance of at least `count` events where `expected` happen on average (Poisson)."""
    if count <= expected:
        return 1.0  # an upper bound; that close to the average no answer depends on it
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1)) if expected > 0 else 0.0
    total = 0.0
    while term > total * 1e-9:
        total += term
        count += 1
        term *= expected / count
    return min(total, 1.0)


def gone_since(before: Iterable[LabelledRange], now: Iterable[Range]) -> tuple[LabelledRange, ...]:
    """Return the parts of labelled memory that are not there any more, sorted by address and apart: what to scan for.

    Args:
        before: the memory at the mark. Where two overlap, the bytes they share are the one's that starts first.
        now: address and length in bytes of all memory that is there now; may overlap.
    """
    live = merge(now)
    starts = [address for address, _ in live]
    gone: list[LabelledRange] = []
    taken = 0
    for part in sorted(before, key=lambda part: (part.start, part.stop)):
        position = max(part.start, taken)
        taken = max(taken, part.stop)
        first = max(0, bisect_right(starts, position) - 1)
        for address, length in live[first : bisect_left(starts, part.stop)]:
            if position < address:
                gone.append(LabelledRange(position, address, part.label))
            position = max(position, address + length)
        if position < part.stop:
            gone.append(LabelledRange(position, part.stop, part.label))
    return tuple(gone)


class Moved(msgspec.Struct, frozen=True):
    """A recorded buffer that is not, or not wholly, where it was: what reads its old address reads something else.

    Attributes:
        name: what used to be there.
        address: where a captured graph still looks for it.
        bytes: how much it reads there.
        gone: those of the bytes where nothing lives now.
        now: what lives there now, by name; sorted.
    """

    name: str
    address: int
    bytes: int
    gone: int
    now: tuple[str, ...]


def moved(recorded: Mapping[str, Range], live: Iterable[LabelledRange]) -> tuple[Moved, ...]:
    """Return which recorded buffers are not where a captured graph reads them; sorted by name, empty if all are.

    Args:
        recorded: address and length in bytes of each static buffer at capture, by name.
        live: the memory that is there now. A label is the name of the tensor that lives there; an empty one says that
            something does, and not what: such bytes are taken to be still the buffer's. Ranges may overlap.

    A buffer that lives under its own name at its own address is where it was, whatever views of it have other names.
    """
    parts = sorted(live, key=lambda part: part.start)
    starts = [part.start for part in parts]
    found = []
    for name, (address, length) in sorted(recorded.items()):
        wanted = (LabelledRange(address, address + length, name),)
        there = [part for part in parts[: bisect_left(starts, address + length)] if part.stop > address]
        own = gone_since(wanted, _as_ranges(part for part in there if part.label == name))
        gone = gone_since(wanted, _as_ranges(there))
        strangers = sorted(
            {
                part.label
                for part in there
                if part.label not in ("", name)
                and any(part.start < lost.stop and lost.start < part.stop for lost in own)
            }
        )
        if gone or strangers:
            found.append(Moved(name, address, length, sum(part.stop - part.start for part in gone), tuple(strangers)))
    return tuple(found)


def _as_ranges(parts: Iterable[LabelledRange]) -> list[Range]:
    return [(part.start, part.stop - part.start) for part in parts]
