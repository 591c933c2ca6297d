"""The tree of processes from outside: who is in it, also when its parent is gone, and what is a process's own."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import psutil
import pytest

from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.driver.nvml import NvmlDriver
from lowtide.probes.host import process_files, process_tree
from lowtide.probes.host.counters import child_processes
from lowtide.probes.host.process_files import MARK, name_of
from lowtide.probes.host.process_tree import ProcessMemory, ProcessTree, TreeMemory
from tests.probes.fake_drivers import FakeNvml, FakeNvmlError
from tests.probes.left_processes import TITLE
from tests.waiting import wait_until

MIB = 1 << 20
WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


class TwoCards(FakeNvml):
    """As NVML, it knows no third card."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.uuids):
            raise FakeNvmlError("Invalid Argument")
        return super().nvmlDeviceGetHandleByIndex(index)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessTree]:
    """Without what earlier tests of this process have started, such as multiprocessing's resource tracker."""
    earlier = set(child_processes())
    monkeypatch.setattr(
        "lowtide.probes.host.process_tree.child_processes",
        lambda: [pid for pid in child_processes() if pid not in earlier],
    )
    tree = ProcessTree()
    tree.start()
    yield tree
    tree.stop()


@contextlib.contextmanager
def child(code: str = WAITS, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python that says when it is ready, and ends with the block."""
    command = options.pop("args", [sys.executable, "-c", code])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, executable=sys.executable, **options
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def only(tree: ProcessTree, driver: Any = None) -> ProcessMemory:
    _, (found,) = TreeMemory(tree).read(None if driver is None else lambda: driver, floor=16 * MIB)
    return found


def test_without_children_there_is_nothing(tree: ProcessTree) -> None:
    assert not tree.any_alive()
    assert tree.descendants() == tree.orphans() == []


def test_children_and_theirs_are_the_tree(tree: ProcessTree) -> None:
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {WAITS!r}]); p.wait()"
    with child(code) as process:
        (grandchild,) = psutil.Process(process.pid).children()
        assert tree.any_alive()
        assert tree.descendants() == sorted([process.pid, grandchild.pid])
        assert tree.orphans() == []


@pytest.mark.parametrize("own_session", [False, True])
def test_an_orphan_is_known_by_its_mark(tree: ProcessTree, *, own_session: bool) -> None:
    code = f"""import subprocess, sys
p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session={own_session})
print(p.pid, flush=True)
sys.stdin.read()"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.kill()
    try:
        assert tree.any_alive()
        assert tree.orphans() == tree.descendants() == [left]
    finally:
        os.kill(left, signal.SIGKILL)
    wait_until(lambda: not tree.orphans())


def _leave(pipe: Any) -> None:
    left = os.fork()
    if not left:
        time.sleep(600)
        os._exit(0)
    pipe.send(left)
    signal.pause()


def test_an_orphan_that_was_only_forked_is_known_by_its_group(tree: ProcessTree) -> None:
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_leave, args=(theirs,))
    process.start()
    left = mine.recv()
    process.kill()
    process.join()
    try:
        if psutil.Process(left).ppid() != 1:
            pytest.skip("another process than number 1 takes orphans in here")
        assert tree.orphans() == [left]
    finally:
        os.kill(left, signal.SIGKILL)


def daemon() -> int:
    """Forks twice, into a session of its own, without a program of its own; the number of the process that stays."""
    reading, writing = os.pipe()
    first = os.fork()
    if not first:
        os.setsid()
        second = os.fork()
        if not second:
            # Nobody is to wait for what it has inherited.
            os.closerange(0, 64)
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(second).encode())
        os._exit(0)
    os.waitpid(first, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return int(pipe.read(20))


def test_a_daemon_that_was_only_forked_is_known_by_where_its_program_lies(tree: ProcessTree) -> None:
    # What an earlier test has forked may be ending still.
    wait_until(lambda: not tree.any_alive())
    left = daemon()
    try:
        assert os.getsid(left) != os.getsid(0)
        assert tree.orphans() == tree.descendants() == [left]
        assert not tree.lost_an_orphan()
    finally:
        os.kill(left, signal.SIGKILL)
    wait_until(tree.lost_an_orphan)
    assert tree.orphans() == []


@pytest.mark.skipif(shutil.which("setarch") is None, reason="util-linux is not installed")
def test_where_addresses_are_not_drawn_forks_are_not_known_by_them() -> None:
    code = "from lowtide.probes.host.process_tree import _addresses_are_drawn; print(_addresses_are_drawn())"
    for command, drawn in (([], "True"), (["setarch", "-R"], "False")):
        said = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == drawn


DAEMON = f"""
import os, signal, sys, time
{inspect.getsource(daemon)}
print("ready", flush=True)
sys.stdin.readline()
print(daemon(), flush=True)
sys.stdin.read()
"""


def test_a_daemon_of_another_program_is_not_of_the_tree() -> None:
    others = {name: value for name, value in os.environ.items() if name != MARK}
    with child(DAEMON, env=others) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        tree = ProcessTree()
        tree.start()
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            left = int(process.stdout.readline())
            assert left not in tree.orphans()
            os.kill(left, signal.SIGKILL)
        finally:
            tree.stop()


def test_a_process_that_is_a_fork_itself_does_not_take_its_parents_forks_for_its_own() -> None:
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_look_for, args=(theirs,))
    process.start()
    mine.recv()
    left = daemon()
    try:
        mine.send(left)
        assert mine.recv() is False
    finally:
        os.kill(left, signal.SIGKILL)
    process.join()


def _look_for(pipe: Any) -> None:
    tree = ProcessTree()
    tree.start()
    pipe.send(None)
    pipe.send(pipe.recv() in tree.orphans())


def test_what_is_in_the_session_of_a_process_that_was_started_and_has_ended_is_known_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = subprocess.run(
        ["sh", "-c", "sleep 60 > /dev/null & echo $! $$"], env={}, start_new_session=True, stdout=subprocess.PIPE
    )
    left, leader = map(int, shell.stdout.split())
    try:
        for started, expected in (([], False), ([leader], True)):
            tree = ProcessTree(lambda started=started: started)  # type: ignore[misc]
            tree.start()
            assert (left in tree.orphans()) == expected
            tree.stop()
    finally:
        os.kill(left, signal.SIGKILL)


def test_what_an_orphan_leaves_that_ends_is_known_at_once(tree: ProcessTree) -> None:
    # The first process is of the tree until it ends; only the last one stays.
    code = f"import os, sys, time\n{inspect.getsource(daemon)}\nprint(os.getpid())\nprint(daemon(), flush=True)"
    shell = subprocess.run(["sh", "-c", '"$@" &', "sh", sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    first, left = map(int, shell.stdout.split())
    # On a busy machine it is there still when it has closed its output.
    wait_until(lambda: (found := process_files.stat(first)) is None or found.state == "Z")
    try:
        assert tree.orphans() == [left]
    finally:
        os.kill(left, signal.SIGKILL)


LEAVES_AN_ORPHAN = """
import os, subprocess, sys, time
print("ready", flush=True)
kind = sys.stdin.readline().strip()
reading, writing = os.pipe()
if not os.fork():
    if kind == "fork":
        left = os.fork()
        if not left:
            time.sleep(600)
            os._exit(0)
    else:
        environment = {} if kind == "program without environment" else None
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment).pid
    os.write(writing, str(left).encode())
    os._exit(0)
os.wait()
print(os.read(reading, 20).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["fork", "program"])
def test_what_is_left_by_a_child_of_a_child_is_known_though_the_children_are_the_same(
    tree: ProcessTree, kind: str
) -> None:
    # As below a fork server, which waits for the processes that it forks for this one.
    with child(LEAVES_AN_ORPHAN) as process:
        assert tree.orphans() == []
        left = orphan_of(process, kind)
        try:
            assert tree.orphans() == [left]
        finally:
            os.kill(left, signal.SIGKILL)


def orphan_of(process: subprocess.Popen[str], kind: str) -> int:
    """Has a process leave an orphan in this group; its identifier."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{kind}\n")
    process.stdin.flush()
    left = int(process.stdout.readline())
    if psutil.Process(left).ppid() != 1:
        os.kill(left, signal.SIGKILL)
        pytest.skip("another process than number 1 takes orphans in here")
    assert os.getpgid(left) == os.getpgrp()
    return left


@pytest.fixture
def neighbour(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process of this group outside the tree, as xdist's other workers are; with a mark or without."""
    others = {name: value for name, value in os.environ.items() if name != MARK}
    with child(LEAVES_AN_ORPHAN, env={**others, MARK: "another"} if request.param else others) as process:
        yield process


@pytest.mark.parametrize(
    ("neighbour", "kind"), [(True, "program"), (True, "fork"), (False, "fork")], indirect=["neighbour"]
)
def test_the_orphan_of_a_neighbour_in_the_group_is_not_of_the_tree(
    neighbour: subprocess.Popen[str], tree: ProcessTree, kind: str
) -> None:
    left = orphan_of(neighbour, kind)
    try:
        assert left not in tree.orphans()
    finally:
        os.kill(left, signal.SIGKILL)


def test_an_orphan_without_any_environment_is_known_by_its_group(tree: ProcessTree) -> None:
    with child(LEAVES_AN_ORPHAN) as process:
        left = orphan_of(process, "program without environment")
        try:
            assert tree.orphans() == [left]
        finally:
            os.kill(left, signal.SIGKILL)


def test_the_mark_goes_with_the_tree_and_leaves_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "outer")
    tree = ProcessTree()
    tree.start()
    assert os.environ[MARK].startswith("outer:")
    tree.stop()
    assert os.environ[MARK] == "outer"


def test_what_a_child_holds_is_its_own(tree: ProcessTree) -> None:
    with child(f"held = b'x' * {64 * MIB}; {WAITS}"):
        found = only(tree)
    assert found.private is not None
    assert 64 * MIB < found.own <= found.private < 90 * MIB
    assert found.cards == {}


def test_a_child_below_the_floor_is_not_read(tree: ProcessTree) -> None:
    with child():
        assert TreeMemory(tree).read(lambda: NoDriver("a test"), floor=64 * MIB)[1] == []


def _collect(pipe: Any, own: int) -> None:
    held = b"x" * own
    gc.collect()
    pipe.send(len(held))
    signal.pause()


@pytest.mark.parametrize("own", [0, 64 * MIB])
@pytest.mark.nightly
def test_copies_of_a_forks_parents_pages_are_not_its_own(tree: ProcessTree, own: int) -> None:
    filler = [[] for _ in range(400_000)]
    memory = TreeMemory(tree)
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_collect, args=(theirs, own))
    process.start()
    try:
        mine.recv()
        _, (found,) = memory.read(None, floor=16 * MIB)
    finally:
        process.kill()
        process.join()
    del filler
    assert found.private is not None
    assert found.private > own + 16 * MIB
    # The parent gives back a little between the reading and the fork, or takes a little more.
    assert abs(found.own - own) < 16 * MIB


def _write(pipe: Any, inherited: bytearray, size: int) -> None:
    for page in range(0, size, 4096):
        inherited[page] = 1
    gc.collect()
    pipe.send(size)
    signal.pause()


def test_no_python_code_runs_at_a_fork(tree: ProcessTree, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python prints and drops what the handler of a signal raises there.
    hooks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **those: hooks.append(those))
    TreeMemory(tree)
    assert hooks == []


@pytest.mark.parametrize("written", [0, 256 * MIB])
def test_what_a_fork_writes_of_its_parents_memory_is_its_own(tree: ProcessTree, written: int) -> None:
    filler = [[] for _ in range(400_000)]
    memory = TreeMemory(tree)
    # Loaded since it was last looked at.
    inherited = bytearray(b"x" * (256 * MIB))
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_write, args=(theirs, inherited, written))
    process.start()
    try:
        mine.recv()
        # The pages behind Python's objects are copied by looking at them; how many there are depends on other tests.
        objects = sys.getallocatedblocks() * process_tree._BLOCK
        _, (found,) = memory.read(None, floor=16 * MIB)
    finally:
        process.kill()
        process.join()
    del filler, inherited
    assert found.forked
    assert (found.private or 0) > written + 16 * MIB
    assert max(0, written - objects) <= found.own < written + 16 * MIB


def test_memory_that_may_not_be_read_is_unknown_and_reported_as_resident(
    tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_files, "rollup", lambda pid: None)
    with child(f"held = b'x' * {64 * MIB}; {WAITS}"):
        found = only(tree)
    assert found.private is None
    assert found.own == found.resident > 64 * MIB


@pytest.mark.parametrize(("made", "times"), [("b'x' * size", 1), ("shared(size)", 3)])
def test_pages_are_counted_again_only_where_shared_memory_has_come_or_gone(
    made: str, times: int, tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    count = process_files.rollup
    monkeypatch.setattr(process_files, "rollup", lambda pid: (counted.append(pid), count(pid))[1])
    memory = TreeMemory(tree)

    def private() -> int:
        _, (found,) = memory.read(None, floor=0)
        return found.private or 0

    steps = f"for size in (32 << 20, 0): sys.stdin.readline(); held = None; held = {made}; print(flush=True)"
    shared = """
def shared(size):
    if size:
        memory = mmap.mmap(-1, size)
        memory.write(b'x' * size)
        return memory
"""
    with child(f"import mmap, sys{shared}print(flush=True)\n{steps}\nsys.stdin.read()") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        few = private()
        assert abs(private() - few) < MIB
        assert len(counted) == 1
        for held in (32 * MIB, 0):
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            assert abs(private() - few - held) < 4 * MIB
        assert len(counted) == times


def test_pages_that_a_fork_writes_are_counted_though_it_gets_no_larger(tree: ProcessTree) -> None:
    inherited = bytearray(b"x" * (64 * MIB))
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    memory = TreeMemory(tree)
    process = fork.Process(target=_write_when_told, args=(theirs, inherited))
    process.start()
    try:
        mine.recv()
        memory.read(None, floor=0)
        mine.send("write")
        mine.recv()
        _, (found,) = memory.read(None, floor=0)
    finally:
        process.kill()
        process.join()
    assert (found.private or 0) >= 64 * MIB
    assert len(inherited) == 64 * MIB


def _write_when_told(pipe: Any, inherited: bytearray) -> None:
    sum(inherited[page] for page in range(0, len(inherited), 4096))
    pipe.send("ready")
    pipe.recv()
    _write(pipe, inherited, len(inherited))


def test_memory_on_cards_is_that_of_the_drivers_list(tree: ProcessTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = TwoCards()
    driver = NvmlDriver(nvml)
    with child() as process:
        nvml.compute[0] = [(process.pid, 700 * MIB), (1, 5)]
        nvml.compute[1] = [(process.pid, None)]
        # Also where it holds next to nothing on the host.
        _, (found,) = TreeMemory(tree).read(lambda: driver, floor=10**12)
    assert found.cards == {"cuda:0": 700 * MIB, "cuda:1": None}


def test_the_driver_is_asked_for_nothing_without_children(tree: ProcessTree) -> None:
    def ask() -> NoDriver:
        raise AssertionError

    assert TreeMemory(tree).read(ask, floor=0)[1] == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["VLLM::EngineCore", "-c", WAITS], "VLLM::EngineCore"),
        ([sys.executable, "-m", "tests.probes.read_again"], "python -m tests.probes.read_again"),
    ],
)
def test_a_process_is_called_what_a_person_calls_it(command: list[str], name: str) -> None:
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        # The kernel shows the command a moment after it has been executed.
        wait_until(lambda: name_of(process.pid) == name)
        process.kill()


def test_a_process_of_multiprocessing_has_its_name() -> None:
    process = get_context("fork").Process(target=signal.pause, name="EngineCore")
    process.start()
    try:
        assert name_of(process.pid or 0) == "EngineCore"
    finally:
        process.kill()
        process.join()
    assert name_of(process.pid or 0) == "gone"


def test_a_fork_has_its_own_name_and_not_the_title_of_its_parent() -> None:
    # xdist's workers have a title where setproctitle is installed.
    code = f"""{TITLE}
import signal
from multiprocessing import get_context
from lowtide.probes.host.process_tree import name_of
take_title(b"[parent]")
process = get_context("fork").Process(target=signal.pause, name="loader")
process.start()
print(name_of(process.pid))
process.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "loader\n"
