"""What was proven at the end of the session, put into what was said of each test before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.reports.schema import Finding, Subject


def proven_as_json(proven: Sequence[Subject]) -> str:
    """For an xdist worker's output."""
    return msgspec.json.encode(proven).decode()


def proven_from_json(text: str) -> list[Subject]:
    """The same, back."""
    return msgspec.json.decode(text, type=list[Subject])


def with_proven(subjects: Sequence[Subject], proven: Sequence[Subject]) -> list[Subject]:
    """The subjects, with the remedies of their findings.

    Args:
        subjects: as they were judged.
        proven: by their ids, in the order in which they were judged: one that was run again is there twice.
    """
    waiting: dict[str, list[Subject]] = {}
    for subject in proven:
        waiting.setdefault(subject.id, []).append(subject)
    told = []
    for subject in subjects:
        found = waiting.get(subject.id) if subject.outcome == "leak" else None
        told.append(_with_remedies(subject, found.pop(0)) if found else subject)
    return told


def _with_remedies(subject: Subject, proven: Subject) -> Subject:
    known = {finding.fingerprint: finding for finding in proven.findings}
    findings = tuple(_with_remedy(finding, known.get(finding.fingerprint)) for finding in subject.findings)
    return msgspec.structs.replace(subject, findings=findings)


def _with_remedy(finding: Finding, proven: Finding | None) -> Finding:
    if proven is None:
        return finding
    return msgspec.structs.replace(
        finding, remedy=proven.remedy, tried=proven.tried, changed=proven.changed, message=proven.message
    )


def retell(stats: Mapping[str, Iterable[Any]], texts: Mapping[str, str]) -> None:
    """Replaces texts in the reports that the terminal has still to show.

    Args:
        stats: the terminal reporter's reports, by outcome.
        texts: what was said, and what is to be said instead.
    """
    for report in [report for reports in stats.values() for report in reports]:
        if getattr(report, "sections", None):
            report.sections = [(name, texts.get(text, text)) for name, text in report.sections]
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        if crash is None:
            continue
        crash.message = texts.get(crash.message, crash.message)
        for entry in report.longrepr.reprtraceback.reprentries:
            entry.lines = [f"{texts[line[:-1]]}\n" if line[:-1] in texts else line for line in entry.lines]
