"""The opcodes of a pickle, with a call of its reader after each batch of a list."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

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
        """It is."""
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
    """What is in the frames, about `_PART` bytes at a time, until something comes that is in none."""
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
