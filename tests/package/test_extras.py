"""What plain lowtide does without, what is said where an extra is missing, and that each shown installation exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lowtide.leakcheck.cli.init import workflow

pytestmark = pytest.mark.nightly

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"torch", "hypothesis", "objgraph", "typer", "click", "rich"}

WITHOUT = """\
import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

*missing, _, module = sys.argv[1:sys.argv.index("--") + 2]
MISSING = set(missing)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[sys.argv.index("--") + 1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

SUITE = """\
import sys, threading
torch = __import__("torch") if TORCH else None
STOP, KEPT = threading.Event(), []

def test_clean():
    assert torch is None or torch.ones(1 << 18).sum() == 1 << 18
    assert not {"torch", "hypothesis", "objgraph", "typer", "rich"} & set(sys.modules) - {"torch" if TORCH else ""}

def test_leak():
    KEPT.append(torch.ones(1 << 18) if TORCH else threading.Thread(target=STOP.wait, daemon=True).start())
"""


def run_without(missing: set[str], folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE` where some packages cannot be imported."""
    (folder / "without.py").write_text(WITHOUT)
    command = [sys.executable, "without.py", *sorted(missing), "--", module, *arguments]
    # No other plugin: some import what is missing.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("torch", [False, True], ids=["without torch", "with torch"])
def test_the_plugin_judges_without_any_extra(torch: bool, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(f"TORCH = {torch}\n{SUITE}")
    options = ["-p", "no:cacheprovider", "-p", "lowtide.pytest_plugin.plugin", "--leakcheck"]
    missing = EXTRAS - ({"torch"} if torch else set())
    report = "--leakcheck-report=report"
    done = run_without(missing, tmp_path, "pytest", *options, "--leakcheck-device=cpu", report, "test_suite.py")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_suite.py::test_leak left something behind" in done.stdout
    assert "CLEAN" not in (tmp_path / "report" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("typer", "--version", "cli"),
        ("rich", "report .", "cli"),
        ("torch", "run", "engine"),
        ("torch", "check json:loads", "engine"),
        ("torch", "defects", "engine"),
        ("hypothesis", "fuzz --examples 1", "fuzz"),
        ("torch", "serve", "engine"),
        ("starlette", "serve", "serve"),
        ("uvicorn", "serve", "serve"),
    ],
)
def test_what_is_missing_is_one_line_that_names_the_extra(
    missing: str, command: str, extra: str, tmp_path: Path
) -> None:
    done = run_without({missing}, tmp_path, "lowtide", *command.split())
    said = f"this command needs {missing}, which cannot be imported (No module named {missing!r})"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f'lowtide: {said}: pip install "lowtide[{extra}]"\n'
    names = {Requirement(each).name for each in PROJECT["optional-dependencies"][extra]}
    assert missing in names


def test_commands_that_judge_nothing_of_torch_s_do_without_it(tmp_path: Path) -> None:
    for command, code in (("--version", 0), ("init .", 0), ("gate --list", 0), ("report .", 2), ("exec -- true", 0)):
        done = run_without({"torch", "hypothesis", "objgraph"}, tmp_path, "lowtide", *command.split())
        assert done.returncode == code, (command, done.stderr)
        assert "pip install" not in done.stderr


def test_plain_lowtide_asks_for_none_of_them() -> None:
    plain = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert plain & EXTRAS == set()


# How to install it

SHOWN = re.compile(r"pip install (?P<what>[^\n`#]+)")
WITHIN = re.compile(r"[\w./$]*\[([\w,]+)\]")
TEXTS = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "action.yml"))]


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_no_text_installs_what_there_is_not(file: Path) -> None:
    """There is no release: a clone or a git address is named first, and extras that exist."""
    check_shown(file.read_text(encoding="utf-8"))


def test_no_first_workflow_installs_what_there_is_not() -> None:
    check_shown(workflow(ROOT))


def check_shown(text: str) -> None:
    for found in SHOWN.finditer(text):
        what = found["what"]
        for extras in WITHIN.findall(what):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), what
        by_name = re.search(r"(?<![./\w])lowtide(?!\w)(?!(?:\[[\w,]+\])? @ git\+)", what)
        # To an installed one an extra can be added by its name, as its messages say.
        assert by_name is None or "once lowtide is installed" in text[: found.start()], what
