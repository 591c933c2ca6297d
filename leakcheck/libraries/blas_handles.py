"""The BLAS library's handles on a card: each thread that uses it takes one, and torch keeps it for the next thread.

On an H200 a handle is an allocation of 64 MiB and two small ones that torch does not count (measured with torch 2.11).
torch keeps the handles of threads that have ended in a pool and hands them to later threads
(`ATen/cuda/CublasHandlePool.cpp`), so that as many stay as there were threads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.probes.device.allocations import AllocationsError, read_allocations
from lowtide.probes.device.torch_allocator import read_segments
from lowtide.probes.memory.ranges import Range, common
from lowtide.probes.originals import loaded, threading

_PATIENCE = 20.0
"""Seconds to wait for the threads of a trial: a first BLAS call loads a library."""

_MOST_THREADS = 32
"""Handles that one trial may ask for: each takes 96 MiB of the card where it is not there yet."""

_SMALLEST = 1 << 20
"""Bytes of the part by which a handle is known: the others are of a size that anything may have."""


@dataclass(frozen=True)
class Trial:
    """What a trial has shown.

    Attributes:
        kept: those of the allocations that are idle handles, by name.
        taken: address and bytes of what the trial itself has taken anew, which stays as well.
    """

    kept: frozenset[str] = frozenset()
    taken: tuple[Range, ...] = ()


class BlasHandles:
    """Knows what a handle takes on each card, and finds by trial how many idle ones there are."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._idle: dict[int, int] = {}

    def learn(self, index: int, before: Sequence[Range], after: Sequence[Range]) -> None:
        """Note what the first BLAS call of this thread took.

        Args:
            index: of the card, as torch numbers it.
            before: the driver's allocations before the call.
            after: those after it.
        """
        self._sizes.setdefault(index, tuple(sorted((size for _, size in _new(index, before, after)), reverse=True)))

    def tried(self, index: int, items: Mapping[str, int]) -> Trial:
        """Which of some new allocations are idle handles.

        So many threads at once use the library as there would be idle handles; only what they do not have to take anew
        was there. What they take anew stays, as idle handles.

        Args:
            index: of the card.
            items: the allocations, in bytes, by name.
        """
        sizes = self._sizes.get(index, ())
        if not sizes or sizes[0] < _SMALLEST:
            return Trial()
        candidates = sum(size == sizes[0] for size in items.values())
        wanted = self._idle.get(index, 0) + candidates
        if not candidates or wanted > _MOST_THREADS:
            return Trial()
        try:
            before = read_allocations(index) or ()
            has_worked = _use_at_once(index, wanted)
            new = _new(index, before, read_allocations(index) or ())
        except AllocationsError:  # then nothing is excused
            return Trial()
        if not has_worked:
            return Trial(taken=tuple(new))
        self._idle[index] = wanted
        taken = sum(size == sizes[0] for _, size in new)
        found: set[str] = set()
        for size, count in Counter(sizes).items():
            alike = [name for name, held in items.items() if held == size and name not in found]
            found.update(alike[: count * max(0, candidates - taken)])
        return Trial(frozenset(found), tuple(new))


def _new(index: int, before: Sequence[Range], after: Sequence[Range]) -> list[Range]:
    """Each allocation that was not there before and is not torch's."""
    known = set(before)
    segments = [(address, size) for _, address, size, _ in read_segments(index) or ()]
    return [entry for entry in after if entry not in known and not common([entry], segments)]


def _use_at_once(index: int, count: int) -> bool:
    """Whether so many threads, each with a handle, came to the end of a small matrix product."""
    meeting = threading.Barrier(count)
    done: list[bool] = []

    def work() -> None:
        try:
            multiply(index)
            meeting.wait(_PATIENCE)
            done.append(True)
        except (RuntimeError, threading.BrokenBarrierError):  # no memory for another handle, or another thread's error
            meeting.abort()

    threads = [threading.Thread(target=work, name="lowtide-blas", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    return len(done) == count


def multiply(index: int) -> None:
    """A small matrix product on a card: the first in a thread takes a handle."""
    torch: Any = loaded("torch")
    with torch.no_grad():
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        torch.mm(ones, ones)
        torch.cuda.synchronize(index)
