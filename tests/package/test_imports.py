"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.probes import native

ROOT = Path(__file__).parents[2]

ARROWS = {
    "probes": set(),
    "reports": {"probes"},
    "leakcheck": {"reports", "probes"},
    "pytest_plugin": {"leakcheck", "reports", "probes"},
    "engine": {"probes"},
}
LAZY = {("leakcheck", "engine")}
REACHING = (
    "reference.py",
    "planted_leaks.py",
)
"""The command line reaches the engine, from inside its functions, or through these of `leakcheck`: what drives the
engine as its users do, or plants leaks in it."""


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of the project that a file imports, and whether from inside a function (or for types only)."""
    tree = ast.parse(path.read_text())
    nested: set[ast.AST] = set()
    for node in ast.walk(tree):
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if inside or types_only:
            nested.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lowtide."):
            found.append((node.module, node in nested))
        elif isinstance(node, ast.Import):
            found += [(alias.name, node in nested) for alias in node.names if alias.name.startswith("lowtide.")]
    return found


@pytest.mark.parametrize("folder", list(ARROWS))
def test_no_arrow_runs_back(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for module, lazy in imports(path):
            target = module.split(".")[1]
            if target == folder or target in ARROWS[folder]:
                continue
            reaches = (folder, target) in LAZY and (lazy or path.name in REACHING)
            assert reaches, f"{path.relative_to(ROOT)} must not import {module}"


def test_of_the_probes_the_engine_knows_the_stages_only() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        for module, _ in imports(path):
            if module.startswith("lowtide.probes"):
                assert module in ("lowtide.probes", "lowtide.probes.stages"), path


@pytest.mark.parametrize("module", ["lowtide", "lowtide.probes.stages", "lowtide.leakcheck.cli.commands"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {{'torch', 'numpy', 'transformers', 'triton'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_what_is_written_in_c_is_built_where_there_is_a_compiler() -> None:
    # Else the tests of it skip themselves, and all that is read takes the longer way.
    assert native.heap is not None
