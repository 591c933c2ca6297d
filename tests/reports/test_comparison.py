"""Two reports beside each other: what is new, grown, gone, or not known, and what fails a build."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lowtide.reports import schema
from lowtide.reports.comparison.changes import (
    LeakChange,
    compare_reports,
    render_as_markdown,
    render_as_page,
    render_for_terminal,
    verdict_of,
)
from lowtide.reports.folder import write_folder
from tests.reports.small_reports import HOSTILE, MIB, finding, report, subject

pytestmark = pytest.mark.nightly


def compared(before: schema.Report, after: schema.Report) -> list[LeakChange]:
    return compare_reports(before, after)


def kinds(before: schema.Report, after: schema.Report) -> list[tuple[str, str, bool]]:
    return [(change.kind, change.side.finding.fingerprint, change.fails) for change in compared(before, after)]


def leak(mark: str, size: int = 8 * MIB, **fields: object) -> schema.Finding:
    return finding(fingerprint=mark, bytes=size, **fields)


def test_findings_of_one_fingerprint_are_one_leak() -> None:
    before = report(subject(leak("same"), leak("gone"), leak("grown"), leak("less")))
    after = report(
        subject(leak("same"), leak("grown"), leak("less", 4 * MIB), leak("new")),
        subject(leak("grown"), name="test_c"),
    )
    assert kinds(before, after) == [
        ("new", "new", True),
        ("grown", "grown", True),
        ("shrunk", "less", False),
        ("same", "same", False),
        ("gone", "gone", False),
    ]
    assert verdict_of(compared(before, after)) == "WORSE: 1 new, 1 grown, 1 gone, 1 shrunk, 1 same"
    assert verdict_of(compared(before, before)) == "NO WORSE: 4 same"
    assert verdict_of([]) == "NO WORSE: no findings in either"


def test_what_was_not_judged_since_is_not_gone() -> None:
    before = report(subject(leak("one"), name="a"), subject(leak("two"), name="b"))
    after = report(subject(name="a"), subject(name="b", outcome="unsupported"))
    assert kinds(before, after) == [("not judged", "two", False), ("gone", "one", False)]
    assert verdict_of(compared(before, after)) == "NOT KNOWN: 1 not judged, 1 gone"


def test_what_a_suppression_knows_does_not_fail() -> None:
    after = report(
        subject(leak("known", suppressed_by="lowtide.toml:3"), leak("both"), leak("both", suppressed_by="x"))
    )
    assert kinds(report(), after) == [("new", "both", True), ("new", "known", False)]
    assert verdict_of(compared(report(), after)) == "WORSE: 2 new; 1 of them known"


@pytest.mark.parametrize(("resource", "kind"), [("tensors", "grown"), ("host-memory", "same")])
def test_a_level_of_the_process_differs_a_little_from_run_to_run(resource: str, kind: str) -> None:
    before, after = (report(subject(leak("one", size, resource=resource))) for size in (100 * MIB, 104 * MIB))
    assert [change[0] for change in kinds(before, after)] == [kind]
    more = report(subject(leak("one", 106 * MIB, resource=resource)))
    assert [change[0] for change in kinds(before, more)] == ["grown"]


def test_what_has_no_bytes_is_counted() -> None:
    before, after = (report(subject(leak("one", 0, count=count, resource="threads"))) for count in (2, 3))
    assert [change[0] for change in kinds(before, after)] == ["grown"]
    assert "2 threads → 3 threads" in render_as_markdown(compared(before, after))


def test_a_report_of_an_older_version_is_understood() -> None:
    before = report(subject(leak("older")))
    after = report(subject(leak("newer", former_fingerprint="older")))
    assert kinds(before, after) == [("same", "newer", False)]


def test_what_an_older_version_took_for_one_leak_is_several_and_no_worse() -> None:
    before = report(subject(leak("older", 16 * MIB)))
    after = report(
        subject(leak("one", 10 * MIB, former_fingerprint="older"), leak("two", 6 * MIB, former_fingerprint="older"))
    )
    assert kinds(before, after) == [("same", "one", False)]
    third = report(subject(*after.subjects[0].findings, leak("three", former_fingerprint="older")))
    assert kinds(before, third) == [("grown", "one", True)]


def test_an_earlier_leak_is_not_lost_where_its_successor_was_there_too() -> None:
    before = report(subject(leak("older"), leak("newer")))
    after = report(subject(leak("newer", former_fingerprint="older")))
    assert kinds(before, after) == [("same", "newer", False), ("gone", "older", False)]


def test_names_stay_texts_everywhere() -> None:
    changes = compared(report(), report(subject(leak("one", message=HOSTILE), name="<script>x</script>")))
    page = render_as_page(changes, "<b>", "after")
    assert "<script" not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<code>&lt;b&gt;</code>" in page
    assert "<b>" not in render_as_markdown(changes)


def shown(before: schema.Report, after: schema.Report) -> str:
    """What a terminal shows of two reports."""
    output = StringIO()
    Console(file=output, width=200, color_system=None).print(render_for_terminal(compared(before, after)))
    return output.getvalue()


def test_a_terminal_has_three_lines_for_each_change_whatever_its_texts_are() -> None:
    hostile = report(subject(leak("0\nWORSE: 9 new", message="a\nb\u202ec"), name="c\nd"))
    assert shown(report(), hostile).splitlines() == [
        r"new 8.0 MiB  a\nb\u202ec",
        r"    in c\nd",
        r"    fingerprint 0\nWORSE: 9 new",
        "WORSE: 1 new",
    ]


def test_what_is_not_known_is_not_shown_as_good() -> None:
    before, after = report(subject(leak("one"), name="a")), report(subject(name="b"))
    output = StringIO()
    console = Console(file=output, width=200, color_system="standard", force_terminal=True)
    console.print(render_for_terminal(compared(before, after)))
    assert "\x1b[1;33mNOT KNOWN: 1 not judged\x1b[0m" in output.getvalue()
    assert '<h1 class="not-known">NOT KNOWN: 1 not judged</h1>' in render_as_page(compared(before, after), "a", "b")


def test_growth_by_less_than_a_size_shows_is_told_in_bytes() -> None:
    one, other = (report(subject(leak("one", size))) for size in (8 * MIB, 8 * MIB + 1))
    assert shown(one, other).startswith("grown 8.0 MiB (+1 B)  ")
    assert shown(other, one).startswith("shrunk 8.0 MiB (-1 B)  ")
    assert shown(one, one).startswith("same 8.0 MiB  ")


@pytest.mark.parametrize("mark", ["`<b>x</b>", "a\nb", "|", "<!--"])
def test_a_fingerprint_is_no_markup_either(mark: str) -> None:
    row = render_as_markdown(compared(report(), report(subject(leak(mark))))).splitlines()[-1]
    assert row.count("|") == 6
    assert row.endswith("</code> |")
    assert "<b>" not in row
    assert "<!--" not in row


def test_many_changes_make_no_summary_that_is_refused() -> None:
    text = render_as_markdown(compared(report(), report(subject(*(leak(f"{turn:016x}") for turn in range(5000))))))
    assert text.count("| new |") == 100
    assert text.endswith("… and 4900 more; `lowtide diff` shows all of them\n")


def run(*words: object, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", *map(str, words)]
    environment = {**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": encoding}
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=environment)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_an_arrow_changes_no_exit_code(tmp_path: Path, encoding: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    write_folder(report(subject(leak("0123", 9 * MIB))), before)
    write_folder(report(subject(leak("0123", message="🌊"))), after)
    done = run("diff", before, after, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("shrunk 9.0 MiB -> 8.0 MiB  \\U0001f30a\n")
    for form in ("markdown", "html"):
        done = run("diff", "--format", form, before, after, encoding=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert "9.0 MiB → 8.0 MiB" in done.stdout
        assert "🌊" in done.stdout
    assert run("report", after, encoding=encoding).returncode == 1


def test_the_command_fails_where_it_is_worse(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    write_folder(report(subject()), before)
    write_folder(report(subject(leak("0123"))), after)
    worse = run("diff", before, after)
    assert worse.returncode == 1
    assert worse.stdout.startswith("new 8.0 MiB  48.0 MiB of tensors did not come back")
    assert worse.stdout.endswith("WORSE: 1 new\n")
    assert run("diff", after, before).returncode == 0
    assert run("diff", "--format", "markdown", before, after).stdout.startswith("## lowtide diff\n\n**WORSE: 1 new**")
    assert run("diff", "--format", "html", before, after).stdout.startswith("<!doctype html>")
    none = run("diff", before, tmp_path)
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)


def test_the_pages_of_a_report_are_made_again(tmp_path: Path) -> None:
    written = msgspec.structs.replace(report(subject(leak("0123"))), command="lowtide run")
    write_folder(written, tmp_path)
    (tmp_path / "index.html").unlink()
    (tmp_path / "junit.xml").write_text("broken")
    shown = run("report", tmp_path)
    assert shown.returncode == 1
    assert "engine.cache.POOL" in shown.stdout
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "junit.xml").read_text().startswith("<?xml")
    assert run("report", tmp_path / "nowhere").stderr.count("\n") == 1


def test_a_page_is_opened_and_made_where_it_is_not_there(tmp_path: Path) -> None:
    write_folder(report(subject()), tmp_path)
    (tmp_path / "index.html").unlink()
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "lowtide", "open", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BROWSER": str(browser)})
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "index.html").as_uri()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "BROWSER": "/nowhere", "PATH": ""}
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"lowtide: no browser can be opened here: open {tmp_path}/index.html\n",
    )
