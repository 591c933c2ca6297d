"""Which libraries a process maps, as the kernel lists them."""

from __future__ import annotations

import _ctypes  # noqa: F401 - from the folder `lib-dynload`
import os
import subprocess
from pathlib import Path

from lowtide.probes.processes.mapped_files import maps_library


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
