"""The order of the tests."""

from __future__ import annotations

import pytest

_LOADERS = (
    # The longest first, so that the short ones fill both processes to the end.
    "test_cli.py",
    "test_fuzz.py",
    "test_checked_life.py",
    "engine",
    "test_allocation_stacks.py",
    "test_faults.py",
    "test_transformers_target.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that load transformers or torch's compiler, as a dispatch mode does, come last: they leave 180,000 objects.

    What goes through the whole heap takes half the time without them.
    """
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, name in enumerate(_LOADERS, 1) if name in item.path.parts), 0)
