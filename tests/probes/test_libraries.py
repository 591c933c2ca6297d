"""Which libraries' code is in memory: pages of a planted library that are touched, and those that are not."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.probes.host.readings import resident_code

# Of several pages that the kernel maps at once, which may have 2 MiB.
SIZE = 16 << 20
CODE = mmap.PROT_READ | mmap.PROT_EXEC
PATTERN = r"libplanted\.so[.\d]*"


@contextlib.contextmanager
def mapped(path: Path, protection: int = CODE) -> Iterator[mmap.mmap]:
    """A file mapped as the loader maps a library's code."""
    if not path.exists():
        path.write_bytes(bytes(SIZE))
    with path.open("rb") as file:
        try:
            memory = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=protection)
        except PermissionError:
            pytest.skip("the folder for temporary files allows no code")
        with memory:
            yield memory


def touch(memory: mmap.mmap, size: int = SIZE) -> None:
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset]


def test_code_that_was_run_is_in_memory(tmp_path: Path) -> None:
    with mapped(tmp_path / "libplanted.so.1") as memory:
        touch(memory)
        assert resident_code(PATTERN) == {"libplanted.so.1": SIZE}
    assert resident_code(PATTERN) == {}


def test_code_that_was_not_run_is_not(tmp_path: Path) -> None:
    with mapped(tmp_path / "libplanted.so.1"):
        assert resident_code(PATTERN) == {"libplanted.so.1": 0}


def test_of_code_that_was_run_in_part_a_part_is(tmp_path: Path) -> None:
    with mapped(tmp_path / "libplanted.so.1") as memory:
        touch(memory, SIZE // 4)
        assert SIZE // 4 <= resident_code(PATTERN)["libplanted.so.1"] < SIZE


def test_data_is_no_code(tmp_path: Path) -> None:
    with mapped(tmp_path / "libplanted.so.1", mmap.PROT_READ) as memory:
        touch(memory)
        assert resident_code(PATTERN) == {}


@pytest.mark.parametrize("name", ["libplanted.so.1.bak", "mylibplanted.so", "libplanted-of-mine.so"])
def test_a_name_that_only_resembles_the_pattern_is_another_s(tmp_path: Path, name: str) -> None:
    with mapped(tmp_path / name) as memory:
        touch(memory)
        assert resident_code(PATTERN) == {}


def test_a_folder_s_name_is_not_the_library_s(tmp_path: Path) -> None:
    (tmp_path / "libplanted.so").mkdir()
    with mapped(tmp_path / "libplanted.so" / "other.so") as memory:
        touch(memory)
        assert resident_code(PATTERN) == {}


def test_a_path_with_spaces_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    with mapped(tmp_path / "a folder" / "libplanted.so") as memory:
        touch(memory)
        assert resident_code(PATTERN) == {"libplanted.so": SIZE}


def test_the_parts_of_one_library_add_up_and_others_are_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "libplanted.so.1", tmp_path / "libplanted.so.2"
    with mapped(first) as one, mapped(first) as another, mapped(second) as other:
        for memory in (one, another, other):
            touch(memory)
        assert resident_code(PATTERN) == {first.name: 2 * SIZE, second.name: SIZE}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of a loader that maps libc.so.6")
def test_a_library_that_everything_uses_is_in_memory() -> None:
    assert resident_code(r"libc\.so\.6|ld-musl-.*").popitem()[1] > 0
