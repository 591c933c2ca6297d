"""A cause is written once in every kind of report, with all subjects that it was seen in; two causes stay two."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
from rich.console import Console

from lowtide.reports import schema
from lowtide.reports.causes import causes_of, seen_before
from lowtide.reports.github import render_annotations
from lowtide.reports.html.page import render_html
from lowtide.reports.junit import render_junit
from lowtide.reports.markdown import render_markdown
from lowtide.reports.outcomes import tries_as_one
from lowtide.reports.sarif import render_sarif
from lowtide.reports.terminal import render, render_worst
from tests.reports.small_reports import finding, report, subject

PATH = (schema.Hop(type="module", edge="kept"), schema.Hop(type="list", edge=".KEPT", suspect=True))


def kept(turn: int, **fields: object) -> schema.Finding:
    return finding(**{"holder": f"kept.KEPT[{turn}]", "path": PATH, **fields})


SAME = [subject(kept(turn), name=f"tests/test_a.py::test_b[{turn}]") for turn in range(5)]


def test_what_many_subjects_leave_has_one_cause() -> None:
    (cause,) = causes_of(SAME)
    assert cause.subjects == [each.id for each in SAME]
    first, second, third, fourth, _ = cause.subjects
    assert cause.elsewhere == f"; also in {second}, {third}, {fourth} and 1 more"
    assert cause.first.subject.id == first


def test_of_a_cause_the_largest_finding_can_be_the_first() -> None:
    (cause,) = causes_of([subject(kept(0, bytes=1), name="a"), subject(kept(1, bytes=2), name="b")])
    assert (cause.first.subject.id, cause.by_largest().first.subject.id) == ("a", "b")
    assert cause.by_largest().elsewhere == "; also in a"


@pytest.mark.parametrize(
    "other", [{"fingerprint": "f" * 16}, {"holder": "kept.OTHER[0]"}, {"suppressed_by": "a reason"}], ids=str
)
def test_another_leak_and_a_known_one_have_causes_of_their_own(other: dict[str, object]) -> None:
    assert [cause.elsewhere for cause in causes_of([subject(kept(0), kept(0, **other))])] == ["", ""]


def test_holders_that_differ_in_numbers_or_digests_are_one() -> None:
    names = ("t[0]", "t[12]", "t['5f2b8c1e-0d4a-4f6b-9c3d-7e8f9a0b1c2d']", "t['deadbeef01']")
    found = [kept(0, holder=name) for name in names]
    assert [cause.first.finding.holder for cause in causes_of([subject(*found)])] == [
        "t[0]",
        "t['5f2b8c1e-0d4a-4f6b-9c3d-7e8f9a0b1c2d']",
    ]


def test_each_subject_knows_which_of_its_findings_were_seen_before() -> None:
    other = kept(0, fingerprint="f" * 16)
    again = seen_before([subject(kept(0), name="a"), subject(other, kept(1), name="b"), subject(name="c")])
    assert [{place: seen.subject.id for place, seen in each.items()} for each in again] == [{}, {1: "a"}, {}]


def shown(text: Callable[[schema.Report], object]) -> Callable[[schema.Report], str]:
    def printed(of: schema.Report) -> str:
        console = Console(width=200)
        with console.capture() as captured:
            console.print(text(of))
        return captured.get()

    return printed


OUTPUTS: dict[str, tuple[Callable[[schema.Report], str], str]] = {
    "html": (render_html, 'aria-label="path from the root'),
    "markdown": (render_markdown, "- path:"),
    "junit": (render_junit, "  path:"),
    "sarif": (render_sarif, "path:"),
    "terminal": (shown(render), "path:"),
    "worst": (shown(lambda of: render_worst(of, "")), "path:"),
    "annotations": (render_annotations, "::error "),
}


@pytest.mark.parametrize(("write", "details"), OUTPUTS.values(), ids=OUTPUTS)
def test_it_is_told_once_with_where_else_it_was_seen(write: Callable[[schema.Report], str], details: str) -> None:
    text = write(report(*SAME))
    assert text.count(details) == 1
    assert "test_b[0]" in text.replace("\\", "")
    assert "test_b[1]" in text.replace("\\", "")
    others = [subject(kept(0, fingerprint=f"{turn}"), name=f"test_{turn}") for turn in range(5)]
    assert write(report(*others)).count(details) == 5


def test_a_result_of_sarif_counts_how_often_it_was_seen() -> None:
    (result,) = json.loads(render_sarif(report(*SAME)))["runs"][0]["results"]
    assert (result["occurrenceCount"], result["properties"]["subjects"]) == (5, [each.id for each in SAME])


def test_each_case_of_junit_fails_with_its_own_amount() -> None:
    sizes = [subject(kept(turn, message=f"{turn} MiB"), name=f"test_b[{turn}]") for turn in range(3)]
    failures = [each.text or "" for each in ElementTree.fromstring(render_junit(report(*sizes))).iter("failure")]
    assert [f"{turn} MiB" in text for turn, text in enumerate(failures)] == [True] * 3
    assert ["the same cause as in test_b[0]" in text for text in failures] == [False, True, True]


def test_of_what_nobody_is_known_to_hold_the_cause_is_not_said_to_be_the_same() -> None:
    unknown = {"cause": "unknown", "holder": None, "path": (), "allocated_at": ()}
    sizes = [subject(kept(turn, **unknown), name=f"test_b[{turn}]") for turn in range(2)]
    _, again = (each.text or "" for each in ElementTree.fromstring(render_junit(report(*sizes))).iter("failure"))
    assert "who holds it is not known, as in test_b[0]" in again
    assert "same cause" not in again


def test_tries_of_a_test_are_one_subject_with_all_that_they_left() -> None:
    name = "test_a.py::test_b"
    clean = schema.Subject(id=name, outcome="clean", reason="a note")
    leaks = [schema.Subject(id=name, outcome="leak", findings=(kept(turn),)) for turn in range(2)]
    other = schema.Subject(id="test_a.py::test_c", outcome="clean")
    first, second = tries_as_one([*leaks, other, clean])
    assert (first.id, first.outcome, first.reason, len(first.findings)) == (name, "leak", "", 2)
    assert second is other


def test_a_fixture_that_is_set_up_for_each_parameter_is_several_subjects() -> None:
    each = [schema.Subject(id="module fixture 'served'", outcome=outcome) for outcome in ("leak", "skipped")]
    assert tries_as_one(each) == each
    assert [subject.outcome for subject in tries_as_one(each, of_all=True)] == ["leak"]
