"""The report folder: all of it is written, each file as a whole, and what goes wrong is one clear line.

Of a run that is killed it has what was finished.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lowtide.reports import schema
from lowtide.reports.folder import UnfinishedReport, write_folder
from lowtide.reports.html.page import render_html
from lowtide.reports.junit import render_junit
from lowtide.reports.markdown import render_markdown
from lowtide.reports.openmetrics import render_openmetrics
from lowtide.reports.perfetto import render_trace
from lowtide.reports.sarif import render_sarif
from tests.reports.small_reports import LIFE, finding, subject
from tests.reports.small_reports import report as small_report

FILES = ["index.html", "junit.xml", "leakcheck.json", "leakcheck.sarif", "metrics.txt", "summary.md", "trace.json"]


def report(name: str = "🌊") -> schema.Report:
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=(), driver="none"
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="now",
        command="lowtide run",
        machine=machine,
        subjects=(schema.Subject(id=name, outcome="error", reason="a\r\nb"),),
    )


def with_finding(name: str) -> schema.Report:
    return small_report(subject(finding(), name=name))


def test_the_folder_has_every_rendering_and_nothing_else(tmp_path: Path) -> None:
    path = write_folder(report(), tmp_path / "deep" / "folder")
    assert path == tmp_path / "deep" / "folder" / "leakcheck.json"
    assert sorted(entry.name for entry in path.parent.iterdir()) == FILES
    assert schema.read(path.parent) == report()
    for name, text in (
        ("index.html", render_html(report())),
        ("junit.xml", render_junit(report())),
        ("summary.md", render_markdown(report())),
        ("leakcheck.sarif", render_sarif(report())),
        ("metrics.txt", render_openmetrics(report())),
        ("trace.json", render_trace(report())),
    ):
        assert (path.parent / name).read_bytes() == text.encode()


def test_the_junit_file_is_read_by_its_declared_encoding(tmp_path: Path) -> None:
    root = ElementTree.parse(write_folder(report(), tmp_path).with_name("junit.xml")).getroot()
    assert [case.get("name") for case in root.iter("testcase")] == ["🌊"]


def test_an_older_report_is_replaced(tmp_path: Path) -> None:
    write_folder(with_finding("oldest"), tmp_path)
    write_folder(with_finding("newest"), tmp_path)
    for name in FILES:
        text = (tmp_path / name).read_text()
        assert "newest" in text
        assert "oldest" not in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(schema.ReportError, match=r"file/leakcheck\.json cannot be written: .*; choose another"):
        write_folder(report(), tmp_path / "file")


@pytest.mark.parametrize("name", ["index.html", "junit.xml", "leakcheck.sarif", "metrics.txt", "summary.md"])
def test_a_file_that_cannot_be_written_is_named_and_leaves_no_part(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(schema.ReportError) as raised:
        write_folder(report(), tmp_path)
    assert str(raised.value) == f"{tmp_path / name} cannot be written: Is a directory; choose another report folder"
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []
    # The report itself is worth more than its renderings.
    assert schema.read(tmp_path) == report()


def test_a_file_whose_writing_breaks_off_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(report("before"), tmp_path)
    whole = Path.write_bytes

    def disk_full(path: Path, data: bytes) -> int:
        if not path.name.startswith("index.html"):
            return whole(path, data)
        whole(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(schema.ReportError, match=r"index\.html cannot be written: No space left on device"):
        write_folder(report("after"), tmp_path)
    assert (tmp_path / "index.html").read_bytes() == render_html(report("before")).encode()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == FILES


def test_importing_it_does_not_load_the_template_engine() -> None:
    code = "import sys, lowtide.reports.folder; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def begun(folder: Path, part: str = "test") -> UnfinishedReport:
    return UnfinishedReport(folder, schema.Begun(report=small_report(), part=part))


def end_of(folder: Path) -> schema.Subject:
    """What is said of a run that has not come to its end."""
    end = schema.read(folder).subjects[-1]
    assert (end.id, end.outcome) == ("the end of the run", "error")
    return end


def test_what_a_run_has_finished_is_read_until_its_report_is_written(tmp_path: Path) -> None:
    write_folder(report("of yesterday"), tmp_path)
    unfinished = begun(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [schema.UNFINISHED_FILE]
    assert end_of(tmp_path).reason == "the run has not come to its end: 0 tests were finished"
    unfinished.add([subject(finding(), name="leaking")])
    unfinished.add([])
    assert end_of(tmp_path).reason == "the run has not come to its end: 1 test was finished"
    unfinished.add([subject(name="clean"), subject(finding(), name="a fixture")])
    read = schema.read(tmp_path)
    assert [(each.id, each.outcome) for each in read.subjects[:-1]] == [
        ("leaking", "leak"),
        ("clean", "clean"),
        ("a fixture", "leak"),
    ]
    assert schema.exit_code(read) == 1
    assert end_of(tmp_path).reason == "the run has not come to its end: 2 tests were finished"
    write_folder(report("of today"), tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == FILES
    assert schema.read(tmp_path) == report("of today")


def test_an_unfinished_run_without_findings_is_not_clean(tmp_path: Path) -> None:
    begun(tmp_path).add([subject(name="clean")])
    assert schema.exit_code(schema.read(tmp_path)) == 2


def test_the_pages_of_a_run_that_goes_on_do_not_end_its_report(tmp_path: Path) -> None:
    unfinished = begun(tmp_path)
    unfinished.add([subject(name="first")])
    write_folder(schema.read(tmp_path), tmp_path, is_final=False)
    unfinished.add([subject(name="second")])
    assert [each.id for each in schema.read(tmp_path).subjects[:-1]] == ["first", "second"]


def test_the_parts_of_one_life_are_one_subject_with_all_stages_and_what_was_known_last(tmp_path: Path) -> None:
    unfinished = begun(tmp_path, "cycle")
    unfinished.add([subject(name="run", stages=LIFE[:2])], goes_on=True)
    unfinished.add([subject(finding(), name="run", stages=LIFE[2:])], goes_on=True)
    (life, _) = schema.read(tmp_path).subjects
    assert (life.outcome, life.stages, len(life.findings)) == ("leak", LIFE, 1)
    assert end_of(tmp_path).reason == "the run has not come to its end: 2 cycles were finished"


def test_the_end_of_a_file_that_was_cut_off_costs_one_part_and_damage_is_counted(tmp_path: Path) -> None:
    unfinished = begun(tmp_path)
    for name in ("first", "second", "third"):
        unfinished.add([subject(name=name)])
    path = tmp_path / schema.UNFINISHED_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert end_of(tmp_path).reason == "the run has not come to its end: 2 tests were finished"
    path.write_bytes(whole.replace(b'"second"', b'"sec'))
    assert [each.id for each in schema.read(tmp_path).subjects[:-1]] == ["first", "third"]
    assert end_of(tmp_path).reason.endswith("3 tests were finished; 1 cannot be read")
    path.write_bytes(whole[:50])
    with pytest.raises(schema.ReportError, match=r"unfinished\.jsonl is not a lowtide-report/1 report"):
        schema.read(tmp_path)


def test_what_cannot_be_written_is_written_with_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = begun(tmp_path)
    write = UnfinishedReport._write

    def refused(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UnfinishedReport, "_open", staticmethod(refused))
    unfinished.add([subject(name="first")])
    monkeypatch.undo()
    monkeypatch.setattr(UnfinishedReport, "_write", staticmethod(lambda file, data: write(file, data[:20])))
    unfinished.add([subject(name="second")])
    monkeypatch.undo()
    unfinished.add([subject(name="third")])
    assert [each.id for each in schema.read(tmp_path).subjects[:-1]] == ["first", "second", "third"]
