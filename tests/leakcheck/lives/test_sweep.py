"""A sweep in several processes says what one process says, and what happens in one is no other's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lowtide.leakcheck.lives import sweep as module
from lowtide.leakcheck.lives import witness
from lowtide.leakcheck.lives.script import Call, Fault
from lowtide.leakcheck.lives.sweep import Swept, SweptCall, shared_sweep
from lowtide.leakcheck.targets.target import TargetError, TargetSource
from tests.leakcheck.lives.test_checked_life import NOT_USED, ElsewhereOnCard
from tests.leakcheck.lives.test_witness import Bare
from tests.leakcheck.small_target import KEPT, SmallTarget
from tests.leakcheck.swept import sweep
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly


def shared(
    target: Any, *kinds: Any, jobs: int = 2, config: Mapping[str, Any] | None = None, listener: Any = None
) -> list[Swept]:
    source = TargetSource([f"from {target.__module__} import {target.__name__}"], target.__name__)
    options = {} if listener is None else {"listener": listener}
    before = psutil.Process().children()
    try:
        return list(shared_sweep(source, target.capabilities, config=config or {}, jobs=jobs, kinds=kinds, **options))
    finally:
        # Whoever runs the tests may have children of its own.
        assert set(psutil.Process().children()) <= set(before)


class Unlucky(SmallTarget):
    """Ends its process in one stage, keeps a tensor in another, and after what it does not survive nothing works."""

    is_spoiled = False

    def map(self, tag: str) -> None:
        try:
            super().map(tag)
        except MemoryError:
            if self.phase == "new" and tag == "runtime":
                os._exit(3)
            type(self).is_spoiled |= self.phase == "asleep" and tag == "kv_cache"
            raise

    def drop(self, tags: Sequence[str]) -> None:
        if not self.is_spoiled:
            super().drop(tags)

    def reload(self) -> None:
        super().reload()
        KEPT.append(torch.ones(1000))


def test_it_says_what_one_process_says_and_what_a_life_does_to_its_process_is_found_in_no_other() -> None:
    heard: list[tuple[str, str, int, int]] = []
    swept = shared(Unlucky, "map", "copy", listener=lambda *point: heard.append(point))
    bad = {item.stage: item for item in swept if item.findings}
    assert list(bad) == ["create", "reload", "wake from 1"]
    # One that ends by itself where something fails.
    ended = bad["create"]
    assert (ended.kind, ended.points, ended.raised, ended.life) == ("map", 3, 2, (Call("create", {}, Fault("map", 2)),))
    (finding,) = ended.findings
    assert finding.message == "map number 2 failed in create, and the process ended by itself (exit code 3)"
    # One in which nothing works any more.
    spoiled = bad["wake from 1"]
    assert (spoiled.kind, spoiled.points, spoiled.raised) == ("map", 2, 1)
    assert spoiled.life[-1] == Call("wake", {}, Fault("map", 1))
    assert [finding.resource for finding in spoiled.findings] == ["arena"]
    # What goes wrong without anything that fails is told once.
    keeps = bad["reload"]
    assert (keeps.kind, keeps.raised, [finding.resource for finding in keeps.findings]) == ("map", 0, ["tensors"])
    assert ("reload", "copy") not in {(item.stage, item.kind) for item in swept}
    # All else is as it is of an engine that is right, in one process.
    right = [item for item in sweep(SmallTarget, config={}, kinds=("map", "copy")) if item.stage != "reload"]
    expected = [bad.get(item.stage, item) if item.kind == "map" else item for item in right]
    assert [item for item in swept if item.stage != "reload"] == expected
    points = [(item.stage, item.kind, at, item.points) for item in right for at in range(item.points)]
    assert sorted(heard) == sorted(points)


class StartsAProcess(Bare):
    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        child = subprocess.Popen(["sleep", "600"])
        # As a terminal's Ctrl-C does.
        child.send_signal(signal.SIGINT)
        assert child.wait(HANG_S) == -signal.SIGINT


def test_a_ctrl_c_ends_no_life_and_an_engine_s_processes_hear_it() -> None:
    others = psutil.Process().children()

    def interrupt(*point: object) -> None:
        for child in set(psutil.Process().children()) - set(others):
            child.send_signal(signal.SIGINT)

    swept = shared(StartsAProcess, "map", jobs=1, listener=interrupt)
    assert [(item.stage, item.points, item.findings) for item in swept if item.points] == [("create", 2, ())]


class LeavesAForkedChild(Bare):
    """Which has all that its parent had open."""

    def create(self, config: Mapping[str, Any]) -> None:
        try:
            super().create(config)
        except MemoryError:
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            Path(os.environ["LOWTIDE_TEST_CHILD"]).write_text(str(child))
            os._exit(3)


def test_a_process_that_ended_is_not_waited_for_because_a_child_of_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_TEST_CHILD", str(tmp_path / "pid"))
    bad = [item for item in shared(LeavesAForkedChild, "map", jobs=1) if item.findings]
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    # It is there still: nobody has waited for its end.
    child.kill()
    assert [(item.stage, item.points, item.life) for item in bad] == [
        ("create", 2, (Call("create", {}, Fault("map", 0)),))
    ]


class LeavesAThread(SmallTarget):
    """Which Python waits for as a process ends."""

    def __init__(self) -> None:
        super().__init__()
        if threading.active_count() < 3:
            threading.Thread(target=threading.Event().wait).start()


def test_a_process_ends_whatever_thread_the_target_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    kill = subprocess.Popen.kill

    def note(process: subprocess.Popen[bytes]) -> None:
        killed.append(process.pid)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", note)
    assert [item for item in shared(LeavesAThread, "map", jobs=1) if item.points]
    assert killed == []


class WaitsForNobody(Bare):
    """And has a process of its own that does, too."""

    def create(self, config: Mapping[str, Any]) -> None:
        try:
            super().create(config)
        except MemoryError:
            child = subprocess.Popen(["sleep", "600"])
            Path(os.environ["LOWTIDE_TEST_CHILD"]).write_text(str(child.pid))
            self.join_worker()

    def join_worker(self) -> None:
        threading.Event().wait()


def test_a_life_that_does_not_end_is_reported_with_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.5)
    monkeypatch.setenv("LOWTIDE_TEST_CHILD", str(tmp_path / "pid"))
    (bad,) = [item for item in shared(WaitsForNobody, "map", jobs=1) if item.findings]
    assert (bad.stage, bad.points, bad.raised, bad.life) == ("create", 2, 0, (Call("create", {}, Fault("map", 0)),))
    (finding,) = bad.findings
    said = (
        r"map number 0 failed in create, and the life had not ended after [\d.]+ s: "
        r"it stood in wait \(threading.py:\d+\), called by wait \(threading.py:\d+\), "
        r"called by join_worker \(test_sweep.py:\d+\), called by create .*"
    )
    assert re.fullmatch(said, finding.message)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("seconds", "limit"), [(0.0, 300.0), (30.0, 300.0), (31.0, 310.0)])
def test_a_life_may_take_ten_times_as_long_as_without_a_fault(seconds: float, limit: float) -> None:
    points = module._Points(0, SweptCall("create", (), Call("create")), "map", Swept("create", "map", 3), seconds)
    assert module._Question(points, 2).limit == limit
    # How long it takes without one nobody knows.
    assert module._Question(points, None).limit is None


def test_where_it_stood_is_unknown_where_nothing_was_written() -> None:
    assert module.where_it_stood("") == "it did not say where it stood"


def test_how_a_process_ended_is_reported_by_name_where_there_is_one() -> None:
    assert [module._how_it_ended(code) for code in (3, -9, -40)] == ["exit code 3", "SIGKILL", "signal 40"]


class EndsWhileItLoads(Bare):
    def create(self, config: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), 9)


class EndsAtWork(Bare):
    """With the settings of a sweep, which it is not loaded with."""

    def create(self, config: Mapping[str, Any]) -> None:
        self.ends = "ends" in config

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        if self.ends:
            os._exit(3)
        return super().infer(prompt_lengths, max_tokens)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (EndsWhileItLoads, r"ended by itself while loading, where nothing was made to fail: SIGKILL"),
        (EndsAtWork, r"ended by itself in (infer|shutdown), where nothing was made to fail: exit code 3"),
    ],
)
def test_what_cannot_be_measured_is_no_result(target: type, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        shared(target, "copy", config={"ends": True})


def test_what_the_processes_could_not_measure_is_said_of_each_stage() -> None:
    (create, *_) = shared(ElsewhereOnCard, "map")
    assert (create.points, create.not_measured) == (3, (NOT_USED,))


def test_points_behind_one_that_is_not_survived_are_not_failed() -> None:
    finding = witness._finding("state", "create", "cpu", "it says something else", [], 1)
    points = module._Points(0, SweptCall("create", (), Call("create")), "map")
    assert not points.is_done
    points.counted = Swept("create", "map", 5)
    points.lived[3] = Swept("create", "map", 5, 0, (finding,), (Call("create", {}, Fault("map", 3)),))
    points.lived[0] = Swept("create", "map", 5, 1)
    # Another process was faster: an earlier one is not survived either.
    assert [module._Question(points, at).is_of_use for at in (1, 2, 3, 4)] == [True, True, False, False]
    assert not points.is_done
    points.lived[1] = Swept("create", "map", 5, 0, (finding,), (Call("create", {}, Fault("map", 1)),))
    assert not module._Question(points, 2).is_of_use
    assert points.is_done
    assert points.swept() == Swept("create", "map", 5, 1, (finding,), (Call("create", {}, Fault("map", 1)),))
