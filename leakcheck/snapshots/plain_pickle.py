"""Reads pickles of plain data: dicts, lists, texts and numbers, and nothing that runs.

Its reader is called after each batch of a list, so that a large file is never in memory as a whole.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import resource
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
    """Makes what the format itself can make. Whatever names a class or a function is refused by that name.

    Args:
        file: opcodes, with calls of `fold` in them.
        fold: called with lists of dicts, each time a batch of their items is complete.
        secret: by which a call in the opcodes is known to come from here and not from the file.
    """

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
    try:
        more = max(_LEAST_MEMORY, _EXPANSION * path.stat().st_size)
    except OSError:
        more = _LEAST_MEMORY
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
