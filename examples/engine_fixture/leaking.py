"""The fixture forgets to close the engine: its thread stays, and keeps the engine and its memory."""

from __future__ import annotations

import pytest

from engine import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_one_request(engine: Engine) -> None:
    assert engine.generate(4).shape == (4,)
