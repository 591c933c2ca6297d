"""`lowtide init`: what it writes is what the gate and GitHub read, and nothing that is there changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.gate.matrix import cells_of, load_settings

CONFIGURATION = "lowtide.toml"
WORKFLOW = ".github/workflows/lowtide.yml"


def init(folder: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["init", str(folder), *arguments])
    return done.exit_code, done.output


def commands(folder: Path) -> list[str]:
    settings, file = load_settings(None, folder)
    assert file == folder / CONFIGURATION
    cells = [cell for cell in cells_of(settings, 0) if not cell.name.startswith("calibration")]
    return [" ".join(cell.command).removeprefix(sys.executable) for cell in cells]


def test_the_first_configuration_is_one_that_the_gate_runs(tmp_path: Path) -> None:
    code, said = init(tmp_path, "--target", "my.engine:Factory.make", "--pytest", 'tests/gpu -k "not slow"')
    assert (code, f"{tmp_path / CONFIGURATION} written" in said) == (0, True)
    lives, fuzz, tests = commands(tmp_path)
    assert "check my.engine:Factory.make" in lives
    assert "--target my.engine:Factory.make" in fuzz
    assert "tests/gpu -k not slow" in tests


def test_without_a_target_the_tests_are_judged_or_the_reference_engine(tmp_path: Path) -> None:
    init(tmp_path)
    (reference,) = commands(tmp_path)
    assert " run " in reference
    (tmp_path / "other" / "tests").mkdir(parents=True)
    init(tmp_path / "other")
    (tests,) = commands(tmp_path / "other")
    assert "-m pytest tests" in tests


@pytest.mark.parametrize(
    ("file", "install"),
    [("pyproject.toml", '"lowtide[fuzz,history] @ git+$LOWTIDE" .'), (None, '"lowtide[fuzz,history] @ git+$LOWTIDE"')],
)
def test_the_workflow_runs_the_gate_every_night_and_keeps_its_report(
    file: str | None, install: str, tmp_path: Path
) -> None:
    if file is not None:
        (tmp_path / file).touch()
    _, said = init(tmp_path)
    assert f"Put lowtide's git address into {tmp_path / WORKFLOW}" in said
    workflow = yaml.safe_load((tmp_path / WORKFLOW).read_text())
    # YAML 1.1 reads `on` as true.
    assert "schedule" in workflow[True]
    steps = workflow["jobs"]["gate"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    assert runs[0].startswith("python -m pip install torch ")
    assert runs[1] == f"python -m pip install {install}"
    assert runs[2] == "lowtide gate --report build/gate"
    last = steps[-1]
    assert (last["if"], last["uses"], last["with"]["path"]) == ("always()", "actions/upload-artifact@v4", "build/gate")


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / CONFIGURATION).write_text("# mine\n")
    code, said = init(tmp_path)
    assert (code, (tmp_path / CONFIGURATION).read_text()) == (0, "# mine\n")
    assert f"{tmp_path / CONFIGURATION} is there already and stays as it is: add a [gate] table" in said
    assert (tmp_path / WORKFLOW).exists()
    (tmp_path / WORKFLOW).write_text("# mine too\n")
    code, said = init(tmp_path)
    assert (code, (tmp_path / WORKFLOW).read_text(), "Now try it" in said) == (0, "# mine too\n", False)


def test_a_link_to_nowhere_is_there_too(tmp_path: Path) -> None:
    (tmp_path / CONFIGURATION).symlink_to(tmp_path / "elsewhere.toml")
    code, _ = init(tmp_path)
    assert (code, (tmp_path / "elsewhere.toml").exists()) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "engine"), "--target engine is no MODULE:FACTORY: use a name such as my_engine.lowtide:factory"),
        (("--target", 'a:b"\nx = 1'), "is no MODULE:FACTORY"),
    ],
)
def test_bad_input_writes_nothing(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, output = init(tmp_path, *arguments)
    assert (code, said in output, list(tmp_path.iterdir())) == (2, True, [])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, output = init(tmp_path / "absent")
    assert (code, "absent is no folder: give the project's" in output) == (2, True)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".github").write_text("a file")
    code, output = init(tmp_path)
    assert (code, output.count("cannot be written: ")) == (2, 1)
