"""The stages in which surviving blocks were allocated, from the history in torch's snapshots."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from lowtide.leakcheck.snapshots import allocator_snapshot
from lowtide.leakcheck.snapshots.allocator_snapshot import compare, sum_stages
from lowtide.leakcheck.snapshots.blocks_and_events import OUTSIDE, Annotation, StageTimeline
from tests.leakcheck.snapshots.torch_snapshots import (
    FORWARD,
    LOAD,
    MIB,
    annotation,
    block,
    event,
    frame,
    read,
    segment,
    written,
)

pytestmark = pytest.mark.nightly

MANY = 1500
"""More than a batch of a list, after which what was read of it is summed."""


def stages_of(path: Path, *blocks: dict[str, Any], **more: Any) -> list[tuple[str | None, int]]:
    """Stage and count of the survivors, in the order of their bytes."""
    return [(each.stage, each.count) for each in read(segment(*blocks), path=path, **more).survivors]


FORWARD_AND_BACKWARD = [
    annotation("START", 10, "forward"),
    annotation("END", 20, "forward"),
    annotation("START", 30, "backward"),
    annotation("END", 40, "backward"),
]


def test_a_block_belongs_to_the_stage_in_whose_time_it_was_allocated(tmp_path: Path) -> None:
    events = [event("alloc", 1, 15), event("alloc", 2, 35), event("alloc", 3, 25)]
    found = stages_of(
        tmp_path / "a.pickle",
        *(block(8 >> turn, LOAD, address=turn) for turn in range(1, 4)),
        device_traces=[events],
        external_annotations=FORWARD_AND_BACKWARD,
    )
    assert found == [("forward", 1), ("backward", 1), (OUTSIDE, 1)]


def test_the_last_allocation_of_an_address_counts(tmp_path: Path) -> None:
    reused = [event("alloc", 1, 15), event("free_requested", 1, 17), event("free_completed", 1, 17)]
    found = stages_of(
        tmp_path / "a.pickle",
        block(1, address=1),
        device_traces=[[*reused, event("alloc", 1, 35)]],
        external_annotations=FORWARD_AND_BACKWARD,
    )
    assert found == [("backward", 1)]
    # What was allocated before the history began was not allocated by one that is over.
    gone = stages_of(
        tmp_path / "b.pickle",
        block(1, address=1),
        device_traces=[reused],
        external_annotations=FORWARD_AND_BACKWARD,
    )
    assert gone == [(None, 1)]


def test_a_block_that_waits_for_a_stream_keeps_its_stage_and_stack(tmp_path: Path) -> None:
    # torch has one list of frames for the block and its events where the history keeps no stacks of frees.
    frames = list(LOAD)
    events = [event("alloc", 1, 15, frames=frames), event("free_requested", 1, 35, frames=frames)]
    path = tmp_path / "a.pickle"
    waits = block(1, None, "active_pending_free", address=1) | {"frames": frames}
    others = [event("alloc", 2 + turn, 16) for turn in range(MANY)]
    snapshot = read(
        segment(waits), path=path, device_traces=[events + others], external_annotations=FORWARD_AND_BACKWARD
    )
    (only,) = snapshot.survivors
    assert (only.stage, only.text) == ("forward", "load_weights, model.py:7")


def test_metadata_goes_before_annotations(tmp_path: Path) -> None:
    found = stages_of(
        tmp_path / "a.pickle",
        block(2, address=1),
        block(1, address=2),
        device_traces=[[event("alloc", 1, 15, user_metadata="loading"), event("alloc", 2, 15, user_metadata="")]],
        external_annotations=FORWARD_AND_BACKWARD,
    )
    assert found == [("loading", 1), ("forward", 1)]


def test_stages_are_of_a_device(tmp_path: Path) -> None:
    snapshot = read(
        segment(block(2, address=1)),
        segment(block(1, address=1), device=1),
        path=tmp_path / "a.pickle",
        device_traces=[[event("alloc", 1, 15)], [event("alloc", 1, 16)]],
        external_annotations=[annotation("START", 10, "forward", 0), annotation("START", 10, "load", 1)],
    )
    assert [(each.device, each.stage) for each in snapshot.survivors] == [("cuda:0", "forward"), ("cuda:1", "load")]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"device_traces": [[event("alloc", 1, 15)]]},
        {"device_traces": [[event("free_completed", 1, 15)]], "external_annotations": FORWARD_AND_BACKWARD},
        {"device_traces": [], "external_annotations": FORWARD_AND_BACKWARD},
        # Versions of torch that recorded no time.
        {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1}]], "external_annotations": FORWARD_AND_BACKWARD},
    ],
)
def test_without_annotations_or_history_no_stage_is_known(tmp_path: Path, more: dict[str, Any]) -> None:
    assert stages_of(tmp_path / "a.pickle", block(1, address=1), **more) == [(None, 1)]


def test_annotations_among_the_events_of_torch_2_4_are_read(tmp_path: Path) -> None:
    marks = [
        event("user_defined", 0, time, frames=[{"name": word, "filename": "forward", "line": 0}])
        for time, word in ((10, "START"), (20, "END"))
    ]
    events = [marks[0], event("alloc", 1, 15), marks[1], event("alloc", 2, 25)]
    found = stages_of(tmp_path / "a.pickle", block(2, address=1), block(1, address=2), device_traces=[events])
    assert found == [("forward", 1), (OUTSIDE, 1)]


def test_of_stages_in_each_other_the_innermost_counts() -> None:
    timeline = StageTimeline(
        [
            Annotation(10, True, "step"),
            Annotation(20, True, "forward"),
            Annotation(30, True, "attention"),
            # Of another thread: ends what began first.
            Annotation(40, False, "forward"),
            Annotation(50, False, "attention"),
            Annotation(60, False, "step"),
        ]
    )
    moments = [timeline.at(time) for time in (5, 10, 25, 35, 45, 55, 65)]
    assert moments == [OUTSIDE, "step", "forward", "attention", "attention", "step", OUTSIDE]


def test_a_stage_that_began_before_the_recording_or_never_ends_is_there() -> None:
    cut = [Annotation(20, False, "forward"), Annotation(30, False, "step"), Annotation(40, True, "save")]
    timeline = StageTimeline(cut)
    assert [timeline.at(time) for time in (1, 25, 35, 99)] == ["forward", "step", OUTSIDE, "save"]


def test_many_open_stages_take_no_square_of_time() -> None:
    count = 100_000
    begins = [Annotation(turn, True, str(turn % 2)) for turn in range(count)]
    ends = [Annotation(count + turn, False, str(turn % 2)) for turn in range(count)]
    timeline = StageTimeline([*begins, *ends])
    assert (timeline.at(count - 1), timeline.at(2 * count)) == ("1", OUTSIDE)


@pytest.mark.parametrize("largest", [10_000_000, 0])
def test_long_lists_are_read_as_short_ones_are(tmp_path: Path, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_snapshot, "_LARGEST_TABLE", largest)
    stacks = [list(FORWARD), list(LOAD)]
    kept = [list(stacks[turn % 2]) for turn in range(MANY)]
    freed = [list(LOAD) for _ in range(MANY)]
    events = []
    for turn in range(MANY):
        # The block and its event have one list of frames, as have the two events of a free.
        events.append(event("alloc", turn, 2 * turn, frames=kept[turn]))
        events.append(event("alloc", MANY + turn, 2 * turn + 1, frames=list(LOAD)))
        events += [
            event(word, MANY + turn, 2 * turn + 1, frames=freed[turn]) for word in ("free_requested", "free_completed")
        ]
    blocks = [block(1, kept[turn], address=turn) for turn in range(MANY)]
    pending = block(1, freed[-1], "active_pending_free", address=2 * MANY - 1)
    free = [block(3, None, "inactive") for _ in range(MANY)]
    snapshot = read(
        segment(*blocks, *free),
        *(segment(block(1, LOAD), block(2, None, "inactive"), device=1, pool=(0, turn)) for turn in range(MANY)),
        segment(pending),
        path=tmp_path / "a.pickle",
        device_traces=[events[:-1]],
        external_annotations=[annotation("START", 0, "first"), annotation("END", MANY, "first")],
    )
    rows = sorted(
        (each.device, each.stage or "", each.text, each.count, each.bytes // MIB) for each in snapshot.survivors
    )
    half = MANY // 4
    assert rows == [
        ("cuda:0", "", "forward, model.py:12", half, half),
        ("cuda:0", "", "load_weights, model.py:7", half + 1, half + 1),
        ("cuda:0", "first", "forward, model.py:12", half, half),
        ("cuda:0", "first", "load_weights, model.py:7", half, half),
        ("cuda:1", "", "load_weights, model.py:7", MANY, MANY),
    ]
    assert (len(snapshot.segments), len(snapshot.pools)) == (MANY + 2, MANY + 1)
    assert (snapshot.pools[0].free // MIB, snapshot.pools[0].largest_free // MIB) == (3 * MANY, 3)


def test_stages_are_summed_and_compared(tmp_path: Path) -> None:
    cycles = [
        read(
            segment(block(turn + 1, LOAD, address=1), block(turn + 1, FORWARD, address=2), block(4, address=3)),
            path=tmp_path / f"{turn}.pickle",
            device_traces=[[event("alloc", 1, 15), event("alloc", 2, 16), event("alloc", 3, 35)]],
            external_annotations=FORWARD_AND_BACKWARD,
        )
        for turn in range(3)
    ]
    (only,) = compare(cycles, "stage")
    assert (only.survivors.stage, [size // MIB for size in only.bytes], only.grows_always) == (
        "forward",
        [2, 4, 6],
        True,
    )
    sums = [(each.survivors.stage, each.bytes[0] // MIB, each.counts[0]) for each in sum_stages(cycles[0])]
    assert sums == [("backward", 4, 1), ("forward", 2, 2)]
    # The stage is no part of a fingerprint.
    unstaged = read(segment(block(4, LOAD)), path=tmp_path / "unstaged.pickle")
    assert unstaged.survivors[0].fingerprint in {each.fingerprint for each in cycles[0].survivors}


def test_the_command_groups_by_stage(tmp_path: Path) -> None:
    files = [
        written(
            tmp_path / f"{turn}.pickle",
            segment(block(turn, LOAD, address=1), block(4, FORWARD, address=2)),
            device_traces=[[event("alloc", 1, 15)]],
            external_annotations=FORWARD_AND_BACKWARD,
        )
        for turn in (1, 2)
    ]
    between = written(
        tmp_path / "between.pickle",
        segment(block(1, LOAD, address=1)),
        device_traces=[[event("alloc", 1, 25)]],
        external_annotations=FORWARD_AND_BACKWARD,
    )
    assert re.search(r"cuda:0\s+outside of all\s+1\.0\s+1", run("--by", "stage", between))
    alone = run(files[0])
    assert re.search(r"cuda:0\s+[0-9a-f]{16}\s+not known\s+forward, model\.py:12\s+4\.0\s+1", alone)
    assert re.search(r"cuda:0\s+[0-9a-f]{16}\s+forward\s+load_weights, model\.py:7\s+1\.0\s+1", alone)
    by_stage = run("--by", "stage", files[0])
    assert re.search(r"cuda:0\s+not known\s+4\.0\s+1\n\s*cuda:0\s+forward\s+1\.0\s+1", by_stage)
    both = run("--by", "stage", *files)
    assert re.search(r"cuda:0\s+forward\s+1\.0\s+2\.0\s+1\.0 grown", both)
    assert "not known" not in both
    assert "the same in all of them, stage by stage" in run("--by", "stage", files[0], files[0])
    # Without stages there is no column of them.
    assert "stage" not in run(written(tmp_path / "plain.pickle", segment(block(1, LOAD))))


def run(*words: object, columns: int = 160) -> str:
    command = [sys.executable, "-m", "lowtide", "snapshot", *map(str, words)]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_long_names_of_stages_and_functions_take_no_width_of_the_rest(tmp_path: Path, columns: int) -> None:
    names = [frame("漢字" * 40, 3, "/srv/model.py")]
    path = written(
        tmp_path / "a.pickle",
        segment(block(1, names, address=1)),
        device_traces=[[event("alloc", 1, 15, user_metadata="forward of microbatch 3 " * 8)]],
    )
    shown = run(path, columns=columns)
    table = shown[shown.index("In use, by") : shown.index("\n\n", shown.index("In use, by"))].splitlines()
    assert columns - 8 < max(map(cell_len, table)) <= columns
    assert re.search(r"cuda:0  [0-9a-f]{16}  forward of .*  1\.0$", table[3])


def test_a_name_that_is_long_or_none_is_handled(tmp_path: Path) -> None:
    long = stages_of(
        tmp_path / "a.pickle", block(1, address=1), device_traces=[[event("alloc", 1, 1, user_metadata="x" * 5000)]]
    )
    assert long == [("x" * 199 + "…", 1)]
    path = tmp_path / "b.pickle"
    path.write_bytes(
        pickle.dumps({"segments": [], "external_annotations": [annotation("START", 1, "a") | {"name": 1}]})
    )
    with pytest.raises(allocator_snapshot.SnapshotError, match="the name of a stage is no text but int"):
        allocator_snapshot.read_snapshot(path)
