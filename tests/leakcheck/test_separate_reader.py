"""Snapshots that would hang or crash Python's unpickler: refused in one line by the process that asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lowtide.leakcheck.snapshots import allocator_snapshot as separate_reader
from lowtide.leakcheck.snapshots.allocator_snapshot import SnapshotError, read_apart, read_snapshot
from tests.leakcheck.torch_snapshots import FORWARD, LOAD, block, segment, written
from tests.waiting import HANG_S, wait_until

TWICE_ITSELF = b"K\x01\x94" + b"".join(b"0h%ch%c\x86\x94" % (turn, turn) for turn in range(60))
"""Opcodes of a tuple that has itself twice, sixty times over."""

NESTED = b"N" + b"\x85" * 3_000_000
"""Opcodes of tuples in each other."""


def with_key(folder: Path, key: bytes) -> Path:
    """A file of one dict, which hashes its key."""
    path = folder / "a.pickle"
    path.write_bytes(b"\x80\x04}" + key + b"Ns.")
    return path


def test_it_reads_what_the_reader_reads(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pickle", segment(block(8, LOAD), block(2, FORWARD), block(6, state="inactive")))
    assert read_apart(path) == read_snapshot(path)


def test_a_file_that_takes_years_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_reader, "_LEAST_SECONDS", 1)
    with pytest.raises(SnapshotError, match=r"a\.pickle: it takes more time than plain data of its size needs"):
        read_apart(with_key(tmp_path, TWICE_ITSELF))


def test_what_is_no_snapshot_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(SnapshotError) as here:
        read_snapshot(path)
    with pytest.raises(SnapshotError) as apart:
        read_apart(path)
    assert str(apart.value) == str(here.value)


def test_the_command_outlives_a_file_that_overflows_the_stack(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "lowtide", "snapshot", with_key(tmp_path, NESTED)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Python cannot read it, the process that tried ended with signal 11: refused" in done.stderr


def test_an_interrupt_ends_the_command_and_its_reader(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowtide", "snapshot", str(with_key(tmp_path, TWICE_ITSELF))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as asking:
        children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")
        wait_until(children.read_text)
        reader = children.read_text().strip()
        # At work, and no more starting up.
        wait_until(lambda: psutil.Process(int(reader)).cpu_times().user > 0.5)
        # As the terminal does: to all of its processes.
        os.killpg(asking.pid, signal.SIGINT)
        _, said = asking.communicate(timeout=HANG_S)
    assert (asking.returncode, "Traceback" in said) == (130, False)
    assert not Path(f"/proc/{reader}").exists()
