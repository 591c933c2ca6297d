"""The examples, run as their README says: the clean files pass, the leaking ones are named with what releases them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lowtide.reports.schema import Finding, Report, read

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SUITES = ("engine_fixture", "module_cache", "rl_loop", "transformers_pipeline", "vllm_life")


def run(name: str, folder: Path, *arguments: str) -> tuple[str, Report]:
    """One suite, in a copy; the last line, and the report."""
    shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-q", "--leakcheck", f"--leakcheck-report={folder / 'report'}"]
    if "lowtide" not in {entry.name for entry in metadata.entry_points(group="pytest11")}:
        command += ["-p", "lowtide.pytest_plugin.plugin"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [*command, *arguments], cwd=folder / name, env=environment, capture_output=True, text=True, check=False
    )
    assert (folder / "report").exists(), done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1], read(folder / "report")


def findings(report: Report) -> dict[str, Finding]:
    return {finding.holder or "": finding for subject in report.subjects for finding in subject.findings}


def test_each_example_is_described() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("__"))
    assert folders == sorted([*SUITES, "published_bugs"])
    assert [name for name in folders if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", [name for name in SUITES if name != "vllm_life"])
def test_the_clean_file_passes(name: str, tmp_path: Path) -> None:
    last, report = run(name, tmp_path)
    assert "passed" in last
    assert {subject.outcome for subject in report.subjects} == {"clean"}


def test_without_a_card_a_real_engine_is_skipped(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    last, report = run("vllm_life", tmp_path, "-rs")
    assert "1 skipped" in last
    assert report.subjects == ()


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
def test_a_leak_is_named_with_what_releases_it(name: str, remedies: dict[str, str], tmp_path: Path) -> None:
    _, report = run(name, tmp_path, "leaking.py")
    found = findings(report)
    assert {holder: item.remedy.action for holder, item in found.items() if item.remedy is not None} == remedies
    assert all(item.remedy is not None and item.remedy.returns_bytes == item.bytes for item in found.values())
    assert all(item.path for item in found.values())
    if name == "rl_loop":
        assert [(item.trend, item.stage) for item in found.values()] == [("growth", "train")]


def test_an_engine_that_no_fixture_closes_is_the_fixtures(tmp_path: Path) -> None:
    _, report = run("engine_fixture", tmp_path, "leaking.py")
    (subject,) = [subject for subject in report.subjects if subject.findings]
    assert subject.id == "module fixture 'engine' (leaking.py)"
    (finding,) = subject.findings
    assert finding.holder == "thread 'engine'"
    assert finding.advice == "keep the engine.Engine, and call its close() at the end"
