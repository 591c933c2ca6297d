"""What was judged in a session: its subjects, the suppressions that they used, and the report on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lowtide
from lowtide.leakcheck.suppressions.entries import Suppressions, find, load, problems, shipped
from lowtide.leakcheck.suppressions.toml import SuppressionError
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
from lowtide.probes.originals import time
from lowtide.pytest_plugin import terminal
from lowtide.pytest_plugin.proven import Proven, retell, with_proven
from lowtide.pytest_plugin.settings import Settings, usage_error
from lowtide.reports.causes import seen_before
from lowtide.reports.folder import UnfinishedReport, write_folder
from lowtide.reports.from_snapshot import report_of
from lowtide.reports.outcomes import tries_as_one
from lowtide.reports.schema import Begun, Finding, NotMeasured, Report, ReportError, Subject
from lowtide.reports.whole_texts import json_bytes

_SUBJECTS = "lowtide_subjects"
"""The attribute under which a test's report carries what was judged, as JSON, also from an xdist worker."""


class Results:
    """The subjects of one session, of its workers' too.

    Args:
        config: pytest's.
        settings: of this run.

    Attributes:
        subjects: in the order in which they were judged.
        problems: what is wrong with the suppressions, once the session is over.
        unwritten: why the report could not be written; empty if it was.

    Raises:
        pytest.UsageError: the file of suppressions cannot be used.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.subjects: list[Subject] = []
        self.problems: tuple[str, ...] = ()
        self.unwritten = ""
        self._config = config
        self._settings = settings
        self._suppressions = _suppressions(config, settings.suppressions)
        self._used: set[str] = set()
        self._unfinished: UnfinishedReport | None = None
        if settings.report is not None and not hasattr(config, "workerinput"):
            AllocatorSnapshots(settings.report).remove_old()

    def subject(self, name: str, findings: Sequence[Finding]) -> Subject:
        """What was judged, with the findings that a suppression covers marked so."""
        findings = self._suppressed(findings) if findings else ()
        leaks = any(finding.suppressed_by is None for finding in findings)
        return Subject(id=name, outcome="leak" if leaks else "clean", findings=tuple(findings))

    def with_snapshot(self, subject: Subject) -> Subject:
        """The subject of a leak on a card, with what torch's allocator has there kept beside the report."""
        on_card = any(finding.device.startswith("cuda") for finding in subject.findings)
        if self._settings.report is None or subject.outcome != "leak" or not on_card:
            return subject
        why = AllocatorSnapshots(self._settings.report).keep(subject.id)
        missing = NotMeasured(what="torch's snapshot after the test", why=why)
        return msgspec.structs.replace(subject, not_measured=(*subject.not_measured, missing)) if why else subject

    def begin(self) -> None:
        """From here on what is judged is in the report's folder, if one is wanted, whatever ends the session."""
        if self._settings.report is not None and not hasattr(self._config, "workerinput"):
            self._unfinished = UnfinishedReport(self._settings.report, Begun(report=self._report([]), part="test"))

    def add(self, subjects: Sequence[Subject]) -> None:
        """Note what was judged."""
        self.subjects += subjects
        if self._unfinished is not None:
            self._unfinished.add(subjects)

    def leaks(self) -> list[Subject]:
        """Those that are not clean, and not known."""
        return [subject for subject in self.subjects if is_bad(subject)]

    def retell(self, proven: Sequence[Proven]) -> None:
        """Put what was proven into the subjects, and into what the terminal has still to show."""
        subjects = with_proven(self.subjects, proven)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            texts: dict[str, str] = {}
            for before, after in zip(self.subjects, subjects, strict=True):
                if before is not after and is_bad(before):
                    verbosity = self._config.get_verbosity()
                    texts[terminal.details(before, verbosity)] = terminal.details(after, verbosity)
                    texts[terminal.headline(before)] = terminal.headline(after)
            retell(reporter.stats, texts)
        self.subjects = subjects

    def tell_causes_once(self) -> None:
        """Shorten what the terminal has still to show of a cause that was seen before: after the last `retell`."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        verbosity = self._config.get_verbosity()
        texts: dict[str, str] = {}
        for subject, again in zip(self.subjects, seen_before(self.subjects), strict=True):
            # Of a test that is run again, pytest may show the last try alone.
            before = {
                place: seen for place, seen in again.items() if seen.subject.id != subject.id or seen.subject is subject
            }
            if is_bad(subject):
                texts.setdefault(terminal.details(subject, verbosity), terminal.details(subject, verbosity, before))
                texts.setdefault(terminal.headline(subject), terminal.headline(subject, before))
        retell(reporter.stats, texts)

    def as_output(self) -> dict[str, object]:
        """What an xdist worker sends of them, for `add_output`: what was judged outside of tests, and what it used."""
        return {"lowtide": _encode(self.subjects), "lowtide_used": sorted(self._used)}

    def add_output(self, output: Mapping[str, Any]) -> None:
        """What a worker sent."""
        self._used |= set(output.get("lowtide_used", ()))
        self.subjects += [subject for subject in _decode(output.get("lowtide", "[]")) if subject not in self.subjects]

    def find_problems(self) -> bool:
        """Look for expired and replaced suppressions, after a run of everything for unused ones too; whether any is."""
        if not self.subjects:
            return False
        findings = [finding for subject in self.subjects for finding in subject.findings]
        ran_all = self._ran_everything()
        self.problems = problems(self._suppressions.entries, self._used, date.today(), findings, ran_all=ran_all)
        return bool(self.problems)

    def write_report(self) -> None:
        """Write the report, if one is wanted; `unwritten` says why that was not possible."""
        if self._settings.report is None:
            return
        try:
            write_folder(self._report(self.subjects), self._settings.report)
        except ReportError as error:
            self.unwritten = f"--leakcheck-report: {error}"

    def _report(self, subjects: Sequence[Subject]) -> Report:
        command = " ".join(["pytest", *self._config.invocation_params.args])
        return report_of(tries_as_one(subjects), lowtide.__version__, command, settings=self._settings.as_texts())

    def _suppressed(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        applied = self._suppressions.apply(findings, date(*time.localtime()[:3]))
        self._used |= applied.used
        return applied.findings

    def _ran_everything(self) -> bool:
        """Whether no test was left out of this run, as far as the command line shows."""
        option = self._config.option
        narrowed = any(getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "stepwise"))
        return not narrowed and not any("::" in text or text.endswith(".py") for text in self._config.args)


def attach(report: Any, subjects: Sequence[Subject]) -> None:
    """Let a test's report carry what was judged."""
    setattr(report, _SUBJECTS, _encode(subjects))


def attached(report: object) -> list[Subject]:
    """What a test's report carries."""
    return _decode(getattr(report, _SUBJECTS, "[]"))


def is_bad(subject: Subject) -> bool:
    """Whether it left something that is not known, or could not be judged."""
    return subject.outcome == "error" or any(finding.suppressed_by is None for finding in subject.findings)


def _encode(subjects: Sequence[Subject]) -> str:
    return json_bytes(list(subjects)).decode()


def _decode(text: str) -> list[Subject]:
    return msgspec.json.decode(text, type=list[Subject])


def _suppressions(config: pytest.Config, given: Path | None) -> Suppressions:
    """The user's entries, then the shipped ones.

    Raises:
        pytest.UsageError: a file cannot be used.
    """
    try:
        path = given or find(config.rootpath)
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        raise usage_error(f"--leakcheck-suppressions: {error}") from None
    return Suppressions((*own, *shipped().entries))
