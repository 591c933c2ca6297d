"""What GitHub Actions shows: annotations that no text can forge, and a summary that is appended."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.cli.console import show_on_github
from lowtide.reports import github
from lowtide.reports.github import MOST_ANNOTATIONS, append_summary, render_annotations
from lowtide.reports.markdown import render_markdown
from lowtide.reports.schema import ReportError
from tests.reports.small_reports import HOSTILE, finding, report, subject


def test_a_leak_is_an_error_at_the_line_of_its_holder(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "cache.py").write_text("\n\nPOOL = []\n")
    assert render_annotations(report(subject(finding())), tmp_path) == (
        "::error file=engine/cache.py,line=3,title=tensors/module-global::"
        "tests/test_a.py::test_b: 48.0 MiB of tensors did not come back, held by engine.cache.POOL\n"
    )


def test_known_findings_and_clean_subjects_have_none() -> None:
    assert render_annotations(report(subject(finding(suppressed_by="known")), subject())) == ""


def test_what_could_not_be_judged_is_an_error_too() -> None:
    failed = subject(name="life", outcome="error", reason="timed out")
    assert render_annotations(report(failed)) == "::error title=not measured::life: timed out\n"


def test_the_largest_ten_are_shown_and_the_last_says_how_many_more_there_are() -> None:
    leaks = [
        subject(finding(bytes=turn << 20, fingerprint=f"{turn}"), name=f"life {turn}")
        for turn in range(1, MOST_ANNOTATIONS + 5)
    ]
    lines = render_annotations(report(*leaks)).splitlines()
    assert len(lines) == MOST_ANNOTATIONS
    assert "::life 14: " in lines[0]
    assert lines[-1] == "::error title=lowtide::5 more are in the summary and the report"
    assert "more are in" not in render_annotations(report(*leaks[:MOST_ANNOTATIONS]))


def test_no_text_ends_its_command_or_adds_a_property() -> None:
    hostile = finding(message=HOSTILE, holder=f"local 'x' of f() in {HOSTILE}:3")
    (line,) = render_annotations(report(subject(hostile, name=HOSTILE))).splitlines()
    head, _, text = line.removeprefix("::error ").partition("::")
    assert head == "title=tensors/module-global"
    assert "%250A" in text
    assert "\x1b" not in line
    (line,) = render_annotations(report(subject(finding(holder="local 'x' of f() in a,b:c%.py:3")))).splitlines()
    assert line.startswith("::error file=a%2Cb%3Ac%25.py,line=3,title=")


def test_the_summary_is_appended_to_the_steps_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    append_summary(report(subject(finding())), {"GITHUB_STEP_SUMMARY": str(page)})
    assert page.read_text() == "before\n" + render_markdown(report(subject(finding())))


def test_without_github_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    append_summary(report(subject(finding())), {})
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_would_be_refused_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github, "_LARGEST_SUMMARY", 100)
    page = tmp_path / "page.md"
    append_summary(report(subject(finding())), {"GITHUB_STEP_SUMMARY": str(page)})
    assert page.read_text() == "## lowtide\n\nThe summary is too long for this page; it is in `summary.md`.\n"


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"the step summary .* cannot be written: Is a directory"):
        append_summary(report(), {"GITHUB_STEP_SUMMARY": str(tmp_path)})


def test_the_gate_shows_what_it_could_not_measure_and_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing runs: there is no such card on any machine.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lowtide.toml").write_text(
        '[gate]\ndevices = ["cuda:99"]\ncalibrate = false\n[[gate.subject]]\nengine = "tiny"\n'
    )
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "page.md")}
    done = CliRunner().invoke(app, ["gate"], env=github)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert line.startswith("::error title=not measured::engine-cuda")
    assert "NOT MEASURED: 1 of 1 subject" in (tmp_path / "page.md").read_text()
    (tmp_path / "page.md").unlink()
    done = CliRunner().invoke(app, ["gate"], env={"GITHUB_ACTIONS": None})
    assert (done.exit_code, "::error" in done.stdout, (tmp_path / "page.md").exists()) == (2, False, False)


def test_a_summary_that_cannot_be_written_does_not_change_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    show_on_github(report(subject(finding())))
    captured = capsys.readouterr()
    assert "the step summary" in captured.err
    assert captured.out.startswith("::error ")
