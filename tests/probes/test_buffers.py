"""The large buffers that Python objects own, wherever they lie."""

from __future__ import annotations

import array
import ctypes
import io
import mmap
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch

from lowtide.probes.memory.buffers import large_buffers
from tests.probes.in_both_ways import in_both_ways
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly

MIB = 1 << 20


class Kept:
    held: Any = None


_way = in_both_ways("owned_by_all")


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    Kept.held = None


def sizes() -> list[int]:
    """Bytes of what is found, of what these tests make: of sizes that nothing else has."""
    return sorted(found.bytes for found in large_buffers() if found.bytes % MIB == 4096)


class Odd(np.ndarray):  # type: ignore[type-arg]
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")


class OddBytes(bytes):
    def __len__(self) -> int:
        raise AssertionError("its length was asked for")


def numbers(size: int) -> Any:
    return np.ones(size // 8)


SIZE = 2 * MIB + 4096


def mapped_without_name(number: int) -> Any:
    os.ftruncate(number, SIZE)
    mapped = mmap.mmap(number, SIZE)
    os.close(number)
    return mapped


def number_of_removed() -> int:
    number, path = tempfile.mkstemp(dir="/dev/shm")
    Path(path).unlink()
    return number


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(SIZE),
        lambda: numbers(SIZE)[5:90],
        lambda: numbers(SIZE).reshape(2, -1).T[1:],
        lambda: numbers(SIZE).view(Odd),
        lambda: np.frombuffer(bytes(SIZE), dtype=np.int8),
        lambda: np.empty(SIZE // 8, dtype=object),
        lambda: bytes(SIZE),
        lambda: OddBytes(bytes(SIZE)),
        lambda: bytearray(SIZE),
        lambda: array.array("d", bytes(SIZE)),
        lambda: mmap.mmap(-1, SIZE),
        lambda: mapped_without_name(os.memfd_create("lowtide_test")),
        lambda: mapped_without_name(number_of_removed()),
        lambda: ctypes.create_string_buffer(SIZE),
        lambda: (ctypes.c_double * (SIZE // 8))(),
        lambda: np.frombuffer(ctypes.create_string_buffer(SIZE), dtype=np.int8),
        # Of these the array of bytes owns it.
        lambda: (ctypes.c_char * SIZE).from_buffer(bytearray(SIZE)),
    ],
)
@pytest.mark.parametrize("hide", [lambda item: item, lambda item: {"a": ({"b": (item,)}, 1)}, lambda item: [[item]]])
def test_what_owns_memory_is_found_with_its_size(make: Any, hide: Any) -> None:
    Kept.held = hide(make())
    assert sizes() == [SIZE]


def mapped_file(folder: Path) -> Any:
    path = folder / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def closed_map(folder: Path) -> Any:
    closed = mmap.mmap(-1, SIZE)
    closed.close()
    return closed


@pytest.mark.parametrize(
    "make",
    [
        mapped_file,
        closed_map,
        # What a tensor owns is counted with the tensors.
        lambda folder: torch.ones(SIZE // 4).numpy(),
        lambda folder: bytes(4096),
        lambda folder: (ctypes.c_char * SIZE).from_address(ctypes.addressof(ctypes.c_int())),
    ],
)
def test_what_owns_no_memory_of_its_own_is_left_out(make: Any, tmp_path: Path) -> None:
    Kept.held = make(tmp_path)
    assert sizes() == []


def test_what_only_a_function_that_runs_has_is_found_until_it_returns() -> None:
    is_made, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        held = bytearray(SIZE)
        is_made.set()
        may_end.wait(HANG_S)
        held.clear()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_made.wait(HANG_S)
    found = sizes()
    may_end.set()
    thread.join()
    assert (found, sizes()) == ([SIZE], [])


def test_one_that_lies_in_several_places_is_found_once() -> None:
    one = numbers(SIZE)
    Kept.held = [one, {"again": one}, one[3:]]
    assert sizes() == [SIZE]


class Named(io.BytesIO):
    """A file with bytes of its own besides."""

    name: bytes


@pytest.mark.parametrize("rewound", [False, True])
def test_a_file_in_memory_has_its_bytes_itself_and_what_it_shares_is_its_owners(*, rewound: bool) -> None:
    file, shared = Named(), bytes(SIZE)
    file.write(bytes(SIZE + MIB))
    file.name = bytes(SIZE + 2 * MIB)
    if rewound:
        file.seek(0)
    Kept.held = [file, shared, io.BytesIO(shared)]
    del shared, file
    found = {type(each.item): [] for each in large_buffers()}
    for each in large_buffers():
        found[type(each.item)].append(each.bytes // MIB)
    assert found[Named] == [(SIZE + MIB) // MIB]
    assert io.BytesIO not in found
    assert {(SIZE + 2 * MIB) // MIB, SIZE // MIB} <= set(found[bytes])
    assert (SIZE + MIB) // MIB not in found[bytes]


def test_what_c_code_of_a_library_says_of_its_objects_is_told() -> None:
    # As of pyarrow's tables: this library is smaller.
    pattern = regex.compile("|".join(f"a{turn}b*c{turn}" for turn in range(3000)))
    # The library's own cache would keep it.
    regex.purge()
    size, identity = sys.getsizeof(pattern), id(pattern)
    Kept.held = {"patterns": [pattern]}
    # What a function that runs has is found in another way.
    del pattern
    (found,) = [found for found in large_buffers() if id(found.item) == identity]
    assert found.bytes == size > MIB
