"""What commands print, where it cannot be encoded, written or read: they end as they do on any terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from lowtide.reports import schema
from tests.reports.small_reports import LIFE, finding, report, subject

pytestmark = pytest.mark.nightly

REPORT = [sys.executable, "-m", "lowtide", "report"]
FULL = "lowtide: the output cannot be written: No space left on device\n"


@pytest.fixture
def leaking(tmp_path: Path) -> Path:
    """A report folder with a leak whose holder has letters that ASCII has not."""
    found = msgspec.structs.replace(finding(), message="held by modèle → 模型")
    schema.write(report(subject(found, stages=LIFE)), tmp_path / "leak")
    return tmp_path / "leak"


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    schema.write(report(subject(stages=LIFE)), tmp_path / "clean")
    return tmp_path / "clean"


def run(
    *words: object, stdout: int | IO[Any] = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **environment}
    return subprocess.run([*REPORT, *map(str, words)], stdout=stdout, stderr=subprocess.PIPE, env=environment)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "utf-8"}, "modèle → 模型".encode()),
        ({"PYTHONIOENCODING": "latin-1"}, "modèle -> \\u6a21\\u578b".encode("latin-1")),
        ({"PYTHONIOENCODING": "ascii"}, rb"mod\xe8le -> \u6a21\u578b"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, rb"mod\xe8le -> \u6a21\u578b"),
    ],
    ids=["utf-8", "latin-1", "ascii", "locale C"],
)
def test_what_an_encoding_does_not_have_is_spelled(leaking: Path, environment: dict[str, str], shown: bytes) -> None:
    done = run(leaking, **environment)
    assert (done.returncode, done.stderr) == (1, b"")
    assert shown in done.stdout


def test_output_that_cannot_be_written_is_one_line(leaking: Path, clean: Path) -> None:
    with Path("/dev/full").open("w") as full:
        red, green = run(leaking, stdout=full), run(clean, stdout=full)
    # That something leaks is known all the same; a green that nobody can read is none.
    assert (red.returncode, red.stderr.decode()) == (1, FULL)
    assert (green.returncode, green.stderr.decode()) == (2, FULL)


def test_the_verdict_stays_where_the_reader_goes_away(leaking: Path, clean: Path) -> None:
    for folder, code in ((leaking, 1), (clean, 0)):
        read, write = os.pipe()
        os.close(read)
        try:
            done = run(folder, stdout=write)
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_streams_that_are_closed_are_no_error(clean: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *REPORT, str(clean)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
