"""Each installation that a page, the action or the first workflow shows, run as written in an empty environment.

The index is a folder: what plain lowtide, its commands and its build need comes from pip's own index beforehand, and
all that is large (torch and what belongs to a card) is there by name only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from lowtide.leakcheck.cli.init import workflow
from tests.package.test_extras import PROJECT, SUITE

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
ADDRESS = "https://git.example/lowtide.git"
REAL = ("cli", "fuzz")
PLAIN = {
    "iniconfig", "jinja2", "lowtide", "markupsafe", "msgspec", "numpy", "packaging", "pluggy", "psutil", "pygments",
    "pytest", "xxhash", *({"exceptiongroup", "tomli", "typing_extensions"} if sys.version_info < (3, 11) else set()),
}  # fmt: skip
SHOWN = re.compile(r"^(?:git clone|pip install) .*$", re.MULTILINE)
INLINE = re.compile(r"`(pip install [^`]*lowtide[^`]*)`")


def requirements(*extras: str) -> Iterator[Requirement]:
    for text in [
        *PROJECT["dependencies"],
        *(each for extra in extras for each in PROJECT["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(text)
        if requirement.name != "lowtide" and (requirement.marker is None or requirement.marker.evaluate()):
            yield requirement


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    wanted = ["hatchling>=1.27", "setuptools>=68", *(str(each) for each in requirements(*REAL) if each.name != "torch")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", folder, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"pip gets no wheels here: {done.stderr.strip().splitlines()[-1:]}")
    there = {file.name.partition("-")[0].lower() for file in folder.iterdir()}
    for extra in PROJECT["optional-dependencies"]:
        for requirement in requirements(extra):
            name = requirement.name.lower().replace("-", "_")
            if name not in there:
                write_stub(folder, name)
    return folder


def write_stub(folder: Path, name: str) -> None:
    """A wheel of a name, in which there is nothing."""
    info = f"{name}-999.dist-info"
    with zipfile.ZipFile(folder / f"{name}-999-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 999\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is here, as a repository of git."""
    folder = tmp_path_factory.mktemp("repository") / "lowtide"
    folder.mkdir()
    for name in ("engine", "leakcheck", "lowtide", "probes", "pytest_plugin", "reports"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "LICENSE", "README.md", "action.yml", "hatch_build.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", folder]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "All"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    return folder


class Machine:
    """An empty environment, in which commands are run as they are written."""

    def __init__(self, folder: Path, index: Path, repository: Path) -> None:
        self.folder = folder
        # With a link to the real program: an agent and other children run it.
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        self.env = {
            "PATH": f"{folder / 'venv' / 'bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
            # `--index-url` counts for nothing beside it.
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": ADDRESS,
        }

    def run(self, command: str, code: int = 0, **environment: str) -> str:
        """What a command prints, which ends with this exit code."""
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env={**self.env, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}"
        return done.stdout

    def packages(self) -> set[str]:
        """What is installed."""
        listed = self.run("pip list --format=freeze --exclude pip --exclude setuptools")
        return {re.split(r"==| @ ", line)[0].lower().replace("-", "_") for line in listed.split("\n") if line}


@pytest.fixture
def machine(tmp_path: Path, index: Path, repository: Path) -> Machine:
    return Machine(tmp_path, index, repository)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_installation_of_a_page_is_one(name: str, machine: Machine) -> None:
    commands = SHOWN.findall((ROOT / name).read_text(encoding="utf-8"))
    assert any(command.startswith(f"git clone {ADDRESS}") for command in commands)
    assert any("torch --index-url" in command for command in commands)
    for command in commands:
        machine.run(command)
    assert {"torch", "cuda_bindings", "hypothesis", "typer"} <= machine.packages()
    assert "lowtide 0.1.0" in machine.run("lowtide --version")


def test_the_other_pages_add_to_a_clone(machine: Machine, repository: Path) -> None:
    shutil.copytree(repository, machine.folder / "lowtide", symlinks=True)
    shown = []
    for page in ("gate.md", "history.md", "index.md", "rocm.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        shown += [command for command in (*SHOWN.findall(text), *INLINE.findall(text)) if "[" in command]
    assert len(shown) >= 5
    for command in dict.fromkeys(shown):
        if not command.startswith("git"):
            machine.run(command)
    assert {"ray", "sqlalchemy", "amdsmi"} <= machine.packages()


def test_the_first_workflow_and_the_action_install_what_they_run(machine: Machine, repository: Path) -> None:
    steps = yaml.safe_load(workflow(machine.folder))
    for step in steps["jobs"]["gate"]["steps"]:
        if "pip install" in step.get("run", ""):
            machine.run(step["run"], **steps["env"])
    assert {"torch", "hypothesis", "sqlalchemy", "typer"} <= machine.packages()
    machine.run("pip uninstall --quiet --yes lowtide torch hypothesis")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (script,) = [step["run"] for step in action["runs"]["steps"] if "pip install" in step.get("run", "")]
    machine.run(script, INSTALL=action["inputs"]["install"]["default"], GITHUB_ACTION_PATH=str(repository))
    assert {"torch", "hypothesis", "lowtide"} <= machine.packages()


def test_plain_lowtide_judges_and_says_which_extra_is_missing(machine: Machine, repository: Path) -> None:
    shutil.copytree(repository, machine.folder / "lowtide", symlinks=True)
    machine.run("pip install ./lowtide && mv lowtide elsewhere")
    assert machine.packages() == PLAIN
    (machine.folder / "test_suite.py").write_text(f"TORCH = False\n{SUITE}")
    judged = machine.run("pytest --leakcheck test_suite.py", code=1)
    assert "1 failed, 1 passed" in judged
    assert "test_suite.py::test_leak left something behind" in judged
    said = machine.run("lowtide ps", code=2)
    assert said.endswith(': pip install "lowtide[cli]"\n')
    machine.run(said.rpartition(": ")[2])
    assert machine.run("lowtide run", code=2).endswith(': pip install "lowtide[engine]"\n')
    assert "no card" in machine.run("lowtide ps", code=0)
