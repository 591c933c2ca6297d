"""What a search for addresses takes and gives: the ranges as a sorted table, and the hits in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.probes.kernels.definition import WORD

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RangeTable:
    """Address ranges to look for: sorted, apart from one another, at least one, none of them empty.

    Attributes:
        starts: first address of each; at least 1, so that a word of zeros is in none.
        stops: the address after the last of each; at most 2^63.
        misalignment: the address bits that an aligned pointer has not set (15: a multiple of 16).
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    misalignment: int

    @property
    def low(self) -> int:
        """First address of the hull."""
        return self.starts[0]

    @property
    def high(self) -> int:
        """The address after the hull."""
        return self.stops[-1]


@dataclass(frozen=True, slots=True)
class Hits:
    """What was found in one tensor.

    Attributes:
        words: how many were read: those at multiples of 8 that lie wholly inside.
        aligned: how many are addresses in the ranges, and aligned as the table asks.
        unaligned: how many are addresses in the ranges, and not aligned.
        listed: byte offset in the tensor and value of the aligned ones with the smallest offsets.
    """

    words: int
    aligned: int
    unaligned: int
    listed: tuple[tuple[int, int], ...]


def aligned_part(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of a contiguous tensor before its first word at a multiple of 8, and how many such words it has."""
    skipped = -tensor.data_ptr() % WORD
    return skipped, max(0, (tensor.nbytes - skipped) // WORD)
