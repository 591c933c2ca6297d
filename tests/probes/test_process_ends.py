"""When processes end that this one may have started or not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lowtide.probes.processes.process_ends import ProcessEnds


def opened() -> set[Path]:
    """Return the descriptors of processes, and of what waits for some."""
    words = ("pidfd", "eventpoll")
    found = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return {each for each in found if any(word in str(each.readlink()) for word in words)}


def waiting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lowtide-ends"}


def eventually(done: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not done() and time.monotonic() < until:
        time.sleep(0.02)
    return done()


def test_the_end_is_noted_when_it_comes_and_not_when_somebody_looks() -> None:
    ends = ProcessEnds()
    child = subprocess.Popen(["sleep", "60"])
    ends.follow(child.pid)
    assert ends.of(child.pid) is None
    child.kill()
    child.wait()
    now = time.monotonic()
    time.sleep(0.5)
    ended = ends.of(child.pid)
    assert ended is not None
    assert abs(ended - now) < 0.4
    ends.close()


def test_of_one_that_is_gone_already_it_is_known_at_once() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ends = ProcessEnds()
    ends.follow(child.pid)
    assert ends.of(child.pid) is not None


def test_nothing_is_left_of_it() -> None:
    before, descriptors = waiting(), opened()
    ends = ProcessEnds()
    child = subprocess.Popen(["sleep", "60"])
    ends.follow(child.pid)
    assert waiting() - before
    ends.close()
    ends.close()
    assert not waiting() - before
    assert not opened() - descriptors
    child.kill()
    child.wait()


def test_one_that_nobody_has_closed_ends_when_it_is_dropped() -> None:
    before, descriptors = waiting(), opened()
    ends = ProcessEnds()
    ends.follow(os.getpid())
    del ends
    assert eventually(lambda: not waiting() - before and not opened() - descriptors)
