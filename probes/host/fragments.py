"""How much of the process's memory is free and yet cannot go back: between the blocks of the heaps that are in use."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

from lowtide.probes.originals import sys

_FREE = re.compile(rb"^(?:# bytes in available blocks|\d+ unused pools \* \d+ bytes) *= *([\d,]+)$", re.MULTILINE)
"""Of what Python says of its arenas, the lines about what is free in those that are not free as a whole."""

_CHUNKS = re.compile(rb'<(?:size|unsorted) from="\d+" to="\d+" total="(\d+)" count="(\d+)"/>')
"""Of what glibc says of its heaps, the free chunks of about one size."""

_PAGES_AROUND = 2 * 4096
"""Bytes of a free chunk that stay when the heap is trimmed, at most: the pages that it shares with its neighbours."""


class Fragments(NamedTuple):
    """Free memory of one heap that blocks in use keep there.

    Attributes:
        heap: whose.
        bytes: of it, at most.
        blocks: how many keep it.
    """

    heap: str
    bytes: int
    blocks: int


def fragments() -> list[Fragments]:
    """Read the heaps of Python and of C, after what can go back has gone; those that cannot be read are left out."""
    arenas = sum(int(size.replace(b",", b"")) for size in _FREE.findall(said_by(tell_arenas)))
    chunks = [(int(total), int(count)) for total, count in _CHUNKS.findall(said_by(_tell_heaps))]
    free = sum(min(total, count * _PAGES_AROUND) for total, count in chunks)
    found = [
        Fragments("Python's arenas", arenas, sys.getallocatedblocks()),
        # Between two free chunks there is one in use, or they would be one.
        Fragments("malloc's heap", free, sum(count for _, count in chunks)),
    ]
    return [each for each in found if each.bytes]


def tell_arenas(stream: ctypes.c_void_p) -> None:
    """Write what `sys._debugmallocstats` prints to stderr, which is the program's."""
    ctypes.pythonapi._PyObject_DebugMallocStats(stream)


def _tell_heaps(stream: ctypes.c_void_p) -> None:
    ctypes.CDLL(None).malloc_info(0, stream)


def said_by(tell: Callable[[ctypes.c_void_p], None]) -> bytes:
    """Return what a function of C's writes to a stream; empty where it is not there."""
    libc, text, size = ctypes.CDLL(None), ctypes.c_char_p(), ctypes.c_size_t()
    try:
        begin = libc.open_memstream
    except AttributeError:
        return b""
    begin.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(begin(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return b""
    with contextlib.suppress(AttributeError):
        tell(stream)
    libc.fclose(stream)
    said = text.value or b""
    libc.free(text)
    return said
