"""What is kept of a life: its sizes, and contents that nobody can read.

The sizes are those of arenas in all processes, of each process, what the driver counts, and this process's RSS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from lowtide.leakcheck.lives.life_record import LifeRecord, Lived, sizes_of
from lowtide.probes.device.driver import DriverReading, NoDriver
from lowtide.probes.snapshot import Snapshot, take_snapshot
from lowtide.probes.stages import PoolKind, PoolReading
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage

MIB = 1 << 20


def pool(tag: str, size: int, *, kind: PoolKind = "arena", device: str = "cuda:0") -> PoolReading:
    return PoolReading(kind=kind, tag=tag, device=device, reserved=size, mapped=size, ranges=())


def snapshot(*pools: PoolReading, driver: int | None = None) -> Snapshot:
    reading = DriverReading(
        device="cuda:0", source="nvml", process_bytes=driver, card_used=None, card_total=None, note=""
    )
    return replace(take_snapshot(driver=NoDriver("a test")), pools=pools, drivers=(reading,))


def worker(rank: int, weights: int, *, card: int) -> ProcessStage:
    device = f"cuda:{rank}"
    return ProcessStage(
        process=ProcessName(pid=rank, name="worker"),
        tensors={},
        arenas={device: {"weights": weights}},
        reserved={},
        cards={device: card},
    )


def test_an_arena_is_summed_up_over_its_parts_and_over_all_processes() -> None:
    taken = snapshot(
        pool("weights", MIB),
        pool("weights", 2 * MIB),
        pool("kv_cache", 4 * MIB),
        pool("sleeping", 8 * MIB, kind="host"),
        pool("weights", 16 * MIB, device="cpu"),
    )
    workers = (worker(0, 32 * MIB, card=100 * MIB), worker(1, 64 * MIB, card=200 * MIB))
    assert sizes_of(taken, "cuda:0", workers) == {
        "arena weights": (1 + 2 + 32 + 64) * MIB,
        "arena kv_cache": 4 * MIB,
        "in worker": 300 * MIB,
        "RSS": taken.host.rss,
    }


def test_the_driver_s_figure_is_there_where_it_is_known() -> None:
    assert sizes_of(snapshot(driver=5 * MIB), "cuda:0")["driver, cuda:0"] == 5 * MIB
    assert "driver, cpu" not in sizes_of(snapshot(driver=5 * MIB), "cpu")


def test_the_sizes_are_those_of_the_latest_reading() -> None:
    record = LifeRecord("a", "cuda:0", 2)
    record.note_baseline(1, snapshot(pool("weights", MIB)))
    assert record.sizes()["arena weights"] == MIB
    record.stages.append(Lived("create", 1, 1.0, snapshot(), snapshot(pool("weights", 3 * MIB))))
    assert record.sizes()["arena weights"] == 3 * MIB
    record.note_baseline(2, snapshot(pool("weights", 2 * MIB)))
    assert record.sizes()["arena weights"] == 2 * MIB


class Names:
    """A life that says what must survive a sleep."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def preserved(self) -> Mapping[str, torch.Tensor]:
        return self._tensors


@pytest.mark.parametrize(
    ("life", "elsewhere", "said"),
    [
        (Names({}), False, ["contents after a wake"]),
        # Its ranks judge their own.
        (Names({}), True, []),
        (Names({"table": torch.zeros(2)}), False, []),
        # It never claimed that anything survives.
        (object(), False, []),
    ],
)
def test_contents_that_nobody_can_read_are_reported_as_not_judged(life: Any, elsewhere: bool, said: list[str]) -> None:
    record = LifeRecord("run", "cpu", 1)
    preserved = record.note_preserved(life, elsewhere=elsewhere)
    assert list(preserved) == (["table"] if isinstance(life, Names) and life.preserved() else [])
    assert [item.what for item in record.not_measured.values()] == said
