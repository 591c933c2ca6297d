"""The contracts of imports: they lead downward."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, in which a test may break something."""
    shutil.copytree(ROOT / "lowtide", tmp_path / "lowtide", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_lead_downward(package: Path) -> None:
    done = contracts(package)
    assert (done.returncode, "Contracts: 4 kept, 0 broken" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("leakcheck/judging/judge.py", "import lowtide.leakcheck.watching.watch", "leakcheck: "),
        ("probes/objects/foreign.py", "import lowtide.probes.references.edges", "probes: "),
        ("probes/stages.py", "import lowtide.reports.sizes", "The plugin is on top"),
        ("engine/kv/kv_cache.py", "import lowtide.engine.scheduler", "engine: "),
        ("leakcheck/attic.py", "", "leakcheck: "),
    ],
)
def test_an_import_that_leads_upward_is_refused(module: str, line: str, broken: str, package: Path) -> None:
    file = package / "lowtide" / module
    file.write_text(
        (file.read_text(encoding="utf-8") if file.exists() else '"""A room nobody knows."""\n') + f"\n{line}\n"
    )
    done = contracts(package)
    assert done.returncode == 1
    assert any(
        reported.startswith(broken) and reported.rstrip().endswith("BROKEN") for reported in done.stdout.splitlines()
    ) or ("attic" in done.stdout + done.stderr)


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    # The copy, not the package that is installed.
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as go; go()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )
