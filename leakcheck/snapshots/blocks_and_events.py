"""Sums what a snapshot of torch's allocator has, while it is being read.

The stages of the program are told by the annotations in it.
"""

from __future__ import annotations

import re
import reprlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from lowtide.probes.memory.stack_frames import StackFrame

_LONGEST = 200
"""Characters of a stage's name, at most: some programs put more than a name into an annotation."""


OUTSIDE = ""
"""The stage of what was allocated outside of all, which no annotation has as its name."""


class Annotation(NamedTuple):
    """The begin or the end of a `torch.profiler.record_function`.

    Attributes:
        time: microseconds since 1970.
        begins: whether it is the begin.
        name: of the stage.
    """

    time: int
    begins: bool
    name: str


class StageTimeline:
    """Says which stage a moment was in: of stages in each other the innermost.

    A stage that ends without having begun was there when recording began. One that does not end is there until the
    snapshot. torch records no threads: the end of a stage ends the last one of that name.
    """

    def __init__(self, annotations: Iterable[Annotation]) -> None:
        ordered = sorted(annotations, key=lambda each: each.time)
        self._times = [each.time for each in ordered]
        self._stages: list[str | None] = []
        stages = _OpenStages()
        for name in _open_at_first(ordered):
            stages.begin(name)
        self._stages.append(stages.innermost)
        for each in ordered:
            if each.begins:
                stages.begin(each.name)
            else:
                stages.end(each.name)
            self._stages.append(stages.innermost)

    def at(self, time: int) -> str | None:
        """Return the stage at a moment (microseconds since 1970): `OUTSIDE` of all, None where none were recorded."""
        if not self._times:
            return None
        stage = self._stages[bisect_right(self._times, time)]
        return OUTSIDE if stage is None else stage


def stage_name(text: object) -> str:
    """Return a stage's name as it is shown.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"the name of a stage is no text but {type(text).__name__}")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


class _OpenStages:
    """The stages that are open; each step takes the same time, however many there are."""

    def __init__(self) -> None:
        self._begun: list[str] = []
        # Those that have not ended, the outermost first; one that ended inside of others stays until these have.
        self._open: list[int] = []
        self._by_name: dict[str, list[int]] = {}
        self._ended: set[int] = set()

    @property
    def innermost(self) -> str | None:
        return self._begun[self._open[-1]] if self._open else None

    def begin(self, name: str) -> None:
        number = len(self._begun)
        self._begun.append(name)
        self._open.append(number)
        self._by_name.setdefault(name, []).append(number)

    def end(self, name: str) -> None:
        self._ended.add(self._by_name[name].pop())
        while self._open and self._open[-1] in self._ended:
            self._ended.remove(self._open.pop())


def _open_at_first(ordered: Iterable[Annotation]) -> list[str]:
    """Return the stages that end without a begin, the outermost first: that one ends last."""
    begun: dict[str, int] = {}
    found = []
    for each in ordered:
        count = begun.get(each.name, 0) + (1 if each.begins else -1)
        if count < 0:
            found.append(each.name)
        begun[each.name] = max(0, count)
    return found[::-1]


_FREE = "inactive"

_NOTHING: tuple[None, str, None] = (None, "", None)

_MOST_BYTES = 1 << 62
"""Beyond any size or address: what is larger was not written by torch."""

_LONGEST_NAME, _LONGEST_FILE = 200, 4096
"""Characters of a function's name, and of a path on Linux: to show one of a million takes minutes."""

_PYTHON_NAME = re.compile(r"\w+|<\w+>")

_SMALL_PAGE, _LARGE_PAGE = 2 << 20, 20 << 20
"""Bytes that torch maps into an expandable segment at once, of small and of large blocks."""


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator has taken from the driver; bytes.

    Attributes:
        device: index of the card.
        pool: (0, 0) for the default one; others are of CUDA graphs and `MemPool`s.
        size: of all of it.
        used: of this, in blocks that are in use or wait for a stream.
        largest_free: the largest block that is free.
        returnable: what `empty_cache()` gives back, unless a CUDA graph or a `MemPool` still has the pool: segments
            without any block in use, and free pages of expandable ones.
        said: what the file says that is in use, beside the blocks that it lists; None where it does not.
    """

    device: int
    pool: tuple[int, int]
    size: int
    used: int
    largest_free: int
    returnable: int
    said: int | None = None

    @property
    def free(self) -> int:
        """Bytes that are not in use."""
        return self.size - self.used

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that are not in the largest free block: from 0 to 1."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class Segment(Reserved, frozen=True, kw_only=True):
    """A segment, or a range that is mapped in an expandable one, which can grow at its end and give back pages."""

    address: int
    expandable: bool


class Blocks(msgspec.Struct):
    """Blocks in use and free ones, as columns: a snapshot can have millions.

    Attributes:
        addresses: of those in use; 0 where torch has not written it.
        sizes: likewise, bytes.
        stacks: likewise, numbers of `Stacks`.
        free: addresses and sizes of the free ones, in turn.
    """

    addresses: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    sizes: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    stacks: array[int] = msgspec.field(default_factory=lambda: array("I"))
    free: array[int] = msgspec.field(default_factory=lambda: array("Q"))

    def add(self, blocks: Sequence[Mapping[str, Any]], stacks: Stacks) -> None:
        """Add some as torch writes them."""
        used = [block for block in blocks if block["state"] != _FREE]
        self.addresses.extend([block.get("address", 0) for block in used])
        self.sizes.extend([block["size"] for block in used])
        self.stacks.extend(stacks.numbers([block.get("frames") or _older_frames(block) for block in used]))
        if len(used) < len(blocks):
            for block in blocks:
                if block["state"] == _FREE:
                    self.free.extend((block.get("address", 0), block["size"]))

    def take_in_use(self, other: Blocks) -> None:
        """Add those in use of others."""
        self.addresses.extend(other.addresses)
        self.sizes.extend(other.sizes)
        self.stacks.extend(other.stacks)


class _Number(int):
    """Of a stack; no file can have one."""


class Stacks:
    """Keeps each stack once.

    Frames are one object each in a snapshot, and so a list of them is known by their identities, which do not change
    while the snapshot is read: the unpickler keeps all objects until then.
    """

    def __init__(self) -> None:
        self.known: list[tuple[StackFrame, ...]] = [()]
        self._numbers: dict[tuple[StackFrame, ...], int] = {(): 0}
        self._by_frames: dict[tuple[int, ...], _Number] = {}
        # Lists with some frames in common, the last of each kind: to compare two lists takes a third of the time that
        # the identities of all frames take.
        self._last: dict[tuple[int, int, int], tuple[list[Any], _Number]] = {}

    def numbers(self, lists: Sequence[list[Any]]) -> list[int]:
        """Replace each stack that is a list by its number, for memory and for the next one that refers to it."""
        found = []
        last_of_kind = self._last
        for frames in lists:
            if not frames:
                found.append(0)
                continue
            first = frames[0]
            if type(first) is _Number:
                found.append(first)
                continue
            length = len(frames)
            last = last_of_kind.get((length, id(first), id(frames[length >> 1])))
            number = last[1] if last is not None and last[0] == frames else self._number(frames)
            frames.clear()
            frames.append(number)
            found.append(number)
        return found

    def _number(self, frames: list[Any]) -> _Number:
        key = tuple(map(id, frames))
        number = self._by_frames.get(key)
        if number is None:
            number = self._by_frames[key] = _Number(self._new(frames))
        self._last[len(frames), id(frames[0]), id(frames[len(frames) >> 1])] = (frames.copy(), number)
        return number

    def _new(self, frames: Sequence[Mapping[str, Any]]) -> int:
        stack = tuple(_frame(each) for each in frames if _is_python(_text(each["filename"]), each))
        number = self._numbers.setdefault(stack, len(self.known))
        if number == len(self.known):
            self.known.append(stack)
        return number


class Events(msgspec.Struct):
    """What the history of one device says of the blocks that are in use at its end.

    Attributes:
        live: by address the time of the allocation in microseconds, None if it was not recorded, and the metadata
            that the program had set for it.
        annotations: those that torch 2.4 has among the events.
    """

    live: dict[int, tuple[int | None, str, list[Any]]] = msgspec.field(default_factory=dict)
    annotations: list[Annotation] = msgspec.field(default_factory=list)

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Add some as torch writes them, in the order of their time, and forget the stacks of what was freed."""
        live = self.live
        for event in events:
            action = event["action"]
            if action == "alloc":
                metadata = event.get("user_metadata", "")
                live[event["addr"]] = (event.get("time_us"), metadata, event.get("frames") or [])
            elif action == "free_completed":
                for frames in (event.get("frames"), live.pop(event["addr"], _NOTHING)[2]):
                    if frames:
                        frames.clear()
            elif action == "user_defined":
                self.annotations.append(_annotation_among_events(event))


def read_segment(segment: Mapping[str, Any], stacks: Stacks) -> tuple[Segment, Blocks]:
    """Read a segment as torch writes it, and its blocks."""
    blocks = _rest_of(segment["blocks"], Blocks)
    blocks.add(segment["blocks"], stacks)
    # Another segment that refers to the same list has them no second time.
    _empty(segment["blocks"])
    first, second = segment.get("segment_pool_id", (0, 0))
    size, address = _whole(segment["total_size"]), _whole(segment.get("address", 0))
    # Older versions write no more than what is allocated, without the blocks that wait for a stream.
    active = segment.get("active_size")
    expandable = bool(segment.get("is_expandable"))
    used = _whole(sum(blocks.sizes))
    page = _LARGE_PAGE if segment.get("segment_type") == "large" else _SMALL_PAGE
    free = list(zip(blocks.free[::2], blocks.free[1::2], strict=True))
    if expandable:
        returnable = sum(_whole_pages(begin - address, length, page) for begin, length in free)
    else:
        returnable = 0 if used else size
    return (
        Segment(
            device=_whole(segment["device"]),
            pool=(_whole(first), _whole(second)),
            address=address,
            expandable=expandable,
            size=size,
            used=used,
            largest_free=max((length for _, length in free), default=0),
            returnable=returnable,
            said=None if active is None else _whole(active),
        ),
        blocks,
    )


_Sums = TypeVar("_Sums", Blocks, Events)


def _rest_of(items: list[Any], kind: type[_Sums]) -> _Sums:
    """Take out of a list the sums of what was in it before; make new ones where there are none."""
    return items.pop(0) if items and type(items[0]) is kind else kind()


def _empty(items: list[Any]) -> None:
    """Empty a list, and its items too: the unpickler keeps them all, for what may refer to them."""
    deque(map(dict.clear, items), maxlen=0)
    items.clear()


def _whole(value: object) -> int:
    """Check a size, an address or a number of something.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int) or not 0 <= value < _MOST_BYTES:
        raise ValueError(f"{reprlib.repr(value)} is no size, address or number")
    return value


def _whole_pages(begin: int, length: int, page: int) -> int:
    """Return the bytes of the pages that lie completely in a range of a segment."""
    return max(0, (begin + length) // page - -(-begin // page)) * page


def _older_frames(block: Mapping[str, Any]) -> list[Any]:
    """Return the frames of a block of torch before 2.1, in the last entry of a history; none if it has none."""
    history = block.get("history") or [{}]
    return history[-1].get("frames") or []


def _frame(frame: Mapping[str, Any]) -> StackFrame:
    return StackFrame(
        _cut(_text(frame["filename"]), _LONGEST_FILE), _whole(frame["line"]), _cut(_text(frame["name"]), _LONGEST_NAME)
    )


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _is_python(file: str, frame: Mapping[str, Any]) -> bool:
    """Return whether a frame is Python's: a history with `stacks="all"` has those of C++ too."""
    if file.endswith(".py") or file.startswith("<"):
        return True
    # A program that is started by its name, or a notebook's command. So are headers of C++ called, but not what is in
    # them: that has its types behind it.
    name = file.rpartition("/")[2]
    return "." not in name and name not in ("", "??") and bool(_PYTHON_NAME.fullmatch(_text(frame["name"])))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    return value


def _annotation_among_events(event: Mapping[str, Any]) -> Annotation:
    """Return the annotation that an event of torch 2.4 stands for: its only frame is called as the annotation's end."""
    (frame,) = event["frames"]
    return Annotation(_whole(event["time_us"]), frame["name"] == "START", stage_name(frame["filename"]))


class SnapshotSums:
    """Takes the parts of a snapshot as they are read, and keeps what is shown of them."""

    def __init__(self) -> None:
        self.stacks = Stacks()
        self.segments: list[Segment] = []
        self.in_use: dict[int, Blocks] = {}

    def fold(self, items: list[Any]) -> None:
        """Replace what has been read of a list by its sums; a list of something else is left as it is.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: an item is not as torch writes it.
        """
        last = items[-1]
        if type(last) is not dict:
            return
        if "blocks" in last:
            self.add_segments(items)
        elif "state" in last:
            blocks = _rest_of(items, Blocks)
            blocks.add(items, self.stacks)
            _empty(items)
            items.append(blocks)
        elif "action" in last:
            events = self.events(items)
            _empty(items)
            items.append(events)

    def add_segments(self, segments: list[Any]) -> None:
        """Add some, and empty the list."""
        for each in segments:
            segment, blocks = read_segment(each, self.stacks)
            self.segments.append(segment)
            self.in_use.setdefault(segment.device, Blocks()).take_in_use(blocks)
        _empty(segments)

    def events(self, items: list[Any]) -> Events:
        """Return the events of a device, from its list in the history."""
        events = _rest_of(items, Events)
        events.add(items)
        return events
