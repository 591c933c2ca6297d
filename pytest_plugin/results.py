"""What was judged in a session: its subjects, the suppressions that they used, and the report on them.

What failed calls of `leakcheck.check()` found waits here for the test's verdict, and what may be tried for a leak for
the end of the session, where what it has shown is put into what was said before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import lowtide
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.remedies import DeferredRemedies, UnprovenLeak
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.judging.ladder import collect
from lowtide.leakcheck.suppressions.entries import Suppressions, find, load, problems, shipped
from lowtide.leakcheck.suppressions.toml import SuppressionError
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Thing, Verdict
from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
from lowtide.probes.originals import time
from lowtide.pytest_plugin import terminal
from lowtide.pytest_plugin.settings import Settings, usage_error
from lowtide.reports.causes import seen_before
from lowtide.reports.folder import UnfinishedReport, write_folder
from lowtide.reports.from_snapshot import report_of, this_machine
from lowtide.reports.heap.kept_heap import remove_old
from lowtide.reports.outcomes import tries_as_one
from lowtide.reports.schema import Begun, Finding, NotMeasured, Report, ReportError, Subject, as_written, json_bytes
from lowtide.reports.statement import noted, reworded

_BACK = "leakcheck.check() found it; it was back at the end of the test"


class _Checked(msgspec.Struct, frozen=True, eq=False):
    """A finding with what distinguishes it from a later one; holds nothing of the program."""

    finding: Finding
    things: frozenset[Thing]
    storages: StorageWatch

    def is_in(self, verdict: Verdict) -> bool:
        """Return whether a later verdict is about the same leak: about the same things, but for those that are gone."""
        gone = {("storage", *key) for key in self.storages.gone()}
        return any((self.things - gone) & things for things in verdict.things.values())


class CheckedLeaks:
    """Those of one test, each once however often it is found."""

    def __init__(self) -> None:
        self._found: list[_Checked] = []

    def clear(self) -> None:
        """Another test begins."""
        self._found = []

    def add(self, verdict: Verdict) -> None:
        """Note that a check failed with this verdict."""
        self._found = [known for known in self._found if not known.is_in(verdict)]
        for finding in verdict.findings:
            things = verdict.things.get(finding.fingerprint, frozenset())
            storages = StorageWatch([(device, int(address)) for kind, device, address in things if kind == "storage"])
            self._found.append(_Checked(finding, things, storages))

    def missing_from(self, verdict: Verdict) -> list[Finding]:
        """Return what the verdict on the whole test does not report, since it was released after the check."""
        return [noted(known.finding, f"; {_BACK}") for known in self._found if not known.is_in(verdict)]


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
        self,
        findings: Sequence[Finding],
        unproven: DeferredRemedies,
        when: str,
        module: str,
        tolerance: int,
        *,
        swept: bool,
        is_held: Callable[[Sequence[UnprovenLeak]], bool],
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
            swept: whether all garbage was collected when it was judged.
            is_held: whether something is seen to hold all that some leaks have left, so that none of it is garbage.
        """
        new = {leak.finding.fingerprint: leak for leak in unproven.tensors}
        # Of what has other parts, such as a thread, it is not known here that these are gone.
        may_be_old = {finding.fingerprint for finding in findings if finding.path and not finding.parts} & new.keys()
        earlier = [
            leak
            for each in self._unproven
            if each.module == module
            for leak in each.later.tensors
            if leak.finding.fingerprint in may_be_old
        ]
        told = {leak.finding.fingerprint for leak in earlier}
        gone = self._gone(when) if told else {}
        unseen = [leak for leak in earlier if leak.finding.fingerprint not in gone and not leak.came_back]
        if unseen and not swept and not is_held(unseen):

            def is_gone() -> bool:
                self.note(when)
                return told <= self._gone(when).keys()

            # What lies at the end of a way that was known was judged without a collection.
            collect(is_gone)
            gone = self._gone(when)
        found = []
        for finding in findings:
            mark = finding.fingerprint
            before, now = gone.get(mark, []) if mark in told else [], new.get(mark)
            room = sum(leak.finding.bytes for leak in before) + tolerance
            if now is not None and before and finding.bytes <= room:
                before[0].supersede(now)
            else:
                found.append(finding)
        return found

    def _gone(self, when: str) -> dict[str, list[UnprovenLeak]]:
        """Return the leaks of tensors that came back at a time, by their fingerprints."""
        gone: dict[str, list[UnprovenLeak]] = {}
        for leak in (leak for each in self._unproven for leak in each.later.tensors if leak.came_back == when):
            gone.setdefault(leak.finding.fingerprint, []).append(leak)
        return gone

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
    """Return what was proven as text for an xdist worker's output."""
    return json_bytes(proven).decode()


def proven_from_json(text: str) -> list[Proven]:
    """Return the same, back."""
    return msgspec.json.decode(text, type=list[Proven])


def with_proven(subjects: Sequence[Subject], proven: Sequence[Proven]) -> list[Subject]:
    """Return the subjects, with the remedies of their findings.

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
    """Replace texts in the reports that the terminal has still to show.

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
        snapshots: keeps what torch's allocator has on cards beside the report; None where none is wanted.

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
        self._machine: dict[str, Any] = {}
        self._unfinished: UnfinishedReport | None = None
        self.snapshots = None if settings.report is None else AllocatorSnapshots(settings.report)
        if self.snapshots is not None and not hasattr(config, "workerinput"):
            self.snapshots.remove_old()

    def subject(self, name: str, findings: Sequence[Finding]) -> Subject:
        """Return what was judged, with the findings that a suppression covers marked so."""
        findings = self._suppressed(findings) if findings else ()
        leaks = any(finding.suppressed_by is None for finding in findings)
        return Subject(id=name, outcome="leak" if leaks else "clean", findings=tuple(findings))

    def with_snapshot(self, subject: Subject) -> Subject:
        """Return the subject of a leak on a card, with what torch's allocator has there kept beside the report."""
        on_card = any(finding.device.startswith("cuda") for finding in subject.findings)
        if self.snapshots is None or subject.outcome != "leak" or not on_card:
            return subject
        why = self.snapshots.keep(subject.id)
        missing = NotMeasured(what="torch's snapshot after the test", why=why)
        return msgspec.structs.replace(subject, not_measured=(*subject.not_measured, missing)) if why else subject

    def begin(self) -> None:
        """Put what is judged from here on into the report's folder, if one is wanted, whatever ends the session."""
        if self._settings.report is not None and not hasattr(self._config, "workerinput"):
            self._unfinished = UnfinishedReport(self._settings.report, Begun(report=self._report([]), part="test"))

    def add(self, subjects: Sequence[Subject]) -> None:
        """Note what was judged."""
        self.subjects += subjects
        if self._unfinished is not None:
            self._unfinished.add(subjects)

    def leaks(self) -> list[Subject]:
        """Return those that are not clean, and not known."""
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
        """Return what an xdist worker sends of them, for `add_output`: what it judged outside of tests, and used."""
        machine = this_machine()
        seen = {"torch": machine.torch, "devices": list(machine.devices)}
        return {"lowtide": _encode(self.subjects), "lowtide_used": sorted(self._used), "lowtide_machine": seen}

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add what a worker sent."""
        self._used |= set(output.get("lowtide_used", ()))
        seen = output.get("lowtide_machine", {})
        if seen.get("torch"):
            # The controller, which runs no test, has not loaded it.
            self._machine = {"torch": seen["torch"], "devices": tuple(seen["devices"])}
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
        report = report_of(tries_as_one(subjects), lowtide.__version__, command, settings=self._settings.as_texts())
        machine = msgspec.structs.replace(report.machine, **self._machine)
        return msgspec.structs.replace(report, machine=machine)

    def _suppressed(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        applied = self._suppressions.apply(findings, date(*time.localtime()[:3]))
        self._used |= applied.used
        return applied.findings

    def _ran_everything(self) -> bool:
        """Return whether no test was left out of this run, as far as the command line shows."""
        option = self._config.option
        narrowed = any(getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "stepwise"))
        return not narrowed and not any("::" in text or text.endswith(".py") for text in self._config.args)


class KeptHeaps:
    """Keeps the walked heaps of the first tests that leak, in this process.

    Args:
        config: pytest's.
        settings: of this run.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._report, self._left = settings.report, settings.keep_heap
        if self._report is not None and not hasattr(config, "workerinput"):
            remove_old(self._report)

    def file(self, name: str) -> HeapFile | None:
        """Return where that of a test is kept; None where no more are."""
        if self._report is None or not self._left:
            return None
        return HeapFile.beside(str(self._report), name, lowtide.__version__)

    def settle(self, file: HeapFile, is_red: bool) -> None:
        """Count the file of a test that is over, or drop it where the test left nothing that is not known."""
        if not is_red:
            file.drop()
        elif file.is_there:
            self._left -= 1


def attach(report: Any, subjects: Sequence[Subject]) -> None:
    """Let a test's report carry what was judged."""
    setattr(report, _SUBJECTS, _encode(subjects))


def attached(report: object) -> list[Subject]:
    """Return what a test's report carries."""
    text = getattr(report, _SUBJECTS, None)
    return [] if text is None else _decode(text)


def is_bad(subject: Subject) -> bool:
    """Return whether it left something that is not known, or could not be judged."""
    return subject.outcome == "error" or any(finding.suppressed_by is None for finding in subject.findings)


def _encode(subjects: Sequence[Subject]) -> str:
    return json_bytes(list(subjects)).decode()


def _decode(text: str) -> list[Subject]:
    return msgspec.json.decode(text, type=list[Subject])


def _suppressions(config: pytest.Config, given: Path | None) -> Suppressions:
    """Return the user's entries, then the shipped ones.

    Raises:
        pytest.UsageError: a file cannot be used.
    """
    try:
        path = given or find(config.rootpath)
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        raise usage_error(f"--leakcheck-suppressions: {error}") from None
    return Suppressions((*own, *shipped().entries))
