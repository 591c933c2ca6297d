"""The workflows and the action: read by actionlint where it is installed, and fitting to the commands they run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.gate.matrix import cells_of, load_settings

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"--[a-z][a-z-]*")


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def help_of(command: str) -> str:
    return CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout


def test_actionlint_has_nothing_to_say_of_any_workflow(tmp_path: Path) -> None:
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed; the hook of pre-commit runs it")
    (tmp_path / "pyproject.toml").touch()
    CliRunner().invoke(app, ["init", str(tmp_path)])
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), *(tmp_path / ".github" / "workflows").glob("*.yml")]
    assert len(files) == 3
    config = ["-config-file", str(ROOT / ".github" / "actionlint.yaml")]
    done = subprocess.run(
        [program, *config, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_use_of_the_action_gives_inputs_that_it_has() -> None:
    inputs = loaded("action.yml")["inputs"]
    jobs = loaded(".github/workflows/nightly.yml")["jobs"]
    uses = [step["with"] for job in jobs.values() for step in job["steps"] if step.get("uses") == "./"]
    assert len(uses) == 3
    assert [name for given in uses for name in given if name not in inputs] == []
    assert {given["config"] for given in uses} == {".github/gate.toml"}
    assert all({"description", "default"} <= each.keys() for each in inputs.values())


def test_the_action_reads_each_input_and_keeps_them_out_of_its_scripts() -> None:
    """An input within a script would be run as a part of it."""
    action = loaded("action.yml")
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert {name for name in action["inputs"] if f"inputs.{name}" not in text} == set()
    scripts = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    assert len(scripts) == 3
    assert [script for script in scripts if "${{" in script] == []
    assert all(step["shell"] == "bash" for step in action["runs"]["steps"] if "run" in step)


def test_the_action_uses_options_that_the_commands_have() -> None:
    scripts = "\n".join(step.get("run", "") for step in loaded("action.yml")["runs"]["steps"])
    for command in ("gate", "history"):
        assert f"lowtide {command}" in scripts
    known = set(OPTION.findall(help_of("gate") + help_of("history"))) | {"--quiet"}
    assert set(OPTION.findall(scripts)) <= known


@pytest.mark.parametrize(("code", "outcome"), [(0, "clean"), (1, "leak"), (2, "not-measured"), (130, "not-measured")])
def test_the_actions_step_ends_as_the_gate_does(code: int, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "lowtide").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit {code}\n')
    (tmp_path / "lowtide").chmod(0o755)
    (script,) = [step["run"] for step in loaded("action.yml")["runs"]["steps"] if step.get("id") == "gate"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REPORT": "a b", "CONFIG": "$(x).toml", "SHARD": ""}
    # As GitHub runs `shell: bash`.
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        env={**env, "GITHUB_OUTPUT": str(tmp_path / "output")},
        check=False,
    )
    assert (done.returncode, (tmp_path / "output").read_text()) == (code, f"outcome={outcome}\n")
    assert (tmp_path / "arguments").read_text() == "--report a b --config $(x).toml\n".replace(
        "--report", "gate --report"
    )


def test_our_own_gate_can_be_run() -> None:
    settings, _ = load_settings(ROOT / ".github" / "gate.toml", ROOT)
    names = {cell.name for cell in cells_of(settings, 1)}
    assert {"lives-cuda", "random-lives-cuda", "faults-cuda", "small-heaps-cpu"} <= names
    assert [
        subject.pytest for subject in settings.subject if subject.pytest and not (ROOT / subject.pytest).exists()
    ] == []


def test_all_tests_still_run_every_night() -> None:
    jobs = loaded(".github/workflows/nightly.yml")["jobs"]
    assert {"run": "make test-all"} in jobs["all-tests"]["steps"]
    assert {"gate-cpu", "gate-cuda", "gate-rocm"} <= jobs.keys()
