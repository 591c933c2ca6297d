"""Which libraries and which shared memory a process maps, as the kernel lists them."""

from __future__ import annotations

import _ctypes  # noqa: F401 - from the folder `lib-dynload`
import mmap
import os
import subprocess
from pathlib import Path

from lowtide.probes.processes.mapped_files import mapped_shared_memory, maps_library


def test_a_library_is_found_by_a_part_of_its_name() -> None:
    assert maps_library(os.getpid(), "libc.so") or maps_library(os.getpid(), "libc-")
    assert not maps_library(os.getpid(), "libnobodyhasthis")


def test_a_folder_of_that_name_is_none() -> None:
    assert "/lib-dynload/" in Path("/proc/self/maps").read_text()
    assert not maps_library(os.getpid(), "lib-dynload")


def test_a_process_that_has_ended_maps_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not maps_library(process.pid, "libc")


def mapped(name: str) -> list[tuple[str, int]]:
    found = mapped_shared_memory(os.getpid())
    assert found is not None
    return [(each.path, each.bytes) for each in found if name in each.path]


def test_files_without_a_name_are_told_and_private_mappings_are_not(tmp_path: Path) -> None:
    file = os.memfd_create("lowtide-test-bucket")
    os.ftruncate(file, 8192)
    (tmp_path / "lowtide-test-bucket").write_bytes(bytes(8192))
    with (tmp_path / "lowtide-test-bucket").open("r+b") as ordinary:
        others = [mmap.mmap(file, 8192, flags=mmap.MAP_PRIVATE), mmap.mmap(ordinary.fileno(), 8192)]
    assert mapped("lowtide-test-bucket") == []
    # Twice the same file is one, with the bytes of both.
    mappings = [mmap.mmap(file, 8192) for _ in range(2)]
    os.close(file)
    assert mapped("lowtide-test-bucket") == [("/memfd:lowtide-test-bucket (deleted)", 16384)]
    for mapping in (*mappings, *others):
        mapping.close()
    assert mapped("lowtide-test-bucket") == []
