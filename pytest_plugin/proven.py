"""What is proven at the end of the session, put into what was said of each test before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies
from lowtide.leakcheck.watching.watch import Watch
from lowtide.reports.schema import Finding, Subject, as_written
from lowtide.reports.statement import reworded
from lowtide.reports.whole_texts import json_bytes


class Proven(msgspec.Struct, frozen=True):
    """What is known of a subject at the end.

    Attributes:
        id: the subject's.
        findings: those that something was tried for, by the fingerprints that they had before.
    """

    id: str
    findings: dict[str, Finding]

    def __post_init__(self) -> None:
        """Keep of the findings what is written: a worker of xdist sends them."""
        written = {mark: as_written(finding) for mark, finding in self.findings.items()}
        msgspec.structs.force_setattr(self, "findings", written)


class DeferredProofs:
    """What is tried at the end of the session, when no test follows."""

    def __init__(self) -> None:
        self._unproven: list[tuple[str, DeferredRemedies]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to try."""
        return not self._unproven

    def add(self, subject: Subject, unproven: DeferredRemedies) -> None:
        """Remember what is to be tried: for what fails or warns, and for nothing that is known."""
        findings = [part for item in subject.findings for part in (item, *item.parts)]
        later = unproven.only(frozenset(part.fingerprint for part in findings if part.suppressed_by is None))
        if later.tensors or later.items:
            self._unproven.append((subject.id, later))

    def note(self, when: str) -> None:
        """Note which leaks the program itself has given back since this was called last."""
        for _, later in self._unproven:
            for leak in later.tensors:
                leak.note(when)

    def prove(self, watch: Watch) -> list[Proven]:
        """Try it, once; by subject, what is known then."""
        unproven, self._unproven = self._unproven, []
        found = watch.prove([later for _, later in unproven])
        return [Proven(name, findings) for (name, _), findings in zip(unproven, found, strict=False)]


def proven_as_json(proven: Sequence[Proven]) -> str:
    """For an xdist worker's output."""
    return json_bytes(proven).decode()


def proven_from_json(text: str) -> list[Proven]:
    """The same, back."""
    return msgspec.json.decode(text, type=list[Proven])


def with_proven(subjects: Sequence[Subject], proven: Sequence[Proven]) -> list[Subject]:
    """The subjects, with the remedies of their findings.

    Args:
        subjects: as they were judged.
        proven: in the order in which the subjects were judged: one that was run again is there twice.
    """
    waiting: dict[str, list[Proven]] = {}
    for known in proven:
        waiting.setdefault(known.id, []).append(known)
    updated = []
    for subject in subjects:
        found = waiting.get(subject.id) if subject.outcome == "leak" else None
        updated.append(_with_remedies(subject, found.pop(0)) if found else subject)
    return updated


def _with_remedies(subject: Subject, proven: Proven) -> Subject:
    findings = tuple(_with_remedy(finding, proven.findings) for finding in subject.findings)
    return msgspec.structs.replace(subject, findings=findings)


def _with_remedy(finding: Finding, proven: Mapping[str, Finding]) -> Finding:
    parts = tuple(_with_remedy(part, proven) for part in finding.parts)
    known = proven.get(finding.fingerprint)
    if known is None:
        return msgspec.structs.replace(finding, parts=parts)
    if known.fingerprint != finding.fingerprint:
        # It turned out to be something else, and so is not known.
        return msgspec.structs.replace(known, parts=parts)
    return reworded(
        finding,
        known.message,
        remedy=known.remedy,
        tried=known.tried,
        changed=known.changed,
        advice=known.advice or finding.advice,
        parts=parts,
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
