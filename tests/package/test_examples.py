"""The examples, run as their README says: the clean files pass, the leaking ones are named with what releases them."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from lowtide.reports.schema import Finding, Report, Subject, read

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SUITES = ("engine_fixture", "module_cache", "rl_loop", "transformers_pipeline", "vllm_life", "vllm_rl_loop")


@dataclass(frozen=True)
class Run:
    """One suite, clean and leaking files in one session, as the README says.

    Attributes:
        last: the last line that pytest printed.
        report: what was judged.
    """

    last: str
    report: Report

    def subjects(self, *, leaking: bool) -> list[Subject]:
        """What was judged in the leaking file, or in the clean one."""
        return [subject for subject in self.report.subjects if ("leaking.py" in subject.id) is leaking]

    def leaks(self) -> dict[str, Finding]:
        """What the leaking file left, by holder."""
        return {
            finding.holder or "": finding for subject in self.subjects(leaking=True) for finding in subject.findings
        }


@functools.cache
def run(name: str) -> Run:
    """A suite, in a copy of its folder; loading torch takes longer than all else, so it is run once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        files = sorted(path.name for path in (folder / name).glob("*.py") if path.name.startswith(("test_", "leaking")))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "--leakcheck",
            f"--leakcheck-report={folder / 'report'}",
        ]
        if "lowtide" not in {entry.name for entry in metadata.entry_points(group="pytest11")}:
            command += ["-p", "lowtide.pytest_plugin.plugin"]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # The clean file first.
        done = subprocess.run(
            [*command, *files[::-1]], cwd=folder / name, env=environment, capture_output=True, text=True, check=False
        )
        assert (folder / "report").exists(), done.stdout + done.stderr
        return Run(done.stdout.strip().splitlines()[-1], read(folder / "report"))


def test_the_image_s_command_and_what_it_installs_are_there() -> None:
    text = (EXAMPLES / "container" / "Dockerfile").read_text()
    (entry,) = [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("ENTRYPOINT")]
    command = [sys.executable, "-m", "lowtide", *entry[1 : entry.index("--")], "--", "no-such-server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    # What it is to start is not there: all before that was understood.
    assert (done.returncode, "no-such-server" in done.stderr) == (2, True), done.stderr
    (extra,) = re.findall(r"pip install .*/opt/lowtide\[(\w+)\]", text)
    assert extra in metadata.metadata("lowtide").get_all("Provides-Extra", [])


def test_each_example_is_described() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("__"))
    assert folders == sorted([*SUITES, "container", "peer_checks", "published_bugs", "what_vllm_leaves"])
    assert [name for name in folders if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("patch", sorted((EXAMPLES / "peer_checks").glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_patch_is_one(patch: Path) -> None:
    """It can be read, whatever it is applied to."""
    read = subprocess.run(["git", "apply", "--numstat", patch], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
    assert f"`{patch.name}`" in (ROOT / "docs" / "peer-checks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in SUITES if not name.startswith("vllm_")])
def test_the_clean_file_is_clean(name: str) -> None:
    judged = run(name).subjects(leaking=False)
    assert judged
    assert {subject.outcome for subject in judged} == {"clean"}


@pytest.mark.parametrize(("name", "skipped"), [("vllm_life", 1), ("vllm_rl_loop", 2)])
def test_without_a_card_or_vllm_a_real_engine_is_skipped(name: str, skipped: int) -> None:
    import torch

    if torch.cuda.is_available() or importlib.util.find_spec("vllm") is not None:
        pytest.skip("there is a card, or vLLM")
    assert f"{skipped} skipped" in run(name).last
    assert run(name).report.subjects == ()


@pytest.mark.parametrize(
    ("name", "remedies"),
    [
        (
            "module_cache",
            {
                "features.embed_once (lru_cache value)": "features.embed_once.cache_clear()",
                "features.SEEN['blue']": "del features.SEEN['blue']",
            },
        ),
        ("rl_loop", {"loop.HISTORY": "loop.HISTORY.clear()"}),
        ("transformers_pipeline", {"leaking.OUTPUTS": "leaking.OUTPUTS.clear()"}),
    ],
)
def test_a_leak_is_named_with_what_releases_it(name: str, remedies: dict[str, str]) -> None:
    # Of an engine that goes on nothing is tried.
    found = {holder: item for holder, item in run(name).leaks().items() if item.stage != "update_weights"}
    assert {holder: item.remedy.action for holder, item in found.items() if item.remedy is not None} == remedies
    assert all(item.remedy is not None and item.remedy.returns_bytes == item.bytes for item in found.values())
    assert all(item.path for item in found.values())


def test_what_a_loop_keeps_grows_turn_by_turn() -> None:
    finding = run("rl_loop").leaks()["loop.HISTORY"]
    assert (finding.trend, finding.stage) == ("growth", "train")


def test_what_an_engine_keeps_of_each_update_is_found_within_ten_turns_though_it_gives_it_back() -> None:
    (finding,) = [each for each in run("rl_loop").leaks().values() if each.stage == "update_weights"]
    assert (finding.resource, finding.trend, finding.holder) == ("tensors", "growth", "engine.sent")
    assert finding.count <= 10
    assert finding.message.startswith("tensors on cpu grow by 512 B with each update_weights")


def test_fifty_turns_of_a_loop_leave_nothing_and_nothing_grows() -> None:
    (subject,) = run("rl_loop").subjects(leaking=False)
    assert (subject.outcome, subject.findings) == ("clean", ())
    names = {stage.name for stage in subject.stages}
    assert {"infer", "sleep", "wake", "update_weights"} <= names


def test_an_engine_that_no_fixture_closes_is_the_fixtures() -> None:
    (subject,) = [subject for subject in run("engine_fixture").subjects(leaking=True) if subject.findings]
    assert subject.id == "module fixture 'engine' (leaking.py)"
    (finding,) = subject.findings
    assert finding.holder == "Engine.weights of thread 'engine'"
    assert finding.advice == "keep the engine.Engine, and call its close() at the end"
