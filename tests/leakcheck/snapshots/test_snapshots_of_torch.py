"""Snapshots that torch itself writes, of a program whose stages and leak are known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, compare, read_snapshot
from lowtide.leakcheck.snapshots.blocks_and_events import OUTSIDE

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm card; torch sees none"),
]

MIB = 1 << 20


@pytest.fixture
def history() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(clear_history=True, global_record_annotations=True)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.empty_cache()


def on_card(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def metadata(stage: str) -> Iterator[None]:
    torch.cuda.memory._set_memory_metadata(stage)
    yield
    torch.cuda.memory._set_memory_metadata("")


def dumped(path: Path) -> AllocatorSnapshot:
    torch.cuda.memory._dump_snapshot(str(path))
    return read_snapshot(path)


def mib_of(snapshot: AllocatorSnapshot) -> dict[str | None, int]:
    """MiB in use by stage."""
    found: dict[str | None, int] = {}
    for each in snapshot.survivors:
        found[each.stage] = found.get(each.stage, 0) + each.bytes // MIB
    return found


@pytest.mark.usefixtures("history")
def test_a_stage_is_what_the_program_set_or_its_annotation(tmp_path: Path) -> None:
    before = mib_of(dumped(tmp_path / "before.pickle"))
    kept = []
    with record_function("forward"):
        kept.append(on_card(32))
        with record_function("attention"):
            kept.append(on_card(64))
            on_card(128)
        kept.append(on_card(2))
        with metadata("optimizer"):
            kept.append(on_card(16))
    kept.append(on_card(8))
    after = dumped(tmp_path / "after.pickle")
    stages = mib_of(after)
    # What earlier tests have left is there still, outside of what this one has recorded.
    grown = {stage: stages[stage] - before.get(stage, 0) for stage in stages}
    assert {stage: more for stage, more in grown.items() if more} == {
        "forward": 34,
        "attention": 64,
        "optimizer": 16,
        OUTSIDE: 8,
    }
    assert {each.text.partition(",")[0] for each in after.survivors if each.stage} == {"on_card"}
    del kept


@pytest.mark.usefixtures("history")
def test_what_grows_from_cycle_to_cycle_is_named_by_its_stack(tmp_path: Path) -> None:
    kept, snapshots = [], []

    def leaking_step() -> None:
        kept.append(on_card(2))

    def clean_step() -> None:
        on_card(2)

    for cycle in range(3):
        with record_function("step"):
            leaking_step()
            clean_step()
        snapshots.append(dumped(tmp_path / f"cycle{cycle}.pickle"))
    (grown,) = [each for each in compare(snapshots) if each.trend != "same"]
    assert grown.grows_always
    assert grown.growth == 4 * MIB
    assert [frame.function for frame in grown.survivors.stack[:2]] == ["on_card", "leaking_step"]
    kept.clear()


@pytest.mark.usefixtures("history")
def test_free_memory_between_blocks_in_use_is_fragmented(tmp_path: Path) -> None:
    kept = [on_card(32) for _ in range(4)]
    del kept[::2]
    torch.cuda.empty_cache()
    # Tests before this one may have left pools of their own.
    (pool,) = [each for each in dumped(tmp_path / "apart.pickle").pools if each.pool == (0, 0)]
    # Blocks of 32 MiB have segments of their own, which are given back.
    assert (pool.free, pool.returnable) == (0, 0)
    # Six of 3 MiB lie in one of 20 MiB, of which the rest is free, too.
    small = [on_card(3) for _ in range(6)]
    del small[::2]
    snapshot = dumped(tmp_path / "between.pickle")
    (pool,) = [each for each in snapshot.pools if each.pool == (0, 0)]
    assert (pool.free, pool.largest_free, pool.returnable) == (11 * MIB, 3 * MIB, 0)
    assert pool.fragmentation == pytest.approx(8 / 11)
    reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert sum(each.size for each in snapshot.pools) == reserved
    assert sum(each.used for each in snapshot.pools) == used
    (segment,) = [each for each in snapshot.segments if each.free and each.pool == (0, 0)]
    assert segment.free == pool.free
    del kept, small
