"""Which library defines a native function."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest

from lowtide.probes.host.native_symbols import defining_library, loaded_libraries

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")

FIRST = "static int grow(int n) { return n + 1; } int encode_batch(int n) { return grow(n) + grow(n + 1); }"
SECOND = "int encode_batch(int n); int serve(int n) { return encode_batch(n) + 1; }"


def compiled(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.c").write_text(text)
    file = folder / f"{name}.so"
    subprocess.run(["cc", "-O0", "-shared", "-fPIC", "-o", file, f"{name}.c"], cwd=folder, check=True)
    return str(file)


def test_the_library_is_the_one_that_defines_it_and_not_one_that_uses_it(tmp_path: Path) -> None:
    first, second = compiled(tmp_path, "first", FIRST), compiled(tmp_path, "second", SECOND)
    assert defining_library(["encode_batch", "serve"], [second, first]) == (first, ["encode_batch"])
    assert defining_library(["serve", "encode_batch"], [second, first]) == (second, ["serve"])


def test_functions_of_one_file_alone_are_found_too(tmp_path: Path) -> None:
    first = compiled(tmp_path, "first", FIRST)
    assert defining_library(["other", "grow"], [first]) == (first, ["grow"])


def test_the_end_of_a_longer_name_is_no_function(tmp_path: Path) -> None:
    first = compiled(tmp_path, "first", FIRST)
    assert defining_library(["batch"], [first]) == ("", [])


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"not a library"])
def test_what_is_no_library_defines_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(content)
    assert defining_library(["grow"], [str(tmp_path / "broken.so"), str(tmp_path / "gone.so")]) == ("", [])


def test_of_what_is_loaded_python_and_the_c_runtime_are_left_out() -> None:
    names = [Path(file).name for file in loaded_libraries(os.getpid())]
    assert any("_multiarray_umath" in name for name in names), numpy.__name__
    assert not [name for name in names if name.startswith(("libc.", "libpython", "_ctypes", "ld-linux"))]
