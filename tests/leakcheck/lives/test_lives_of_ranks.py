"""Lives of several ranks: what a report says of contents that nobody here can read, and how a search makes targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.engine.defects import find_defect
from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.lives.life_record import LifeRecord
from lowtide.leakcheck.targets.reference import ReferenceTarget, reference_target


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


@pytest.mark.parametrize("bug", [None, "rank-keeps"])
def test_a_life_that_fails_is_printed_with_its_ranks(bug: str | None) -> None:
    subjected = reference_target("cpu", find_defect(bug) if bug else None, {"tensor_parallel_size": 2})
    space: dict[str, Any] = {}
    exec("\n".join(subjected.source.imports), space)
    target = eval(subjected.source.factory, space)()
    assert isinstance(target, ReferenceTarget)
    assert target.engine.config.tensor_parallel_size == 2
    assert subjected.factory().engine.config == target.engine.config  # type: ignore[attr-defined]


def test_ranks_are_for_random_lives_of_the_reference_engine() -> None:
    for others in (["--faults"], ["--target", "module:factory"]):
        result = CliRunner().invoke(app, ["fuzz", "--tensor-parallel-size", "2", *others])
        assert result.exit_code == 2
        assert "leave --target and --faults out" in result.output
