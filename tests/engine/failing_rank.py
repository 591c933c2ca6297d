"""A rank's process in which one order fails: after it was done, as a rank fails that the others cannot wait for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine import ranks
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.model_executor.parallel_layers import ProcessGroup
from lowtide.engine.processes import Connection
from lowtide.engine.ranks import RankProcess
from lowtide.engine.worker import Worker

VARIABLE = "LOWTIDE_TEST_FAILS"


def failing(
    rank: int,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    once_in: Path,
    before: bool = False,
    as_nccl: bool = False,
) -> None:
    """The first order of a kind fails on one rank, of engines that are created from here on.

    With `as_nccl` no collective can be broken off.
    """
    when = "before" if before else "after"
    monkeypatch.setenv(VARIABLE, f"{rank} {order} {when} {'nccl' if as_nccl else 'gloo'} {once_in}")
    monkeypatch.setattr("lowtide.engine.ranks.ENTRY", f"{__name__}:main")


def main(connection: Connection) -> None:
    rank, failing_order, when, backend, once_in = os.environ[VARIABLE].split(" ", 4)
    done = Path(once_in)

    def or_fail(owner: Any, name: str, kind: str | None) -> None:
        call = getattr(owner, name)

        def call_or_fail(self: Any, *arguments: Any) -> Any:
            if os.environ["RANK"] != rank or (kind or arguments[0]) != failing_order or done.exists():
                return call(self, *arguments)
            done.touch()
            if when == "after":
                call(self, *arguments)
            raise OutOfMemoryError("no room, as it was asked for")

        setattr(owner, name, call_or_fail)

    if failing_order == "execute_model":
        or_fail(Worker, "execute_model", "execute_model")
    else:
        or_fail(RankProcess, "follow", None)
    if backend == "nccl":
        ProcessGroup.break_off = lambda self: None  # type: ignore[method-assign]
    ranks.main(connection)
