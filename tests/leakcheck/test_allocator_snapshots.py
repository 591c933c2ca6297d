"""Snapshots of torch's allocator: read without running anything, summed by stack and pool, and compared."""

from __future__ import annotations

import os
import pickle
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, SnapshotError, read_snapshot
from lowtide.leakcheck.snapshots.comparison import compare

MIB = 1 << 20
PROTOCOLS = (2, 3, 4, 5)


def frame(function: str, line: int = 1, file: str = "/srv/model.py") -> dict[str, Any]:
    return {"name": function, "filename": file, "line": line}


FORWARD = [frame("empty", 0, "??"), frame("forward", 12), frame("step", 40)]
LOAD = [frame("load_weights", 7), frame("<module>", 90)]


def block(size: int, frames: Sequence[dict[str, Any]] | None = None, state: str = "active_allocated") -> dict[str, Any]:
    return {
        "size": size * MIB,
        "requested_size": size * MIB,
        "state": state,
        "address": 0,
        "frames": list(frames or ()),
    }


def segment(*blocks: dict[str, Any], device: int = 0, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    size = sum(each["size"] for each in blocks)
    return {"device": device, "total_size": size, "segment_pool_id": pool, "stream": 0, "blocks": list(blocks)}


def history(entries: int) -> list[list[dict[str, Any]]]:
    return [[{"action": "alloc", "addr": turn, "size": 512, "frames": LOAD} for turn in range(entries)]]


def written(path: Path, *segments: dict[str, Any], protocol: int = 4, entries: int = 3, **more: Any) -> Path:
    whole = {"segments": list(segments), "device_traces": history(entries), "allocator_settings": {}, **more}
    path.write_bytes(pickle.dumps(whole, protocol=protocol))
    return path


def read(*segments: dict[str, Any], path: Path, **more: Any) -> AllocatorSnapshot:
    return read_snapshot(written(path, *segments, **more))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_blocks_in_use_are_summed_by_the_stack_that_allocated_them(tmp_path: Path, protocol: int) -> None:
    snapshot = read(
        segment(
            block(8, LOAD), block(4, FORWARD), block(2, FORWARD, "active_pending_free"), block(6, state="inactive")
        ),
        segment(block(1, FORWARD), device=1),
        segment(block(3)),
        path=tmp_path / "a.pickle",
        protocol=protocol,
    )
    rows = [(each.device, each.text, each.bytes // MIB, each.count) for each in snapshot.survivors]
    assert rows == [
        ("cuda:0", "load_weights, model.py:7", 8, 1),
        ("cuda:0", "forward, model.py:12", 6, 2),
        ("cuda:0", "no stack was recorded", 3, 1),
        ("cuda:1", "forward, model.py:12", 1, 1),
    ]
    # The same leak on another card is the same leak.
    assert snapshot.survivors[1].fingerprint == snapshot.survivors[3].fingerprint
    assert len({each.fingerprint for each in snapshot.survivors}) == 3


def test_the_fingerprint_of_a_stack_goes_without_its_lines(tmp_path: Path) -> None:
    marks = {
        read(segment(block(1, [frame("forward", line)])), path=tmp_path / "a.pickle").survivors[0].fingerprint
        for line in (12, 13)
    }
    assert len(marks) == 1


def test_free_memory_is_told_by_pool(tmp_path: Path) -> None:
    snapshot = read(
        segment(block(4, LOAD), block(6, state="inactive")),
        segment(block(10, state="inactive")),
        segment(block(3, LOAD), block(1, state="inactive"), pool=(0, 5)),
        path=tmp_path / "a.pickle",
    )
    default, graphs = snapshot.pools
    sizes = (default.reserved, default.used, default.free, default.largest_free, default.empty)
    assert [size // MIB for size in sizes] == [20, 4, 16, 10, 10]
    assert default.fragmentation == pytest.approx(6 / 16)
    assert (graphs.id, graphs.segments, graphs.fragmentation) == ((0, 5), 1, 0.0)


def test_a_list_of_segments_and_blocks_of_old_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "segments.pickle"
    old = {"size": MIB, "state": "active_allocated", "history": [{"addr": 1, "real_size": 1, "frames": FORWARD}]}
    path.write_bytes(pickle.dumps([{"device": 0, "total_size": MIB, "blocks": [old]}]))
    (only,) = read_snapshot(path).survivors
    assert only.text == "forward, model.py:12"


def test_a_text_that_looks_like_the_history_is_no_history(tmp_path: Path) -> None:
    # The bytes before a key of that name, inside a text.
    odd = frame("odd", 1, "/srv/\x8c\rdevice_traces.py")
    snapshot = read(segment(block(1, [odd])), path=tmp_path / "a.pickle", device_tracesX="\x8c\rdevice_traces")
    assert [each.count for each in snapshot.survivors] == [1]


def test_the_history_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    # 40 MiB of history, 5 times as much as objects.
    path = written(tmp_path / "a.pickle", segment(block(1, LOAD)), entries=400_000)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from lowtide.leakcheck.snapshots.allocator_snapshot import read_snapshot\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert read_snapshot(Path(sys.argv[1])).survivors\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < path.stat().st_size * 2


def test_cycles_are_compared_by_stack_and_card(tmp_path: Path) -> None:
    cycles = [
        read(segment(block(8, LOAD), block(turn + 1, FORWARD)), *extra, path=tmp_path / f"{turn}.pickle")
        for turn, extra in enumerate([(segment(block(2)),), (), (segment(block(1, LOAD), device=1),)])
    ]
    compared = compare(cycles)
    rows = [(each.survivors.text, [size // MIB for size in each.bytes], each.trend) for each in compared]
    assert sorted(rows) == [
        ("forward, model.py:12", [1, 2, 3], "grown"),
        ("load_weights, model.py:7", [0, 0, 1], "new"),
        ("no stack was recorded", [2, 0, 0], "gone"),
    ]
    assert [each.survivors.text for each in compared if each.grows_always] == ["forward, model.py:12"]
    assert compare(cycles[:1] * 2) == []


def test_ranks_are_compared_whatever_the_numbers_of_their_cards(tmp_path: Path) -> None:
    ranks = [
        read(segment(block(8, LOAD), block(size, FORWARD), device=rank), path=tmp_path / f"{rank}.pickle")
        for rank, size in enumerate((4, 9, 4))
    ]
    (only,) = compare(ranks, by_rank=True)
    assert (only.survivors.text, only.spread // MIB, [size // MIB for size in only.bytes]) == (
        "forward, model.py:12",
        5,
        [4, 9, 4],
    )


class Runs:
    """Its pickle calls a function when it is read by an ordinary unpickler."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("where", ["segments", "after", "inside"])
def test_what_would_run_is_refused_by_its_name(tmp_path: Path, protocol: int, where: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / "a.pickle"
    runs = Runs(mark)
    good = [segment(block(1, LOAD))]
    whole = {
        "segments": {"segments": runs, "device_traces": []},
        "after": {"segments": good, "settings": runs},
        "inside": [segment({**block(1), "frames": [{**frame("f"), "line": runs}]})],
    }[where]
    path.write_bytes(pickle.dumps(whole, protocol=protocol))
    pickle.loads(path.read_bytes())
    mark.rmdir()
    module = os.mkdir.__module__
    with pytest.raises(SnapshotError, match=re.escape(f"{path}: it asks for {module}.mkdir, and a snapshot needs")):
        read_snapshot(path)
    assert not mark.exists()


def test_what_would_run_in_the_history_is_not_even_looked_at(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment(block(1, LOAD))], "device_traces": Runs(mark)}))
    assert len(read_snapshot(path).survivors) == 1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read|cut off"),
        (b"not a pickle", "cut off, or no pickle of plain data"),
        (pickle.dumps({"segments": [segment(block(1))]})[:-20], "cut off"),
        (pickle.dumps({"weights": 1}), "no segments"),
        (pickle.dumps([1, 2]), "not as torch writes it"),
        (
            pickle.dumps({"segments": [{"device": 0, "total_size": 1}]}),
            r"not as torch writes it \(KeyError: 'blocks'\)",
        ),
        # A persistent identifier; a text of 2^62 bytes; an entry of the memo far away.
        (b"\x80\x04K\x01Q.", "refers to objects outside of the file"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x3f.", "."),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "asks for more memory|cut off|no segments"),
    ],
)
def test_a_file_that_is_no_snapshot_is_one_clear_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(SnapshotError, match=said) as raised:
        read_snapshot(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"none\.pickle cannot be read: No such file or directory"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(SnapshotError, match="cannot be read: "):
        read_snapshot(tmp_path)


SMALL = pickle.dumps({"segments": [segment(block(1, LOAD), block(2, FORWARD))], "device_traces": history(2)})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(SMALL) - 1), bytes_=st.binary(max_size=4), cut=st.integers(0, 8))
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, place: int, bytes_: bytes, cut: int) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(SMALL[:place] + bytes_ + SMALL[place + cut :])
    began = time.monotonic()
    # Nothing else comes out.
    with suppress(SnapshotError):
        read_snapshot(path)
    assert time.monotonic() - began < 20


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", "snapshot", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})


def test_the_command_shows_one_file_and_the_differences_of_several(tmp_path: Path) -> None:
    one = written(tmp_path / "one.pickle", segment(block(8, LOAD), block(6, state="inactive")))
    two = written(tmp_path / "two.pickle", segment(block(8, LOAD), block(5, FORWARD)))
    alone = run(one)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert re.search(r"cuda:0\s+default\s+1\s+14\.0\s+8\.0\s+6\.0\s+6\.0\s+0\.0\s+0%", alone.stdout)
    assert re.search(r"cuda:0\s+[0-9a-f]{16}\s+load_weights, model\.py:7\s+8\.0\s+1", alone.stdout)
    assert "  load_weights, /srv/model.py:7" in alone.stdout
    both = run(one, two)
    assert re.search(r"[0-9a-f]{16}\s+forward, model\.py:12\s+0\.0\s+5\.0\s+5\.0 new", both.stdout)
    assert "load_weights" not in both.stdout.partition("What differs")[2]
    ranks = run("--by", "rank", one, one)
    assert "in use is the same in all of them, stack by stack" in ranks.stdout


def test_the_command_refuses_what_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    done = run(path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "os.system" in done.stderr
