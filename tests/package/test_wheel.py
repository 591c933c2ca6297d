"""What is built: sdist to wheel, with every module and no other top-level name."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "probes", "reports", "leakcheck", "pytest_plugin")
"""The product folders of the layout; one that is not there yet has no link either."""

READ_FROM_THE_SOURCE = (
    ".github/ISSUE_TEMPLATE/missed-leak.yml",
    ".github/gate.toml",
    ".github/workflows/ci.yml",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "action.yml",
    "SECURITY.md",
    "docs/data/vllm-sleep.txt",
    "docs/vllm-leak.svg",
    "mkdocs.yml",
)
"""What its reader looks for, and what the tests and `make docs` read."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it alone."""
    out = tmp_path_factory.mktemp("dist")
    # The backend's own hooks, as an installer calls them; no isolated environment, so that nothing is downloaded.
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def sources() -> set[str]:
    """Every file of the product, as the import package should have it."""
    files = {f"lowtide/{path.name}" for path in (ROOT / "lowtide").iterdir() if path.is_file()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files.add(f"lowtide/{path.relative_to(ROOT)}")
    return files


def test_the_wheel_has_every_file_of_the_product(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == sources()
    schemas = {"lowtide-report-1.schema.json", "processes/lowtide-ps-1.schema.json"}
    assert {"lowtide/py.typed", *(f"lowtide/reports/{name}" for name in schemas)} <= packaged


def test_without_a_compiler_there_is_a_wheel_all_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    if built[1].name.endswith("-py3-none-any.whl"):
        pytest.skip("nothing can be compiled here: this is the wheel without")
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", source]
    done = subprocess.run(command, check=True, env={**os.environ, "CC": "false"}, capture_output=True, text=True)
    assert "built without heap.c" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files, zipfile.ZipFile(built[1]) as whole:
        missing = set(whole.namelist()) - set(files.namelist())
    assert {name for name in missing if ".dist-info/" not in name} == {"lowtide/probes/native/heap.abi3.so"}
    assert built[1].name.startswith("lowtide-")
    assert "-cp310-abi3-linux_" in built[1].name


def test_the_wheel_has_no_other_top_level_name(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lowtide"}


def test_the_sdist_has_the_tests_and_what_runs_them(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"Makefile", "LICENSE", "README.md", "pyproject.toml", "tests/package/test_wheel.py"} <= names


def test_the_sdist_has_the_pages_the_examples_and_what_their_tests_read(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert set(READ_FROM_THE_SOURCE) <= names
    folders = [ROOT / name for name in ("docs", "examples", "benchmarks", "tests", ".github")]
    there = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*") if is_source(path)}
    assert len(there) > 200
    assert there - names == set()


def is_source(path: Path) -> bool:
    return path.is_file() and not {"__pycache__", ".hypothesis", ".pytest_cache"} & set(path.parts)


def test_each_folder_has_its_link_and_the_tree_has_no_empty_module() -> None:
    for folder in FOLDERS:
        assert (ROOT / folder).is_dir() == (ROOT / "lowtide" / folder).is_symlink()
    empty = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.read_text().strip()]
    assert empty == []


def test_an_installed_wheel_runs_from_anywhere(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "import lowtide, lowtide.engine.core as core; print(lowtide.__version__, core.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "site" / "lowtide" / "engine" / "core.py") in done.stdout
