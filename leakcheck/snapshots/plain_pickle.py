"""Reads pickles of plain data: dicts, lists, texts and numbers, and nothing that runs."""

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

from lowtide.leakcheck.snapshots.batched_opcodes import BatchedOpcodes
from lowtide.reports.escaping import one_line

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
    """What a file says, or an error about it, as a part of a message: one line that is not too long."""
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
