"""Writes snapshots of any size: CPython's pickle of a small one, in which a part is repeated.

The small one has what `torch.cuda.memory._dump_snapshot` writes: keys and actions are one object each, frames are one
object each, and each allocation has a list of frames of its own. A list is pickled in batches of 1000 items, and such a
batch can stand there many times.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

Part = Literal["segments", "history"]

BATCH = 1000
FRAME = 64 << 10
"""Bytes after which CPython ends a frame of the format."""

STACKS, STEPS = 50, 8
STAGES = ("forward", "backward", "optimizer")
_NOW, _ADDRESS, _SIZE = 1_760_000_000_000_000, 0x7F2A00000000, 512
_POOL = [0, 0]
_BOUNDARY = b"e(}\x94("


def small_snapshot(depth: int) -> dict[str, Any]:
    """Five batches of blocks and of events, with three stages in each of some steps; `depth` frames in each stack."""
    frames = [[_frame(turn, each) for each in range(depth)] for turn in range(STACKS)]
    kept = [list(frames[turn % STACKS]) for turn in range(5 * BATCH)]
    blocks = [
        {
            "address": _ADDRESS + turn * _SIZE,
            "size": _SIZE,
            "requested_size": 500,
            "state": "active_allocated",
            "frames": kept[turn],
        }
        for turn in range(len(kept))
    ]
    segment = {
        "device": 0,
        "address": _ADDRESS,
        "total_size": _SIZE * len(blocks),
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }
    # Each fourth allocation is kept; of the others torch writes two more events.
    events = []
    for turn, stack in enumerate(kept):
        now = _NOW + turn
        events.append(_event("alloc", _ADDRESS + turn * _SIZE, now, stack))
        freed, freeing = _ADDRESS - (turn + 1) * _SIZE, list(stack)
        events.append(_event("alloc", freed, now, list(stack)))
        events.append(_event("free_requested", freed, now, freeing))
        events.append(_event("free_completed", freed, now, freeing))
    return {
        "segments": [segment],
        "device_traces": [events],
        "allocator_settings": {"expandable_segments": True},
        "external_annotations": list(_annotations(len(kept))),
    }


def write_snapshot(path: Path, part: Part, size: int, depth: int) -> int:
    """Write a snapshot of about `size` bytes, of which `part` is by far the most.

    Returns:
        How often a batch of 1000 blocks or events is in it beyond those of the small one.
    """
    plain = b"".join(_without_frames(pickle.dumps(small_snapshot(depth), protocol=4)))
    history = plain.index(b"device_traces")
    first = plain.index(_BOUNDARY, history if part == "history" else 0)
    second = plain.index(_BOUNDARY, first + 1)
    begin, batch, rest = plain[: first + 1], plain[first + 1 : second + 1], plain[second + 1 :]
    repeats = max(0, (size - len(plain)) // len(batch))
    # What follows refers to objects by their number: those of the repeated batches come in between.
    shifted = b"".join(_shifted(rest, _memoised(begin + batch), repeats * (_memoised(batch))))
    with path.open("wb") as file:
        file.write(b"\x80\x04" + _framed(begin[2:]))
        framed = _framed(batch)
        for _ in range(repeats + 1):
            file.write(framed)
        file.write(_framed(shifted))
    return repeats


def _frame(stack: int, turn: int) -> dict[str, Any]:
    return {"name": f"function_{turn}_{stack}", "filename": f"/srv/model/layer_{turn}.py", "line": 10 * turn + stack}


def _event(action: str, address: int, now: int, stack: list[Any]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": _SIZE,
        "stream": 0,
        "time_us": now,
        "compile_context": "",
        "user_metadata": "",
        "pool_id": tuple(_POOL),
        "frames": stack,
    }


def _annotations(moments: int) -> Iterator[dict[str, Any]]:
    length = moments // (STEPS * len(STAGES))
    for turn in range(STEPS * len(STAGES)):
        # torch makes a new text each time.
        name = "".join(list(STAGES[turn % len(STAGES)]))
        yield {"name": name, "stage": "START", "device": 0, "time_us": _NOW + turn * length}
        yield {"name": "".join(list(name)), "stage": "END", "device": 0, "time_us": _NOW + (turn + 1) * length - 1}


def _opcodes(data: bytes) -> Iterator[tuple[str, Any, bytes]]:
    """Name, argument and bytes of each opcode; data that does not end a pickle is read to its end."""
    found = [(code.name, argument, place) for code, argument, place in pickletools.genops(data + b".")]
    for (name, argument, place), (_, _, after) in pairwise(found):
        yield name, argument, data[place:after]
    name, argument, place = found[-1]
    if place < len(data):
        yield name, argument, data[place:]


def _without_frames(data: bytes) -> Iterator[bytes]:
    for name, _, raw in _opcodes(data):
        if name != "FRAME":
            yield raw


def _memoised(data: bytes) -> int:
    return sum(name == "MEMOIZE" for name, _, _ in _opcodes(data))


def _shifted(data: bytes, begin: int, by: int) -> Iterator[bytes]:
    for name, argument, raw in _opcodes(data):
        far = name in ("BINGET", "LONG_BINGET") and argument >= begin
        yield b"j" + struct.pack("<I", argument + by) if far else raw


def _framed(data: bytes) -> bytes:
    """In frames, as CPython's pickler ends them: with the first opcode beyond 64 KiB."""
    parts, frame = [], bytearray()
    for _, _, raw in _opcodes(data):
        frame += raw
        if len(frame) >= FRAME:
            parts.append(b"\x95" + struct.pack("<Q", len(frame)) + frame)
            frame = bytearray()
    return b"".join([*parts, b"\x95" + struct.pack("<Q", len(frame)) + frame])
