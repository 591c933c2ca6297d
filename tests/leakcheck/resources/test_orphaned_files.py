"""Which entries of /dev/shm this process made, noted while they are made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from lowtide.leakcheck.resources.orphaned_files import OwnSegments

posixshmem = pytest.importorskip("_posixshmem")


@pytest.fixture
def segments() -> Iterator[OwnSegments]:
    segments = OwnSegments()
    segments.start()
    yield segments
    segments.stop()


def made(name: str | None = None) -> str:
    """The name of a segment that was made, closed and unlinked."""
    memory = shared_memory.SharedMemory(name, create=True, size=4096)
    memory.close()
    memory.unlink()
    return memory.name.lstrip("/")


def test_what_is_made_is_noted_as_the_folder_lists_it(segments: OwnSegments) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        (name,) = segments.names
        assert Path("/dev/shm", name).exists()
    finally:
        memory.close()
        memory.unlink()


def test_what_is_made_under_a_given_name_is_noted(segments: OwnSegments) -> None:
    assert segments.names == {made("lowtide-of-a-test")}


def test_what_is_only_opened_is_not() -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    segments = OwnSegments()
    segments.start()
    try:
        shared_memory.SharedMemory(memory.name).close()
        assert segments.names == set()
    finally:
        segments.stop()
        memory.close()
        memory.unlink()


def test_what_another_process_makes_is_not(segments: OwnSegments) -> None:
    code = (
        "from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=1); m.close(); m.unlink()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert segments.names == set()


def test_one_that_exists_already_is_not_made_by_trying(segments: OwnSegments) -> None:
    path = Path("/dev/shm/lowtide-of-a-test")
    path.touch()
    try:
        with pytest.raises(FileExistsError):
            shared_memory.SharedMemory(path.name, create=True, size=4096)
        assert segments.names == set()
    finally:
        path.unlink()


def test_before_the_start_and_after_the_stop_nothing_is_noted() -> None:
    segments = OwnSegments()
    made()
    segments.start()
    segments.stop()
    made()
    assert segments.names == set()


def test_started_and_stopped_twice_it_leaves_python_as_it_was() -> None:
    before = posixshmem.shm_open
    segments = OwnSegments()
    for _ in range(2):
        segments.start()
    name = made()
    for _ in range(2):
        segments.stop()
    assert posixshmem.shm_open is before
    assert segments.names == {name}


def test_of_two_that_nest_each_notes(segments: OwnSegments) -> None:
    inner = OwnSegments()
    inner.start()
    first = made()
    inner.stop()
    second = made()
    assert inner.names == {first}
    assert segments.names == {first, second}
