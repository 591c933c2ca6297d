"""What a snapshot of torch's allocator has: blocks in use by stack and stage, and how free memory lies in pools.

A file is read in a process of its own, so that none can hang or crash the one that asks for it, and as plain data:
dicts, lists, texts and numbers, and nothing that runs. Its reader is called after each batch of a list, so that a large
file is never in memory as a whole. Several snapshots are compared: of one process from cycle to cycle, or of ranks at
the same moment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import pickle
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.snapshots.blocks_and_events import (
    Annotation,
    Blocks,
    Events,
    Reserved,
    Segment,
    SnapshotSums,
    StageTimeline,
    stage_name,
)
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function, telling_frames
from lowtide.reports.escaping import one_line

_PART = 1 << 20
"""Bytes that are read at once."""

_FRAMED = 4
"""The first protocol with frames; older ones are read without calls."""

_FRAME = b"\x95"

_BATCH_ENDS, _BATCH_BEGINS = b"ue", b"(}\x94("
"""Where a batch of dicts ends and the next begins: SETITEMS, APPENDS, MARK, EMPTY_DICT, MEMOIZE, MARK.

CPython's pickler writes lists in batches of 1000 items. No text has these bytes, since UTF-8 has no 0x94 behind `}`.
"""


class BatchedOpcodes(io.RawIOBase):
    """Reads a pickle, and puts opcodes for a call behind each batch of dicts in a list.

    These calls are all that frees memory before the end of a pickle: an unpickler by itself keeps every object.

    The frames of the format are left out, because CPython's unpickler takes nothing across the end of one, and the
    opcodes that come in make it longer.

    Args:
        file: at its beginning.
        call: opcodes that find the list on the stack and leave it there.
    """

    def __init__(self, file: BinaryIO, call: bytes) -> None:
        self._parts = self._called(file, _BATCH_ENDS + call + _BATCH_BEGINS)
        self._part = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or a part of it; how many bytes, 0 at the end."""
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part = memoryview(part)
        size = min(len(self._part), len(buffer))
        buffer[:size] = self._part[:size]
        self._part = self._part[size:]
        return size

    def _called(self, file: BinaryIO, with_call: bytes) -> Iterator[bytes]:
        without = _BATCH_ENDS + _BATCH_BEGINS
        begin = file.read(2)
        yield begin
        if begin[:1] == b"\x80" and begin[1] >= _FRAMED:
            rest = b""
            for payload in _payloads(file):
                data = (rest + payload).replace(without, with_call)
                # The place may be cut by the end of what was read.
                end = max(0, len(data) - len(without) + 1)
                yield data[:end]
                rest = data[end:]
            yield rest
        while part := file.read(_PART):
            yield part


def _payloads(file: BinaryIO) -> Iterator[bytes]:
    """Yield what is in the frames, about `_PART` bytes at a time, until something comes that is in none."""
    parts: list[bytes] = []
    size = 0
    while True:
        head = file.read(9)
        if head[:1] != _FRAME or len(head) < 9:
            yield b"".join([*parts, head])
            return
        left = int.from_bytes(head[1:], "little")
        while left:
            part = file.read(min(left, _PART))
            if not part:
                yield b"".join(parts)
                return
            left -= len(part)
            size += len(part)
            parts.append(part)
            if size >= _PART:
                yield b"".join(parts)
                parts, size = [], 0


_EXPANSION = 8
"""Bytes of memory that a byte of a pickle may take: a small integer takes 2 bytes there and 32 as an object."""

_LEAST_MEMORY = 1 << 30

_BUFFER = 1 << 20

_LONGEST_QUOTE = 200
"""Characters of a file that a message has."""

_PACKED = {
    b"\x1f\x8b": "it is compressed by gzip: unpack it first",
    b"BZh": "it is compressed by bzip2: unpack it first",
    b"\xfd7zXZ": "it is compressed by xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd: unpack it first",
    b"PK\x03\x04": "it is a zip archive, as torch.save writes it: write the snapshot with pickle.dump",
}
"""What a file that is no pickle by itself begins with."""

Fold = Callable[[list[Any]], None]
"""Takes from a list that is being read what it does not need any more."""


class PickleError(ValueError):
    """A file that cannot be read as plain data; the message names it and says why."""


def quoted(text: str) -> str:
    """Return what a file says, or an error about it, as part of a message: one line that is not too long."""
    return one_line(text[:_LONGEST_QUOTE])


class _FoldError(Exception):
    """What is told apart from a broken pickle: the reader's own function has raised its cause."""


class _Plain(pickle.Unpickler):
    """Makes what the format itself can make. Whatever names a class or a function is refused by that name."""

    def __init__(self, file: io.BufferedReader[Any], fold: Fold, secret: str) -> None:
        super().__init__(file)
        self._fold, self._secret = fold, secret

    def find_class(self, module: str, name: str, /) -> Any:
        asked = quoted(f"{module}.{name}")
        raise PickleError(f"it asks for {asked}, and a snapshot needs nothing but plain data: refused")

    def persistent_load(self, pid: Any, /) -> Any:
        if type(pid) is not tuple or len(pid) != 2 or pid[1] != self._secret:
            raise PickleError("it refers to objects outside of the file: refused")
        if type(pid[0]) is list and pid[0]:
            try:
                self._fold(pid[0])
            except Exception as error:
                raise _FoldError from error
        return pid[0]


def read_plain(path: Path, fold: Fold) -> Any:
    """Read a pickle of plain data.

    Args:
        path: the file.
        fold: called with each list of dicts, from time to time while it is read, and free to change the list and its
            items, so that of a pickle which is larger than memory only what is needed is kept. The last items of a
            list, up to 1000, are left in what is returned.

    Raises:
        PickleError: the file cannot be read, is cut off, or is no pickle of plain data.
        MemoryError: as it is; and what `fold` raises.
    """
    try:
        with path.open("rb") as file:
            for begin, problem in _PACKED.items():
                if file.peek(len(begin)).startswith(begin):
                    raise PickleError(problem)
            return _loaded(file, fold)
    except OSError as error:
        raise PickleError(f"it cannot be read: {error.strerror or error}") from error
    except _FoldError as error:
        raise error.__cause__ or error from None
    except (PickleError, MemoryError):
        raise
    except Exception as error:
        # An unpickler raises nearly anything for bytes that are no pickle.
        problem = quoted(str(error))
        raise PickleError(f"it is cut off, or no pickle of plain data: {problem}") from error


def _loaded(file: BinaryIO, fold: Fold) -> Any:
    secret = secrets.token_hex(16)
    # SHORT_BINUNICODE, TUPLE2, BINPERSID: a persistent identifier is how a pickle calls its reader.
    call = b"\x8c" + bytes([len(secret)]) + secret.encode() + b"\x86Q"
    with io.BufferedReader(BatchedOpcodes(file, call), _BUFFER) as opcodes:
        return _Plain(opcodes, fold, secret).load()


@contextlib.contextmanager
def enough_memory_for(path: Path) -> Iterator[None]:
    """Let this process take the memory that plain data of a file's size can need, and not more.

    A few bytes of a pickle can ask for all memory of a machine. Python's garbage collection is off meanwhile, because
    each one would pass over all that was read.

    Raises:
        MemoryError: more is needed.
    """
    more = max(_LEAST_MEMORY, _EXPANSION * _size(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    collects, hook = gc.isenabled(), sys.excepthook
    gc.disable()
    # Of a bytearray that is too large CPython says by this hook that it was made badly; the error itself is raised.
    sys.excepthook = lambda *_: None
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        sys.excepthook = hook
        if collects:
            gc.enable()


By = Literal["cycle", "rank", "stage"]
"""What several snapshots are: of one process, by stack or by stage, or of ranks."""

Trend = Literal["new", "gone", "grown", "shrunk", "same"]


_LARGEST_TABLE = 10_000_000

_LEAST_SECONDS = 10

_BYTES_PER_SECOND = 4 << 20
"""A tenth of what one busy core reads."""


class SnapshotError(ValueError):
    """A file that is no snapshot of torch's allocator; the message names it and says what is wrong with it."""


class Survivors(msgspec.Struct, frozen=True):
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


class Pool(Reserved, frozen=True, kw_only=True):
    """The segments of one pool on one device, and how many it has taken from the driver."""

    segments: int


class AllocatorSnapshot(msgspec.Struct, frozen=True):
    """One snapshot."""

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
            device=device,
            pool=number,
            segments=len(each),
            size=sum(segment.size for segment in each),
            used=sum(segment.used for segment in each),
            said=sum(segment.used if segment.said is None else segment.said for segment in each),
            largest_free=max(segment.largest_free for segment in each),
            returnable=sum(segment.returnable for segment in each),
        )


def _fingerprint(device: str, stack: Sequence[StackFrame]) -> str:
    suspects = tuple(frame.function.rpartition(".")[2] for frame in stack)
    function = allocating_function(stack)
    return fingerprint(resource="tensors", device=device, stage="", suspects=suspects, allocated_in=function)


class Compared(msgspec.Struct, frozen=True):
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
