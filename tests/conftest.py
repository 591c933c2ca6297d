"""The order of the tests."""

from __future__ import annotations

import pytest

_LOADERS = (
    "engine",
    "test_allocation_stacks.py",
    "test_checked_life.py",
    "test_cli.py",
    "test_faults.py",
    "test_fuzz.py",
    "test_transformers_target.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that load transformers or torch's compiler, as a dispatch mode does, come last: they leave 180,000 objects.

    What goes through the whole heap takes half the time without them.
    """
    items.sort(key=lambda item: any(name in item.path.parts for name in _LOADERS))
