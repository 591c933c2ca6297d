"""What stands in for a library's functions while tests are watched passes for them."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy

MODULES = (os, signal, socket, subprocess, tempfile, threading, multiprocessing)


@pytest.fixture
def watched() -> Iterator[None]:
    watch = Watch(Policy(card=False))
    watch.open()
    watch.begin()
    yield
    watch.close()


def reported() -> dict[tuple[str, ...], Any]:
    """What the modules' functions and methods say of themselves, and whether each can be pickled."""
    places = [(module.__name__, module) for module in MODULES]
    places += [
        (f"{name}.{inner}", kind)
        for name, module in places
        for inner, kind in vars(module).items()
        if type(kind) is type and kind.__module__ == name
    ]
    return {
        (place, name): (value.__name__, value.__doc__, _signature(value), _is_picklable(value))
        for place, owner in places
        for name, value in vars(owner).items()
        if inspect.isroutine(value) and hasattr(value, "__name__")
    }


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (ValueError, TypeError):
        return ""


def _is_picklable(function: Any) -> bool:
    with contextlib.suppress(Exception):
        return pickle.loads(pickle.dumps(function)) is function
    return False


BEFORE = reported()


@pytest.mark.usefixtures("watched")
def test_functions_say_of_themselves_what_they_said() -> None:
    now = reported()
    changed = {place: (BEFORE[place], now[place]) for place in BEFORE if now[place] != BEFORE[place]}
    assert changed == {}


@pytest.mark.usefixtures("watched")
def test_a_function_can_be_sent_to_another_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=os.kill, args=(os.getpid(), 0))
    process.start()
    process.join()
    assert process.exitcode == 0
    # The other process has the function itself.
    sent = pickle.dumps(os.pipe)
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    said = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout
    assert said.decode().strip() == "<built-in function pipe>"
