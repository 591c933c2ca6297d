"""The file of a kept heap: a zip archive of `meta.json` and of one `.npy` for each array, without pickles.

`meta.json` is `Meta`. The arrays are those of `HeapCopy` by their names, little-endian, with one dimension. Both have
what a path in a report has, names of types, attributes and modules, and keys of dicts; no value, and no contents.

Whatever such a file is by the time that it is read, it is checked as a whole: what is asked of it then never fails.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec

from lowtide.probes.heap.heap_copy import HeapCopy
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import os, sys, time
from lowtide.reports.reading.json_files import UnreadableError, decode_json, plain, read_bounded
from lowtide.reports.schema import ReportError, json_bytes

FORMAT = "lowtide-heap/1"

FOLDER = "heaps"
"""Where they are, in a report's folder."""

SUFFIX = ".heap.npz"

_ARRAYS = {
    "kinds": "<i4",
    "sizes": "<i8",
    "flags": "|u1",
    "turns": "|u1",
    "counts": "<i4",
    "edges": "<i4",
    "labels": "<i4",
    "namespaces": "<i4",
    "modules": "<i4",
}
_META = "meta.json"
_MOST_UNPACKED = 8 << 30
_FAST = 1
_LONGEST = 200
_FORMATS = re.compile(r"lowtide-heap/(\d{1,9})")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a kept heap has beside its arrays.

    Attributes:
        format: `lowtide-heap/1`.
        version: of the lowtide that has written it.
        python: of the process.
        subject: the test, block or life after which it was kept.
        time: when that was, in seconds since 1970.
        types: as those of `HeapCopy`.
        registries: likewise.
        roots: likewise.
        texts: likewise.
    """

    format: str
    version: str
    python: str
    subject: str
    time: float
    types: tuple[str, ...]
    registries: tuple[int, ...]
    roots: tuple[tuple[int, str, str, str], ...]
    texts: tuple[str, ...]


class _Head(msgspec.Struct):
    """The two fields that every version has; others are passed over."""

    format: str
    version: str = ""


class KeptHeap(msgspec.Struct, frozen=True):
    """A heap that was read from a file, and what is known of where it is from."""

    meta: Meta
    heap: HeapCopy


def file_name(subject: str) -> str:
    """Return the name of the file of what is kept after a test or a life, in `heaps/`."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", subject).strip("-")
    return f"{words[-_LONGEST:]}{SUFFIX}"


def kept_files(report: Path) -> list[Path]:
    """Return those of the report in a folder."""
    return sorted((report / FOLDER).glob(f"*{SUFFIX}"))


def remove_old(report: Path) -> None:
    """Take those of an earlier run away; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for old in kept_files(report):
            old.unlink(missing_ok=True)


def write_heap(heap: HeapCopy, folder: str, name: str, subject: str, version: str) -> None:
    """Write a heap, the file as a whole or not at all.

    Args:
        heap: the heap.
        folder: where to; it is made where it is missing in one that is there.
        name: of the file.
        subject: after which test, block or life it was taken.
        version: lowtide's.

    Raises:
        ReportError: it cannot be written.
    """
    meta = Meta(
        format=FORMAT,
        version=version,
        python=sys.version.partition(" ")[0],
        subject=subject,
        time=time.time(),
        types=heap.types,
        registries=heap.registries,
        roots=heap.roots,
        texts=heap.texts,
    )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        _add(archive, _META, json_bytes(meta))
        for part, kind in _ARRAYS.items():
            array = io.BytesIO()
            np.lib.format.write_array(array, getattr(heap, part).astype(kind, copy=False), allow_pickle=False)
            _add(archive, f"{part}.npy", array.getvalue())
    path = f"{folder}/{name}"
    partial = f"{path}.partial"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        try:
            number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                left = data.getbuffer()
                while left:
                    left = left[os.write(number, left) :]
            finally:
                os.close(number)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    # With a date of its own: the clock may be one that a test has set.
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data, compresslevel=_FAST)


def read_heap(path: Path) -> KeptHeap:
    """Read a kept heap.

    Raises:
        UnreadableError: it is none, is cut off, damaged or of a newer version, or contradicts itself; the message says
            why, in one line, and does not name the file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(read_bounded(path))) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST_UNPACKED:
                raise UnreadableError(f"would be larger than {_MOST_UNPACKED >> 30} GiB: it is not read")
            meta = _meta(archive.read(_META))
            arrays = {name: _array(archive.read(f"{name}.npy"), kind) for name, kind in _ARRAYS.items()}
    except UnreadableError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError, RuntimeError) as error:
        why = plain(str(error) or type(error).__name__)
        raise UnreadableError(
            f"is not a {FORMAT} file, or is damaged: {why}: name one that --keep-heap has written"
        ) from error
    heap = HeapCopy(meta.types, meta.registries, meta.roots, meta.texts, **arrays)
    if not _is_whole(heap):
        raise UnreadableError(f"is a damaged {FORMAT} file: it contradicts itself: copy it again")
    return KeptHeap(meta, heap)


def _meta(data: bytes) -> Meta:
    head = decode_json(data, _Head)
    written = _FORMATS.fullmatch(head.format)
    if written is None:
        raise UnreadableError(f"is not a {FORMAT} file: its format is {plain(repr(head.format))}")
    if head.format != FORMAT:
        by = f" by lowtide {plain(head.version)}" if head.version else ""
        age = "newer" if int(written[1]) > 1 else "older"
        raise UnreadableError(
            f"was written{by} as {written[0]}, which is {age} than {FORMAT}: read it with a lowtide that knows it"
        )
    return decode_json(data, Meta)


def _array(data: bytes, kind: str) -> Any:
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version of the format")
    shape, _, found = np.lib.format.read_array_header_1_0(file)
    size = len(data) - file.tell()
    if found.str != kind or len(shape) != 1 or shape[0] * found.itemsize != size:
        raise ValueError(f"an array of {found} with shape {shape} in {size} bytes")
    return np.frombuffer(data, found, offset=file.tell())


def _is_whole(heap: HeapCopy) -> bool:
    """Return whether all that arrays say of each other is there."""
    nodes, edges = len(heap.kinds), len(heap.edges)
    roots = np.array([root[0] for root in heap.roots], np.int64)
    places = np.array(heap.registries, np.int64)
    return bool(
        {len(heap.sizes), len(heap.flags), len(heap.turns), len(heap.counts)} == {nodes}
        and len(heap.labels) == edges
        and len(heap.namespaces) == len(heap.modules)
        and int(heap.counts.sum(dtype=np.int64)) == edges
        and _are_within(heap.counts, 0, edges + 1)
        and _are_within(heap.kinds, 0, len(heap.types))
        and _are_within(places, 0, len(heap.types))
        and _are_within(heap.labels, -(1 << 31), len(heap.texts))
        and all(_are_within(some, 0, nodes) for some in (heap.edges, heap.namespaces, heap.modules, roots))
        and _are_within(heap.sizes, 0, 1 << 62)
        and float(heap.sizes.sum(dtype=np.float64)) < 1 << 62
    )


def _are_within(numbers: Any, least: int, end: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= least and numbers.max() < end)
