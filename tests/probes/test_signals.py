"""Signals: what a handler raises reaches the program whatever of lowtide is called meanwhile.

Python drops an exception that is raised in what the collector or a weak reference calls. So that code is written in C,
where no handler runs: a signal that has arrived waits until the program's own code goes on.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType

import pytest

from lowtide.probes import stages
from lowtide.probes.heap.births import Births, young_generations_tell
from tests.sent_signals import ROUNDS, arrivals


class InPython:
    """What must not be: a callback of the collector that is written in Python."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Do nothing."""


@pytest.fixture
def births() -> Iterator[Births]:
    if not young_generations_tell():
        pytest.skip("this interpreter has no young generations")
    births = Births()
    births.start()
    births.mark("call")
    births.begin("stage")
    # Hypothesis has one in Python for the rest of the process, once it has run a test.
    there = list(gc.callbacks)
    gc.callbacks[:] = [each for each in there if not isinstance(each, FunctionType | MethodType)]
    yield births
    gc.callbacks[:] = there
    births.stop()


NUMBERS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGUSR1], ids=lambda each: each.name)


def test_what_is_measured_is_lost_where_python_code_is_called() -> None:
    in_python = InPython()
    gc.callbacks.append(in_python)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda _: None)
            assert arrivals(signal.SIGUSR1, lambda: partial(gc.collect, 0)) < ROUNDS
    finally:
        gc.callbacks.remove(in_python)


@NUMBERS
@pytest.mark.parametrize("generation", [0, 1])
def test_all_arrive_that_come_before_a_collection(births: Births, number: int, generation: int) -> None:
    assert arrivals(number, lambda: partial(gc.collect, generation)) == ROUNDS
    assert births.label == "stage"


class Source:
    """Something that reports memory."""

    def read_pools(self) -> tuple[stages.PoolReading, ...]:
        return ()


def announced() -> partial[object]:
    holder = [Source()]
    stages.announce(holder[0])
    return partial(holder.clear)


@NUMBERS
def test_all_arrive_that_come_before_an_announced_source_dies(number: int) -> None:
    assert arrivals(number, announced) == ROUNDS
    assert stages.announced_pools() == ()


def test_what_is_dropped_is_forgotten_however_it_was_announced() -> None:
    source = Source()
    stages.announce(source)
    stages.announce(source)
    key = id(source)
    assert key in stages._sources
    del source
    assert key not in stages._sources


# What `json.loads` makes in C takes a collection again and again.
LOOP = f"""
import gc, json, os, signal, sys, threading
from lowtide import LeakCheck

text = json.dumps([{{"id": number, "pair": [number, number]}} for number in range(3000)])
counts = []

class Arrived(Exception):
    pass

def handler(*_):
    raise Arrived

signal.signal(signal.SIGALRM, handler)
with LeakCheck():
    for _ in range({ROUNDS}):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.003)
            while True:
                json.loads(text)
        except Arrived:
            counts.append(1)
print(len(counts))
"""


def test_all_arrive_in_a_block_that_is_watched() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout, done.stderr) == (f"{ROUNDS}\n", "")


AT_EXIT = """
import sys
sys.path.insert(0, {folder!r})
from lowtide.probes.heap.births import Births
births = Births()
births.start()
births.mark("call")
import holder
"""

LATE = """
class Late:
    def __del__(self):
        kept = [[] for _ in range(200_000)]
"""

# Dies when this module's names are taken away, which is after the modules are: not in a collection, which starts none.
HOLDER = """
import late
HELD = late.Late()
"""


def test_an_interpreter_that_ends_says_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "holder.py").write_text(HOLDER)
    code = AT_EXIT.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_records_nothing_until_it_watches_itself(births: Births) -> None:
    read, write = os.pipe()
    if not os.fork():
        try:
            gc.collect(1)
            before = births._record.made
            births.mark("in the fork")
            births.start()
            gc.collect(1)
            os.write(write, json.dumps([before, births._record.made]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert json.loads(answer.read()) == [0, 1]
