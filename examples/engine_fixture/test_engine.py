"""Clean: the engine belongs to the fixture, which closes it; the tests leave nothing under it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_one_request(engine: Engine) -> None:
    assert engine.generate(4).shape == (4,)


def test_another_request(engine: Engine) -> None:
    assert engine.generate(8).sum() == 0
