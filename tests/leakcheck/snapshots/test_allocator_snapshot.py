"""Snapshots of torch's allocator: read without running anything, summed by stack and pool, and compared.

Those that would hang or crash Python's unpickler are refused in one line by the process that asked for them.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.leakcheck.snapshots import allocator_snapshot
from lowtide.leakcheck.snapshots.allocator_snapshot import SnapshotError, compare, read_apart, read_snapshot, texts_of
from tests.leakcheck.snapshots.torch_snapshots import (
    FORWARD,
    LOAD,
    MIB,
    annotation,
    block,
    event,
    frame,
    history,
    read,
    segment,
    written,
)
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

PROTOCOLS = (2, 3, 4, 5)

MANY = 1500
"""More than a batch of a list, after which what was read of it is summed."""

NESTED = b"]" * 100_000 + b"a" * 99_999
"""Opcodes of lists in each other: Python cannot compare them, nor make a text of them."""

SMALL = pickle.dumps({"segments": [segment(block(1, LOAD), block(2, FORWARD))], "device_traces": history(2)})

LARGE = pickle.dumps(
    {
        "segments": [segment(*[block(1, FORWARD) for _ in range(MANY)])],
        "device_traces": history(MANY),
        "external_annotations": [annotation("START", 1, "forward"), annotation("END", 2, "forward")],
    }
)


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
        ("cuda:0", "no Python stack was recorded", 3, 1),
        ("cuda:1", "forward, model.py:12", 1, 1),
    ]
    # The same leak on another card is the same leak.
    assert snapshot.survivors[1].fingerprint == snapshot.survivors[3].fingerprint
    assert len({each.fingerprint for each in snapshot.survivors}) == 3


def test_stacks_that_differ_in_one_frame_are_told_apart(tmp_path: Path) -> None:
    common = [frame(name) for name in "abcdef"]
    stacks = [[*common[:place], frame("other"), *common[place + 1 :]] for place in range(len(common))]
    # Twice each, since the second one may be known by then.
    blocks = [block(1 + turn, stack) for _ in range(2) for turn, stack in enumerate(stacks)]
    found = {
        each.stack.index(("/srv/model.py", 1, "other")): each
        for each in read(segment(*blocks), path=tmp_path / "a.pickle").survivors
    }
    assert {place: (each.bytes // MIB, each.count) for place, each in found.items()} == {
        place: (2 * (place + 1), 2) for place in range(len(common))
    }


def test_the_fingerprint_of_a_stack_goes_without_its_lines(tmp_path: Path) -> None:
    marks = {
        read(segment(block(1, [frame("forward", line)])), path=tmp_path / "a.pickle").survivors[0].fingerprint
        for line in (12, 13)
    }
    assert len(marks) == 1


@pytest.mark.parametrize(
    ("file", "function", "python"),
    [
        ("/srv/train.py", "main", True),
        ("/usr/local/bin/train", "main", True),
        ("/usr/local/bin/train", "<module>", True),
        ("<stdin>", "<lambda>", True),
        ("??", "main", False),
        ("", "main", False),
        ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", "malloc", False),
        ("/usr/include/c++/11/functional", "std::function<void ()>::operator()() const", False),
        ("/usr/include/c++/11/functional", "operator()(int)", False),
    ],
)
def test_a_frame_is_told_from_those_of_c(tmp_path: Path, file: str, function: str, python: bool) -> None:
    (only,) = read(segment(block(1, [frame(function, 3, file)])), path=tmp_path / "a.pickle").survivors
    assert only.stack == (((file, 3, function),) if python else ())


def test_a_name_of_any_length_is_shown_at_once(tmp_path: Path) -> None:
    long = "x" * 20_000_000
    path = written(tmp_path / "a.pickle", segment(block(1, [frame(long, 1, f"/srv/{long}.py")])))
    assert len(run(path).stdout) < 20_000


def test_free_memory_is_told_by_pool(tmp_path: Path) -> None:
    snapshot = read(
        segment(block(4, LOAD), block(6, state="inactive")),
        segment(block(10, state="inactive")),
        segment(block(3, LOAD), block(1, state="inactive"), pool=(0, 5)),
        path=tmp_path / "a.pickle",
    )
    default, graphs = snapshot.pools
    sizes = (default.size, default.used, default.free, default.largest_free, default.returnable)
    assert [size // MIB for size in sizes] == [20, 4, 16, 10, 10]
    assert default.fragmentation == pytest.approx(6 / 16)
    assert (graphs.pool, graphs.segments, graphs.fragmentation) == ((0, 5), 1, 0.0)


def test_free_memory_is_told_by_segment(tmp_path: Path) -> None:
    snapshot = read(
        segment(block(4, LOAD)),
        segment(block(3, state="inactive"), block(2, LOAD), block(1, state="inactive"), address=0x2000),
        segment(block(8, state="inactive"), pool=(0, 5), address=0x1000),
        path=tmp_path / "a.pickle",
    )
    rows = [
        (each.address, each.pool, *(size // MIB for size in (each.size, each.used, each.free, each.largest_free)))
        for each in snapshot.segments
    ]
    assert rows == [(0x1000, (0, 5), 8, 0, 8, 8), (0x2000, (0, 0), 6, 2, 4, 3), (0, (0, 0), 4, 4, 0, 0)]
    assert [each.fragmentation for each in snapshot.segments] == [0, pytest.approx(1 / 4), 0]


@pytest.mark.parametrize(
    ("kind", "expandable", "returnable"),
    # Pages of 2 MiB lie at 4, and at 10, 12 and 14 of 0 to 17; the page of 20 MiB has blocks in use.
    [("small", True, 8), ("large", True, 0), ("small", False, 0)],
)
def test_expandable_segments_give_back_free_pages(tmp_path: Path, kind: str, expandable: bool, returnable: int) -> None:
    start = 64 * MIB
    places = [(3, "active_allocated"), (3, "inactive"), (3, "active_allocated"), (8, "inactive")]
    blocks, at = [], start
    for size, state in places:
        blocks.append(block(size, LOAD, state, at))
        at += size * MIB
    snapshot = read(
        {**segment(*blocks, address=start), "segment_type": kind, "is_expandable": expandable},
        path=tmp_path / "a.pickle",
    )
    assert snapshot.pools[0].returnable // MIB == returnable
    assert snapshot.segments[0].expandable is expandable


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


def test_reading_takes_less_memory_than_the_objects_of_a_file(tmp_path: Path) -> None:
    stack = [frame(f"f{turn}") for turn in range(30)]
    events = []
    for turn in range(50_000):
        freeing = list(stack)
        events.append(event("alloc", turn, turn, frames=list(stack)))
        events += [event(word, turn, turn, frames=freeing) for word in ("free_requested", "free_completed")]
    path = written(tmp_path / "a.pickle", segment(*(block(1, stack) for _ in range(50_000))), device_traces=[events])
    # Not `ru_maxrss`, which begins with what this process had.
    code = (
        "import re, sys; from pathlib import Path\n"
        "from lowtide.leakcheck.snapshots.allocator_snapshot import read_snapshot\n"
        "peak = lambda: int(re.search('VmHWM:(.*)kB', Path('/proc/self/status').read_text())[1])\n"
        "before = peak()\n"
        "assert read_snapshot(Path(sys.argv[1])).survivors\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    # It is 2 times its size, and as objects 7 times.
    assert int(done.stdout) * 1024 < path.stat().st_size * 4


def test_one_list_of_blocks_in_many_segments_counts_once(tmp_path: Path) -> None:
    # Else a small file would take hours, and reach the limit of time that every test has.
    shared = [block(1, LOAD) for _ in range(MANY)]
    many = [{**segment(), "total_size": MANY * MIB, "blocks": shared} for _ in range(20_000)]
    (only,) = read(*many, path=tmp_path / "a.pickle").survivors
    assert only.count == MANY


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
        ("no Python stack was recorded", [2, 0, 0], "gone"),
    ]
    assert [each.survivors.text for each in compared if each.grows_always] == ["forward, model.py:12"]
    assert compare(cycles[:1] * 2) == []


def test_ranks_are_compared_whatever_the_numbers_of_their_cards(tmp_path: Path) -> None:
    ranks = [
        read(segment(block(8, LOAD), block(size, FORWARD), device=rank), path=tmp_path / f"{rank}.pickle")
        for rank, size in enumerate((4, 9, 4))
    ]
    (only,) = compare(ranks, "rank")
    assert (only.survivors.text, only.spread // MIB, [size // MIB for size in only.bytes]) == (
        "forward, model.py:12",
        5,
        [4, 9, 4],
    )


def test_of_functions_of_one_name_in_several_files_the_largest_is_named(tmp_path: Path) -> None:
    files = []
    for turn in (1, 2):
        blocks = [block(size * turn, [frame("forward", 3, f"/srv/{name}.py")]) for name, size in (("a", 30), ("b", 1))]
        files.append(written(tmp_path / f"{turn}.pickle", segment(*blocks)))
    (only,) = compare([read_snapshot(file) for file in files])
    assert (only.survivors.text, only.growth // MIB) == ("forward, a.py:3", 31)
    shown = run(files[0]).stdout
    mark = only.survivors.fingerprint
    assert f"{mark}  30.0 MiB\n  forward, /srv/a.py:3\n{mark}  1.0 MiB\n  forward, /srv/b.py:3\n" in shown


class Runs:
    """Its pickle calls a function when it is read by an ordinary unpickler."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("where", ["segments", "history", "after", "inside"])
def test_what_would_run_is_refused_by_its_name(tmp_path: Path, protocol: int, where: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / "a.pickle"
    runs = Runs(mark)
    good = [segment(block(1, LOAD))]
    whole = {
        "segments": {"segments": runs, "device_traces": []},
        "history": {"segments": good, "device_traces": [[{"action": "alloc", "addr": runs}]]},
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


def test_what_is_asked_for_is_one_line_however_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    name = b"sys\x1b[31mtem\n" + b"m" * 200
    path.write_bytes(b"\x80\x04\x8c\x02os\x8c" + bytes([len(name)]) + name + b"\x93.")
    with pytest.raises(SnapshotError, match=r"it asks for os\.sys") as raised:
        read_snapshot(path)
    assert str(raised.value).isprintable()


def odd_frame() -> dict[str, Any]:
    """Of C++, and so nobody looks at its name."""
    return frame("".join(["HE", "RE"]), file="??")


def with_nested(**segments: Any) -> bytes:
    return pickle.dumps(segments).replace(b"\x8c\x04HERE", NESTED)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read|cut off"),
        (b"\x1f\x8b\x08", "it is compressed by gzip: unpack it first"),
        (b"PK\x03\x04archive/data.pkl", "it is a zip archive, as torch.save writes it: write the snapshot with pickle"),
        (b"not a pickle", "cut off, or no pickle of plain data"),
        (pickle.dumps({"segments": [segment(block(1))]})[:-20], "cut off"),
        (pickle.dumps({"segments": [segment(block(1)) for _ in range(MANY)]})[:-20], "cut off"),
        (pickle.dumps({"weights": 1}), "no segments"),
        (pickle.dumps([1, 2]), "not as torch writes it"),
        (
            pickle.dumps({"segments": [{"device": 0, "total_size": 1}]}),
            r"not as torch writes it \(KeyError: 'blocks'\)",
        ),
        (pickle.dumps({"segments": [{**segment(block(1)), "device": -1}]}), "-1 is no size, address or number"),
        (pickle.dumps({"segments": [segment({**block(1), "size": 1 << 4000})]}), "not as torch writes it"),
        (
            with_nested(segments=[segment(block(1, [{**frame("f"), "filename": "HERE"}]))]),
            "list in the place of a text",
        ),
        (with_nested(segments=[segment(block(1, [*LOAD, odd_frame()]), block(1, [*LOAD, odd_frame()]))]), "Recursion"),
        (pickle.dumps({"segments": [segment(block(1) | {"frames": [0]})]}), "TypeError: 'int' object is not"),
        (with_nested(segments=[{**segment(), "device": "HERE"}]), "is no size, address or number"),
        (with_nested(segments=[{**segment(), "blocks": "HERE"}]), "not as torch writes it"),
        (with_nested(segments=[], device_traces="HERE"), "not as torch writes it"),
        (pickle.dumps({"segments": [*[segment(block(1)) for _ in range(MANY)], 1]}), "not as torch writes it"),
        (
            pickle.dumps({"segments": [segment(*[{**block(1), "address": "1"} for _ in range(MANY)])]}),
            "not as torch writes it",
        ),
        (pickle.dumps({"segments": [segment(block(1))], "device_traces": [[{"action": "alloc"}]]}), "KeyError: 'addr'"),
        # Floats of a million letters, and of a control code in a line of its own.
        (b"\x80\x04F" + b"x" * 1_000_000 + b"\n.", "could not convert string to float: 'x{100,200}$"),
        (b"\x80\x04F\x1b[31m\n.", "could not convert string to float: '"),
        # A persistent identifier, also one like ours; a text of 2^62 bytes; an entry of the memo far away.
        (b"\x80\x04K\x01Q.", "refers to objects outside of the file"),
        (b"\x80\x04]\x8c\x20" + b"0" * 32 + b"\x86Q.", "refers to objects outside of the file"),
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
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"none\.pickle: it cannot be read: No such file or directory"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(SnapshotError, match="cannot be read: "):
        read_snapshot(tmp_path)


def test_a_bytearray_that_is_too_large_is_refused_in_one_line_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "snapshot.pickle"
    for turn in range(20):
        path.write_bytes(SMALL.replace(b"\x8c\x05empty", b"\x96" + (1 << 34).to_bytes(8, "little") + b"\x94" * turn))
        with pytest.raises(SnapshotError, match="it asks for more memory"):
            read_snapshot(path)
    assert capfd.readouterr() == ("", "")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.sampled_from([SMALL, LARGE]), place=st.floats(0, 1), bytes_=st.binary(max_size=4), cut=st.integers(0, 8)
)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, whole: bytes, place: float, bytes_: bytes, cut: int) -> None:
    path = tmp_path / "a.pickle"
    begin = int(place * len(whole))
    path.write_bytes(whole[:begin] + bytes_ + whole[begin + cut :])
    # Nothing else comes out, and it ends.
    with suppress(SnapshotError):
        read_snapshot(path)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", "snapshot", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})


def test_the_command_shows_one_file_and_the_differences_of_several(tmp_path: Path) -> None:
    one = written(tmp_path / "one.pickle", segment(block(8, LOAD), block(6, state="inactive")))
    two = written(tmp_path / "two.pickle", segment(block(8, LOAD), block(5, FORWARD)))
    alone = run(one)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert re.search(r"cuda:0\s+default\s+1\s+14\.0\s+8\.0\s+6\.0\s+6\.0\s+0\.0\s+0%", alone.stdout)
    assert re.search(r"cuda:0\s+default\s+0x0\s+14\.0\s+8\.0\s+6\.0\s+6\.0\s+0%", alone.stdout)
    assert re.search(r"cuda:0\s+[0-9a-f]{16}\s+load_weights, model\.py:7\s+8\.0\s+1", alone.stdout)
    assert "  load_weights, /srv/model.py:7" in alone.stdout
    assert "Segments" not in run(two).stdout
    both = run(one, two)
    assert re.search(r"[0-9a-f]{16}\s+forward, model\.py:12\s+0\.0\s+5\.0\s+5\.0 new", both.stdout)
    assert "load_weights" not in both.stdout.partition("What differs")[2]
    ranks = run("--by", "rank", one, one)
    assert "in use is the same in all of them, stack by stack" in ranks.stdout


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    # torchtitan and Megatron-Bridge write a folder for each step.
    files = []
    for turn in (1, 2):
        (tmp_path / f"step_{turn}" / "all").mkdir(parents=True)
        files.append(written(tmp_path / f"step_{turn}" / "all" / "rank0.pickle", segment(block(turn, LOAD))))
    shown = run(*files).stdout
    assert "\nstep_2/all/rank0.pickle: pools (MiB)\n" in shown
    assert re.search(r"allocated by +step_1/all/rank0\.pickle +step_2/all/rank0\.pickle +growth\n", shown)
    assert "\nrank0.pickle: pools (MiB)\n" in f"\n{run(files[0], files[0]).stdout}"


def test_the_command_shows_the_frames_of_the_program_in_a_stack(tmp_path: Path) -> None:
    torch = [frame(f"torch{turn}", file="/x/site-packages/torch/nn.py") for turn in range(6)]
    program = [frame(name, line, "/x/site-packages/vllm/model.py") for line, name in enumerate(("layer", "model"), 8)]
    path = written(tmp_path / "a.pickle", segment(block(1, [*torch, *program, *torch, frame("serve")])))
    shown = run(path).stdout
    assert "layer, model.py:8" in shown
    lines = [line.strip() for line in shown[shown.rindex("1.0 MiB") :].splitlines()[1:]]
    assert lines == [
        "torch0, /x/site-packages/torch/nn.py:1",
        "… 5 more",
        "layer, /x/site-packages/vllm/model.py:8",
        "model, /x/site-packages/vllm/model.py:9",
        "… 6 more",
        "serve, /srv/model.py:1",
    ]


def test_rows_of_one_function_are_told_apart_by_the_caller_in_which_they_differ(tmp_path: Path) -> None:
    def stack(line: int, caller: str = "prefill") -> list[dict[str, Any]]:
        return [frame("empty", file="/x/site-packages/torch/nn.py"), frame("alloc", 3), frame(caller, line)]

    stacks = [stack(10), stack(12), [*stack(10), frame("serve", 7)], stack(30, "decode")]
    alone = frame("load", 1), frame("main", 2)
    snapshot = read(
        segment(*(block(5 - turn, each) for turn, each in enumerate(stacks)), block(9, alone)), path=tmp_path / "a"
    )
    assert texts_of(snapshot.survivors) == [
        "load, model.py:1",
        "alloc, model.py:3 < prefill, model.py:10",
        "alloc, model.py:3 < prefill, model.py:12",
        "alloc, model.py:3 < serve, model.py:7",
        "alloc, model.py:3 < decode, model.py:30",
    ]
    assert texts_of(snapshot.survivors[:2]) == ["load, model.py:1", "alloc, model.py:3"]


@pytest.mark.parametrize(("said", "is_told"), [(4, False), (7, True), (None, False)])
def test_a_file_that_contradicts_itself_is_told(tmp_path: Path, said: int | None, is_told: bool) -> None:
    active = {} if said is None else {"active_size": said * MIB}
    waiting = block(1, LOAD, state="active_pending_free")
    path = written(tmp_path / "a.pickle", {**segment(block(3, LOAD), waiting, block(6, state="inactive")), **active})
    shown = " ".join(run(path).stdout.split())
    told = "the file contradicts itself: of cuda:0 it says that 7.0 MiB are in use, and its blocks are 4.0"
    assert (told in shown) == is_told
    assert ("contradicts" in shown) == is_told


def test_the_command_refuses_what_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    done = run(path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "os.system" in done.stderr


TWICE_ITSELF = b"K\x01\x94" + b"".join(b"0h%ch%c\x86\x94" % (turn, turn) for turn in range(60))
"""Opcodes of a tuple that has itself twice, sixty times over."""

NESTED_TUPLES = b"N" + b"\x85" * 3_000_000
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
    monkeypatch.setattr(allocator_snapshot, "_LEAST_SECONDS", 1)
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
        [sys.executable, "-X", "faulthandler", "-m", "lowtide", "snapshot", with_key(tmp_path, NESTED_TUPLES)],
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
