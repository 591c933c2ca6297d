"""The committed baseline: what is known passes until its day, what is new fails, what is gone is to be removed."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.leakcheck.gate.known_findings import KnownFinding, KnownFindings, KnownFindingsError
from lowtide.reports.schema import Finding, Subject

TODAY = datetime.date(2030, 1, 1)
LATER = datetime.date(2030, 2, 1)


def finding(mark: str) -> Finding:
    return Finding(
        resource="tensors",
        cause="module-global",
        bytes=8,
        count=1,
        device="cpu",
        stage="call",
        message=f"tensor {mark}",
        fingerprint=mark * 16,
    )


def subject(cell: str, *marks: str) -> Subject:
    return Subject(id=f"{cell}/test", outcome="leak" if marks else "clean", findings=tuple(map(finding, marks)))


def known(*marks: str, cells: tuple[str, ...] = ("one",), expires: datetime.date = LATER) -> KnownFindings:
    entries = tuple(
        KnownFinding(fingerprint=mark * 16, reason="issue 7", owner="ann", expires=expires, cells=cells)
        for mark in marks
    )
    return KnownFindings(Path("baseline.json"), entries)


def test_what_is_known_passes_with_its_reason_and_what_is_new_does_not() -> None:
    (both, alone) = known("a").mark([subject("one", "a", "b"), subject("one", "a")], TODAY)
    assert both.outcome == "leak"
    assert [each.suppressed_by is None for each in both.findings] == [False, True]
    assert alone.outcome == "clean"
    assert alone.findings[0].suppressed_by == "baseline.json: issue 7 (owner ann, until 2030-02-01)"


def test_an_entry_counts_through_its_last_day() -> None:
    entries = known("a", expires=TODAY)
    assert entries.mark([subject("one", "a")], TODAY)[0].outcome == "clean"
    assert entries.expired(TODAY) == []
    tomorrow = TODAY + datetime.timedelta(days=1)
    assert entries.mark([subject("one", "a")], tomorrow)[0].outcome == "leak"
    assert entries.expired(tomorrow) == list(entries.entries)


def test_what_is_gone_is_what_its_cells_no_longer_show() -> None:
    entries = known("a", "b", cells=("one", "two"))
    assert [entry.fingerprint for entry in entries.gone([subject("one", "a")], {"one", "two"})] == ["b" * 16]
    # A cell that did not run to its end shows nothing.
    assert entries.gone([subject("one", "a")], {"one"}) == []


def test_an_update_adds_what_is_new_and_removes_what_is_gone(tmp_path: Path) -> None:
    entries = replace(known("a", "b"), file=tmp_path / "baseline.json")
    subjects = entries.mark([subject("one", "a", "c"), subject("two", "c")], TODAY)
    judged = {"one", "two"}
    new, change = entries.updated(subjects, judged, reason="issue 9", owner="bob", expires=LATER)
    assert change.lines() == [f"- {'b' * 16} : ", f"+ {'c' * 16} tensors: tensor c"]
    new.save()
    again = KnownFindings.load(new.file)
    assert [(entry.fingerprint[0], entry.reason, entry.cells) for entry in again.entries] == [
        ("a", "issue 7", ("one",)),
        ("c", "issue 9", ("one", "two")),
    ]
    assert {each.outcome for each in again.mark(subjects, TODAY)} == {"clean"}


def test_an_update_needs_a_reason_only_for_what_it_adds() -> None:
    with pytest.raises(KnownFindingsError, match="1 new finding would be added: give --reason TEXT and --owner NAME"):
        known().updated([subject("one", "a")], {"one"}, reason=" ", owner="ann", expires=LATER)
    new, change = known("a").updated([subject("one")], {"one"}, reason="", owner="", expires=LATER)
    assert (new.entries, change.added) == ((), ())


def test_an_update_renews_an_expired_entry() -> None:
    entries = known("a", expires=TODAY - datetime.timedelta(days=1))
    subjects = entries.mark([subject("one", "a")], TODAY)
    new, _ = entries.updated(subjects, {"one"}, reason="still issue 7", owner="ann", expires=LATER)
    assert [(entry.reason, entry.expires) for entry in new.entries] == [("still issue 7", LATER)]


def test_no_file_is_an_empty_baseline(tmp_path: Path) -> None:
    assert KnownFindings.load(tmp_path / "none.json").entries == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a lowtide-baseline/1 baseline"),
        ('{"schema": "lowtide-baseline/9", "findings": []}', "this version reads lowtide-baseline/1"),
        ('{"schema": "lowtide-baseline/1", "findings": [], "x": 1}', "unknown field `x`"),
        (
            '{"schema": "lowtide-baseline/1", "findings": '
            '[{"fingerprint": "f", "reason": "", "owner": "a", "expires": "2030-01-01"}]}',
            "f needs a reason and an owner",
        ),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(KnownFindingsError, match=message):
        KnownFindings.load(path)
