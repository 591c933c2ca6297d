"""The order of the tests."""

from __future__ import annotations

import pytest

_LOADERS = ("engine", "test_cli.py", "test_allocation_stacks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that load transformers or torch's compiler come last: they leave 180,000 objects in the process.

    What goes through the whole heap takes half the time without them.
    """
    items.sort(key=lambda item: any(name in item.path.parts for name in _LOADERS))
