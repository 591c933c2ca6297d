"""Run with `TRITON_INTERPRET=1`: prints where Triton's version of a kernel and the plain one disagree, as JSON.

A process of its own, for Triton reads the variable when it is first imported, and keeps to it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random

import torch

from lowtide.probes.kernels import compiled, plain
from lowtide.probes.kernels.definition import Geometry, RangeTable

CPU = torch.device("cpu")
SMALL = Geometry(lanes=2, rounds=2)  # 32 bytes to a section, so that every size up to past two of them is feasible


def before_unmapped(data: torch.Tensor) -> torch.Tensor:
    """A copy of some bytes after which no memory is: whoever reads past the end ends the process."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory = ctypes.c_char.from_buffer(pages)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(memory) + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(pages, dtype=torch.uint8)[mmap.PAGESIZE - len(data) : mmap.PAGESIZE]
    return copy.copy_(data)


def fingerprints() -> tuple[int, list[str]]:
    """Every size from none to past two sections; at an aligned address, at an odd one, and at those between."""
    data = torch.tensor(list(random.Random(1).randbytes(128)), dtype=torch.uint8)
    assert data.data_ptr() % 16 == 0
    cases = [(offset, size) for offset in (0, 1) for size in range(2 * SMALL.section + 10)]
    cases += [(offset, size) for offset in (2, 4, 8) for size in (0, 1, 4, 31, 32, 33, 64, 66, 72)]
    wrong = []
    for offset, size in cases:
        part = data[offset : offset + size]
        tensors = [part if offset else before_unmapped(part)]
        if compiled.fingerprint_sums(tensors, CPU, SMALL) != plain.fingerprint_sums(tensors, CPU, SMALL):
            wrong.append(f"{size} bytes at {offset}")
    return len(cases), wrong


def searches() -> tuple[int, list[str]]:
    """Every number of words from none to past two sections, at every offset; many words are in the ranges or near."""
    source = random.Random(2)
    ranges = RangeTable(
        (0x7F00_0000_0100, 0x7F00_0000_0200, 0x7F00_0000_0208),
        (0x7F00_0000_0110, 0x7F00_0000_0204, 0x7F00_0000_0300),
        misalignment=15,
    )
    near = [start + more for start in (*ranges.starts, *ranges.stops) for more in (-8, -1, 0, 1, 8, 16)]
    words = [source.choice([*near, 0, -1, -(1 << 63)]) for _ in range(64)]
    aligned = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    shifted = torch.empty(len(aligned) + 1, dtype=torch.uint8)[1:]  # the words are not at multiples of 8 here
    shifted.copy_(aligned)
    cases = [(data, offset, 8 * count) for data in (aligned, shifted) for offset in (0, 7) for count in range(11)]
    cases += [(aligned, 0, 512), (shifted, 7, 500)]
    wrong = []
    for data, offset, size in cases:
        part = data[offset : offset + size]
        tensors = [part if offset else before_unmapped(part), data[:40]]
        for room in (3, 64):
            found = compiled.find_words(tensors, CPU, ranges, listed=4, room=room, geometry=SMALL)
            if found != plain.find_words(tensors, CPU, ranges, listed=4, piece=48):
                wrong.append(f"{size} bytes at {offset}, room for {room}")
    return len(cases), wrong


if __name__ == "__main__":
    print(json.dumps({"fingerprints": fingerprints(), "searches": searches()}))  # noqa: T201
