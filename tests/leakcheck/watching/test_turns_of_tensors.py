"""What grows with each turn of a program that keeps tensors, where these are followed by themselves and where not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from lowtide.leakcheck.findings import turn_growth
from lowtide.leakcheck.findings.turn_growth import Grown, TurnGrowth
from lowtide.probes.heap.container_lengths import read_lengths


def grown_with_tensors(*, seconds: float, bound: int) -> Grown:
    """Return what grows where a list gets a tensor with each turn, and keeps so many."""
    growth, kept = TurnGrowth("intervals", by_frames=True, asked=True, seconds=seconds), list[torch.Tensor]()
    for turn in range(1, 13):
        kept.append(torch.ones(1 << 18))
        del kept[:-bound]
        growth.note("")
        growth.read(turn, begins=turn == 1, ends=turn == 12)
    return growth.end("", "")


@pytest.mark.parametrize(
    "others",
    [pytest.param(0, id="alone"), pytest.param(600_000, id="in a large heap", marks=pytest.mark.nightly)],
)
def test_tensors_in_a_list_are_its_growth_where_nobody_else_follows_them(others: int) -> None:
    # Of these the first reading keeps a table that is larger than all that grows.
    large: list[list[int]] = [[] for _ in range(others)]
    grown = grown_with_tensors(seconds=1.0, bound=100)
    del large
    (finding,) = grown.containers
    assert (finding.resource, finding.device, finding.bytes >> 20) == ("tensors", "cpu", 11)
    assert (finding.holder or "").startswith("local 'kept' of grown_with_tensors")
    assert grown.host is None


@pytest.mark.parametrize(("seconds", "readings"), [(1.0, 7), (0.0, 12)], ids=["intervals", "turns"])
def test_of_a_running_program_every_second_interval_is_read_and_the_last(
    seconds: float, readings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(wanted: Collection[int] = ()) -> Any:
        read.append(len(wanted))
        return read_lengths(wanted)

    monkeypatch.setattr(turn_growth, "read_lengths", counted)
    monkeypatch.setattr(TurnGrowth, "end", lambda growth, stretch, module: Grown())
    grown_with_tensors(seconds=seconds, bound=100)
    assert len(read) == readings


@pytest.mark.parametrize(("seconds", "bound"), [(1.0, 4), (0.0, 100)], ids=["bounded", "followed by themselves"])
def test_tensors_in_its_quiet_twins_are_none(seconds: float, bound: int) -> None:
    assert grown_with_tensors(seconds=seconds, bound=bound).containers == ()
