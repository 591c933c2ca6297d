"""Signals that a test sends right before something happens, and how many of them reach the program."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

ROUNDS = 200
NUMBERS = (signal.SIGINT, signal.SIGALRM)

# Only tells the kernel: `os.kill` itself looks whether a signal has come.
_KILL = ctypes.CDLL(None).kill

_call: Callable[..., object] = partial.__call__


class Arrived(BaseException):
    """A handler has run."""


@contextmanager
def raising(number: int) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Arrived

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def arrivals(number: int, happens: Callable[[], partial[object]]) -> int:
    """How many of `ROUNDS` signals arrive that are sent right before something happens, with no Python between."""
    count = 0
    with raising(number):
        for _ in range(ROUNDS):
            steps = partial(_KILL, os.getpid(), number), happens()
            try:
                deque(map(_call, steps), maxlen=0)
                # The handler has run by now.
                str(count)
            except Arrived:
                count += 1
    return count


def all_arrive_elsewhere(module: str, happens: str) -> None:
    """Require that all signals arrive and what is dropped is given back, in a process without audit hooks of libraries.

    One that is written in Python (filelock has one) hears of each thread that starts, and in it handlers run.

    Args:
        module: a module of tests.
        happens: the function in it that makes what happens.
    """
    source = f"from {module} import {happens} as happens; from tests.sent_signals import ROUNDS, arrivals; "
    source += "from lowtide.engine.teardown import WhenDropped; from tests.waiting import wait_until; "
    source += f"found = [arrivals(number, happens) for number in {[int(number) for number in NUMBERS]}]; "
    source += "assert found == [ROUNDS, ROUNDS], found; "
    source += "wait_until(lambda: not WhenDropped._waiting)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
