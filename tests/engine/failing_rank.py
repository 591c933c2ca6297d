"""A rank's process in which one order fails: after it was done, as a rank fails that the others cannot wait for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.processes.channel import Connection
from lowtide.engine.ranks import rank_process
from lowtide.engine.ranks.rank_process import RankProcess

VARIABLE = "LOWTIDE_TEST_FAILS"


def failing(rank: int, order: str, monkeypatch: pytest.MonkeyPatch, *, once_in: Path, before: bool = False) -> None:
    """The first order of a kind fails on one rank, of engines that are created from here on."""
    monkeypatch.setenv(VARIABLE, f"{rank} {order} {'before' if before else 'after'} {once_in}")
    monkeypatch.setattr("lowtide.engine.ranks.executor.ENTRY", f"{__name__}:main")


def main(connection: Connection) -> None:
    rank, failing_order, when, once_in = os.environ[VARIABLE].split(" ", 3)
    follow = RankProcess._follow
    done = Path(once_in)

    def follow_or_fail(self: RankProcess, order: Any) -> dict[str, int]:
        if os.environ["RANK"] != rank or type(order).__name__ != failing_order or done.exists():
            return follow(self, order)
        done.touch()
        if when == "after":
            follow(self, order)
        raise OutOfMemoryError("no room, as it was asked for")

    RankProcess._follow = follow_or_fail  # type: ignore[method-assign]
    rank_process.main(connection)
