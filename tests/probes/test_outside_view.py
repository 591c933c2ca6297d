"""Processes seen from outside: real ones, by what the kernel and the driver say of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.device.driver.nvml import NvmlDriver
from lowtide.probes.host import process_files
from lowtide.probes.processes import outside_view
from lowtide.probes.processes.outside_view import by_process, read_process, read_processes
from tests.probes.fake_drivers import FakeNvml
from tests.probes.left_processes import TITLE, holder
from tests.waiting import HANG_S, wait_until

MIB = 1 << 20
WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with started(WAITS) as process:
        yield process
        process.kill()


def started(code: str, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_an_orphan_is_one_with_its_memory_and_its_shared_file() -> None:
    with holder("psm_0a1b2c3d", 100 * MIB, left=True) as pid:
        # It says that it is there, and then goes to sleep.
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
        view = read_process(pid)
        assert view is not None
        assert view.is_orphan
        assert view.memory is not None
        assert 100 * MIB <= view.memory.private + view.memory.shared < 130 * MIB
        assert view.shared_memory == {"psm_0a1b2c3d": MIB}
        assert (view.status, view.user, view.not_measured) == ("sleeping", psutil.Process().username(), {})
        assert view.created == pytest.approx(time.time(), abs=30)


def test_its_twin_that_has_a_parent_is_none() -> None:
    with holder("psm_0a1b2c3e", MIB, left=False) as pid:
        view = read_process(pid)
        assert view is not None
        assert (view.is_orphan, view.parent) == (False, os.getpid())


def test_what_init_has_started_itself_is_no_orphan(child: subprocess.Popen[str]) -> None:
    process = process_files.stat(child.pid)
    assert process is not None
    own = process_files.ProcessStat(process.pid, "sshd", "S", 1, process.pid, process.started, process.pid)
    left = process_files.ProcessStat(process.pid, "sshd", "S", 1, 2**22 + 1, process.started, process.pid)
    assert not outside_view.is_orphan(own)
    assert outside_view.is_orphan(left)


def test_a_child_of_an_engine_is_an_orphan_in_a_session_of_its_own_too(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_files.ProcessStat(child.pid, "VLLM::EngineCor", "S", 1, child.pid, 10**9, child.pid)
    role = outside_view.read_role("VLLM::EngineCore")
    monkeypatch.setattr(outside_view, "runs_python", lambda parent: False)
    assert outside_view.is_orphan(process, role)
    # The engine itself is a container's first process.
    monkeypatch.setattr(outside_view, "runs_python", lambda parent: True)
    assert not outside_view.is_orphan(process, role)


def test_several_are_read_side_by_side(child: subprocess.Popen[str]) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]).wait()"
    with started(code) as top:
        views = read_processes({top.pid, *process_files.descendants_of(top.pid)})
        top.kill()
        assert [view.parent for view in views] == [os.getpid(), top.pid]
        assert views[0].created <= views[1].created
        assert child.pid not in {view.pid for view in views}
        os.kill(views[1].pid, signal.SIGKILL)


def test_a_stopped_process_is_read_and_says_that_it_is_stopped(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: getattr(process_files.stat(child.pid), "state", "") == "T")
    (view,) = read_processes([child.pid])
    assert view.status == "stopped"
    assert view.memory is not None
    assert view.memory.private > MIB


def test_a_title_is_the_name_and_tells_role_and_rank() -> None:
    title = "VLLM::Worker_TP1"
    with started(f"{TITLE}take_title({title.encode()!r})\n{WAITS}") as process:
        view = read_process(process.pid)
        process.kill()
    assert view is not None
    assert (view.name, view.command) == (title, title)
    assert (str(view.role), view.role.rank, view.role.is_child) == ("vllm worker, rank tp1", 1, True)


def test_the_rank_is_that_of_the_environment() -> None:
    env = {**os.environ, "RANK": "3"}
    with started(WAITS, env=env) as process:
        view = read_process(process.pid)
        process.kill()
    assert view is not None
    assert view.role.rank == 3


def test_bytes_on_cards_are_those_of_the_driver(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml()
    nvml.compute = {0: [(child.pid, 700 * MIB), (os.getpid(), 1)], 1: [(child.pid, None)]}
    (view,) = read_processes([child.pid], by_process(read_card_holders(NvmlDriver(nvml))))
    assert view.cards == {"cuda:0": 700 * MIB, "cuda:1": None}


@pytest.mark.parametrize("reading", ["rollup", "sizes"])
def test_a_process_that_ends_in_the_middle_is_left_out(
    reading: str, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dies_while_read(child, monkeypatch, reading, reap=True)
    assert [view.pid for view in read_processes([child.pid, os.getpid()])] == [os.getpid()]


def test_a_process_that_becomes_a_zombie_in_the_middle_is_marked(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dies_while_read(child, monkeypatch, "rollup", reap=False)
    (view,) = read_processes([child.pid])
    assert (view.status, view.memory, view.descriptors, view.shared_memory) == ("zombie", None, None, None)
    assert "its parent has not waited for it" in view.not_measured["memory"]


def dies_while_read(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, reading: str, *, reap: bool) -> None:
    """The process is killed when its memory is read, or what is read last."""
    original = getattr(process_files, reading)

    def read(pid: int) -> Any:
        if pid == child.pid:
            child.kill()
            if reap:
                child.wait()
            wait_until(lambda: getattr(process_files.stat(pid), "state", "Z") == "Z")
        return original(pid)

    monkeypatch.setattr(outside_view, reading, read)


def test_what_may_not_be_read_is_not_measured_and_not_0(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_view, "rollup", lambda pid: None)
    view = read_process(child.pid)
    assert view is not None
    assert view.memory is None
    assert view.not_measured.keys() == {"memory"}
    assert f"process {child.pid} may not be read by user" in view.not_measured["memory"]
    # What everybody may read is known all the same.
    assert view.private == view.resident > MIB


def test_a_process_that_the_kernel_does_not_let_be_read_holds_up_nobody(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def rollup(pid: int) -> Any:
        if pid == child.pid:
            released.wait(HANG_S)
        return process_files.rollup(pid)

    monkeypatch.setattr(outside_view, "rollup", rollup)
    views = {view.pid: view for view in read_processes([child.pid, os.getpid()], patience=2.0)}
    released.set()
    assert views[child.pid].not_measured["memory"] == "the kernel did not let it be read for 2 s"
    assert views[child.pid].resident > MIB
    assert views[os.getpid()].memory is not None
    wait_until(lambda: not any(thread.name.startswith("lowtide-reader") for thread in threading.enumerate()))


def test_a_process_that_is_not_there_is_nobody() -> None:
    assert read_process(2**22 + 1) is None
    assert read_processes([2**22 + 1]) == ()
