"""What is counted by name grows only where one turn after the other leaves more of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lowtide.leakcheck.findings.item_findings import NamedGrowth
from lowtide.reports.schema import Finding


def grown(turns: Sequence[Sequence[str]]) -> list[Finding]:
    """What is found where there are these descriptors after each turn."""
    now: list[str] = []
    growth = NamedGrowth("update_weights", lambda: {"file-descriptors": dict.fromkeys(now, 1)})
    for names in turns:
        growth.begin()
        now = list(names)
        growth.end()
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
