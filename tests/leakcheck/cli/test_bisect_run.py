"""`git bisect run lowtide bisect-step` on a real repository: sixty commits, a leak in one, some that do not build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.reports import schema

pytestmark = pytest.mark.nightly

COMMITS, LEAKING, BROKEN = 60, 41, range(28, 34)

ENGINE = """
import torch

KEPT = []


def step(number):
    batch = torch.ones(1 << 20)
    {body}
    return batch.sum().item() + number
"""

SUITE = """
import engine


def test_step():
    assert engine.step({number}) > 0
"""

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--leakcheck", "--leakcheck-device=cpu")


def git(repository: Path, *arguments: str) -> str:
    names = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    # Bytecode by a file's time in seconds would outlive a checkout.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        ["git", *arguments], cwd=repository, env=env, capture_output=True, text=True, check=False, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in range(1, COMMITS + 1):
        body = "KEPT.append(batch)" if number >= LEAKING else "pass"
        body = "this does not build" if number in BROKEN else body
        (folder / "engine.py").write_text(ENGINE.format(body=body))
        (folder / "test_engine.py").write_text(SUITE.format(number=number))
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"commit {number}")
    return folder


def test_the_commit_that_leaks_is_found(repository: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*PYTEST, f"--leakcheck-report={tmp_path / 'report'}"]
    assert subprocess.run(command, cwd=repository, env=env, check=False).returncode == 1
    ((leak,),) = [subject.findings for subject in schema.read(tmp_path / "report").subjects]
    git(repository, "bisect", "start", "HEAD", f"HEAD~{COMMITS - 1}")
    step = [sys.executable, "-m", "lowtide", "bisect-step", "--fingerprint", leak.fingerprint, "--"]
    said = git(repository, "bisect", "run", *step, *PYTEST, "--leakcheck-report={report}")
    assert f"commit {LEAKING}\n" in git(repository, "show", "-s", "--format=%s", "refs/bisect/bad")
    assert "is the first bad commit" in said
    assert "git bisect skip" in git(repository, "bisect", "log")
