"""Runs the cells, as many at a time as cards and processors allow, and keeps one report that is always readable.

It is judged by a committed baseline (`KnownFindings`): findings that are known, each with its reason, owner and expiry.
New findings fail the gate; known ones that no longer appear are reported, and `--update` removes them.
"""

from __future__ import annotations

import datetime
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
from msgspec.structs import replace

import lowtide
from lowtide.leakcheck.gate.cells import CellResult, RayCluster, exclusive, not_run, run_cell
from lowtide.leakcheck.gate.matrix import CALIBRATION_FILE, Cell, GateError
from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions
from lowtide.leakcheck.suppressions.toml import write_whole
from lowtide.reports.folder import write_folder
from lowtide.reports.reading.json_files import UnreadableError, decode_json, read_bounded
from lowtide.reports.schema import Finding, Machine, Report, ReportError, Subject, json_bytes, read

SCHEMA = "lowtide-baseline/1"


class KnownFindingsError(ValueError):
    """A baseline that cannot be read, written or updated; one line with the file and what to do."""


class KnownFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finding that may stay for now.

    Attributes:
        fingerprint: the finding's, as a report gives it.
        reason: why it may stay.
        owner: who answers for it.
        expires: the last day on which it is known.
        cells: the cells in which it was found.
        resource: what is retained, for readers.
        message: the finding's, for readers.
    """

    fingerprint: str
    reason: str
    owner: str
    expires: datetime.date
    cells: tuple[str, ...] = ()
    resource: str = ""
    message: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    findings: tuple[KnownFinding, ...]


class KnownFindingsUpdate(msgspec.Struct, frozen=True):
    """What `--update` does: which entries come, and which go."""

    added: tuple[KnownFinding, ...]
    removed: tuple[KnownFinding, ...]

    def lines(self) -> list[str]:
        """Return the difference, a line per entry."""
        return [
            *(f"- {entry.fingerprint} {entry.resource}: {entry.message}" for entry in self.removed),
            *(f"+ {entry.fingerprint} {entry.resource}: {entry.message}" for entry in self.added),
        ]


class KnownFindings(msgspec.Struct, frozen=True):
    """A baseline."""

    file: Path
    entries: tuple[KnownFinding, ...] = ()

    @classmethod
    def load(cls, file: Path) -> KnownFindings:
        """Read the baseline of a file; it is empty if there is none yet.

        Raises:
            KnownFindingsError: it cannot be read.
        """
        if not file.exists():
            return cls(file)
        try:
            data = read_bounded(file)
        except UnreadableError as error:
            raise KnownFindingsError(f"{file} {error}") from error
        try:
            content = decode_json(data, _File)
        except UnreadableError as error:
            raise KnownFindingsError(f"{file} is not a {SCHEMA} baseline: {error}") from error
        if content.schema != SCHEMA:
            raise KnownFindingsError(f"{file} has the schema {content.schema!r}; this version reads {SCHEMA}")
        for entry in content.findings:
            if not entry.reason.strip() or not entry.owner.strip():
                raise KnownFindingsError(f"{file}: {entry.fingerprint} needs a reason and an owner")
        return cls(file, content.findings)

    def save(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            KnownFindingsError: it cannot be written.
        """
        content = _File(schema=SCHEMA, findings=tuple(sorted(self.entries, key=lambda entry: entry.fingerprint)))
        try:
            write_whole(self.file, msgspec.json.format(json_bytes(content), indent=2) + b"\n")
        except OSError as error:
            raise KnownFindingsError(f"{self.file} cannot be written: {error.strerror}") from error

    def mark(self, subjects: Iterable[Subject], today: datetime.date) -> list[Subject]:
        """Return the subjects with each known finding marked as suppressed by its entry."""
        known = Suppressions(
            tuple(
                Suppression(
                    id=self.file.name,
                    reason=f"{entry.reason} (owner {entry.owner}, until {entry.expires})",
                    fingerprint=entry.fingerprint,
                    expires=entry.expires,
                )
                for entry in self.entries
            )
        )
        return [known.judge(subject, today)[0] for subject in subjects]

    def expired(self, today: datetime.date) -> list[KnownFinding]:
        """Return the entries whose last day is over; their findings fail the gate again."""
        return [entry for entry in self.entries if entry.expires < today]

    def gone(self, subjects: Sequence[Subject], judged: Collection[str]) -> list[KnownFinding]:
        """Return the entries that no longer have a finding, and can be removed.

        Args:
            subjects: all of the gate.
            judged: the names of the cells that ran to their end; an entry of a cell that did not run stays.
        """
        findings = [finding for subject in subjects for finding in subject.findings]
        found = {each.fingerprint for finding in findings for each in (finding, *finding.parts)}
        return [entry for entry in self.entries if entry.fingerprint not in found and set(entry.cells) <= set(judged)]

    def updated(
        self,
        subjects: Sequence[Subject],
        judged: Collection[str],
        *,
        reason: str,
        owner: str,
        expires: datetime.date,
    ) -> tuple[KnownFindings, KnownFindingsUpdate]:
        """Return the baseline with the findings that nothing knows added and those that are gone removed.

        Raises:
            KnownFindingsError: something is to be added, and reason or owner is missing.
        """
        removed = self.gone(subjects, judged)
        cells: dict[str, list[str]] = {}
        new: dict[str, Finding] = {}
        for subject in subjects:
            for finding in subject.findings:
                cells.setdefault(finding.fingerprint, []).append(subject.id.partition("/")[0])
                if finding.suppressed_by is None:
                    new.setdefault(finding.fingerprint, finding)
        if new and not (reason.strip() and owner.strip()):
            count = f"{len(new)} new finding{'s' if len(new) > 1 else ''}"
            raise KnownFindingsError(f"{count} would be added: give --reason TEXT and --owner NAME as well")
        added = tuple(
            KnownFinding(
                fingerprint=mark,
                reason=reason,
                owner=owner,
                expires=expires,
                cells=tuple(dict.fromkeys(cells[mark])),
                resource=finding.resource,
                message=finding.message,
            )
            for mark, finding in new.items()
        )
        # An expired entry is replaced by the one that is added for the same finding.
        kept = tuple(entry for entry in self.entries if entry not in removed and entry.fingerprint not in new)
        return replace(self, entries=kept + added), KnownFindingsUpdate(added, tuple(removed))


_CALIBRATION_POLL_S = 0.1
"""Seconds after which a lane asks again whether the calibration that its cells wait for has ended."""

_MOST_AT_ONCE = 64
"""Cells that wait for a cluster at the same time."""

Listener = Callable[[Cell, CellResult], None]


def earlier_findings(folder: Path) -> Suppressions:
    """Return entries for the findings of an earlier report, which are not new.

    Raises:
        ReportError: there is no report in the folder, or it cannot be read.
    """
    findings = [finding for subject in read(folder).subjects for finding in subject.findings]
    marks = dict.fromkeys(finding.fingerprint for finding in findings)
    return Suppressions(
        tuple(Suppression(id="not new", reason=f"also in {folder}", fingerprint=mark) for mark in marks)
    )


class Gate(msgspec.Struct):
    """One run of the gate.

    Attributes:
        cells: what runs.
        folder: of the report; each cell has a folder of its own in `cells/`.
        machine: where the gate runs; a cell's report may say more.
        cards: how many cards there are.
        cpu_workers: cells on the CPU at the same time.
        known: the committed baseline.
        earlier: entries for findings that are not new.
        cluster: runs the cells elsewhere; None runs them here.
        listener: called after each cell.
        results: what the cells that ran have given, by name.
    """

    cells: Sequence[Cell]
    folder: Path
    machine: Machine
    cards: int = 0
    cpu_workers: int = 1
    known: KnownFindings = msgspec.field(default_factory=lambda: KnownFindings(Path("lowtide-baseline.json")))
    earlier: Suppressions = msgspec.field(default_factory=Suppressions)
    cluster: RayCluster | None = None
    listener: Listener = lambda cell, result: None
    results: dict[str, CellResult] = msgspec.field(default_factory=dict)
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _stopped: threading.Event = msgspec.field(default_factory=threading.Event)
    _started: str = ""
    _problem: ReportError | None = None

    def run(self) -> Report:
        """Run all cells, and write the report after each.

        Raises:
            ReportError: the report cannot be written.
        """
        self._started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        # Readable from the start: a gate that is killed in its first cell must not leave the report of yesterday.
        self._write()
        waiting = list(self.cells)
        for cell in [each for each in waiting if each.missing]:
            waiting.remove(cell)
            self._add(cell, not_run(cell, "unsupported", cell.missing))
        lanes: list[int | None] = [*range(self.cards), *[None] * self.cpu_workers]
        if self.cluster is not None:
            lanes = [None] * min(len(waiting), _MOST_AT_ONCE)
        threads = [threading.Thread(target=self._work, args=(lane, waiting), daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            # Not `join()` without a limit, which a Ctrl-C would wait for.
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
        except BaseException:
            self._stopped.set()
            for thread in threads:
                thread.join()
            raise
        if self._problem is not None:
            raise self._problem
        return self.report()

    def _work(self, card: int | None, waiting: list[Cell]) -> None:
        """Run cells in one lane, that of a card or one of the CPU's, until none is left for it."""
        while not self._stopped.is_set():
            with self._lock:
                fitting = [each for each in waiting if self.cluster is not None or _fits(each, card)]
                cell = next(filter(self._is_ready, fitting), None)
                if cell is not None:
                    waiting.remove(cell)
            if cell is not None:
                self._add(cell, self._run(cell, card))
            elif not fitting:
                return
            else:
                self._stopped.wait(_CALIBRATION_POLL_S)

    def _is_ready(self, cell: Cell) -> bool:
        """Return whether the calibration that a cell is judged by has ended, if it is run here at all."""
        if self.cluster is not None or cell.calibration in self.results:
            return True
        return all(each.name != cell.calibration for each in self.cells)

    def _calibrated(self, cell: Cell) -> Cell:
        """Return the cell with the tolerances of its calibration; unchanged where that has written none.

        Nor for a cluster, whose nodes have noise of their own.
        """
        folder = self.folder / "cells" / cell.calibration
        ran_here = cell.calibration in self.results and self.cluster is None
        if not ran_here or not (folder / CALIBRATION_FILE).is_file():
            return cell
        return replace(cell, command=(*cell.command, "--calibration", str(folder.absolute())))

    def _run(self, cell: Cell, card: int | None) -> CellResult:
        folder = self.folder / "cells" / cell.name
        cell, stopped = self._calibrated(cell), self._stopped.is_set
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            if self.cluster is not None:
                return self.cluster.run(cell, folder, stopped)
            with nullcontext() if card is None else exclusive(card, stopped):
                return run_cell(cell, folder, card, stopped)
        except (OSError, GateError) as error:
            return not_run(cell, "error", f"the cell could not be run: {error}")

    def _add(self, cell: Cell, result: CellResult) -> None:
        with self._lock:
            self.results[cell.name] = result
            try:
                self._write()
            except ReportError as error:
                self._problem = error
                self._stopped.set()
        self.listener(cell, replace(result, subjects=tuple(self._marked(result.subjects))))

    def _write(self) -> None:
        write_folder(self.report(), self.folder)

    def judge_by(self, known: KnownFindings) -> Report:
        """Write the report anew, by another baseline.

        Raises:
            ReportError: it cannot be written.
        """
        self.known = known
        self._write()
        return self.report()

    def report(self) -> Report:
        """Report what is known so far; a cell that has not ended is an error, so that no unfinished report is clean."""
        subjects: list[Subject] = []
        for cell in self.cells:
            result = self.results.get(cell.name)
            if result is None:
                result = not_run(cell, "error", "the gate ended before this cell did")
            subjects += result.subjects
        machines = [result.machine for result in self.results.values() if result.machine is not None]
        return Report(
            schema="lowtide-report/1",
            version=lowtide.__version__,
            created=self._started,
            command=shlex.join(["lowtide", *sys.argv[1:]]),
            machine=max(machines, key=lambda machine: len(machine.devices), default=self.machine),
            subjects=tuple(self._marked(subjects)),
        )

    def _marked(self, subjects: Iterable[Subject]) -> list[Subject]:
        today = datetime.date.today()
        marked = self.known.mark(subjects, today)
        return [self.earlier.judge(subject, today)[0] for subject in marked]

    def judged(self) -> frozenset[str]:
        """Return the names of the cells that ran to their end: what they do not report is gone."""
        wrong = ("error", "unsupported")
        return frozenset(
            name
            for name, result in self.results.items()
            if not any(subject.outcome in wrong for subject in result.subjects)
        )


def _fits(cell: Cell, card: int | None) -> bool:
    if card is None:
        return cell.device == "cpu"
    return cell.device in ("cuda", f"cuda:{card}")
