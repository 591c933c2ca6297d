"""Whatever a process opens or starts is told by what it is, where it was made, who holds it, and what ends it."""

from __future__ import annotations

import tempfile

import pytest

from lowtide.reports.schema import Finding
from tests.pytest_plugin.conftest import InnerRun, RunInner

THINGS = """
import atexit
import functools
import mmap
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from multiprocessing import resource_tracker, shared_memory

import pytest

# Else that of a child starts one for itself, which removes what is left when the child has ended.
resource_tracker.ensure_running()
FORK = multiprocessing.get_context("fork")
LEFT = []
PAIRS = {"segments": [], "processes": []}


class Worker:
    def __init__(self):
        self.ours, self.theirs = socket.socketpair()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        self.ours.recv(1)

    def close(self):
        self.theirs.close()
        self.thread.join()
        self.ours.close()


class Server:
    process = None


def make_epoll(tmp_path):
    return select.epoll()


def make_scandir(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    entries = os.scandir(tmp_path)
    next(entries)
    return entries


def nameless():
    number = os.memfd_create("lowtide_test")
    os.ftruncate(number, 4096)
    return number


MAPPED = mmap.mmap(nameless(), 4096)


def make_mmap(tmp_path):
    with open(tmp_path / "mapped", "wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def make_database(tmp_path):
    database = sqlite3.connect(tmp_path / "database")
    database.execute("create table a (b)")
    return database


def make_attached(tmp_path):
    database = sqlite3.connect(":memory:")
    database.execute("attach ? as other", [str(tmp_path / "attached")])
    database.execute("create table other.a (b)")
    return database


def make_worker(tmp_path):
    return Worker()


@pytest.mark.parametrize("is_kept", [True, False])
def test_socket_file(is_kept):
    path = tempfile.mktemp(suffix=".lowtide_test")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
    if not is_kept:
        os.unlink(path)


@pytest.fixture
def server():
    path = tempfile.mktemp(suffix=".lowtide_test")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        yield path
    os.unlink(path)


def test_client(server, tmp_path):
    with socket.socket(socket.AF_UNIX) as mine, socket.socket(socket.AF_UNIX) as client:
        mine.bind(str(tmp_path / "mine"))
        client.connect(server)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("make", [make_epoll, make_scandir, make_mmap, make_database, make_attached, make_worker])
def test_one(make, is_kept, tmp_path):
    made = make(tmp_path)
    if is_kept:
        LEFT.append(made)
    else:
        made.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_thread_of_nobody(is_kept):
    worker = Worker()
    worker.thread.name = "scheduler"
    if not is_kept:
        worker.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_file_of_the_same_name(is_kept):
    number = nameless()
    if not is_kept:
        os.close(number)


@pytest.mark.parametrize("is_kept", [True, False])
def test_array(is_kept):
    array = multiprocessing.Array("d", 1000)
    if is_kept:
        LEFT.append(array)


@pytest.mark.parametrize("is_kept", [True, False])
def test_reserved(is_kept):
    reserved = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    if is_kept:
        LEFT.append(reserved)
    else:
        reserved.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_at_exit(is_kept):
    segment = shared_memory.SharedMemory(create=True, size=4096)
    atexit.register(segment.close)
    if not is_kept:
        atexit.unregister(segment.close)
        segment.close()
        segment.unlink()


def end(number):
    os.close(number)


class Owner:
    pass


OWNER, CALLS = Owner(), []


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("way", ["at exit", "finalizer", "partial", "alarm"])
def test_numbers_to_close(way, is_kept, tmp_path):
    number = os.open(tmp_path, os.O_RDONLY)
    if way == "at exit":
        atexit.register(os.close, number)
    elif way == "finalizer":
        finalizer = weakref.finalize(OWNER, os.close, number)
    elif way == "partial":
        CALLS.append(functools.partial(os.close, number))
    else:
        # Which seconds only look like.
        atexit.register(signal.alarm, number)
    if not is_kept:
        os.close(number)
        atexit.unregister(os.close)
        atexit.unregister(signal.alarm)
        CALLS.clear()
        if way == "finalizer":
            finalizer.detach()


@pytest.mark.parametrize("is_kept", [True, False])
def test_files_at_exit(is_kept, tmp_path):
    for name in "abc":
        file = open(tmp_path / name, "w")
        atexit.register(file.close)
        if not is_kept:
            file.close()
            atexit.unregister(file.close)


@pytest.mark.parametrize("is_kept", [True, False])
def test_segments(is_kept):
    two = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(2)]
    if is_kept:
        PAIRS["segments"] += two
    else:
        for segment in two:
            segment.close()
            segment.unlink()


@pytest.mark.parametrize("is_kept", [True, False])
def test_closed_segment(is_kept):
    segment = shared_memory.SharedMemory(create=True, size=4096)
    segment.close()
    if not is_kept:
        segment.unlink()


def _hold_segment(connection, is_kept):
    segment = shared_memory.SharedMemory(create=True, size=4096)
    if not is_kept:
        segment.unlink()
    connection.send(segment.name)
    connection.recv()


@pytest.mark.parametrize("is_kept", [True, False])
def test_segment_of_a_child(is_kept):
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=_hold_segment, args=(theirs, is_kept), name="Core")
    child.start()
    ours.recv()
    child.kill()
    child.join()
    child.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_processes(is_kept):
    commands = (["sleep", "1000"], [sys.executable, "-c", "import time\\ntime.sleep(99)"])
    two = [subprocess.Popen(command) for command in commands]
    if is_kept:
        PAIRS["processes"] += two
    else:
        for process in two:
            process.kill()
            process.wait()


@pytest.mark.parametrize("is_kept", [True, False])
def test_process_of_a_class(is_kept):
    process = FORK.Process(target=threading.Event().wait, name="engine-core", daemon=True)
    process.start()
    if is_kept:
        Server.process = process
    else:
        process.kill()
        process.join()
        process.close()


DAEMONS = []


@pytest.mark.parametrize("is_kept", [True, False])
def test_daemon(is_kept):
    reading, writing = os.pipe()
    first = os.fork()
    if not first:
        os.setsid()
        second = os.fork()
        if not second:
            os.closerange(0, 64)
            time.sleep(60)
        else:
            os.write(writing, str(second).encode())
        os._exit(0)
    os.waitpid(first, 0)
    left = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    if is_kept:
        DAEMONS.append(left)
    else:
        os.kill(left, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def end_of_all():
    yield
    for left in DAEMONS:
        os.kill(left, signal.SIGKILL)
    for process in PAIRS["processes"]:
        process.kill()
    for segment in PAIRS["segments"]:
        segment.unlink()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_inner.py": THINGS})


def finding_of(run: InnerRun, name: str) -> Finding:
    (subject,) = [each for each in run.report.subjects if each.id.endswith(f"::{name}")]
    (finding,) = subject.findings
    return finding


@pytest.mark.parametrize(
    ("name", "resource", "holder", "says"),
    [
        ("test_one[make_epoll-True]", "file-descriptors", "test_inner.LEFT[0]", "LEFT[0].close()"),
        ("test_one[make_scandir-True]", "file-descriptors", "test_inner.LEFT[1]", "LEFT[1].close()"),
        ("test_one[make_mmap-True]", "file-descriptors", "test_inner.LEFT[2]", "LEFT[2].close()"),
        ("test_one[make_database-True]", "file-descriptors", "test_inner.LEFT[3]", "LEFT[3].close()"),
        ("test_one[make_attached-True]", "file-descriptors", "test_inner.LEFT[4]", "LEFT[4].close()"),
        ("test_one[make_worker-True]", "threads", "test_inner.LEFT[5]", "it runs test_inner.Worker.serve (test_inner"),
        ("test_one[make_worker-True]", "threads", "test_inner.LEFT[5]", "started in Worker.__init__, test_inner.py:"),
        ("test_thread_of_nobody[True]", "threads", "thread 'scheduler'", "it runs test_inner.Worker.serve (test_inner"),
        ("test_file_of_the_same_name[True]", "file-descriptors", "", "; call os.close() with the descriptor"),
        ("test_array[True]", "file-descriptors", "test_inner.LEFT[6]", "pym-"),
        ("test_reserved[True]", "address-space", "test_inner.LEFT[7]", "2.0 GiB at 0x"),
        ("test_reserved[True]", "address-space", "test_inner.LEFT[7]", "LEFT[7].close()"),
        (
            "test_at_exit[True]",
            "shared-memory",
            "atexit.register(",
            "; call close() and unlink() of the multiprocessing.",
        ),
        ("test_numbers_to_close[at exit-True]", "file-descriptors", "atexit.register(function close)", "call os.close"),
        ("test_numbers_to_close[at exit-True]", "file-descriptors", "atexit.register(function close)", "made in test_"),
        (
            "test_numbers_to_close[finalizer-True]",
            "file-descriptors",
            "weakref.finalize(<test_inner.Owner>, close)",
            "keep what weakref.finalize(<test_inner.Owner>, close) returned, and call it in teardown",
        ),
        (
            "test_numbers_to_close[partial-True]",
            "file-descriptors",
            "test_inner.CALLS[0]",
            "call test_inner.CALLS[0]() in teardown",
        ),
        (
            "test_numbers_to_close[alarm-True]",
            "file-descriptors",
            "",
            "call os.close() with the descriptor in teardown",
        ),
        ("test_files_at_exit[True]", "file-descriptors", "atexit.register(function", "3 file descriptors still open"),
        ("test_segments[True]", "shared-memory", "test_inner.PAIRS['segments']", "call close() and unlink() of each"),
        ("test_segments[True]", "shared-memory", "test_inner.PAIRS['segments']", "; made in test_segments"),
        ("test_closed_segment[True]", "shared-memory", "psm_", "; made in test_closed_segment, test_inner.py:"),
        ("test_closed_segment[True]", "shared-memory", "psm_", "now: os.unlink('/dev/shm/psm_"),
        ("test_segment_of_a_child[True]", "shared-memory", "psm_", "; made in process "),
        ("test_segment_of_a_child[True]", "shared-memory", "psm_", " (Core), started in test_segment_of_a_child, "),
        (
            "test_socket_file[True]",
            "temporary-files",
            tempfile.gettempdir(),
            "bound in test_socket_file, test_inner.py:",
        ),
        ("test_socket_file[True]", "temporary-files", tempfile.gettempdir(), ".lowtide_test') returns it"),
        ("test_processes[True]", "processes", "test_inner.PAIRS['processes']", "(sleep 1000)"),
        ("test_processes[True]", "processes", "test_inner.PAIRS['processes']", "-c 'import time time.sleep(99)')"),
        ("test_processes[True]", "processes", "test_inner.PAIRS['processes']", "started in test_processes"),
        ("test_processes[True]", "processes", "test_inner.PAIRS['processes']", "call terminate() of each"),
        ("test_process_of_a_class[True]", "processes", "test_inner.Server.process", "(engine-core); started in test_"),
        ("test_process_of_a_class[True]", "processes", "test_inner.Server.process", "Server.process.terminate()"),
        ("test_daemon[True]", "processes", "", "; its parent has ended; since "),
        ("test_daemon[True]", "processes", "", "end it with that: os.kill("),
    ],
)
def test_a_thing_is_told_by_what_it_is_and_who_holds_it(
    run: InnerRun, name: str, resource: str, holder: str, says: str
) -> None:
    finding = finding_of(run, name)
    assert finding.resource == resource
    assert (finding.holder or "").startswith(holder)
    assert says in f"{finding.message}; {finding.advice}"


def test_a_descriptor_is_not_told_by_what_has_mapped_another_file_of_the_same_name(run: InnerRun) -> None:
    assert "MAPPED" not in (finding_of(run, "test_file_of_the_same_name[True]").holder or "")


@pytest.mark.parametrize(
    "name",
    [
        *(f"test_one[make_{kind}-False]" for kind in ("epoll", "scandir", "mmap", "database", "attached", "worker")),
        *(
            f"test_{kind}[False]"
            for kind in (
                "thread_of_nobody",
                "file_of_the_same_name",
                "array",
                "reserved",
                "at_exit",
                "files_at_exit",
                "segments",
                "closed_segment",
                "segment_of_a_child",
                "processes",
                "process_of_a_class",
                "daemon",
                "socket_file",
            )
        ),
        *(f"test_numbers_to_close[{way}-False]" for way in ("at exit", "finalizer", "partial", "alarm")),
        "test_client",
    ],
)
def test_what_is_ended_is_no_leak(run: InnerRun, name: str) -> None:
    (subject,) = [each for each in run.report.subjects if each.id.endswith(f"::{name}")]
    assert (subject.outcome, subject.findings) == ("clean", ())
