"""`lowtide init`: the first configuration of the gate, and the first nightly workflow for GitHub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import refuse, say

CONFIGURATION = Path("lowtide.toml")

WORKFLOW = Path(".github/workflows/lowtide.yml")

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_HEAD = """\
# What `lowtide gate` runs every night: each subject on each device, in processes of its own.

[gate]
devices = ["auto"]  # a card if there is one, else the CPU; also: "cpu", "cuda", "cuda:0"
timeout = 1800      # seconds for one cell; then all its processes are ended
"""

_TARGET_SUBJECT = """
# Whole lives of your engine: create, infer, sleep, wake, shutdown.
[[gate.subject]]
name = "lives"
target = $target

# Random lives; each prints the smallest life that fails.
[[gate.subject]]
name = "random-lives"
fuzz = $target
examples = 50
"""

_PYTEST_SUBJECT = """
# Your own tests, each judged by `pytest --leakcheck`.
[[gate.subject]]
name = "tests"
pytest = $pytest
"""

_NO_TARGET = """
# Whole lives of your engine, once there is a factory for it (a target).
# [[gate.subject]]
# name = "lives"
# target = "my_engine.lowtide:factory"
"""

_REFERENCE_SUBJECT = """
# lowtide's reference engine, which is clean: replace it by what you want to have judged.
[[gate.subject]]
engine = "tiny"
"""

# Not str.format: GitHub's expressions have braces.
_WORKFLOW = Template("""\
name: lowtide
on:
  schedule:
    - cron: "17 3 * * *"
  workflow_dispatch:
permissions:
  contents: read
env:
  # Put lowtide's git address here: there is no release yet that pip could find by its name.
  LOWTIDE: https://git.example/lowtide.git
  # And here the index of torch's CPU builds, which "Get started" on torch's site shows.
  TORCH_CPU: https://torch-cpu.example
jobs:
  gate:
    # A runner with a card sees what only a card has: runs-on: [self-hosted, gpu]
    runs-on: ubuntu-latest
    timeout-minutes: 120
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      # torch's CPU build, for a runner without a card; one with a card does without this line.
      - run: python -m pip install torch --index-url $$TORCH_CPU
      - run: python -m pip install "lowtide[fuzz,history] @ git+$$LOWTIDE" $install
      - uses: actions/cache@v4
        with:
          path: lowtide-history.sqlite
          key: lowtide-history-$${{ github.run_id }}
          restore-keys: lowtide-history-
      - run: lowtide gate --report build/gate
      - if: always()
        run: lowtide history --add build/gate --page build/gate/history.html
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: lowtide
          path: build/gate
""")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The project's folder.")] = Path(),
    target: Annotated[str | None, typer.Option(metavar="MODULE:FACTORY", help="Your engine's target.")] = None,
    pytest: Annotated[
        str | None, typer.Option(metavar="ARGS", help="What pytest runs [default: tests, if there is such a folder].")
    ] = None,
) -> None:
    """Write a first lowtide.toml and a nightly workflow for GitHub; a file that is there stays as it is.

    Exit codes: 0 written, or all there already; 2 bad input.
    """
    if not folder.is_dir():
        refuse(f"{folder} is no folder: give the project's")
    written, kept = _write_starter_files(folder, target, pytest)
    for path in written:
        say(f"{path} written")
    for path in kept:
        hint = ": add a [gate] table if it has none" if path.name == CONFIGURATION.name else ""
        say(f"{path} is there already and stays as it is{hint}")
    if folder / WORKFLOW in written:
        say(f"Put lowtide's git address into {folder / WORKFLOW}: there is no release yet that pip could find.")
    if written:
        say("Now try it: `lowtide gate --list` shows the cells, `lowtide gate` runs them.")


def _write_starter_files(folder: Path, target: str | None, tests: str | None) -> tuple[list[Path], list[Path]]:
    """Write the files that are not there yet; one that is there stays as it is.

    Returns:
        What was written, and what was there already.
    """
    if target is not None and not _TARGET.fullmatch(target):
        refuse(f"--target {target} is no MODULE:FACTORY: use a name such as my_engine.lowtide:factory")
    if tests is None and (folder / "tests").is_dir():
        tests = "tests"
    texts = {CONFIGURATION: _configuration(target, tests), WORKFLOW: workflow(folder)}
    written, kept = [], []
    for name, text in texts.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Fails where there is one, also where it came a moment ago.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            kept.append(path)
        except OSError as error:
            refuse(f"{path} cannot be written: {error.strerror}")
        else:
            written.append(path)
    return written, kept


def _configuration(target: str | None, tests: str | None) -> str:
    """Return the text of a first `lowtide.toml`."""
    parts = [_HEAD]
    # A string of JSON is one of TOML as well.
    parts.append(_NO_TARGET if target is None else Template(_TARGET_SUBJECT).substitute(target=json.dumps(target)))
    if tests is not None:
        parts.append(Template(_PYTEST_SUBJECT).substitute(pytest=json.dumps(tests, ensure_ascii=False)))
    if target is None and tests is None:
        parts.append(_REFERENCE_SUBJECT)
    return "".join(parts)


def workflow(folder: Path) -> str:
    """Return the text of a first nightly workflow."""
    is_package = any((folder / name).exists() for name in ("pyproject.toml", "setup.py", "setup.cfg"))
    return re.sub(r" +\n", "\n", _WORKFLOW.substitute(install="." if is_package else ""))
