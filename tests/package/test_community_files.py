"""What a contributor meets: the changelog, the hooks of pre-commit, the issue forms and the workflows."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import lowtide

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS_OF_CHANGE = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FORM_ELEMENTS = ("markdown", "textarea", "input", "dropdown", "checkboxes")


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def problems_of_changelog(text: str) -> list[str]:
    """What Keep a Changelog 1.1 asks for and this has not."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    releases = dict(zip(parts[1::2], parts[2::2], strict=True))
    problems = [] if next(iter(releases), "") == "[Unreleased]" else ["the first section is not [Unreleased]"]
    versions: list[tuple[Version, datetime.date]] = []
    for name, body in releases.items():
        if name != "[Unreleased]":
            released = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", name)
            if released is None:
                problems.append(f"{name!r} is no [version] - date")
            else:
                versions.append((Version(released[1]), datetime.date.fromisoformat(released[2])))
        kinds = re.split(r"^### (.+)$", body, flags=re.MULTILINE)
        if kinds[0].strip():
            problems.append(f"{name} has text outside of a kind of change")
        problems += [f"{name} has the unknown kind {kind!r}" for kind in kinds[1::2] if kind not in KINDS_OF_CHANGE]
        problems += [
            f"{kind} of {name} has no entry"
            for kind, entries in zip(kinds[1::2], kinds[2::2], strict=True)
            if not entries.strip().startswith("- ")
        ]
    if versions != sorted(versions, reverse=True):
        problems.append("the newest version is not the first")
    return problems


def test_the_changelog_keeps_the_form_and_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert problems_of_changelog(text) == []
    assert f"\n## [{lowtide.__version__}] - " in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("## [0.1.0] - 2026-01-02\n### Added\n- a\n", "the first section is not [Unreleased]"),
        ("## [Unreleased]\n## 0.1.0\n### Added\n- a\n", "'0.1.0' is no [version] - date"),
        ("## [Unreleased]\n- a\n", "[Unreleased] has text outside of a kind of change"),
        ("## [Unreleased]\n### News\n- a\n", "[Unreleased] has the unknown kind 'News'"),
        ("## [Unreleased]\n### Added\n\n", "Added of [Unreleased] has no entry"),
        (
            "## [Unreleased]\n## [0.1.0] - 2026-01-02\n### Added\n- a\n## [0.2.0] - 2026-02-02\n### Added\n- b\n",
            "the newest version is not the first",
        ),
    ],
)
def test_what_a_changelog_lacks_is_named(text: str, problem: str) -> None:
    assert problems_of_changelog(text) == [problem]


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert [form.stem for form in FORMS] == ["bug", "config", "false-alarm", "missed-leak"]


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_a_form_asks_for_the_report_and_warns_of_what_is_in_it(form: Path) -> None:
    document: Mapping[str, Any] = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= document.keys()
    elements: Sequence[Mapping[str, Any]] = document["body"]
    assert {element["type"] for element in elements} <= set(FORM_ELEMENTS)
    names = [element["id"] for element in elements]
    assert len(set(names)) == len(names)
    assert [element["id"] for element in elements if not element["attributes"].get("label")] == []
    (report,) = [element for element in elements if element["attributes"]["label"] == "leakcheck.json"]
    assert "--leakcheck-report=DIR" in report["attributes"]["description"]
    assert "SECURITY.md" in report["attributes"]["description"]
    # A bug may come before there is a report.
    assert report.get("validations", {}).get("required", False) == (form.stem != "bug")


@pytest.mark.nightly
def test_pre_commit_takes_its_configuration() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_hooks_are_those_of_make_lint_and_actionlint() -> None:
    hooks = {hook["id"]: hook for repo in loaded(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert sorted(hooks) == ["actionlint", "mypy", "ruff-check", "ruff-format"]
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint: ")[2].partition("\n\n")[0]
    for name in ("ruff-check", "ruff-format", "mypy"):
        program, *arguments = hooks[name]["entry"].removesuffix(" --force-exclude").split()
        assert " ".join([program.replace(".venv/bin", "$(BIN)"), *arguments]) in recipe


def test_a_hook_from_elsewhere_has_a_fixed_version() -> None:
    remote = [repo for repo in loaded(".pre-commit-config.yaml")["repos"] if repo["repo"] != "local"]
    assert [repo["repo"] for repo in remote if not re.fullmatch(r"v\d+\.\d+\.\d+", repo["rev"])] == []
    assert len(remote) == 1


def test_the_workflows_run_the_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = []
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
            called += [step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("make ")]
    assert {"lint", "test", "test-all", "docs"} <= set(called) <= targets
