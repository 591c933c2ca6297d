"""What a snapshot of torch's allocator has: blocks in use by stack and stage, and how free memory lies in pools.

A file is read in a process of its own, so that none can hang or crash the one that asks for it. Several snapshots are
compared: of one process from cycle to cycle, or of ranks at the same moment.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.snapshots.blocks_and_events import (
    Annotation,
    Blocks,
    Events,
    Segment,
    SnapshotSums,
    StageTimeline,
    stage_name,
)
from lowtide.leakcheck.snapshots.plain_pickle import PickleError, enough_memory_for, quoted, read_plain
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function, telling_frames

By = Literal["cycle", "rank", "stage"]
"""What several snapshots are: of one process, by stack or by stage, or of ranks."""

Trend = Literal["new", "gone", "grown", "shrunk", "same"]


_LARGEST_TABLE = 10_000_000

_LEAST_SECONDS = 10

_BYTES_PER_SECOND = 4 << 20
"""A tenth of what one busy core reads."""


class SnapshotError(ValueError):
    """A file that is no snapshot of torch's allocator; the message names it and says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """The blocks in use that were allocated from one stack in one stage, on one device.

    Attributes:
        device: `cuda:0`, as the program that wrote the snapshot numbers its cards.
        stack: Python's frames, the innermost first; empty where no history was recorded when they were allocated, or
            by a thread of C++ alone, as autograd's.
        stage: in which they were allocated: what `torch.cuda.memory._set_memory_metadata` had set, or else the
            innermost `record_function`; empty outside of all, None where the snapshot does not say it.
        bytes: what they take, with what the allocator has rounded them up to.
        count: how many blocks.
        fingerprint: the same for this stack in every snapshot, whatever its lines, stages and cards.
    """

    device: str
    stack: tuple[StackFrame, ...]
    stage: str | None
    bytes: int
    count: int
    fingerprint: str

    @property
    def text(self) -> str:
        """`load_weights, model.py:12`: the innermost function that is not torch's or Python's."""
        if not self.stack:
            return "no Python stack was recorded"
        return frame_text(self.stack[telling_frames(self.stack)[0]])


def frame_text(frame: StackFrame) -> str:
    """Return a frame as `load_weights, model.py:12`."""
    return f"{frame.function}, {Path(frame.file).name}:{frame.line}"


def texts_of(survivors: Sequence[Survivors]) -> list[str]:
    """Return the text of each; with the caller in which their stacks differ, where several would have one text."""
    alike: dict[tuple[str, str], set[tuple[StackFrame, ...]]] = {}
    for each in survivors:
        alike.setdefault((each.device, each.text), set()).add(each.stack)
    return [_told_apart(each, alike[each.device, each.text]) for each in survivors]


def _told_apart(survivors: Survivors, stacks: Collection[tuple[StackFrame, ...]]) -> str:
    telling = [survivors.stack[place] for place in telling_frames(survivors.stack)] if survivors.stack else []
    others = [[stack[place] for place in telling_frames(stack)] for stack in stacks if stack != survivors.stack]
    # The innermost one that each of the others lacks tells it from them all; of the others' callers it may be one.
    callers = [
        next((place for place, frame in enumerate(telling) if other[place : place + 1] != [frame]), 0)
        for other in others
    ]
    place = max(callers, default=0)
    return survivors.text if not place else f"{survivors.text} < {frame_text(telling[place])}"


@dataclass(frozen=True, slots=True)
class Pool:
    """The segments of one pool on one device; bytes.

    Attributes:
        device: `cuda:0`.
        id: (0, 0) for the default one; others are of CUDA graphs and `MemPool`s.
        segments: how many it has taken from the driver.
        reserved: in them.
        used: of these, in blocks that are in use or wait for a stream.
        said: what the file says that is in use, beside its blocks: another figure, where it contradicts itself.
        largest_free: the largest block that is free.
        returnable: what `empty_cache()` gives back, unless a CUDA graph or a `MemPool` still has the pool: segments
            without any block in use, and free pages of expandable ones.
    """

    device: str
    id: tuple[int, int]
    segments: int
    reserved: int
    used: int
    said: int
    largest_free: int
    returnable: int

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
        segments: those with the most free bytes first.
    """

    name: str
    survivors: tuple[Survivors, ...]
    pools: tuple[Pool, ...]
    segments: tuple[Segment, ...]


def read_snapshot(path: Path) -> AllocatorSnapshot:
    """Read what `torch.cuda.memory._dump_snapshot` has written, or a pickle of `torch.cuda.memory_snapshot()`.

    Nothing in it is executed: whatever is more than plain data is refused by its name.

    Raises:
        SnapshotError: it cannot be read, or is no such file.
    """
    sums = SnapshotSums()
    try:
        with enough_memory_for(path):
            read = read_plain(path, sums.fold)
            segments = read.get("segments") if isinstance(read, dict) else read
            if not isinstance(segments, list):
                raise SnapshotError(f"{path} is no snapshot of torch's allocator: it has no segments")
            sums.add_segments(segments)
            return _summed(path.name, sums, read if isinstance(read, dict) else {})
    except SnapshotError:
        raise
    except PickleError as error:
        raise SnapshotError(f"{path}: {error}") from error
    except MemoryError as error:
        raise SnapshotError(f"{path}: it asks for more memory than plain data of its size needs") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        problem = f"a part of it is not as torch writes it ({type(error).__name__}: {quoted(str(error))})"
        raise SnapshotError(f"{path} is no snapshot of torch's allocator: {problem}") from error


def _summed(name: str, sums: SnapshotSums, snapshot: Mapping[str, Any]) -> AllocatorSnapshot:
    events = [sums.events(each) for each in snapshot.get("device_traces", ())]
    annotations = _annotations(snapshot.get("external_annotations", ()))
    survivors: list[Survivors] = []
    for device, blocks in sums.in_use.items():
        history = events[device] if device < len(events) else Events()
        timeline = StageTimeline([*history.annotations, *annotations.get(device, ())])
        survivors += _survivors(f"cuda:{device}", blocks, sums.stacks.known, _stages(history, timeline))
    survivors.sort(key=lambda each: (-each.bytes, each.fingerprint, each.stage is None, each.stage or ""))
    segments = sorted(sums.segments, key=lambda each: (-each.free, each.device, each.address))
    return AllocatorSnapshot(name, tuple(survivors), tuple(_pools(segments)), tuple(segments))


def _annotations(entries: Iterable[Mapping[str, Any]]) -> dict[int, list[Annotation]]:
    """Return by device the annotations that torch since 2.5 keeps beside the history."""
    found: dict[int, list[Annotation]] = {}
    for entry in entries:
        annotation = Annotation(int(entry["time_us"]), entry["stage"] == "START", stage_name(entry["name"]))
        found.setdefault(int(entry["device"]), []).append(annotation)
    return found


def _stages(history: Events, timeline: StageTimeline) -> dict[int, str]:
    """Return by address the stages of the blocks, where they are known."""
    found = {}
    for address, (time, metadata, _) in history.live.items():
        stage = stage_name(metadata) if metadata else None if time is None else timeline.at(time)
        if stage is not None:
            found[address] = stage
    return found


def _survivors(
    device: str, blocks: Blocks, stacks: Sequence[tuple[StackFrame, ...]], stages: Mapping[int, str]
) -> Iterator[Survivors]:
    if not blocks.addresses:
        return
    names = [None, *sorted(set(stages.values()))]
    numbers = {name: turn for turn, name in enumerate(names)}
    known = sorted(stages)
    stage_of = np.array([0, *(numbers[stages[address]] for address in known)])
    addresses = np.frombuffer(blocks.addresses, np.uint64)
    # Each address is the last one up to it, or its stage is not known.
    place = np.searchsorted(np.array(known, np.uint64), addresses, side="right")
    stage = np.where(np.array([0, *known], np.uint64)[place] == addresses, stage_of[place], 0)
    stack = np.frombuffer(blocks.stacks, np.uint32).astype(np.int64)
    found, which = _distinct(stack * len(names) + stage, len(stacks) * len(names))
    counts = np.bincount(which, minlength=len(found))
    sizes = np.zeros(len(found), np.uint64)
    np.add.at(sizes, which, np.frombuffer(blocks.sizes, np.uint64))
    for kind, size, count in zip(found.tolist(), sizes.tolist(), counts.tolist(), strict=True):
        frames = stacks[kind // len(names)]
        yield Survivors(device, frames, names[kind % len(names)], size, count, _fingerprint(device, frames))


def _distinct(kinds: NDArray[np.int64], end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the kinds below `end` that occur, and for each value the place of its kind among them."""
    # A table of all takes a fifth of the time that sorting takes, and of very many it would take all memory.
    if end > _LARGEST_TABLE:
        found, which = np.unique(kinds, return_inverse=True)
        return found, which
    found = np.flatnonzero(np.bincount(kinds, minlength=end))
    places = np.zeros(end, np.int64)
    places[found] = np.arange(len(found))
    return found, places[kinds]


def _pools(segments: Iterable[Segment]) -> Iterator[Pool]:
    by_pool: dict[tuple[int, tuple[int, int]], list[Segment]] = {}
    for segment in segments:
        by_pool.setdefault((segment.device, segment.pool), []).append(segment)
    for (device, number), each in sorted(by_pool.items()):
        yield Pool(
            device=f"cuda:{device}",
            id=number,
            segments=len(each),
            reserved=sum(segment.size for segment in each),
            used=sum(segment.used for segment in each),
            said=sum(segment.used if segment.said is None else segment.said for segment in each),
            largest_free=max(segment.largest_free for segment in each),
            returnable=sum(segment.returnable for segment in each),
        )


def _fingerprint(device: str, stack: Sequence[StackFrame]) -> str:
    suspects = tuple(frame.function.rpartition(".")[2] for frame in stack)
    function = allocating_function(stack)
    return fingerprint(resource="tensors", device=device, stage="", suspects=suspects, allocated_in=function)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was allocated from one stack, or in one stage, in each of the snapshots.

    Attributes:
        survivors: of the last snapshot that has some of it, the largest of those that are added up: functions of the
            same names may be in other files.
        bytes: in each snapshot.
        counts: blocks, likewise.
    """

    survivors: Survivors
    bytes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def growth(self) -> int:
        """Bytes in the last snapshot beyond those in the first."""
        return self.bytes[-1] - self.bytes[0]

    @property
    def spread(self) -> int:
        """Bytes between the snapshot with the most and that with the least of it."""
        return max(self.bytes) - min(self.bytes)

    @property
    def trend(self) -> Trend:
        """What became of it from the first snapshot to the last."""
        first, last = self.bytes[0], self.bytes[-1]
        if first == last:
            return "same"
        if not first:
            return "new"
        if not last:
            return "gone"
        return "grown" if last > first else "shrunk"

    @property
    def grows_always(self) -> bool:
        """Whether it is more in each snapshot than in the one before; two snapshots do not say so."""
        steps = list(zip(self.bytes, self.bytes[1:], strict=False))
        return len(steps) > 1 and all(before < after for before, after in steps)


def compare(snapshots: Sequence[AllocatorSnapshot], by: By = "cycle") -> list[Compared]:
    """Return what differs between snapshots; the largest difference first.

    Args:
        snapshots: in the order of their time, or of their ranks.
        by: `rank` where each is another rank's, whose card has another number: then those of one stack are the same,
            whatever the card, and not the growth counts but the spread. `stage` for the growth by stage.
    """
    compared = _side_by_side(snapshots, by)
    differing = [each for each in compared if (each.spread if by == "rank" else each.growth)]
    return sorted(differing, key=lambda each: -(each.spread if by == "rank" else abs(each.growth)))


def sum_stages(snapshot: AllocatorSnapshot) -> list[Compared]:
    """Sum what was allocated in each stage of one snapshot; the most bytes first."""
    return sorted(_side_by_side([snapshot], "stage"), key=lambda each: -each.bytes[0])


def _side_by_side(snapshots: Sequence[AllocatorSnapshot], by: By) -> list[Compared]:
    held: dict[tuple[str | None, str], list[list[int]]] = {}
    latest: dict[tuple[str | None, str], Survivors] = {}
    seen: dict[tuple[str | None, str], int] = {}
    for turn, snapshot in enumerate(snapshots):
        for each in snapshot.survivors:
            key = (each.stage if by == "stage" else each.fingerprint, "" if by == "rank" else each.device)
            amounts = held.setdefault(key, [[0, 0] for _ in snapshots])[turn]
            amounts[0] += each.bytes
            amounts[1] += each.count
            # Within a snapshot the largest comes first.
            if seen.get(key) != turn:
                seen[key], latest[key] = turn, each
    return [
        Compared(latest[key], tuple(size for size, _ in amounts), tuple(count for _, count in amounts))
        for key, amounts in held.items()
    ]


def read_apart(path: Path) -> AllocatorSnapshot:
    """Read as `read_snapshot` does, with an end to the processor time that a file may take.

    A tuple that has itself twice, sixty times over, is a key whose hash takes years, and one that is nested a million
    times overflows the C stack: CPython bounds neither, and nothing in the same process can.

    Raises:
        SnapshotError: as `read_snapshot` does; or the reader took too long, or crashed.
    """
    # Not "spawn", which takes as long as the start of the command does.
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    reader = context.Process(target=_read, args=(path, answer), daemon=True)
    reader.start()
    answer.close()
    try:
        read: AllocatorSnapshot | SnapshotError = answers.recv()
    except EOFError:
        reader.join()
        problem = _why_it_ended(reader.exitcode or 0)
        raise SnapshotError(f"{path}: {problem}: refused") from None
    finally:
        answers.close()
        reader.kill()
        reader.join()
        # Its pipes, which an error's traceback would keep until the next full collection.
        reader.close()
    if isinstance(read, SnapshotError):
        raise read
    return read


def _read(path: Path, answer: Connection) -> None:
    # Ctrl-C is for the one that asks, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    _, most_core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most_core))
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = _LEAST_SECONDS + _size(path) // _BYTES_PER_SECOND
    if most_seconds != resource.RLIM_INFINITY:
        seconds = min(seconds, most_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most_seconds))
    try:
        answer.send(read_snapshot(path))
    except SnapshotError as error:
        # Without its causes, which may have parts of the file.
        answer.send(SnapshotError(str(error)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _why_it_ended(exit_code: int) -> str:
    if exit_code == -signal.SIGXCPU:
        return "it takes more time than plain data of its size needs"
    ended = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"Python cannot read it, the process that tried ended with {ended}"
