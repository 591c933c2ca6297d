"""What is counted by name grows only where one turn after the other leaves more of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lowtide.leakcheck.findings import item_findings
from lowtide.leakcheck.findings.item_findings import NamedGrowth
from lowtide.probes.device.torch_allocator import StrandedSegment
from lowtide.reports.schema import Finding


def grown(turns: Sequence[Sequence[str]]) -> list[Finding]:
    """What is found where there are these descriptors after each turn."""
    now: list[str] = []
    growth = NamedGrowth("update_weights", lambda: {"file-descriptors": dict.fromkeys(now, 1)})
    for names in turns:
        growth.begin("update_weights")
        now = list(names)
        growth.end("update_weights")
    return growth.findings()


def test_what_each_turn_leaves_is_growth() -> None:
    (finding,) = grown([[f"{10 + number} -> /srv/bucket" for number in range(turn)] for turn in range(1, 6)])
    assert (finding.resource, finding.count, finding.trend) == ("file-descriptors", 4, "growth")
    assert finding.message == (
        "4 file descriptors more, which 4 calls of update_weights in a row have left: "
        "11 -> /srv/bucket, 12 -> /srv/bucket, 13 -> /srv/bucket and 1 more"
    )


@pytest.mark.parametrize(
    "turns",
    [
        # The first one fills what is filled once.
        [["10 -> /a", "11 -> /a", "12 -> /a"]] * 6,
        # The next one is opened before the last one is closed, so that numbers alternate.
        [[f"{10 + turn % 2} -> /a"] for turn in range(12)],
        # A pool of four.
        [[f"{10 + number} -> /a" for number in range(min(turn, 4))] for turn in range(1, 13)],
        [["10 -> /a"], ["10 -> /a", "11 -> /a"], ["10 -> /a"], ["10 -> /a", "11 -> /a"], ["10 -> /a"]],
        [],
    ],
)
def test_what_is_replaced_or_fills_is_none(turns: list[list[str]]) -> None:
    assert grown(turns) == []


def stranded(turns: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What is found where these streams, which are gone, have a segment of 64 MiB each after each turn."""
    now: list[StrandedSegment] = []
    monkeypatch.setattr(item_findings, "stranded_segments", lambda: tuple(now))
    growth = NamedGrowth("update_weights", dict)
    for streams in turns:
        growth.begin("update_weights")
        now[:] = [StrandedSegment("cuda:0", stream, stream << 30, 64 << 20) for stream in streams]
        growth.end("update_weights")
    return growth.findings()


def test_what_each_turn_leaves_on_another_stream_is_told_with_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = stranded([range(1, turn + 1) for turn in range(1, 6)], monkeypatch)
    assert (finding.resource, finding.cause, finding.bytes, finding.count) == (
        "reserved",
        "allocator-cache",
        256 << 20,
        4,
    )
    assert finding.message == (
        "256.0 MiB reserved on cuda:0 for 4 streams that no longer exist, which 4 calls of update_weights in a row "
        "have left: no other stream gets what was freed on one"
    )


@pytest.mark.parametrize("turns", [[[7]] * 6, [[7 + turn % 2] for turn in range(12)], [[1], [1, 2], [1], [1, 2], [1]]])
def test_what_is_reserved_for_the_same_streams_again_is_none(
    turns: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stranded(turns, monkeypatch) == []
