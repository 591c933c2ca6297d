"""What the fingerprint of a card's memory is: constants, geometry and the last step, of Triton's and the plain version.

The bytes, padded with zeros, are little-endian 64-bit words `w`, cut into sections of `rounds` x `lanes` words; word
`round * lanes + lane` of a section belongs to that lane. Each lane is hashed twice, with different keys, as in NH
(Black and others, "UMAC: Fast and Secure Message Authentication", 1999; the exclusive or instead of the addition is
XXH3's):

    state[p] = sum over rounds of low32(w ^ key[p][round]) * high32(w ^ key[p][round])    mod 2^64, p = 0, 1

and its two states are mixed, together with the lane's index in the whole tensor, by a bijection of 128 bits. The sums
of the mixed states over all lanes, mod 2^64, do not depend on who computes which section when. The last step, a
bijection again, adds the length.

So a change within one aligned 32-bit word is always seen: one factor of one product changes, the other is zero under at
most one of the two keys, and nothing after that loses a bit. Any other change is missed with a chance of about 2^-64:
two words swapped have different keys or different lanes, two flipped signs do not cancel in products, a block that
moved has other lanes. This is no defence against somebody who builds a collision: the keys are known.

Beside it: which tensors have bytes to read, and what a search for addresses takes and gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from lowtide.probes.originals import loaded

WORD = 8  # bytes
_MASK = (1 << 64) - 1

# Stafford's 13th variant of MurmurHash3's last step, as in splitmix64 (Steele and others, 2014).
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
CHAIN = 0xD1342543DE82EF95  # odd: carries the first state into the second


class Geometry(msgspec.Struct, frozen=True):
    """How words are dealt to lanes: a part of the fingerprint's definition.

    Attributes:
        lanes: words side by side that are hashed apart from one another; a power of two.
        rounds: words of a lane that are hashed together.
    """

    lanes: int
    rounds: int

    @property
    def section(self) -> int:
        """Bytes of one section."""
        return self.lanes * self.rounds * WORD


# Sixteen rounds make the mixing of a lane (about 45 instructions on a card) cheap beside its hashing (7 per word).
GEOMETRY = Geometry(lanes=512, rounds=16)


def mix(value: int) -> int:
    """Return a bijection of 64-bit numbers in which every bit of the result depends on every bit of the argument."""
    value = (value ^ (value >> 30)) * MIX_FIRST & _MASK
    value = (value ^ (value >> 27)) * MIX_SECOND & _MASK
    return value ^ (value >> 31)


def key(which: int, round_index: int) -> int:
    """Return the 64 key bits of a round under the first (0) or the second (1) key."""
    return mix((2 * round_index + which + 1) * GOLDEN & _MASK)


def finish_all(sums: Iterable[tuple[int, int]], lengths: Iterable[int]) -> list[int]:
    """Return `finish` of each."""
    return [finish(first, second, length) for (first, second), length in zip(sums, lengths, strict=True)]


def finish(first: int, second: int, length: int) -> int:
    """Return the fingerprint, 128 bits, from the two sums over all lanes and the length in bytes."""
    high = mix(first + length * GOLDEN & _MASK)
    low = mix(second + high * CHAIN & _MASK)
    return high << 64 | low


if TYPE_CHECKING:
    import torch


class RangeTable(msgspec.Struct, frozen=True):
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


class Hits(msgspec.Struct, frozen=True):
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
    """Return the bytes of a contiguous tensor before its first word at a multiple of 8, and its number of these."""
    skipped = -tensor.data_ptr() % WORD
    return skipped, max(0, (tensor.nbytes - skipped) // WORD)


if TYPE_CHECKING:
    import torch


class UnreadableTensorError(ValueError):
    """A tensor whose bytes cannot be read; the message says why, and what to give instead."""


def check_readable(tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements are not in plain memory.

    Raises:
        UnreadableTensorError: it has no memory, or none that holds its elements as an array.
    """
    import torch

    fake = getattr(loaded("torch._subclasses.fake_tensor"), "FakeTensor", None)
    if tensor.device.type == "meta" or (fake is not None and issubclass(type(tensor), fake)):
        raise UnreadableTensorError("it is a stand-in without memory (meta or fake); give the real tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnreadableTensorError(
            f"its layout ({tensor.layout}, {tensor.dtype}) is no plain array; give the tensors that hold its parts"
        )
    try:
        reachable = is_lazy_copy(tensor) or not tensor.numel() or tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise UnreadableTensorError(f"torch gives no address for it ({error}); give the tensors inside it") from error
    if not reachable:
        raise UnreadableTensorError("it has no memory of its own; give the tensors inside it")


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a readable tensor whose elements lie in their logical order: itself if they do, else a copy."""
    if is_lazy_copy(tensor):
        return tensor.clone()  # asking for its address would make the copy that copy-on-write put off
    return tensor.resolve_conj().resolve_neg().contiguous()


def is_lazy_copy(tensor: torch.Tensor) -> bool:
    """Return whether this is a copy on write that was not made yet."""
    import torch

    internals: Any = torch._C
    return bool(internals._is_cow_tensor(tensor))
