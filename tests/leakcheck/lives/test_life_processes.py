"""Random lives of an engine in another process: what it must give back there is judged, and faults reach it there."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine import EngineState
from lowtide.engine.errors import OutOfMemoryError
from lowtide.leakcheck.lives import fuzz
from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.script import Fault, LifeError
from lowtide.leakcheck.lives.sweep import live, stages
from lowtide.leakcheck.targets.faults import Injection, Kind
from lowtide.leakcheck.targets.reference import ReferenceTarget
from lowtide.leakcheck.targets.target import TargetFactory
from lowtide.probes.host.process_files import stat
from tests.leakcheck import spawned_target
from tests.leakcheck.spawned_target import SpawnedTarget

pytestmark = pytest.mark.nightly

MIB = 1 << 20
QUICK = {"num_blocks": 16, "engine_process": True}


class Quick(Lives):
    """Lives of an engine that takes nothing from its client's libraries: there is nothing to warm up."""

    def warm_up(self) -> None: ...


@contextmanager
def lives(factory: TargetFactory, **settings: bool) -> Iterator[Quick]:
    with Quick(factory, explain=False, **settings) as opened:
        yield opened


def lived(opened: Lives, infers: int = 1) -> None:
    life = CheckedLife(opened)
    try:
        life.create()
        for _ in range(infers):
            life.infer([3], 2)
        life.close()
    except LifeError:
        life.abandon()
        raise


def unmeasured(opened: Lives) -> list[str]:
    return [item.why for item in opened.unmeasured]


def serve(requests: Connection, weights: int) -> None:
    """Answers; what the first step gives it stays until it ends, or until the second one."""
    held: list[bytes] = []
    while (asked := requests.recv()) != "end":
        if asked == "takes":
            held.append(b"x" * weights)
        elif asked == "gives back":
            held.append(b"x" * weights)
            held.clear()
        elif asked == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        requests.send(None)


class Asked(SpawnedTarget):
    """In each infer the child does one thing; it has 200 MiB to do it with."""

    weights = 200 * MIB
    does = "nothing"

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.ask(self.does)
        return [list(range(max_tokens)) for _ in prompt_lengths]


class Takes(Asked):
    does = "takes"


class GivesBack(Asked):
    does = "gives back"


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawned_target, "serve", serve)


def test_host_memory_that_is_nobodys_in_a_child_fails_the_life() -> None:
    with lives(Takes) as opened, pytest.raises(LifeError) as raised:
        lived(opened)
    (finding,) = raised.value.findings
    assert (finding.resource, finding.stage) == ("host-memory", "infer")
    # What the child had free before is not new.
    assert 190 * MIB <= finding.bytes < 210 * MIB
    assert finding.process is not None
    assert finding.process.name == "EngineCore"
    assert " of host memory are unexplained after infer" in finding.message


def test_a_child_that_gives_it_back_is_judged_and_clean() -> None:
    with lives(GivesBack) as opened:
        lived(opened, infers=4)
        assert unmeasured(opened) == []


def test_a_search_ends_with_what_grows_over_its_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaks(Asked):
        does = "takes"
        # More than an inference may add, and so little that no life fails by itself, however often it infers.
        weights = 5 * MIB

    monkeypatch.setattr(fuzz, "Lives", Quick)
    found = fuzz.fuzz(Leaks, examples=8, seed=1)
    told = ([finding.resource for finding in found.findings], found.life, found.reason)
    assert told == (["host-memory"], (), "")
    monkeypatch.setattr(Leaks, "does", "gives back")
    assert fuzz.fuzz(Leaks, examples=8, seed=1).findings == ()


def test_growth_adds_up_over_the_processes_of_several_lives() -> None:
    class Leaks(Asked):
        does = "takes"
        weights = 16 * MIB

    with lives(Leaks) as opened:
        lived(opened, infers=3)
        assert opened.processes.engine.findings_at_end() == []
        # Five that add show it however much of a heap that is trimmed meanwhile was free.
        for _ in range(2):
            lived(opened, infers=3)
        (finding,) = opened.processes.engine.findings_at_end()
    assert re.search(r"grows by 1\d\.\d MiB with each infer, ", finding.message)
    assert " in 6 of 6 that followed another one" in finding.message


def test_what_asking_for_holders_takes_and_gives_back_is_no_growth() -> None:
    class Leaks(Asked):
        does = "takes"
        # So that a trim which gives back some of the child's own heap takes no step below what an inference may add.
        weights = 8 * MIB

    with lives(Leaks) as opened:
        # Seven come to what no process may take at all.
        lived(opened, infers=6)
        (finding,) = opened.processes.engine.findings_at_end()
    # From the fourth one on, the child has searched its heap for holders in between.
    assert re.search(r"grows by 8\.[01] MiB with each infer, ", finding.message)
    assert re.search(r" in (\d) of \1 that followed another one", finding.message)
    assert (finding.holder or "").startswith("thread 'MainThread', local 'held' of serve() in test_life_processes.py:")


def test_too_few_inferences_are_no_clean_search() -> None:
    with lives(Asked) as opened:
        lived(opened)
        (why,) = unmeasured(opened)
        assert why.startswith("it infers too rarely to say whether it grows: try more lives")


def test_a_sweep_of_faults_does_not_ask_for_growth() -> None:
    with lives(Asked, growth=False) as opened:
        lived(opened)
        assert unmeasured(opened) == []


def test_a_child_that_does_not_answer_is_not_measured() -> None:
    class Stops(Asked):
        def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
            self.requests.send("stop")
            # Else it could be told to go on before it has stopped.
            while (process := stat(self.child.pid or 0)) is not None and process.state != "T":
                time.sleep(0.01)
            return [list(range(max_tokens)) for _ in prompt_lengths]

        def shutdown(self) -> None:
            if self.child is not None:
                os.kill(self.child.pid or 0, signal.SIGCONT)
            super().shutdown()

    with lives(Stops) as opened:
        opened._tokens[3] = (2, (0, 1))
        lived(opened)
        assert any("did not answer within 5 s: it is stopped" in why for why in unmeasured(opened))


@pytest.fixture(scope="module")
def reference() -> Iterator[Callable[[], Lives]]:
    """Lives of the reference engine with its core in a process of its own; opened once, since that takes seconds."""
    with lives(lambda: ReferenceTarget("cpu", QUICK), growth=False) as opened:
        yield lambda: opened


POINTS: Sequence[tuple[str, Kind]] = (
    ("create", "map"),
    ("infer", "allocation"),
    ("sleep(1)", "copy"),
    ("wake from 1", "map"),
    ("wake from 2", "interrupt"),
    ("shutdown", "interrupt"),
)


@pytest.mark.parametrize(("stage", "kind"), POINTS, ids=lambda value: str(value))
def test_a_fault_in_the_core_s_process_is_rolled_back_there(
    reference: Callable[[], Lives], stage: str, kind: Kind
) -> None:
    opened = reference()
    found = next(each for each in stages(opened.capabilities, {}) if each.name == stage)
    done = live(opened, found, Fault(kind, 1 if kind == "map" else 0))
    assert done.findings == ()
    assert done.raised
    assert done.points >= 1


def test_a_wake_that_leaves_half_of_its_memory_mapped_in_the_core_is_found(reference: Callable[[], Lives]) -> None:
    class HalfMapped(ReferenceTarget):
        """Says of its core what an engine would have mapped that does not undo a wake which fails."""

        def pages(self) -> Mapping[str, int]:
            mapped = dict(super().pages() or {})
            if self.engine.state is EngineState.ASLEEP and self.woken:
                mapped["weights"] = 1 << 20
            return mapped

        woken = False

        def wake(self, tags: Sequence[str] | None) -> None:
            self.woken = True
            super().wake(tags)

    with lives(lambda: HalfMapped("cpu", QUICK), growth=False) as opened:
        found = next(each for each in stages(opened.capabilities, {}) if each.name == "wake from 1")
        (finding,) = live(opened, found, Fault("map", 1)).findings
    assert (finding.resource, finding.holder) == ("arena", "arena 'weights'")


def test_what_was_raised_in_the_core_is_known_by_its_type_and_words() -> None:
    injection = Injection("map", 0, raised=OutOfMemoryError("no room"), is_elsewhere=True)
    assert injection.caused(OutOfMemoryError("no room"))
    assert not injection.caused(OutOfMemoryError("no room for something else"))
    assert not injection.caused(RuntimeError("no room"))
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = OutOfMemoryError("no room")
    assert injection.caused(wrapped, (RuntimeError,))
    assert not Injection("map", 0, raised=OutOfMemoryError("no room")).caused(OutOfMemoryError("no room"))


def test_no_file_stays_of_faults_in_the_core(
    reference: Callable[[], Lives], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = reference()
    found = next(each for each in stages(opened.capabilities, {}) if each.name == "wake from 1")
    assert live(opened, found, Fault("map", 0)).raised
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("lowtide-faults-")]


def test_a_target_without_other_processes_has_its_faults_here() -> None:
    target: Any = ReferenceTarget("cpu")
    assert target.injecting(Injection("map")) is None
    assert target.pages() is None
