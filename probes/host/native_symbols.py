"""Which of the libraries that a process has loaded defines a native function, by their tables of symbols."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence

from lowtide.probes.mappings import read_mappings
from lowtide.probes.objects.described import is_of_python
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import os, sys

_RUNTIME = re.compile(
    r"(?:libpython|(?:ld-linux|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libc\+\+|libffi)\b)"
)
"""Through these every allocation goes, or every call: none of them decides that memory is kept."""

_SECTION = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("address", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("align", "<u8"),
        ("entry", "<u8"),
    ]
)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
"""`Elf64_Shdr` and `Elf64_Sym`, see elf(5)."""

_TABLES = (2, 11)
"""The types of sections that have symbols: all of them, and those for the dynamic linker."""

_UNDEFINED = 0
"""The section of a symbol that another library defines."""


def loaded_libraries(pid: int) -> tuple[str, ...]:
    """Return the files with code that a process has loaded, but for those of Python and of the C runtime.

    Raises:
        OSError: its maps cannot be read.
    """
    files = dict.fromkeys(each.path for each in read_mappings(pid, " r-xp ") if "/" in each.path)
    program = os.path.realpath(sys.executable)
    return tuple(
        file for file in files if file != program and not (is_of_python(file) or _RUNTIME.match(os.path.basename(file)))
    )


def defining_library(symbols: Sequence[str], libraries: Iterable[str]) -> tuple[str, list[str]]:
    """Return the library that defines the first of some functions that any of them defines, and those that it defines.

    Args:
        symbols: the names of functions, as their library has them.
        libraries: files.
    """
    first, found = len(symbols), ("", list[str]())
    for library in libraries:
        earliest = next(_defined(symbols[:first], library), None)
        if earliest is not None:
            first = symbols.index(earliest)
            found = (library, list(_defined(symbols, library)))
    return found


def _defined(symbols: Sequence[str], library: str) -> Iterator[str]:
    try:
        number = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(number, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(number)
        with mapped:
            yield from _defined_in(mapped, symbols)
    except (OSError, ValueError, IndexError, struct.error):
        return  # gone, or no ELF file of 64 bits


def _defined_in(mapped: mmap.mmap, symbols: Sequence[str]) -> Iterator[str]:
    if mapped[:6] != b"\x7fELF\x02\x01":
        return
    (start,) = struct.unpack_from("<Q", mapped, 40)
    size, count = struct.unpack_from("<HH", mapped, 58)
    if size != _SECTION.itemsize:
        return
    sections = np.frombuffer(mapped[start : start + size * count], _SECTION)
    tables = [each for each in sections if each["type"] in _TABLES]
    for symbol in symbols:
        if any(_defines(mapped, table, sections[table["link"]], symbol.encode() + b"\0") for table in tables):
            yield symbol


def _defines(mapped: mmap.mmap, table: np.void, strings: np.void, name: bytes) -> bool:
    start, size = int(strings["offset"]), int(strings["size"])
    at, places = mapped.find(name, start, start + size), list[int]()
    # A name may be the end of a longer one: linkers share it.
    while at >= 0:
        places.append(at - start)
        at = mapped.find(name, at + 1, start + size)
    if not places:
        return False
    offset = int(table["offset"])
    entries = np.frombuffer(mapped[offset : offset + int(table["size"])], _SYMBOL)
    return bool(np.any(np.isin(entries["name"], places) & (entries["section"] != _UNDEFINED)))
