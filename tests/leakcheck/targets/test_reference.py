"""The reference engine as it is driven through a life to be judged, and in how many processes a search drives it."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.engine import EngineConfig
from lowtide.engine.defects import find_defect
from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.targets.reference import FixedReference, ReferenceTarget, reference_target

MIB = 1 << 20


@pytest.mark.parametrize("level", [1, 2])
def test_what_a_sleep_dropped_cannot_pass_for_the_zeros_that_it_was(level: int) -> None:
    target = FixedReference(EngineConfig(device="cpu", kv_cache_bytes=4 * MIB))
    target.create({})
    try:
        cache = target.engine._core.worker.memory.arena("kv_cache")
        assert not cache.bytes_at(0, 4 * MIB).any()
        target.sleep(level, "wait")
        target.wake(None)
        assert (cache.bytes_at(0, 4 * MIB) == 0xA5).all()
    finally:
        target.shutdown()


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
