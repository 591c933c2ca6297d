"""Runs the cells, as many at a time as cards and processors allow, and keeps one report that is always readable."""

from __future__ import annotations

import datetime
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import lowtide
from lowtide.leakcheck.gate.cells import CellResult, RayCluster, exclusive, not_run, run_cell
from lowtide.leakcheck.gate.known_findings import KnownFindings
from lowtide.leakcheck.gate.matrix import CALIBRATION_FILE, Cell, GateError
from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions
from lowtide.reports.folder import write_folder
from lowtide.reports.schema import Machine, Report, ReportError, Subject, read

_CALIBRATION_POLL_S = 0.1
"""Seconds after which a lane asks again whether the calibration that its cells wait for has ended."""

_MOST_AT_ONCE = 64
"""Cells that wait for a cluster at the same time."""

Listener = Callable[[Cell, CellResult], None]


def earlier_findings(folder: Path) -> Suppressions:
    """Entries for the findings of an earlier report, which are not new.

    Raises:
        ReportError: there is no report in the folder, or it cannot be read.
    """
    findings = [finding for subject in read(folder).subjects for finding in subject.findings]
    marks = dict.fromkeys(finding.fingerprint for finding in findings)
    return Suppressions(
        tuple(Suppression(id="not new", reason=f"also in {folder}", fingerprint=mark) for mark in marks)
    )


@dataclass
class Gate:
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
    known: KnownFindings = field(default_factory=lambda: KnownFindings(Path("lowtide-baseline.json")))
    earlier: Suppressions = field(default_factory=Suppressions)
    cluster: RayCluster | None = None
    listener: Listener = lambda cell, result: None
    results: dict[str, CellResult] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)
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
        cell = self._calibrated(cell)
        try:
            if self.cluster is not None:
                return self.cluster.run(cell, folder, self._stopped.is_set)
            if card is None:
                return run_cell(cell, folder, None, self._stopped.is_set)
            with exclusive(card, self._stopped.is_set):
                return run_cell(cell, folder, card, self._stopped.is_set)
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
