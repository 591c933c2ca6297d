"""The house's rules: each room says what it is for, imports lead downward."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSES = ("engine", "leakcheck", "probes", "pytest_plugin", "reports")


def modules() -> list[Path]:
    found = [file for house in HOUSES for file in sorted((ROOT / house).rglob("*.py"))]
    assert len(found) > 200
    return found


def test_each_room_says_what_it_is_for() -> None:
    inits = [file for file in modules() if file.name == "__init__.py"]
    assert len(inits) > 15
    assert [str(file) for file in inits if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))] == []


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def name_of(file: Path) -> str:
    """Return a module's whole name."""
    parts = ("lowtide", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def bound_by(file: Path) -> set[str]:
    """Return the names that a module itself defines."""
    # The trees of all modules would take a hundred megabytes.
    tree = parsed(file)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return defined | {name.id for name in names if isinstance(name.ctx, ast.Store)}


def test_a_name_is_imported_from_where_it_is_defined_or_from_a_room_s_face() -> None:
    files = {name_of(file): file for file in modules() if file.name != "__init__.py"}
    elsewhere = [
        f"{file.relative_to(ROOT)}: {node.module}.{name.name}"
        for file in modules()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module in files
        for name in node.names
        if name.name not in bound_by(files[node.module])
    ]
    # These two stand for modules of others, with their functions as they were.
    kept = ("lowtide.probes.originals.", "lowtide.probes.original_numpy.")
    assert [line for line in elsewhere if not line.partition(": ")[2].startswith(kept)] == []


def test_no_two_classes_have_one_name() -> None:
    # The engine's processes and its ranks speak by messages of their own, which are named alike.
    classes = [
        (node.name, str(file.relative_to(ROOT)))
        for file in modules()
        if file.relative_to(ROOT).parts[0] != "engine"
        for node in parsed(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    count = Counter(name for name, _ in classes)
    assert [line for line in classes if count[line[0]] > 1] == []


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
        ("engine/kv/block_pool.py", "import lowtide.engine.scheduler", "engine: "),
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
