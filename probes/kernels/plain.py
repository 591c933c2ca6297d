"""The kernels in plain torch: what Triton's are held against, and what a card without Triton uses.

It runs on a CPU too, where `host` reads ten times as fast; there memory is read in pieces that fit a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowtide.probes.kernels.definition import (
    CHAIN,
    GEOMETRY,
    GOLDEN,
    MIX_FIRST,
    MIX_SECOND,
    WORD,
    Geometry,
    Hits,
    RangeTable,
    aligned_part,
    contiguous,
    finish_all,
    key,
)

_LOW_HALF = (1 << 32) - 1
_LEAST = -(1 << 63)


def fingerprints(tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    """Return the fingerprint by `definition` of each of some readable tensors on one device; wait for it once."""
    return finish_all(fingerprint_sums(tensors, device), (tensor.nbytes for tensor in tensors))


def fingerprint_sums(
    tensors: Sequence[torch.Tensor], device: torch.device, geometry: Geometry = GEOMETRY
) -> list[tuple[int, int]]:
    """Return the two sums that `definition.finish` takes, of readable tensors on one device.

    Waits for the device once. Takes a working memory of three pieces: 384 KiB on the CPU, 192 MiB on a card.
    """
    sums = torch.zeros((len(tensors), 2), dtype=torch.int64, device=device)
    hasher = _Hasher(device, geometry)
    for row, tensor in zip(sums, tensors, strict=True):
        hasher.add(contiguous(tensor), row)
    return [(_unsigned(first), _unsigned(second)) for first, second in sums.tolist()]


class _Hasher:
    """Hashes tensors piece by piece, in working memory that it keeps between them."""

    def __init__(self, device: torch.device, geometry: Geometry) -> None:
        self._geometry = geometry
        self._sections = max(1, _piece_bytes(device) // geometry.section)
        shape = (self._sections, geometry.rounds, geometry.lanes)
        self._copied, self._keyed, self._low = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3))
        keys = [[_signed(key(which, turn)) for turn in range(geometry.rounds)] for which in (0, 1)]
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device).view(2, geometry.rounds, 1)
        # Sections whose lanes are mixed together: the mixing is a few dozen small steps.
        self._mixed = self._sections * max(1, (1 << 14) // (self._sections * geometry.lanes))
        self._states = torch.empty((2, self._mixed, geometry.lanes), dtype=torch.int64, device=device)
        self._lanes = torch.arange(self._mixed * geometry.lanes, dtype=torch.int64, device=device)

    def add(self, tensor: torch.Tensor, sums: torch.Tensor) -> None:
        """Add a tensor's mixed states to `sums`, two 64-bit numbers."""
        data = as_bytes(tensor)
        size = self._geometry.section
        sections = -(-data.numel() // size)
        for first in range(0, sections, self._mixed):
            last = min(first + self._mixed, sections)
            for start in range(first, last, self._sections):
                stop = min(start + self._sections, last)
                words = self._words(data[start * size : stop * size], stop - start)
                self._hash(words, self._states[:, start - first : stop - first])
            self._mix(first, self._states[:, : last - first], sums)

    def _words(self, piece: torch.Tensor, sections: int) -> torch.Tensor:
        """Return the piece as words by section, round and lane; copied where it is not whole, aligned sections."""
        shape = (sections, self._geometry.rounds, self._geometry.lanes)
        if piece.numel() == sections * self._geometry.section and piece.storage_offset() % WORD == 0:
            return piece.view(torch.int64).view(shape)
        copied = self._copied[:sections]
        copied.zero_()
        _copy_bytes(copied.view(-1).view(torch.uint8), piece)
        return copied

    def _hash(self, words: torch.Tensor, states: torch.Tensor) -> None:
        """Write the two states of each lane of some sections."""
        keyed, low = self._keyed[: len(words)], self._low[: len(words)]
        for keys, state in zip(self._keys, states, strict=True):
            torch.bitwise_xor(words, keys, out=keyed)
            torch.bitwise_and(keyed, _LOW_HALF, out=low)
            keyed.bitwise_right_shift_(32).bitwise_and_(_LOW_HALF)
            torch.sum(low.mul_(keyed), 1, out=state)

    def _mix(self, first_section: int, states: torch.Tensor, sums: torch.Tensor) -> None:
        """Mixes the states of the lanes from a section on with their indices, and adds them to `sums`."""
        first_states, second_states = states.reshape(2, -1)
        lanes = self._lanes[: len(first_states)] + first_section * self._geometry.lanes
        mixed = _mix(first_states + lanes * _signed(GOLDEN))
        sums[0] += mixed.sum()
        sums[1] += _mix(second_states + mixed * _signed(CHAIN)).sum()


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Return `definition.mix` of each; the shifts of torch's signed numbers would bring the sign in."""
    values = (values ^ _shifted(values, 30)) * _signed(MIX_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(MIX_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, places: int) -> torch.Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)


def find_words(
    tensors: Sequence[torch.Tensor], device: torch.device, table: RangeTable, listed: int, piece: int | None = None
) -> list[Hits]:
    """Return the words of readable tensors on one device that are addresses in the ranges of `table`.

    Args:
        tensors: on `device`.
        device: theirs.
        table: the ranges.
        listed: how many hits of a tensor are listed, those with the smallest offsets.
        piece: bytes that are looked at in one go; default: what fits a cache. Waits for the device after each.
    """
    length = max(1, (piece or _piece_bytes(device)) // WORD)
    scratch = torch.empty(length, dtype=torch.int64, device=device)
    inside = torch.empty(length, dtype=torch.bool, device=device)
    starts = torch.tensor(table.starts, dtype=torch.int64, device=device)
    stops = torch.tensor(table.stops, dtype=torch.int64, device=device)
    # One signed comparison for both ends: what lies below the hull wraps round to the largest numbers.
    bias = _signed(_unsigned(_LEAST - table.low))
    bound = table.high - table.low + _LEAST
    found = []
    for tensor in map(contiguous, tensors):
        aligned = unaligned = 0
        offsets: list[int] = []
        values: list[int] = []
        for offset, words in _pieces(tensor, scratch):
            near = inside[: len(words)]
            torch.add(words, bias, out=scratch[: len(words)])
            torch.lt(scratch[: len(words)], bound, out=near)
            if not near.any():
                continue
            places = near.nonzero().view(-1)
            candidates = words[places]
            holders = torch.searchsorted(starts, candidates, right=True) - 1
            held = candidates < stops[holders]
            whole = held & (candidates & table.misalignment == 0)
            unaligned += int((held & ~whole).sum())
            hits = int(whole.sum())
            aligned += hits
            if hits and len(offsets) < listed:
                offsets += (places[whole][: listed - len(offsets)] * WORD + offset).tolist()
                values += candidates[whole][: listed - len(values)].tolist()
        found.append(Hits(aligned_part(tensor)[1], aligned, unaligned, tuple(zip(offsets, values, strict=True))))
    return found


def count_noise(tensor: torch.Tensor, misalignment: int) -> tuple[int, int]:
    """Words of a readable tensor that are neither a small number nor an address, and those of them that are aligned.

    A small number has an upper half of zeros or (negative) of ones; an address has 16 upper bits of zeros, and none of
    the bits of `misalignment`.
    """
    noise = even = 0
    tensor = contiguous(tensor)
    scratch = torch.empty(_piece_bytes(tensor.device) // WORD, dtype=torch.int64, device=tensor.device)
    for _, words in _pieces(tensor, scratch):
        upper = words >> 32
        large = (upper != 0) & (upper != -1)
        aligned = (words & misalignment) == 0
        foreign = (upper < 0) | (upper >= 1 << 15)
        noise += int((large & ~(aligned & ~foreign)).sum())
        even += int((large & aligned & foreign).sum())
    return noise, even


def _pieces(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Byte offset and words of each piece of a tensor's aligned part; in `scratch` where they cannot be viewed."""
    skipped, count = aligned_part(tensor)
    data = as_bytes(tensor)[skipped : skipped + count * WORD]
    step = len(scratch) * WORD
    for start in range(0, data.numel(), step):
        piece = data[start : start + step]
        if piece.storage_offset() % WORD == 0:
            yield skipped + start, piece.view(torch.int64)
        else:
            # The address is a multiple of 8, the offset into a storage that begins at an odd one is not.
            words = torch.empty(piece.numel() // WORD, dtype=torch.int64, device=piece.device)
            _copy_bytes(words.view(torch.uint8), piece)
            yield skipped + start, words


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, in place."""
    return tensor.view(-1).view(torch.uint8)


def _copy_bytes(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes to the front of `into`, on the CPU in steps of so few that torch starts no threads."""
    step = 1 << 15 if source.device.type == "cpu" else max(1, source.numel())
    for start in range(0, source.numel(), step):
        part = source[start : start + step]
        into[start : start + part.numel()].copy_(part)


def _piece_bytes(device: torch.device) -> int:
    """Return the bytes worked on in one go.

    On the CPU they stay in a core's cache, and are few enough that torch starts no threads: waiting for those after
    each of its small steps costs far more than they save where the cores are busy, as in a test suite. On a card they
    are enough to hide the launches.
    """
    return 1 << 17 if device.type == "cpu" else 1 << 26


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(value: Any) -> int:
    return int(value) & ((1 << 64) - 1)
