"""What is proven at the end of the session, put into what was said of each test before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies, UnprovenLeak
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


class _Unproven(NamedTuple):
    """What is to be tried for a subject; its test module is empty for one that is no test."""

    id: str
    module: str
    later: DeferredRemedies


class DeferredProofs:
    """What is tried at the end of the session, when no test follows."""

    def __init__(self) -> None:
        self._unproven: list[_Unproven] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to try."""
        return not self._unproven

    def add(self, subject: Subject, unproven: DeferredRemedies, module: str = "") -> None:
        """Remember what is to be tried: for what fails or warns, and for nothing that is known.

        Args:
            subject: what left it.
            unproven: what is to be tried.
            module: the test module, if the subject is a test.
        """
        if not (unproven.tensors or unproven.items):
            return
        findings = [part for item in subject.findings for part in (item, *item.parts)]
        later = unproven.only(frozenset(part.fingerprint for part in findings if part.suppressed_by is None))
        if later.tensors or later.items:
            self._unproven.append(_Unproven(subject.id, module, later))

    def news(
        self, findings: Sequence[Finding], unproven: DeferredRemedies, when: str, module: str, tolerance: int
    ) -> list[Finding]:
        """Return the findings without those of what only takes the place of what an earlier test left.

        As in `LAST["engine"] = Engine()` in each test: what is held there is one engine, and that is told once in each
        test module. What takes more room than what was told is growth.

        Args:
            findings: of one test.
            unproven: what is to be tried for them.
            when: what was noted of a leak that came back in this test.
            module: the test's.
            tolerance: bytes that it may leave.
        """
        new = {leak.finding.fingerprint: leak for leak in unproven.tensors}
        told: set[str] = set()
        gone: dict[str, list[UnprovenLeak]] = {}
        for each in self._unproven if new else ():
            for leak in each.later.tensors:
                mark = leak.finding.fingerprint
                if each.module == module:
                    told.add(mark)
                if leak.came_back == when:
                    gone.setdefault(mark, []).append(leak)
        found = []
        for finding in findings:
            mark = finding.fingerprint
            before, now = gone.get(mark, []) if mark in told else [], new.get(mark)
            room = sum(leak.finding.bytes for leak in before) + tolerance
            # Of what has other parts, such as a thread, it is not known here that these are gone.
            if now is not None and before and finding.path and not finding.parts and finding.bytes <= room:
                before[0].supersede(now)
            else:
                found.append(finding)
        return found

    def note(self, when: str) -> None:
        """Note which leaks the program itself has given back since this was called last."""
        for each in self._unproven:
            for leak in each.later.tensors:
                leak.note(when)

    def prove(self, watch: Watch) -> list[Proven]:
        """Try it, once; by subject, what is known then."""
        unproven, self._unproven = self._unproven, []
        found = watch.prove([each.later for each in unproven])
        return [Proven(each.id, findings) for each, findings in zip(unproven, found, strict=False)]


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
        trend=known.trend,
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
