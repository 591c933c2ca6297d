"""`lowtide heap` asked in a process without torch about what a test, a block and a life have left; and its refusals."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide import LeakCheck
from lowtide.leakcheck.cli.commands import app
from lowtide.reports import schema

pytestmark = pytest.mark.nightly

MIB = 1 << 20
SECRET = "a-secret-of-the-engines-4711"

HELPER = f"""
import torch

ENGINES = {{}}

class Model:
    def __init__(self):
        self.layers = [torch.zeros(1 << 20, dtype=torch.uint8)]

class Engine:
    def __init__(self):
        self.model = Model()
        self.prompts = ["{SECRET}", ["{SECRET}"]]
"""

TESTS = """
import helper

def test_leaves_an_engine():
    helper.ENGINES["served"] = helper.Engine()

def test_gives_it_back():
    helper.ENGINES["next"] = helper.Engine()
    del helper.ENGINES["next"]
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter in which importing torch fails."""
    code = "import sys; sys.modules['torch'] = None; from lowtide.leakcheck.cli.commands import main; main()"
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", code, "heap", *arguments], capture_output=True, text=True, check=False, env=env
    )


def answered(*arguments: str) -> Any:
    done = without_torch(*arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def suite(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "helper.py").write_text(HELPER)
    (folder / "test_engine.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lowtide.pytest_plugin.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--leakcheck", "--leakcheck-settle=0.05", *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tested")
    done = suite(folder, "--leakcheck-report=report", "--leakcheck-keep-heap=5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kept heap: lowtide heap " in done.stdout
    return folder / "report"


@pytest.fixture(scope="module")
def file(tested: Path) -> str:
    (found,) = (tested / "heaps").iterdir()
    return str(found)


def findings_in(report: Path) -> list[schema.Finding]:
    return [finding for subject in schema.read(report).subjects for finding in subject.findings]


def test_the_file_names_the_path_and_holder_of_the_finding(tested: Path, file: str) -> None:
    (finding,) = findings_in(tested)
    (left,) = answered(file)["left"]
    path = answered(file, "--path-to", str(left["id"]))
    assert [(hop["type"], hop["edge"]) for hop in path["hops"]] == [(hop.type, hop.edge) for hop in finding.path]
    assert left["path"] == finding.holder == "helper.ENGINES['served'].model.layers[0]"
    assert MIB <= left["retained"] < 1.01 * MIB
    suspects = [hop["edge"] for hop in path["hops"] if hop.get("suspect")]
    assert suspects[0] == next(hop.edge for hop in finding.path if hop.suspect)


@pytest.mark.nightly
def test_the_file_says_who_holds_a_type_and_what_an_object_holds_alone(file: str) -> None:
    assert [(row["holder"], row["edge"], row["count"]) for row in answered(file, "--holds", "helper.Model")] == [
        ("helper.Engine", ".model", 1)
    ]
    engine = answered(file, "--path-to", "helper.Engine")["id"]
    under = answered(file, "--dominators", str(engine))
    assert [row["type"] for row in under] == ["helper.Model", "list"]
    assert under[0]["retained"] >= MIB
    storages = answered(file, "--holds", "storage on cpu")
    assert ("torch.Tensor", "storage") in [(row["holder"], row["edge"]) for row in storages]


@pytest.mark.nightly
def test_what_is_printed_is_the_finding_s_path_in_lines_that_fit(tested: Path, file: str) -> None:
    path = without_torch(file, "--path-to", "torch.Tensor").stdout
    assert "-> ['served']  (helper.Engine)" in path
    for question in ((), ("--path-to", "torch.Tensor"), ("--holds", "dict"), ("--dominators", "all")):
        done = without_torch(file, *question)
        assert (done.returncode, done.stderr) == (0, "")
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert len(done.stdout.splitlines()) < 80
    assert SECRET not in without_torch(file, "--top", "1000").stdout


def test_contents_are_not_in_the_file(file: str) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    assert any(b"['served']" in part for part in parts)
    assert not any(SECRET.encode() in part for part in parts)


@pytest.mark.nightly
def test_nothing_is_kept_unasked_and_old_files_go(tested: Path, tmp_path: Path) -> None:
    assert suite(tmp_path, "--leakcheck-report=report").returncode == 1
    assert not (tmp_path / "report" / "heaps").exists()
    (tmp_path / "report" / "heaps").mkdir()
    old = tmp_path / "report" / "heaps" / "earlier.heap.npz"
    old.write_text("an earlier run's")
    done = suite(tmp_path, "--leakcheck-report=report", "--leakcheck-keep-heap=1", "-k", "gives")
    assert done.returncode == 0, done.stdout
    assert [*old.parent.iterdir()] == []


def test_a_heap_without_a_report_is_refused(tmp_path: Path) -> None:
    done = suite(tmp_path, "--leakcheck-keep-heap=1")
    assert done.returncode == 4
    assert "add --leakcheck-report" in done.stderr


KEPT: list[object] = []


@pytest.mark.nightly
def test_a_block_keeps_its_heap_where_it_leaves_something(tmp_path: Path) -> None:
    file = tmp_path / "block.heap.npz"
    file.write_text("an earlier block's")
    with LeakCheck(keep_heap=file) as check:
        KEPT.append(bytearray(1))
        KEPT.clear()
    assert check.report.subjects[0].outcome == "clean"
    assert not file.exists()
    file.write_text("an earlier block's")
    with contextlib.suppress(ValueError), LeakCheck(keep_heap=file):
        raise ValueError
    assert not file.exists()
    import torch

    with LeakCheck("the block", keep_heap=str(file)) as check:
        KEPT.append(torch.zeros(MIB, dtype=torch.uint8))
    KEPT.clear()
    (finding,) = check.report.subjects[0].findings
    overview = answered(str(file))
    assert overview["subject"] == "the block"
    assert [row["path"] for row in overview["left"]] == [finding.holder]


TARGETS = """
import torch
from lowtide.targets import Capabilities

LEFT = []

class Engine:
    pass

class Clean:
    capabilities = Capabilities(device="cpu")

    def create(self, config):
        self.engine = Engine()
        self.engine.weights = torch.ones(1 << 20, dtype=torch.uint8)

    def infer(self, prompt_lengths, max_tokens):
        return [[1] * max_tokens for _ in prompt_lengths]

    def shutdown(self):
        self.engine.__dict__.clear()

class Leaks(Clean):
    def shutdown(self):
        LEFT.append(self.engine.weights)
        super().shutdown()
"""


def check_life(target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "targets_of_mine.py").write_text(TARGETS)
    command = [sys.executable, "-m", "lowtide", "check", target, "--cycles", "2", "--report", "report", "--keep-heap"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)


@pytest.mark.nightly
def test_a_life_keeps_the_heap_of_its_end_where_it_leaves_something(tmp_path: Path) -> None:
    done = check_life("targets_of_mine:Leaks", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = (tmp_path / "report" / "heaps").iterdir()
    assert "kept heap: lowtide heap" in done.stdout
    holder = next(finding.holder for finding in findings_in(tmp_path / "report") if finding.resource == "tensors")
    assert [row["path"] for row in answered(str(file))["left"]] == [f"{holder}[{turn}]" for turn in range(2)]


@pytest.mark.nightly
def test_a_life_that_gives_all_back_keeps_none(tmp_path: Path) -> None:
    done = check_life("targets_of_mine:Clean", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [*(tmp_path / "report").rglob("*.heap.npz*")] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.npz"], "cannot be read"),
        (["{file}", "--path-to", "helper.Absent"], "no object of type helper.Absent"),
        (["{file}", "--holds", "99999999999"], "no object 99999999999"),
        (["{file}", "--path-to", "list", "--holds", "list"], "exclude each other"),
        ([__file__], "is not a lowtide-heap/1 file"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(arguments: list[str], said: str, file: str) -> None:
    done = CliRunner().invoke(app, ["heap", *(text.replace("{file}", file) for text in arguments)])
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line
