"""The gate's configuration, and the cells that it makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtide.leakcheck.gate import matrix
from lowtide.leakcheck.gate.matrix import Cell, GateError, GateSettings, Shard, load_settings

SMALL = '[gate]\n[[gate.subject]]\nengine = "tiny"\n'

DEVICES = ("cpu", "cuda")


def written(folder: Path, text: str, name: str = "lowtide.toml") -> GateSettings:
    path = folder / name
    path.write_text(text)
    return load_settings(path, folder)[0]


def cells_of(settings: GateSettings, cards: int) -> list[Cell]:
    """The subjects' cells, without those that calibrate."""
    return [cell for cell in matrix.cells_of(settings, cards) if not cell.name.startswith("calibration-")]


def test_the_matrix_is_subjects_times_devices_times_settings(tmp_path: Path) -> None:
    settings = written(
        tmp_path,
        """
        [gate]
        devices = ["cpu", "cuda"]
        timeout = 60
        [gate.settings.plain]
        [gate.settings.frozen]
        FREEZE = "1"
        [[gate.subject]]
        engine = "tiny"
        [[gate.subject]]
        name = "mine"
        target = "package.module:factory"
        devices = ["cpu"]
        settings = ["frozen"]
        timeout = 5
        env = { FREEZE = "2" }
        """,
    )
    cells = cells_of(settings, 1)
    names = ["engine-cpu-plain", "engine-cpu-frozen", "engine-cuda-plain", "engine-cuda-frozen", "mine-cpu-frozen"]
    assert [cell.name for cell in cells] == names
    assert [cell.timeout for cell in cells] == [60, 60, 60, 60, 5]
    # The subject's own variables count, and a cell on the CPU sees no card.
    assert dict(cells[-1].env) == {"FREEZE": "2", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert dict(cells[3].env) == {"FREEZE": "1"}


@pytest.mark.parametrize(
    ("subject", "command"),
    [
        ('engine = "1b"\nseed = 3', "lowtide run --device cpu --preset 1b --cycles 2 --seed 3"),
        ('engine = "models/mine"\ncycles = 5', "lowtide run --device cpu --model models/mine --cycles 5"),
        ('target = "a.b:c"\nargs = ["--x"]', "lowtide check a.b:c --cycles 2 --x"),
        ("pytest = \"tests -m 'not slow'\"", "pytest tests -m not slow --leakcheck"),
        ('fuzz = "lowtide"\nexamples = 7\nseed = 1', "lowtide fuzz --device cpu --examples 7 --seed 1"),
        ('fuzz = "a.b:c"', "lowtide fuzz --target a.b:c --examples 100"),
        ('faults = "lowtide"', "lowtide fuzz --device cpu --faults"),
    ],
)
def test_each_kind_has_its_command(tmp_path: Path, subject: str, command: str) -> None:
    (cell,) = cells_of(written(tmp_path, f'[gate]\ndevices = ["cpu"]\n[[gate.subject]]\n{subject}\n'), 0)
    assert " ".join(cell.command[2:]) == command
    assert cell.report_option == ("--leakcheck-report" if "pytest" in command else "--report")


def test_on_a_card_a_second_process_takes_what_sleeps_free_unless_told_otherwise(tmp_path: Path) -> None:
    text = '[gate]\ndevices = ["cuda"]\n[[gate.subject]]\nengine = "tiny"\n[[gate.subject]]\ntarget = "a:b"\n'
    assert [cell.command[-1] for cell in cells_of(written(tmp_path, text), 1)] == ["--tenant", "--tenant"]
    cells = cells_of(written(tmp_path, text + "tenant = false\n"), 1)
    assert [cell.command[-1] for cell in cells] == ["--tenant", "2"]


@pytest.mark.parametrize(("cards", "device"), [(0, "cpu"), (2, "cuda")])
def test_auto_takes_a_card_if_there_is_one(tmp_path: Path, cards: int, device: str) -> None:
    (cell,) = cells_of(written(tmp_path, SMALL), cards)
    assert (cell.device, cell.missing) == (device, "")


def test_each_device_is_calibrated_once_unless_switched_off(tmp_path: Path) -> None:
    text = (
        '[gate]\ndevices = ["cpu", "cuda"]\n[gate.settings.a]\n[gate.settings.b]\n[[gate.subject]]\nengine = "tiny"\n'
    )
    cells = matrix.cells_of(written(tmp_path, text), 1)
    assert [cell.name for cell in cells if cell.calibrates] == ["calibration-cpu", "calibration-cuda"]
    assert cells[1].command[1:] == ("-m", "lowtide.leakcheck.gate.calibration", "--device", "cuda")
    assert len(matrix.cells_of(written(tmp_path, text.replace("[gate]", "[gate]\ncalibrate = false", 1)), 1)) == 4


@pytest.mark.parametrize(
    ("subject", "calibration"),
    [
        ('engine = "tiny"', "calibration-cpu"),
        ('engine = "tiny"\ncalibrated = false', ""),
        ('engine = "1b"', ""),
        ('engine = "1b"\ncalibrated = true', "calibration-cpu"),
        ('target = "a:b"', ""),
        ('target = "a:b"\ncalibrated = true', "calibration-cpu"),
        ('pytest = "tests"', ""),
    ],
)
def test_the_engine_that_is_calibrated_is_judged_by_the_calibration(
    tmp_path: Path, subject: str, calibration: str
) -> None:
    text = f'[gate]\ndevices = ["cpu"]\n[[gate.subject]]\n{subject}\n'
    (cell,) = cells_of(written(tmp_path, text), 0)
    assert cell.calibration == calibration
    (cell,) = cells_of(written(tmp_path, text.replace("[gate]", "[gate]\ncalibrate = false", 1)), 0)
    assert cell.calibration == ""


def test_each_shard_calibrates_the_devices_that_it_uses(tmp_path: Path) -> None:
    subjects = [f'[[gate.subject]]\nname = "{device}"\nengine = "tiny"\ndevices = ["{device}"]\n' for device in DEVICES]
    cells = matrix.cells_of(written(tmp_path, "[gate]\n" + "".join(subjects)), 1)
    parts = [[cell.name for cell in Shard(index, 2).part(cells)] for index in (1, 2)]
    assert parts == [["calibration-cpu", "cpu-cpu"], ["calibration-cuda", "cuda-cuda"]]


def test_a_card_that_is_not_here_is_no_cell_that_passes(tmp_path: Path) -> None:
    settings = written(tmp_path, SMALL.replace("[gate]", '[gate]\ndevices = ["cuda", "cuda:1"]', 1))
    assert [cell.missing for cell in cells_of(settings, 1)] == ["", "cuda:1 is not here: this machine has 1 card"]
    assert [bool(cell.missing) for cell in cells_of(settings, 0)] == [True, True]


def test_shards_share_the_cells_and_lose_none(tmp_path: Path) -> None:
    text = "[gate]\n" + "".join(f'[[gate.subject]]\nname = "s{turn}"\nengine = "tiny"\n' for turn in range(7))
    cells = cells_of(written(tmp_path, text), 0)
    parts = [Shard(index, 3).part(cells) for index in (1, 2, 3)]
    assert sorted(cell.name for part in parts for cell in part) == sorted(cell.name for cell in cells)
    assert [len(part) for part in parts] == [3, 2, 2]
    assert Shard.parse("2/3") == Shard(2, 3)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2", ""])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(GateError, match=f"--shard {re.escape(text)} is not possible: use I/N"):
        Shard.parse(text)


def test_the_project_file_serves_as_well_and_the_own_one_comes_first(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="no gate is configured here: write a lowtide"):
        load_settings(None, tmp_path)
    project = SMALL.replace("gate", "tool.lowtide.gate")
    (tmp_path / "pyproject.toml").write_text(project)
    assert load_settings(None, tmp_path)[1].name == "pyproject.toml"
    # A lowtide.toml for suppressions alone is no gate.
    (tmp_path / "lowtide.toml").write_text("[[suppressions]]\n")
    assert load_settings(None, tmp_path)[1].name == "pyproject.toml"
    (tmp_path / "lowtide.toml").write_text(SMALL)
    assert load_settings(None, tmp_path)[1].name == "lowtide.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate]\nsubject = []\n", "the gate has no subject"),
        ("[gate]\n", "missing required field `subject`"),
        ("[gate\n", "is not valid TOML"),
        (f"gate = {'[' * 5000}{']' * 5000}\n", "cannot be read: it is nested too deeply"),
        (f"gate = {'1' * 5000}\n", "cannot be read: a number in it has too many digits"),
        ("[other]\n", r"has no table \[gate\]: write one with `lowtide init`"),
        (SMALL + "speed = 3\n", "unknown field `speed`"),
        (
            '[gate]\n[[gate.subject]]\npytest = "tests"\ncalibrated = true\n',
            "subject pytest cannot be calibrated: only the lives of engine and target are",
        ),
        (SMALL + "cycles = 0\n", "cycles 0 of subject engine is not possible: use 1 or more"),
        (SMALL + 'cycles = "2"\n', "Expected `int`, got `str`"),
        (SMALL + 'fuzz = "lowtide"\n', "subject 1 needs exactly one of engine, .* has engine and fuzz"),
        ('[gate]\n[[gate.subject]]\nname = "a"\n', "subject 1 needs exactly one of .* and has none"),
        (SMALL + SMALL[7:], "two subjects are named engine"),
        (SMALL + 'devices = ["gpu"]\n', "device gpu is not known; allowed are auto, cpu, cuda and cuda:N"),
        (SMALL + 'settings = ["none"]\n', r"names the setting none, which \[gate.settings\] lacks"),
        (SMALL + 'name = "../up"\n', "the name '../up' of a subject is not possible"),
        (SMALL + "timeout = -1\n", "timeout -1.0 is not possible"),
        (SMALL.replace("[gate]\n", "[gate]\ncpu-workers = 0\n", 1), "cpu-workers 0 is not possible"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(GateError, match=message) as refused:
        written(tmp_path, text)
    assert "\n" not in str(refused.value)
    assert "lowtide.toml" in str(refused.value)


def test_two_cells_of_one_name_are_refused(tmp_path: Path) -> None:
    text = '[gate]\ndevices = ["cpu"]\n[gate.settings.x]\n[gate.settings.cpu-x]\n' + "".join(
        f'[[gate.subject]]\nname = "{name}"\nengine = "tiny"\nsettings = ["{setting}"]\n'
        for name, setting in (("a", "cpu-x"), ("a-cpu", "x"))
    )
    with pytest.raises(GateError, match="two cells are named a-cpu-cpu-x"):
        cells_of(written(tmp_path, text), 0)
