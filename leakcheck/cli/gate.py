"""`lowtide gate`: the nightly gate."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lowtide.leakcheck.cli.console import (
    check_positive,
    check_writable,
    ended_with,
    find_console,
    interruptible,
    refuse,
    say,
    show_on_github,
)
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.schema import Report, ReportError, Subject, exit_code
from lowtide.reports.terminal import finding_text

if TYPE_CHECKING:
    from rich.console import Console

    from lowtide.leakcheck.gate.cells import CellResult
    from lowtide.leakcheck.gate.gate import Gate
    from lowtide.leakcheck.gate.matrix import Cell, Shard

_KNOWN_DAYS = 90


def gate(
    config: Annotated[
        Path | None, typer.Option(help="The configuration [default: lowtide.toml, or pyproject.toml].")
    ] = None,
    report: Annotated[Path, typer.Option(help="Folder for the report and each cell's own report and log.")] = Path(
        "build/gate"
    ),
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Run each N-th cell, from the I-th.")] = None,
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Run the cells whose names match.")] = None,
    new_since: Annotated[
        Path | None, typer.Option(help="An earlier report folder: only what it does not contain fails.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Add new findings to the baseline, and remove those that are gone.")
    ] = False,
    reason: Annotated[str, typer.Option(help="With --update: why the new findings may stay for now.")] = "",
    owner: Annotated[str, typer.Option(help="With --update: who answers for them.")] = "",
    days: Annotated[int, typer.Option(help="With --update: for how many days they are known.")] = _KNOWN_DAYS,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The Ray cluster that runs the cells: auto, ray://HOST:10001, local."),
    ] = None,
    list_cells: Annotated[
        bool, typer.Option("--list", help="Print the cells and their commands; run nothing.")
    ] = False,
) -> None:
    """Run a matrix of subjects, devices and settings, each cell in its own processes, and judge all of it as one.

    Exit codes: 0 clean, 1 a leak was found, 2 bad input or something could not be measured, 130 interrupted.
    """
    check_positive(days=days)
    if (reason or owner) and not update:
        refuse("--reason and --owner belong to --update: add it, or leave them out")
    from lowtide.leakcheck.gate.cells import RayCluster, count_cards
    from lowtide.leakcheck.gate.gate import Gate, KnownFindings, KnownFindingsError, earlier_findings
    from lowtide.leakcheck.gate.matrix import GateError, Shard, cells_of, load_settings
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.reports.from_snapshot import this_machine

    with interruptible("interrupted; the report has what was finished"), ExitStack() as stack:
        try:
            settings, file = load_settings(config, Path.cwd())
            known = KnownFindings.load(file.parent / settings.baseline)
            earlier = earlier_findings(new_since) if new_since is not None else Suppressions()
            part = Shard.parse(shard) if shard is not None else None
            cluster = stack.enter_context(RayCluster(ray, Path.cwd())) if ray is not None else None
            cards = count_cards() if cluster is None else cluster.cards
            cells = _chosen(cells_of(settings, cards), only, part)
        except (GateError, KnownFindingsError, ReportError) as error:
            refuse(str(error))
        if list_cells:
            _list(cells)
            return
        check_writable(report)
        console = find_console()
        run = Gate(cells, report, this_machine())
        run.cards, run.cpu_workers, run.cluster = cards, settings.cpu_workers, cluster
        run.known, run.earlier, run.listener = known, earlier, _Lines(console, len(cells)).show
        unwritten = ""
        try:
            written = run.run()
            if update:
                written = _update(console, run, reason, owner, days)
        except (ReportError, KnownFindingsError) as error:
            if not run.results:
                refuse(str(error))
            # What was found is not lost for it.
            written, unwritten = run.report(), str(error)
        _show(console, run, written)
        show_on_github(written)
        raise typer.Exit(ended_with(exit_code(written), unwritten))


def _chosen(cells: list[Cell], only: str | None, shard: Shard | None) -> list[Cell]:
    """Return the cells that this job runs."""
    from lowtide.leakcheck.gate.matrix import GateError

    chosen = [cell for cell in cells if only is None or fnmatch(cell.name, only)]
    if not chosen:
        names = ", ".join(cell.name for cell in cells)
        raise GateError(f"--only {only} matches no cell; there are {names}")
    return chosen if shard is None else shard.part(chosen)


def _list(cells: list[Cell]) -> None:
    for cell in cells:
        missing = f"  ({cell.missing})" if cell.missing else ""
        say(f"{cell.name}: {shlex.join(cell.command)}{missing}")


class _Lines(msgspec.Struct):
    """Prints a line per cell, as each one ends."""

    console: Console
    cells: int
    ended: int = 0

    def show(self, cell: Cell, result: CellResult) -> None:
        self.ended += 1
        word, style = _outcome(result.subjects)
        line = f"{self.ended}/{self.cells} {cell.name}: {word}, {result.seconds:.1f} s"
        self.console.print(HangingText(line, style=style))


def _outcome(subjects: Iterable[Subject]) -> tuple[str, str]:
    """Return a cell's outcome in a word, and the style in which it is shown."""
    outcomes = {subject.outcome for subject in subjects}
    if "leak" in outcomes:
        return "leak", "red"
    if outcomes & {"error", "unsupported"}:
        return "not judged", "yellow"
    return "clean", "green"


def _show(console: Console, run: Gate, report: Report) -> None:
    """Print what failed and why, what is known, and what the baseline no longer needs."""
    from lowtide.reports.markdown import verdict

    today = datetime.date.today()
    for subject in report.subjects:
        findings = [finding for finding in subject.findings if finding.suppressed_by is None]
        if findings or subject.reason:
            reason = f": {subject.reason}" if subject.reason else ""
            console.print(HangingText(f"{subject.id}{reason}", style="bold"))
        for finding in findings:
            console.print(finding_text(finding))
    for entry in run.known.expired(today):
        expired = f"{entry.fingerprint} expired on {entry.expires} (owner {entry.owner})"
        console.print(HangingText(f"{run.known.file.name}: {expired}"))
    for entry in run.known.gone(report.subjects, run.judged()):
        gone = f"{entry.fingerprint} is gone ({entry.message}): remove it with --update"
        console.print(HangingText(f"{run.known.file.name}: {gone}"))
    console.print(HangingText(f"report: {run.folder / 'index.html'}"))
    console.print(HangingText(verdict(report), style="bold"))


def _update(console: Console, run: Gate, reason: str, owner: str, days: int) -> Report:
    """Bring the baseline up to date, show the difference, and write the report anew."""
    expires = datetime.date.today() + datetime.timedelta(days=days)
    known, change = run.known.updated(run.report().subjects, run.judged(), reason=reason, owner=owner, expires=expires)
    known.save()
    for line in change.lines() or ["no change"]:
        console.print(HangingText(f"{known.file.name}: {line}", style="green" if line.startswith("+") else ""))
    return run.judge_by(known)
