"""The order of the tests, and what a failed fixture of many tests is to each of them."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("lowtide", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lowtide")

# Where the tests run in the background of a script, Ctrl-C is ignored, also by each process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the files come in the order in which they are given; pytest puts those together that share fixtures.

    The Makefile gives those last that load transformers or torch's compiler: they leave 180,000 objects, with which
    what goes through the whole heap takes twice the time.
    """
    given = {config.invocation_params.dir / argument: place for place, argument in enumerate(config.args)}
    items.sort(key=lambda item: given.get(item.path, len(given)))


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
