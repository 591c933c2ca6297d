"""What is written in C and in Python, tested by the same tests."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.probes import native


def in_both_ways(name: str) -> Any:
    """Return a fixture by which each test of a module runs with a function in C, and without it.

    Args:
        name: the function's in `lowtide.probes.native`.
    """

    @pytest.fixture(autouse=True, params=["in C", "in Python"])
    def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "in Python":
            monkeypatch.setattr(native, name, None)
        elif getattr(native, name) is None:
            pytest.skip("no compiler")

    return way
