"""A calibration says how small a leak is found; one that is blind, or that alarms without a leak, does not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.gate import calibration, planted_leaks
from lowtide.leakcheck.gate.calibration import (
    LEAST_TOLERANCE,
    MIB,
    NULL_LIVES,
    Calibration,
    CalibrationError,
    Noise,
    Sight,
    calibrate,
    live_null_lives,
    noise_of,
    read_tolerances,
)
from lowtide.leakcheck.gate.matrix import CALIBRATION_FILE
from lowtide.leakcheck.gate.planted_leaks import PLANTED, PlantedLeak, smallest_found
from lowtide.reports import schema
from lowtide.reports.schema import ResourceName
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly

ON_HOST = next(leak for leak in PLANTED if leak.is_level and not leak.needs_card)

TABLE = {"host-memory": 32 * MIB, "tensors cpu": 0, "arena cpu": 0}


@pytest.mark.parametrize(
    ("lives", "largest", "tolerance"),
    [
        pytest.param((0, 0, 0), 0, LEAST_TOLERANCE, id="quiet: the least"),
        pytest.param((2 * MIB, 0, 0), 2 * MIB, 8 * MIB, id="a margin above the noise"),
        pytest.param((0, -3 * MIB, 0), 3 * MIB, 12 * MIB, id="what falls is noise, too"),
        pytest.param((20 * MIB, 0, 0), 20 * MIB, 32 * MIB, id="never above the table"),
        pytest.param((16 * MIB, 16 * MIB, 16 * MIB), 0, LEAST_TOLERANCE, id="a steady leak is no noise"),
    ],
)
def test_a_tolerance_comes_from_how_far_lives_are_from_the_usual_life(
    lives: tuple[int, ...], largest: int, tolerance: int
) -> None:
    noise = Noise("host-memory", lives, 32 * MIB)
    assert (noise.largest, noise.tolerance) == (largest, tolerance)


def test_what_must_come_back_exactly_gets_no_tolerance() -> None:
    assert Noise("tensors cpu", (MIB, 0), 0).tolerance == 0
    calibrated = Calibration("cpu", noise_of([{}, {"tensors cpu": MIB, "host-memory": 0}], TABLE), ())
    assert calibrated.tolerances == {"host-memory": LEAST_TOLERANCE}


def test_the_first_life_and_what_cannot_be_read_are_no_noise() -> None:
    lives: list[dict[str, int | None]] = [
        {"host-memory": 99, "tensors cpu": 1, "arena cpu": 0},
        {"host-memory": 5, "tensors cpu": None, "arena cpu": 0},
        {"host-memory": 7, "tensors cpu": 0},
    ]
    noise = noise_of(lives, TABLE)
    assert {key: each.lives for key, each in noise.items()} == {"host-memory": (5, 7)}
    assert noise_of(lives[:1], TABLE) == {}


QUIET = Noise("host-memory", (0, 2 * MIB), 32 * MIB)
FACTS = "(host-memory: noise 2.0 MiB, tolerance 8.0 MiB, table 32.0 MiB)"
EXACT = Noise("tensors cpu", (0, 0), 0)
FOUND = "smallest planted leak found:"


@pytest.mark.parametrize(
    ("noise", "smallest", "by_table", "outcome", "reason"),
    [
        (QUIET, 16 * MIB, 16 * MIB, "clean", f"{FOUND} 16.0 MiB {FACTS}"),
        (QUIET, 16 * MIB, 64 * MIB, "clean", f"{FOUND} 16.0 MiB; by the table's tolerance: 64.0 MiB {FACTS}"),
        (QUIET, 16 * MIB, None, "clean", f"{FOUND} 16.0 MiB; by the table's tolerance: none {FACTS}"),
        (EXACT, MIB, MIB, "clean", f"{FOUND} 1.0 MiB, the smallest planted (tensors cpu: noise 0 B)"),
        (QUIET, 32 * MIB, 32 * MIB, "unsupported", f"{FOUND} 32.0 MiB; a gate must find 16.0 MiB {FACTS}"),
        (QUIET, None, None, "unsupported", f"no planted leak was found {FACTS}"),
        (None, MIB, MIB, "unsupported", "this machine does not report the metric"),
    ],
)
def test_a_place_is_measured_only_where_16_mib_are_found(
    noise: Noise | None, smallest: int | None, by_table: int | None, outcome: str, reason: str
) -> None:
    subject = Sight("host memory", noise, smallest, by_table, MIB).subject
    assert (subject.id, subject.outcome, subject.reason) == ("host memory", outcome, reason)


def test_a_place_that_could_not_be_measured_is_an_error() -> None:
    subject = Sight("host memory", QUIET, None, None, MIB, "it ended").subject
    assert (subject.outcome, subject.reason) == ("error", "it ended")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, ...]]]:
    """Processes that answer at once: null lives, and the smallest leak by the place."""

    def answer(found: dict[str, Any], problem: str = "") -> list[tuple[str, ...]]:
        started = []

        def run(function: str, *arguments: Any) -> Any:
            started.append((function, *arguments))
            if function == "write_null_lives":
                life = {"host-memory": 2 * MIB, "tensors cpu": 0, "arena cpu": 0}
                lives = [{}, life, *[dict.fromkeys(life, 0)] * (arguments[1] - 2)]
                return {"lives": lives, "tolerances": TABLE, "problem": problem}
            smallest = found.get(arguments[0], MIB)
            if isinstance(smallest, Exception):
                raise smallest
            by_each = [smallest if tolerances else 64 * MIB for tolerances in arguments[2]]
            return {"found": by_each, "floor": MIB}

        monkeypatch.setattr(calibration, "_in_own_process", run)
        return started

    return answer


def test_each_place_of_the_device_is_measured_with_the_calibrated_tolerances(processes: Any) -> None:
    started = processes({"host memory": 8 * MIB})
    calibrated = calibrate("cpu")
    tolerances = {"host-memory": 8 * MIB}
    assert started[0] == ("write_null_lives", "cpu", NULL_LIVES)
    places = [leak.name for leak in PLANTED if not leak.needs_card]
    # Where the table's tolerance is larger, it is measured what that finds.
    alternatives = [[tolerances]] * 4 + [[tolerances, {}]]
    assert started[1:] == [
        ("write_smallest", name, "cpu", each) for name, each in zip(places, alternatives, strict=True)
    ]
    assert [sight.smallest for sight in calibrated.sights] == [*[MIB] * 4, 8 * MIB]
    assert [sight.by_table for sight in calibrated.sights] == [*[MIB] * 4, 64 * MIB]
    assert [subject.outcome for subject in calibrated.subjects] == ["clean"] * 6


def test_a_finding_without_a_leak_ends_the_calibration(processes: Any) -> None:
    started = processes({}, problem="64.0 MiB of host-memory did not come back")
    (subject,) = calibrate("cpu").subjects
    assert (subject.id, subject.outcome) == ("nothing planted", "error")
    assert "64.0 MiB of host-memory" in subject.reason
    assert len(started) == 1


@pytest.mark.parametrize(
    ("smallest", "outcome"),
    [
        (16 * MIB, "clean"),
        (32 * MIB, "unsupported"),
        (None, "unsupported"),
        (CalibrationError("it ended"), "error: it ended"),
    ],
)
def test_a_gate_that_is_blind_in_one_place_exits_2(
    processes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], smallest: Any, outcome: str
) -> None:
    code = 0 if outcome == "clean" else 2
    processes({"in an lru_cache": smallest})
    assert calibration.main(["--report", str(tmp_path), "--device", "cpu"]) == code
    report = schema.read(tmp_path)
    assert schema.exit_code(report) == code
    others = [subject for subject in report.subjects if subject.id != "in an lru_cache"]
    assert [subject.outcome for subject in others] == ["clean"] * 5
    assert f"in an lru_cache: {outcome}" in capsys.readouterr().out
    assert read_tolerances(tmp_path, "cpu") == {"host-memory": 8 * MIB}
    table = json.loads((tmp_path / CALIBRATION_FILE).read_text())
    (row,) = [place for place in table["places"] if place["place"] == "host memory"]
    assert row == {
        "place": "host memory",
        "metric": "host-memory",
        "noise": 2 * MIB,
        "tolerance": 8 * MIB,
        "smallest_found": MIB,
        "smallest_found_by_table": 64 * MIB,
    }


def test_a_device_that_is_not_here_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main(["--report", str(tmp_path), "--device", "tpu"]) == 2
    assert capsys.readouterr().err == ("lowtide: device 'tpu' is not one that torch knows: use 'cpu' or 'cuda:N'\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "has no calibrated tolerances: "),
        ('{"device": "cpu"}', "has no calibrated tolerances: Object missing required field `tolerances`"),
        ('{"device": "cpu", "tolerances": {"driver": "8 MiB"}}', "has no calibrated tolerances: Expected `int`"),
        ('{"device": "cuda:0", "tolerances": {}}', "is of cuda:0, and the engine is on cpu: calibrate there"),
    ],
)
def test_tolerances_that_cannot_be_read_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / CALIBRATION_FILE
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalibrationError) as caught:
        read_tolerances(tmp_path, "cpu")
    assert str(caught.value).startswith(f"{path} {said}")


class Run:
    """A run of lives that is not run; keeps the tolerances that it is given."""

    given: ClassVar[list[dict[str, int]]] = []
    interrupted = False

    def __init__(self, name: str, *args: object, tolerances: dict[str, int], **options: object) -> None:
        self.given.append(tolerances)

    def run(self) -> schema.Subject:
        return schema.Subject(id="run", outcome="clean")


COMMANDS = [("run", "--device", "cpu"), ("check", "tests.leakcheck.small_target:SmallTarget")]


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "check"])
def test_lives_are_judged_by_the_calibration_that_is_given(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / CALIBRATION_FILE).write_text('{"device": "cpu", "tolerances": {"host-memory": 5}, "places": []}')
    monkeypatch.setattr("lowtide.leakcheck.lives.lifecycle.LifecycleRun", Run)
    monkeypatch.setattr(Run, "given", [])
    for arguments in (("--calibration", str(tmp_path)), ()):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 0, result.output
    assert Run.given == [{"host-memory": 5}, {}]


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "check"])
def test_a_calibration_that_is_not_there_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, "--calibration", str(tmp_path / "none")])
    assert result.exit_code == 2
    said = f"lowtide: --calibration {tmp_path}/none/calibration.json cannot be read: No such file or directory\n"
    assert result.stderr.endswith(said)


def ending(program: str) -> Callable[..., subprocess.Popen[bytes]]:
    return lambda text, **options: subprocess.Popen([sys.executable, "-S", "-c", program], **options)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "write_null_lives ended with exit code 3 and wrote no result"),
        ("import os; os.kill(os.getpid(), 9)", "write_null_lives ended with exit code -9 and wrote no result"),
        ("import time; time.sleep(3600)", "write_null_lives took more than 0.2 s and was ended"),
    ],
)
def test_a_process_without_a_result_is_an_error(monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    monkeypatch.setattr(calibration, "start_program", ending(program))
    monkeypatch.setattr(calibration, "_PROGRAM_LIMIT_S", 0.2 if "sleep" in program else HANG_S)
    with pytest.raises(CalibrationError) as caught:
        live_null_lives("cpu", 2)
    assert str(caught.value) == said


def left(resource: ResourceName, size: int) -> schema.Finding:
    return schema.Finding(
        resource=resource,
        cause="unknown",
        bytes=size,
        count=1,
        device="",
        stage="shutdown",
        message="",
        fingerprint="",
    )


def test_leaks_are_halved_down_to_the_smallest_and_to_a_page() -> None:
    assert planted_leaks.sizes(4096) == tuple(each * MIB for each in (64, 32, 16, 8, 4, 2, 1))
    assert planted_leaks.sizes(2 * MIB) == tuple(each * MIB for each in (64, 32, 16, 8, 4, 2))


def test_a_places_figures_come_with_the_smallest_leak_that_its_pages_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CardDriver()
    monkeypatch.setattr(planted_leaks, "open_driver", lambda index: driver)
    monkeypatch.setattr(planted_leaks, "check_device", torch.device)

    def findings_with(leak: PlantedLeak, device: str, size: int, tolerances: dict[str, int]) -> list[schema.Finding]:
        return [left("driver", size)] if size >= tolerances["driver"] else []

    monkeypatch.setattr(planted_leaks, "findings_with", findings_with)
    file = tmp_path / "result.json"
    alternatives = [{"driver": MIB}, {"driver": 9 * MIB}, {"driver": 65 * MIB}]
    planted_leaks.write_smallest("the driver alone", "cuda:0", alternatives, str(file))
    assert json.loads(file.read_text()) == {"found": [2 * MIB, 16 * MIB, None], "floor": 2 * MIB}


@pytest.mark.parametrize("least", [*planted_leaks.sizes(4096), 65 * MIB])
def test_the_smallest_leak_that_is_found_is_the_one_reported(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def plant(size: int, device: str, undo: ExitStack) -> None:
        events.append(size)
        undo.callback(events.append, "removed")

    def run(name: str, device: str, lives: int, script: object, after_create: Any, tolerances: object) -> Any:
        after_create()
        (size,) = events[-1:]
        found = (left("tensors", size),) if size >= least else ()
        subject = schema.Subject(id="x", outcome="leak", findings=found)
        return SimpleNamespace(run=lambda: subject)

    monkeypatch.setattr(planted_leaks, "_run", run)
    assert smallest_found(PlantedLeak("nowhere", plant), "cpu", {}) == (None if least > 64 * MIB else least)
    assert events[1::2] == ["removed"] * 3
    assert len(events) == 6
    assert smallest_found(PlantedLeak("nowhere", plant, "arena"), "cpu", {}) is None


def test_a_planted_leak_is_found_by_the_judge_of_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (16 * MIB,))
    assert smallest_found(ON_HOST, "cpu", {"host-memory": 8 * MIB}) == 16 * MIB


class CardDriver:
    """A card's driver with pages of 2 MiB."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def granularity(self) -> int:
        return 2 * MIB

    def create(self, size: int) -> int:
        self.held[len(self.held) + 7] = size
        return len(self.held) + 6

    def release(self, handle: int) -> None:
        del self.held[handle]


def test_what_the_driver_alone_knows_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CardDriver()
    monkeypatch.setattr(planted_leaks, "open_driver", lambda index: driver)
    monkeypatch.setattr(planted_leaks, "check_device", torch.device)
    (leak,) = [each for each in PLANTED if each.needs_card]
    with ExitStack() as undo:
        leak.plant(4 * MIB, "cuda:0", undo)
        leak.plant(64 * MIB, "cuda:0", undo)
        assert list(driver.held.values()) == [4 * MIB, 64 * MIB]
    assert driver.held == {}
    assert leak.page("cuda:0") == 2 * MIB
    assert leak.metric_on("cuda:0") == "driver cuda:0"


def test_a_planted_leak_within_the_tolerance_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (16 * MIB,))
    assert smallest_found(ON_HOST, "cpu", {}) is None
