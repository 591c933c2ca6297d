"""The order of the tests."""

from __future__ import annotations

import pytest

LOADERS = (
    "test_life.py",
    "test_config.py",
    "test_model.py",
    "test_cli.py",
    "test_golden.py",
    "test_golden_life.py",
    "test_allocation_stacks.py",
)
"""Files whose tests load transformers or torch's compiler: 180,000 objects that stay in the process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those come last: what goes through the whole heap takes half the time without them."""
    items.sort(key=lambda item: item.path.name in LOADERS)
