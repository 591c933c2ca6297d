"""The search: it finds what a target does wrong, makes the life that shows it as short as can be, and prints it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, settings
from rich.console import Console
from rich.progress import Progress, TaskID

from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.cli import fuzz as fuzz_command
from lowtide.leakcheck.lives.fuzz import Found, as_program, fuzz, lifecycle_machine
from lowtide.leakcheck.lives.script import Call, Coverage, Fault, LifeError
from lowtide.leakcheck.lives.sweep import stages
from lowtide.leakcheck.targets.reference import THOROUGH, reference, reference_target
from lowtide.leakcheck.targets.target import TargetSource, start_program
from tests.leakcheck.lives.test_checked_life import DoesNotRollBack, ForgetsAtWake, SaysOtherThings
from tests.leakcheck.small_target import KEPT, SmallTarget
from tests.leakcheck.swept import sweep

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The example database is kept in the current directory.
    monkeypatch.chdir(tmp_path)
    yield
    KEPT.clear()


def names(found: Found) -> list[str]:
    return [f"illegal {call.name}" if call.illegal else call.name for call in found.life]


def test_an_engine_that_is_right_goes_through_everything_without_a_finding() -> None:
    heard: list[int] = []

    def listen(coverage: Coverage) -> None:
        heard.append(coverage.lives)

    found = fuzz(SmallTarget, examples=60, seed=1, listener=listen)
    assert (found.findings, found.life, found.reason) == ((), (), "")
    assert found.coverage.lives == len(heard) >= 60
    assert heard == sorted(heard)
    assert not found.coverage.failed
    assert {"new", "running", "running, requests unfinished", "asleep at level 1", "closed"} <= found.coverage.states
    assert len(found.coverage.edges) > 30


class LeaksAtASecondSleep(SmallTarget):
    """What only shows in an order."""

    sleeps = 0

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        done = super().sleep(level, mode)
        self.sleeps += 1
        if self.sleeps == 2:
            KEPT.append(torch.ones(100))
        return done


@pytest.mark.parametrize(
    ("target", "life", "resource"),
    [
        (ForgetsAtWake, ["create", "sleep", "wake"], "contents"),
        (SaysOtherThings, ["create", "sleep", "wake", "infer"], "contents"),
        (LeaksAtASecondSleep, ["create", "sleep", "wake", "sleep", "shutdown"], "tensors"),
        (DoesNotRollBack, ["create", "sleep", "wake"], "arena"),
    ],
)
def test_what_is_wrong_is_found_and_shortened_as_far_as_can_be(
    target: type[SmallTarget], life: list[str], resource: str
) -> None:
    found = fuzz(target, examples=200, seed=0, steps=6)
    assert found.findings[0].resource == resource
    assert found.reason == ""
    assert names(found) == life
    assert (found.life[-1].fault is not None) is (target is DoesNotRollBack)


def test_the_progress_line_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Line(Progress):
        def update(self, task_id: TaskID, **fields: Any) -> None:
            said.append(fields["description"])
            super().update(task_id, **fields)

    monkeypatch.setattr(fuzz_command, "progress_line", lambda console: Line(console=console, disable=True))
    # Where it looks for targets, and stays.
    monkeypatch.syspath_prepend(Path.cwd())
    subjected = fuzz_command.named_target("tests.leakcheck.lives.test_checked_life:ForgetsAtWake")
    fuzz_command.search(subjected, examples=50, seed=1, steps=10, console=Console(quiet=True))
    lives = [line for line in said if line.startswith("lives: ")]
    shrinking = [line for line in said if line.startswith("shrinking: ")]
    assert said == [*lives, *shrinking]
    assert all(re.fullmatch(r"lives: \d+ states, \d+ edges, no finding", line) for line in lives)
    assert all(re.fullmatch(r"shrinking: \d+ states, \d+ edges, 1 finding", line) for line in shrinking)
    # It goes on while the life that fails is shortened.
    assert len(shrinking) > 3


def test_a_seed_finds_the_same_again() -> None:
    first, again = (fuzz(SaysOtherThings, examples=100, seed=7).life for _ in range(2))
    assert first == again


@pytest.fixture
def ci() -> Iterator[None]:
    """Have Hypothesis draw the same examples each time, as it does where `CI` is set."""
    settings.register_profile("as on CI", settings.get_profile("lowtide"), derandomize=True, database=None)
    settings.load_profile("as on CI")
    yield
    settings.load_profile("lowtide")


@pytest.mark.usefixtures("ci")
def test_without_a_seed_each_search_draws_one_that_repeats_it() -> None:
    first, second = (fuzz(SmallTarget, examples=20) for _ in range(2))
    assert first.seed != second.seed
    again = fuzz(SmallTarget, examples=20, seed=first.seed)
    tried = [(each.coverage.calls, each.coverage.states, each.coverage.edges) for each in (first, again)]
    assert tried[0] == tried[1]


def test_without_a_seed_what_failed_last_is_tried_first() -> None:
    first = fuzz(ForgetsAtWake, examples=100, seed=3)
    assert first.findings
    again = fuzz(ForgetsAtWake, examples=100)
    assert again.life == first.life
    assert again.coverage.lives < first.coverage.lives


def test_what_fails_only_once_is_said_not_to_have_been_measured() -> None:
    class Once(SmallTarget):
        failed: list[None] = []  # noqa: RUF012 - of the process

        def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
            answer = super().infer(prompt_lengths, max_tokens)
            if max_tokens == 2 and not self.failed:
                self.failed.append(None)
                return []
            return answer

    found = fuzz(Once, examples=200, seed=0)
    assert "a life that failed did not fail again" in found.reason
    assert found.findings[0].resource == "contents"


def test_a_life_is_printed_as_a_program_that_fails_by_itself(tmp_path: Path) -> None:
    found = fuzz(ForgetsAtWake, examples=100, seed=0)
    source = TargetSource(["from tests.leakcheck.lives.test_checked_life import ForgetsAtWake"], "ForgetsAtWake")
    program = as_program(found.life, source)
    file = tmp_path / "life.py"
    file.write_text(program)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(root)}
    )
    assert done.returncode == 1
    assert "LifeError: weights changed its contents between sleep and wake" in done.stderr


def test_a_program_has_what_it_needs_and_no_more() -> None:
    source = TargetSource(["from a import make"], "make", "DEFECTS['x'].activate()")
    text = as_program([Call("create"), Call("wake", {}, Fault("map", 1)), Call("sleep", illegal=True)], source)
    assert text.splitlines() == [
        "from a import make",
        "from lowtide.leakcheck.checked_life import CheckedLife, Fault, Lives",
        "",
        "with DEFECTS['x'].activate(), Lives(make) as lives:",
        "    life = CheckedLife(lives)",
        "    life.create()",
        "    life.wake(fault=Fault(kind='map', at=1))",
        "    life.illegal('sleep')",
        "    life.close()",
    ]
    assert "Fault" not in as_program([Call("create")], source)


def run_case(machine: Any) -> None:
    case = machine.TestCase
    case.settings = settings(case.settings, max_examples=100, derandomize=True, database=None, phases=[Phase.generate])
    case("runTest").runTest()


def test_a_machine_is_a_test_case_and_can_be_subclassed() -> None:
    run_case(lifecycle_machine(SmallTarget))
    with pytest.raises(LifeError, match="weights changed its contents"):
        run_case(lifecycle_machine(ForgetsAtWake))

    class Stricter(lifecycle_machine(SmallTarget)):  # type: ignore[misc]
        @hypothesis.stateful.invariant()
        def never_sleeps(self) -> None:
            assert self._life.model.phase != "asleep", "it sleeps"

    with pytest.raises(AssertionError, match="it sleeps"):
        run_case(Stricter)


# --- every fault point ----------------------------------------------------------------------------------------------


def test_every_point_of_an_engine_that_is_right_is_survived() -> None:
    swept = list(sweep(SmallTarget, config={}, kinds=("map", "allocation", "copy", "interrupt")))
    assert [item for item in swept if item.findings] == []
    points = {(item.stage, item.kind): (item.points, item.raised) for item in swept}
    assert points["create", "map"] == (3, 3)
    assert points["wake from 1", "map"] == (2, 2)
    assert points["infer", "map"] == (0, 0)
    assert points["sleep(1)", "allocation"][0] >= 1
    # All that was counted failed, each in a life of its own.
    assert all(raised == count for count, raised in points.values())


def test_a_point_that_is_not_survived_is_reported_with_its_life() -> None:
    swept = list(sweep(DoesNotRollBack, config={}, kinds=("map",)))
    (bad,) = [item for item in swept if item.findings]
    assert (bad.stage, bad.points) == ("wake from 1", 2)
    assert bad.findings[0].resource == "arena"
    assert bad.life[-1] == Call("wake", {}, Fault("map", 1))


class Keeps(SmallTarget):
    """Without anything that fails."""

    def reload(self) -> None:
        super().reload()
        KEPT.append(torch.ones(1000))


def test_a_stage_that_goes_wrong_by_itself_is_reported_once() -> None:
    swept = list(sweep(Keeps, config={}, kinds=("map", "copy"), among=("create", "reload")))
    assert [(item.stage, item.kind) for item in swept] == [("create", "map"), ("create", "copy"), ("reload", "map")]
    bad = swept[-1]
    assert (bad.raised, [finding.resource for finding in bad.findings]) == (0, ["tensors"])
    assert [call.name for call in bad.life] == ["create", "infer", "reload", "shutdown"]


def test_some_of_the_points_can_be_left_out() -> None:
    lives: list[tuple[str, int, int]] = []

    def listen(stage: str, kind: str, at: int, points: int) -> None:
        lives.append((stage, at, points))

    list(sweep(SmallTarget, config={}, kinds=("map",), every=2, listener=listen))
    assert [(at, points) for stage, at, points in lives if stage == "create"] == [(0, 3), (2, 3)]
    swept = list(sweep(SmallTarget, config={}, kinds=("map",), among=("create", "wake from 1")))
    assert [(item.stage, item.points) for item in swept] == [("create", 3), ("wake from 1", 2)]


def test_the_stages_are_those_that_a_target_has() -> None:
    able = SmallTarget.capabilities
    assert [stage.name for stage in stages(able, {})] == [
        "create",
        "infer",
        "step",
        "reset_prefix_cache",
        "reload",
        "sleep(1)",
        "wake from 1",
        "sleep(1) again",
        "shutdown",
        "shutdown asleep",
    ]
    from lowtide.leakcheck.targets.target import Capabilities

    assert [stage.name for stage in stages(Capabilities(), {"size": 1})] == ["create", "infer", "shutdown"]
    first: Mapping[str, Any] = stages(Capabilities(), {"size": 1})[0].call.arguments
    assert first == {"config": {"size": 1}}


# --- lowtide's own engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seed", "life", "resource"),
    [
        ("undrained-offload", 7, ["create", "infer", "reset_prefix_cache"], "kv-blocks"),
    ],
)
def test_a_historical_bug_is_found_by_the_order_of_the_calls(
    name: str, seed: int, life: list[str], resource: str
) -> None:
    subjected = reference_target("cpu", DEFECTS[name])
    with subjected.context:
        found = fuzz(subjected.factory, examples=200, seed=seed)
    assert names(found) == life
    assert {finding.resource for finding in found.findings} == {resource}


def test_the_reference_engine_goes_through_random_lives_without_a_finding() -> None:
    found = fuzz(reference, examples=5, seed=5)
    assert (found.findings, found.reason) == ((), "")
    assert found.coverage.lives >= 5


def test_the_reference_engine_survives_what_fails_in_it() -> None:
    swept = list(sweep(reference, config=THOROUGH, kinds=("map", "reserve", "copy", "collective"), every=30))
    assert [item for item in swept if item.findings] == []
    points = {(item.stage, item.kind): item.points for item in swept}
    # Five arenas, two of them workspaces, a ring, and a buffer of the offload.
    assert points["create", "reserve"] == 7
    assert points["wake from 1", "map"] == 2
    assert points["reload", "copy"] >= 1
    # The group that is made, and the tokens that are agreed on.
    assert (points["create", "collective"], points["infer", "collective"]) == (1, 2)


class DropsACtrlC(SmallTarget):
    """As Python does with what hits a finalizer."""

    creates = 0

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        type(self).creates += 1
        if self.creates == 8:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def plain_ctrl_c() -> Iterator[None]:
    # A worker of pytest-xdist is deaf to it.
    known = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, known)


@pytest.mark.usefixtures("plain_ctrl_c")
@pytest.mark.parametrize(
    "search",
    [lambda: fuzz(DropsACtrlC, examples=500, seed=1), lambda: list(sweep(DropsACtrlC, config={}))],
    ids=["random lives", "every point"],
)
def test_a_ctrl_c_that_was_dropped_ends_it_before_the_next_life(
    search: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DropsACtrlC, "creates", 0)
    with pytest.raises(KeyboardInterrupt):
        search()
    # A life may create an engine once more.
    assert DropsACtrlC.creates <= 11
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_of_the_fuzzer_is_deaf_to_ctrl_c_from_its_beginning_on_and_its_own_processes_are_not() -> None:
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = start_program(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", stdout=subprocess.PIPE
    )
    with process:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=300)
    assert (process.returncode, said) == (0, b"True\n")
