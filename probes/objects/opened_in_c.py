"""What objects that are written in C have opened, where they do not say it in Python: read from their memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.probes.mappings import AddressMap, read_mappings
from lowtide.probes.objects.described import is_of_python
from lowtide.probes.originals import loaded, os, sys

_FIRST_FIELD = object.__basicsize__
"""Where the first field of an object lies, behind its reference count and its type."""

_HEAD, _WORD = 16, 8
"""Bytes of that in the builds of Python whose objects are known here, and of a field."""

_LATEST = (3, 14)
"""The last version of Python whose `sqlite3.Connection` is known to begin with its database."""


def _type_of_scandir() -> type:
    with os.scandir("/") as entries:
        return type(entries)


SCANDIR = _type_of_scandir()
"""The type of what `os.scandir` returns, which has no name in Python."""


def number_of_scandir(entries: Any) -> int:
    """Return the descriptor of a folder that is being listed; -1 where it is closed, or that cannot be read."""
    # Its last fields are the stream of the folder, and the descriptor that it was given.
    stream = _stream_of(entries) if _knows_scandir() else 0
    return _number_of_stream(stream) if stream else -1


def _knows_scandir() -> bool:
    with os.scandir("/") as entries:
        is_there = _stream_of(entries) != 0
    return is_there and _stream_of(entries) == 0


def _stream_of(entries: Any) -> int:
    return _word(id(entries) + type(entries).__basicsize__ - 2 * _WORD)


def _number_of_stream(stream: int) -> int:
    function: Any = ctypes.CDLL(None).dirfd
    function.argtypes = [ctypes.c_void_p]
    return int(function(stream))


def addresses_of_mappings(mappings: Sequence[Any]) -> list[int]:
    """Return where each `mmap.mmap` lies, shape [len(mappings)]; 0 where it is closed, or that cannot be read."""
    is_known = bool(mappings) and _knows_mappings()
    return [_word(id(mapping) + _FIRST_FIELD) if is_known else 0 for mapping in mappings]


def _knows_mappings() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as sample:
        address = _word(id(sample) + _FIRST_FIELD)
        is_there = AddressMap(read_mappings()).at(address) is not None
    return is_there and _word(id(sample) + _FIRST_FIELD) == 0


def numbers_of_mappings(mappings: Sequence[Any]) -> list[int]:
    """Return the descriptor that each `mmap.mmap` has of its file, which is its own, shape [len(mappings)].

    -1 for none, or where that cannot be read.
    """
    place = _place_of_number() if mappings else 0
    return [ctypes.c_int.from_address(id(mapping) + place).value if place else -1 for mapping in mappings]


def has_nameless_memory(mapping: Any) -> bool:
    """Return whether a `mmap.mmap` is of shared memory that has no name in /dev/shm, or none any more."""
    try:
        path = os.readlink(f"/proc/self/fd/{numbers_of_mappings([mapping])[0]}")
    except OSError:
        return False
    return path.startswith(("/memfd:", "/dev/shm/")) and path.endswith(" (deleted)")


def _place_of_number() -> int:
    """Return at which byte of a `mmap.mmap` its descriptor stands, which versions of Python differ in; 0 if nowhere."""
    number = os.memfd_create("lowtide")
    try:
        os.ftruncate(number, mmap.PAGESIZE)
        with mmap.mmap(number, mmap.PAGESIZE) as sample:
            places = range(_FIRST_FIELD + _WORD, type(sample).__basicsize__, ctypes.sizeof(ctypes.c_int))
            found = [at for at in places if _is_copy_of(number, ctypes.c_int.from_address(id(sample) + at).value)]
    finally:
        os.close(number)
    return found[0] if len(found) == 1 else 0


def _is_copy_of(number: int, other: int) -> bool:
    """Return whether another descriptor is of the same file."""
    try:
        first, second = os.fstat(number), os.fstat(other)
    except OSError:
        return False
    return other != number and (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def files_at(addresses: Sequence[int]) -> list[str]:
    """Return the path of the file that is mapped at each address, without the kernel's ` (deleted)`; "" for none."""
    mapped = AddressMap(read_mappings())
    paths = ["" if (found := mapped.at(address)) is None else found.path for address in addresses]
    return [path.removesuffix(" (deleted)") if path.startswith("/") else "" for path in paths]


def files_of_database(connection: Any) -> list[str]:
    """Return the paths of the files that a `sqlite3.Connection` has opened or attached; none where nobody can tell."""
    extension: Any = loaded("_sqlite3")
    database = _word(id(connection) + _FIRST_FIELD) if _HEAD == _FIRST_FIELD and sys.version_info[:2] <= _LATEST else 0
    if not database or extension is None:
        return []
    try:
        # Of the very library that the connection is of, which a program may have several of.
        library: Any = ctypes.CDLL(getattr(extension, "__file__", None))
        file_of = library.sqlite3_db_filename
    except (OSError, AttributeError):
        return []
    file_of.argtypes, file_of.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_char_p
    names = _names_of_attached(library, database)
    return [os.fsdecode(path) for name in names if (path := file_of(database, name))]


def _names_of_attached(library: Any, database: int) -> Iterator[bytes]:
    name_of = getattr(library, "sqlite3_db_name", None)
    if name_of is None:  # before SQLite 3.39
        return iter([b"main"])
    name_of.argtypes, name_of.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_char_p
    return itertools.takewhile(bool, (name_of(database, turn) for turn in itertools.count()))


def defined_in_libraries(kinds: Sequence[type]) -> list[type]:
    """Return those of some classes that C code of a library defines, which is not Python's; none if nobody can tell.

    What frees an instance is a function in that library, and of every class of a `class` statement the same one.
    """
    if _deallocator(_First) != _deallocator(_Second) or _deallocator(_First) == _deallocator(int):
        return []
    pythons, *files = files_at([_deallocator(kind) for kind in (int, *kinds)])
    return [
        kind
        for kind, file in zip(kinds, files, strict=True)
        if file and pythons and file != pythons and not is_of_python(file)
    ]


class _First:
    pass


class _Second:
    pass


def _deallocator(kind: type) -> int:
    # Behind the head of an object with a number of items, its name, its size, and that of an item.
    return _word(id(kind) + _FIRST_FIELD + 4 * _WORD)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
