"""Whether births can be followed is decided by what the collector does, not by a version number."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest

from lowtide.probes.objects.collector import Collector, observed_collector, why_unusable

GENERATIONS = ((0,), (1,), (2,))


def test_this_interpreter_is_seen_to_have_generations() -> None:
    assert observed_collector() == Collector("cpython", True, GENERATIONS)
    assert why_unusable(observed_collector()) == ""


def test_to_look_changes_nothing_but_what_is_young() -> None:
    gc.disable()
    try:
        before = gc.get_threshold(), gc.get_debug(), gc.get_freeze_count(), len(gc.callbacks)
        observed_collector()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert (gc.get_threshold(), gc.get_debug(), gc.get_freeze_count(), len(gc.callbacks)) == before


@pytest.mark.parametrize(
    ("collector", "why"),
    [
        pytest.param(Collector("cpython", True, GENERATIONS), "", id="3.10 to 3.13, 3.14.5, 3.15"),
        pytest.param(Collector("cpython", True, ((0,), (1,), (1,))), "incremental", id="kept in one old space"),
        pytest.param(Collector("cpython", True, ((0,), (2,), (2,))), "incremental", id="old at once"),
        pytest.param(Collector("cpython", True, ((0,), (), ())), "incremental", id="listed nowhere"),
        pytest.param(Collector("cpython", False, ((0, 1, 2),) * 3), "without the lock", id="free-threaded"),
        pytest.param(Collector("cpython", False, GENERATIONS), "without the lock", id="free-threaded, lock enabled"),
        pytest.param(Collector("pypy", True, GENERATIONS), "this is pypy", id="another interpreter"),
    ],
)
def test_each_kind_of_collector(collector: Collector, why: str) -> None:
    assert (why_unusable(collector) == "") == (why == "")
    assert why in why_unusable(collector)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_supported_version_that_is_here_is_seen_as_usable(version: str) -> None:
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if not found:
        pytest.skip(f"there is no Python {version} here")
    code = "from lowtide.probes.objects.collector import *; print(why_unusable(observed_collector()) or 'usable')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([found[-1], "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "usable", done.stderr


@pytest.mark.nightly
def test_collections_that_start_by_themselves_change_nothing_of_what_is_seen() -> None:
    expected, thresholds = observed_collector(), gc.get_threshold()
    # As in a kernel of Jupyter, where other threads make objects meanwhile.
    gc.set_threshold(1, 1, 1)
    try:
        assert [observed_collector() for _ in range(20)] == [expected] * 20
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
