"""Reads pickles of plain data: dicts, lists, texts and numbers, and nothing that runs."""

from __future__ import annotations

import contextlib
import io
import mmap
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TRACES = (b"\x8c\rdevice_traces", b"X\r\x00\x00\x00device_traces")
"""The key of the history in a snapshot, as protocols 4 and 5 and as protocols 1 to 3 write it."""

_STOP = b"u."
"""Sets the items that are on the stack, and ends."""

_LONGEST_FRAME = 1 << 20
"""Bytes by which a frame of a pickle may reach beyond what is read of it: those of CPython have 64 KiB."""

_EXPANSION = 8
"""Bytes of memory that a byte of a pickle may take: a small integer takes 2 bytes there and 32 as an object."""

_LEAST_MEMORY = 1 << 30


_NO_PICKLE = (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, ValueError)
"""What an unpickler raises where a pickle was cut in the middle of a value."""


class PickleError(ValueError):
    """A file that cannot be read as plain data; the message names it and says why."""


class _Plain(pickle.Unpickler):
    """Makes what the format itself can make. Whatever names a class or a function is refused by that name."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise PickleError(f"it asks for {module}.{name}, and a snapshot needs nothing but plain data: refused")

    def persistent_load(self, pid: Any, /) -> Any:
        raise PickleError("it refers to objects outside of the file: refused")


class _Begin(io.RawIOBase):
    """The beginning of some bytes, followed by what ends a pickle there and by zeros, which nobody looks at.

    Args:
        data: the bytes.
        stop: where the beginning ends.
    """

    def __init__(self, data: mmap.mmap, stop: int) -> None:
        self._parts = [memoryview(data)[:stop], memoryview(_STOP + bytes(_LONGEST_FRAME))]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._parts:
            return 0
        first = self._parts[0]
        size = min(len(first), len(buffer))
        buffer[:size] = first[:size]
        if size == len(first):
            self._parts.pop(0).release()
        else:
            self._parts[0] = first[size:]
        return size

    def close(self) -> None:
        while self._parts:
            self._parts.pop().release()
        super().close()


def read_plain(path: Path) -> Any:
    """What a pickle has, without the history of allocations of a snapshot, which is by far the most of it.

    Raises:
        PickleError: the file cannot be read, is cut off, or is no pickle of plain data.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            _limited_memory(max(_LEAST_MEMORY, _EXPANSION * len(data))),
        ):
            return _loaded(data)
    except PickleError as error:
        raise PickleError(f"{path}: {error}") from None
    except OSError as error:
        raise PickleError(f"{path} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise PickleError(f"{path}: it asks for more memory than plain data of its size needs") from error
    except Exception as error:
        # An unpickler raises nearly anything for bytes that are no pickle.
        raise PickleError(f"{path} is cut off, or no pickle of plain data: {error}") from error


def _loaded(data: mmap.mmap) -> Any:
    for key in _TRACES:
        stop = data.find(key)
        if stop >= 0:
            # A text that has these bytes inside is no key: then all of it is read.
            with contextlib.suppress(*_NO_PICKLE), io.BufferedReader(_Begin(data, stop), 1 << 20) as beginning:
                return _Plain(beginning).load()
    data.seek(0)
    return _Plain(data).load()


@contextlib.contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """So many bytes beyond what the process has: a few bytes of a pickle can ask for all memory of a machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
