"""A `transformers` model, driven through random lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.leakcheck.lives.fuzz import fuzz
from lowtide.leakcheck.targets.transformers_target import transformers_model

pytestmark = pytest.mark.nightly


def test_a_transformers_model_lives_without_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The example database is kept in the current directory.
    monkeypatch.chdir(tmp_path)
    found = fuzz(transformers_model, examples=6, seed=0)
    assert (found.findings, found.reason) == ((), "")
    assert {"running", "asleep at level 1"} <= found.coverage.states
