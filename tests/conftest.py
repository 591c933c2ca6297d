"""The order of the tests, and what a failed fixture of many tests is to each of them."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

# Where the tests run in the background of a script, Ctrl-C is ignored, also by each process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Report the failure of a fixture that tests share once, in the first of them; the others are skipped.

    pytest raises it again for each of them, and would print a shared run's whole output a hundred times.
    """
    try:
        yield
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception) as error:
        first = vars(error).setdefault("first_raised_in", item.nodeid)
        if first == item.nodeid:
            raise
        pytest.skip(f"a fixture that it shares with {first} failed there")
