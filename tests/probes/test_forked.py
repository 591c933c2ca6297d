"""Work on the heap in a fork: what it sees, what the process notices, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import psutil
import pytest

from lowtide.probes.heap.holders import trace
from lowtide.probes.host.process_files import children_of
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import gc as original_gc
from lowtide.probes.originals import sys as original_sys
from lowtide.probes.processes.forked import ForkError, in_a_fork
from tests.resized_buffers import buffers_resized_meanwhile
from tests.waiting import HANG_S, wait_until

KEPT: list[object] = []


class Thing:
    pass


def walk() -> bytes:
    thing = Thing()
    KEPT.append(thing)
    with trace([thing], ignore={id(sys._getframe())}) as found:
        path = found.path(0)
    return b"" if path is None else f"{path.root_name}{path.steps[0].edge}".encode()


def test_the_process_notices_nothing_of_a_walk_through_its_heap() -> None:
    with buffers_resized_meanwhile() as errors:
        assert in_a_fork(walk) == f"{__name__}.KEPT".encode()
        assert errors == []
    assert KEPT == []


LOCAL = threading.local()


def way_to_the_only_thing() -> bytes:
    (thing,) = all_instances(Thing)
    with trace([thing], ignore={id(sys._getframe())}) as found:
        path = found.path(0)
    return b"" if path is None else f"{path.root_name}{''.join(step.edge for step in path.steps)}".encode()


def test_what_another_thread_has_in_a_local_of_threads_is_seen_and_let_go_of() -> None:
    started, ended = threading.Event(), threading.Event()

    def wait_with_a_thing() -> None:
        LOCAL.thing = Thing()
        started.set()
        ended.wait()

    thread = threading.Thread(target=wait_with_a_thing)
    thread.start()
    started.wait()
    try:
        assert in_a_fork(way_to_the_only_thing) == f"{__name__}.LOCAL.thing".encode()
    finally:
        ended.set()
        thread.join()
    assert all_instances(Thing) == []


def test_frames_of_other_threads_are_seen_and_let_go_of() -> None:
    started, ended = threading.Event(), threading.Event()

    def wait_here() -> None:
        started.set()
        ended.wait()

    thread = threading.Thread(target=wait_here, name="the other one")
    thread.start()
    started.wait()

    def seen() -> bytes:
        ended.set()
        frames = {frame.f_code.co_name for frame in original_sys._current_frames().values()}
        names = {each.name for each in threading._active.values()}  # type: ignore[attr-defined]
        return repr(("wait" in frames, "the other one" in names)).encode()

    try:
        assert in_a_fork(seen) == b"(True, True)"
        # It was set in the fork alone.
        assert not ended.is_set()
    finally:
        ended.set()
        thread.join()


def test_garbage_is_not_collected_there() -> None:
    reading, writing = os.pipe()
    try:

        class Loud:
            def __del__(self) -> None:
                os.write(writing, b"x")

        gc.disable()
        loud = Loud()
        loud.itself = loud  # type: ignore[attr-defined]
        del loud
        assert in_a_fork(lambda: str(original_gc.collect() + gc.collect()).encode()) == b"0"
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        gc.collect()
        assert os.read(reading, 1) == b"x"
    finally:
        gc.enable()
        os.close(reading)
        os.close(writing)


def test_what_fails_there_is_an_error_here() -> None:
    with pytest.raises(ForkError, match=r"^ZeroDivisionError: .+ \(<lambda>, line \d+\)$"):
        in_a_fork(lambda: bytes(1 // 0))
    with pytest.raises(ForkError, match="ended without an answer"):
        in_a_fork(lambda: os._exit(1))
    assert in_a_fork(lambda: b"x" * (1 << 20)) == b"x" * (1 << 20)


def test_one_that_takes_too_long_is_ended() -> None:
    before = set(children_of(os.getpid()))
    with pytest.raises(ForkError, match=r"did not answer within 0\.1 s, and was ended"):
        in_a_fork(lambda: bytes(int(time.sleep(60) or 0)), 0.1)
    wait_until(lambda: set(children_of(os.getpid())) <= before)


ENDS_MEANWHILE = """
import os, time
from lowtide.probes.processes.forked import in_a_fork

def work():
    print(os.getpid(), flush=True)
    time.sleep(600)
    return b""

in_a_fork(work)
"""


def test_it_ends_with_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDS_MEANWHILE], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        assert psutil.pid_exists(child)
        program.kill()
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_whoever_else_has_the_pipe_holds_up_nothing() -> None:
    def work() -> bytes:
        child = os.fork()
        if not child:
            time.sleep(HANG_S)
            os._exit(0)
        return str(child).encode()

    child = int(in_a_fork(work, HANG_S / 2))
    # It has the pipe still.
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_warnings_about_forks_are_no_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_a_fork(lambda: b"well") == b"well"
