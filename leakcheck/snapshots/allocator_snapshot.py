"""What a snapshot of torch's allocator has: blocks in use by allocating stack, and how free memory lies in pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.snapshots.plain_pickle import PickleError, read_plain
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function

_FREE = "inactive"


class SnapshotError(ValueError):
    """A file that is no snapshot of torch's allocator; the message names it and says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """The blocks in use that were allocated from one stack, on one device.

    Attributes:
        device: `cuda:0`, as the program that wrote the snapshot numbers its cards.
        stack: Python's frames, the innermost first; empty where no history was recorded when they were allocated.
        bytes: what they take, with what the allocator has rounded them up to.
        count: how many blocks.
        fingerprint: the same for this stack in every snapshot, whatever its lines and cards.
    """

    device: str
    stack: tuple[StackFrame, ...]
    bytes: int
    count: int
    fingerprint: str

    @property
    def text(self) -> str:
        """`load_weights, model.py:12`: the program's own function that allocated them."""
        if not self.stack:
            return "no stack was recorded"
        function = allocating_function(self.stack)
        own = next((frame for frame in self.stack if frame.function.rpartition(".")[2] == function), self.stack[0])
        return f"{own.function}, {Path(own.file).name}:{own.line}"


@dataclass(frozen=True, slots=True)
class Pool:
    """The segments of one pool on one device; bytes.

    Attributes:
        device: `cuda:0`.
        id: (0, 0) for the default one; others are of CUDA graphs and `MemPool`s.
        segments: how many it has taken from the driver.
        reserved: in them.
        used: of these, in blocks that are in use or wait for a stream.
        largest_free: the largest block that is free.
        empty: in segments without any block in use, which `empty_cache()` gives back.
    """

    device: str
    id: tuple[int, int]
    segments: int
    reserved: int
    used: int
    largest_free: int
    empty: int

    @property
    def free(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.reserved - self.used

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that are not in the largest free block: from 0 to 1."""
        return 1 - self.largest_free / self.free if self.free else 0.0


@dataclass(frozen=True, slots=True)
class AllocatorSnapshot:
    """One snapshot.

    Attributes:
        name: of its file.
        survivors: the largest first.
        pools: by device and number.
    """

    name: str
    survivors: tuple[Survivors, ...]
    pools: tuple[Pool, ...]


@dataclass(slots=True)
class _Sum:
    segments: int = 0
    reserved: int = 0
    used: int = 0
    largest_free: int = 0
    empty: int = 0


@dataclass(slots=True)
class _Stacks:
    """Keeps each stack once, and knows it by the frames that a pickle has once for all blocks."""

    known: dict[tuple[int, ...], tuple[StackFrame, ...]] = field(default_factory=dict)

    def of(self, frames: Sequence[Mapping[str, Any]]) -> tuple[StackFrame, ...]:
        key = tuple(map(id, frames))
        if key not in self.known:
            python = (frame for frame in frames if _is_python(str(frame["filename"])))
            self.known[key] = tuple(
                StackFrame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in python
            )
        return self.known[key]


def read_snapshot(path: Path) -> AllocatorSnapshot:
    """A file that `torch.cuda.memory._dump_snapshot` has written, or a pickle of `torch.cuda.memory_snapshot()`.

    Nothing in it is executed: whatever is more than plain data is refused by its name.

    Raises:
        SnapshotError: it cannot be read, or is no such file.
    """
    try:
        read = read_plain(path)
    except PickleError as error:
        raise SnapshotError(str(error)) from error
    segments = read.get("segments") if isinstance(read, dict) else read
    if not isinstance(segments, list):
        raise SnapshotError(f"{path} is no snapshot of torch's allocator: it has no segments")
    try:
        return _summed(path.name, segments)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"a segment or a block is not as torch writes it ({type(error).__name__}: {error})"
        raise SnapshotError(f"{path} is no snapshot of torch's allocator: {problem}") from error


def _summed(name: str, segments: Iterable[Mapping[str, Any]]) -> AllocatorSnapshot:
    stacks = _Stacks()
    pools: dict[tuple[str, tuple[int, int]], _Sum] = {}
    held: dict[tuple[str, tuple[StackFrame, ...]], list[int]] = {}
    for segment in segments:
        device = f"cuda:{int(segment['device'])}"
        first, second = segment.get("segment_pool_id", (0, 0))
        pool = pools.setdefault((device, (int(first), int(second))), _Sum())
        pool.segments += 1
        pool.reserved += int(segment["total_size"])
        used = 0
        for block in segment["blocks"]:
            size = int(block["size"])
            if block["state"] == _FREE:
                pool.largest_free = max(pool.largest_free, size)
                continue
            used += size
            amounts = held.setdefault((device, stacks.of(_frames_of(block))), [0, 0])
            amounts[0] += size
            amounts[1] += 1
        pool.used += used
        pool.empty += 0 if used else int(segment["total_size"])
    survivors = [
        Survivors(device, stack, size, count, _fingerprint(device, stack))
        for (device, stack), (size, count) in held.items()
    ]
    survivors.sort(key=lambda each: (-each.bytes, each.fingerprint))
    return AllocatorSnapshot(
        name,
        tuple(survivors),
        tuple(
            Pool(device, number, each.segments, each.reserved, each.used, each.largest_free, each.empty)
            for (device, number), each in sorted(pools.items())
        ),
    )


def _frames_of(block: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The frames of a block; torch before 2.1 has them in the last entry of a history."""
    frames = block.get("frames")
    if frames is None:
        history = block.get("history") or [{}]
        frames = history[-1].get("frames")
    return frames or ()


def _is_python(file: str) -> bool:
    """Whether a frame is Python's: a history with `stacks="all"` has those of C++ too."""
    return file.endswith(".py") or file.startswith("<")


def _fingerprint(device: str, stack: Sequence[StackFrame]) -> str:
    suspects = tuple(frame.function.rpartition(".")[2] for frame in stack)
    function = allocating_function(stack)
    return fingerprint(resource="tensors", device=device, stage="", suspects=suspects, allocated_in=function)
