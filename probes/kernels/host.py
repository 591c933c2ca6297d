"""Reads memory of the host at about the speed at which it can be read: XXH3 in native code, and two steps of numpy.

Floor on two cores of an EPYC: torch's sum reads about 30 GB/s. One thread of XXH3 reads 24 to 27. The arithmetic of
`definition` takes ten steps of numpy a word, each at 30 to 40 GB/s where the data lies in a cache, and so 2 to 3 GB/s
in all; a matrix product of whole numbers reads 1.9 (torch), of bytes 2.4 to 4.3 (torch's int8, 16 columns). So the
fingerprint of host memory is another function than that of a card's memory. (`benchmarks/oracles.py` has the rates.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from lowtide.probes.kernels.definition import WORD, Hits, RangeTable, aligned_part, contiguous

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

T = TypeVar("T")
R = TypeVar("R")

# Words searched in one go: few enough that their difference stays in a cache (2 MiB), enough of them that two threads
# seldom wait for the interpreter; pieces of 256 KiB take half as long again.
_PIECE = 1 << 18
# Bytes below which a second thread costs more than it saves.
_WORTH_THREADS = 32 << 20


def fingerprints(tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    """128 bits over the bytes of each of some readable tensors in host memory: XXH3 of them, in logical order.

    Different contents have the same bits with a probability of about 2^-128, as far as XXH3 is known (Collet, xxHash
    0.8); contents that somebody built to collide are not detected.
    Large ones are shared out to as many threads as torch uses (`torch.set_num_threads`), which end with the call; those
    that must be copied first are read one after the other.
    """
    found: dict[int, int] = {}
    in_place: dict[int, NDArray[np.uint8]] = {}
    for place, tensor in enumerate(tensors):
        plain = contiguous(tensor)
        if plain is tensor:
            in_place[place] = _bytes(plain)
        else:
            found[place] = _digest(_bytes(plain))
    # Threads get arrays and no tensors: modes of torch are set for one thread.
    digests = _shared_out(_digest, list(in_place.values()), _threads(sum(data.nbytes for data in in_place.values())))
    found.update(zip(in_place, digests, strict=True))
    return [found[place] for place in range(len(tensors))]


def _digest(data: NDArray[np.uint8]) -> int:
    return xxhash.xxh3_128_intdigest(data.data)


def find_words(tensors: Sequence[torch.Tensor], device: torch.device, table: RangeTable, listed: int) -> list[Hits]:
    """Return the words of readable tensors in host memory that are addresses in the ranges of `table`.

    A large tensor is shared out to as many threads as torch uses, which end with the call.

    Args:
        tensors: on the CPU.
        device: theirs.
        table: the ranges.
        listed: how many hits of a tensor are listed, those with the smallest offsets.
    """
    search = _Search(table, listed)
    return [search.find(contiguous(tensor)) for tensor in tensors]


class _Part(msgspec.Struct, frozen=True):
    """What a stretch of a tensor's words has: counts as in `Hits`, and the first aligned ones by their index."""

    aligned: int
    unaligned: int
    listed: tuple[tuple[int, int], ...]


class _Search:
    """Looks for addresses in one table of ranges."""

    def __init__(self, table: RangeTable, listed: int) -> None:
        self._listed = listed
        self._starts = np.array(table.starts, dtype=np.uint64)
        self._stops = np.array(table.stops, dtype=np.uint64)
        self._low, self._span = np.uint64(table.low), np.uint64(table.high - table.low)
        self._misalignment = np.uint64(table.misalignment)

    def find(self, tensor: torch.Tensor) -> Hits:
        """Return what one contiguous tensor has."""
        skipped, count = aligned_part(tensor)
        words: Words = _bytes(tensor)[skipped : skipped + count * WORD].view(np.uint64)
        threads = _threads(words.nbytes)
        stretches = [(count * turn // threads, count * (turn + 1) // threads) for turn in range(threads)]
        parts = _shared_out(lambda stretch: self._stretch(words, *stretch), stretches, threads)
        return Hits(
            count,
            sum(part.aligned for part in parts),
            sum(part.unaligned for part in parts),
            tuple((index * WORD + skipped, value) for part in parts for index, value in part.listed)[: self._listed],
        )

    def _stretch(self, words: Words, first: int, stop: int) -> _Part:
        above = np.empty(_PIECE, np.uint64)
        aligned = unaligned = 0
        listed: list[tuple[int, int]] = []
        for start, piece in _pieces(words, first, stop):
            # One number covers both ends: what lies below the hull wraps round to the largest numbers.
            distance = np.subtract(piece, self._low, out=above[: len(piece)])
            if distance.min() >= self._span:
                continue
            (places,) = (distance < self._span).nonzero()
            candidates = piece[places]
            holders = np.searchsorted(self._starts, candidates, side="right") - 1
            held = candidates < self._stops[holders]
            whole = held & (candidates & self._misalignment == 0)
            hits = int(np.count_nonzero(whole))
            aligned += hits
            unaligned += int(np.count_nonzero(held)) - hits
            room = self._listed - len(listed)
            if hits and room > 0:
                listed += zip((places[whole][:room] + start).tolist(), candidates[whole][:room].tolist(), strict=True)
        return _Part(aligned, unaligned, tuple(listed))


def _pieces(words: Words, first: int, stop: int) -> Iterator[tuple[int, Words]]:
    for start in range(first, stop, _PIECE):
        yield start, words[start : min(start + _PIECE, stop)]


def _threads(size: int) -> int:
    """Return how many threads read so many bytes."""
    return torch.get_num_threads() if size >= _WORTH_THREADS else 1


def _shared_out(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what `work` makes of each."""
    if min(threads, len(items)) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="lowtide-read") as pool:
        return list(pool.map(work, items))


class _Memory:
    """Where a tensor's bytes are, as numpy asks for it; keeps the tensor.

    `Tensor.numpy()` would do, and leave its mark: the storage could never be resized again.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.nbytes,),
            "data": (tensor.data_ptr(), True),
        }


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor, in place, to be read only."""
    return np.asarray(_Memory(tensor)) if tensor.nbytes else np.empty(0, np.uint8)
