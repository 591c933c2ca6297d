"""`lowtide exec`: any command, judged by what its tree of processes leaves when it has ended."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse, write
from lowtide.leakcheck.cli.judged_lives import load_suppressions
from lowtide.leakcheck.cli.reporting import begin_report, check_writable, ended_with, make_report, write_report

if TYPE_CHECKING:
    from lowtide.leakcheck.cli.processes.command_run import CommandEnd
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.schema import Subject


def execute(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the report as JSON (lowtide-report/1); the command's own output: stderr."),
    ] = False,
    suppressions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
    ] = None,
    settle: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long its processes and the driver have to let go at the end.")
    ] = 5.0,
) -> None:
    """Run a command with agents in all its processes, and judge what they leave when it has ended.

    Signals are passed on to it. What it leaves: orphans, files in /dev/shm that no living process uses, sockets and
    temporary files of ended processes, semaphores, memory on cards that the driver counts for ended processes. Where it
    marks its stages, what grows in its processes with each `infer`, and what a `sleep` keeps there, is judged, too.

    Exit codes: 1 something stays, 2 it could not be measured or bad input; else the command's own.
    """
    if not command:
        refuse("there is no command: give one, as in `lowtide exec -- python serve.py`")
    if not 0 <= settle < float("inf"):
        refuse(f"--settle {settle} is not possible: use 0 or more seconds")
    known = load_suppressions(suppressions)
    if report is not None:
        check_writable(report)
    raise typer.Exit(_execute(command, report, as_json, known, settle))


def _execute(command: list[str], report: Path | None, as_json: bool, known: Suppressions, settle: float) -> int:
    from lowtide.leakcheck.cli.processes.command_run import CommandError, run_command
    from lowtide.probes.device.driver import find_driver

    driver = find_driver()
    try:
        with begin_report(report, driver):
            ended = run_command(command, driver, settle=settle, to_stderr=as_json)
        return _report(_subject(command[0], ended), ended.status, driver, report, as_json, known)
    except CommandError as error:
        refuse(str(error))
    finally:
        driver.close()


def _subject(program: str, ended: CommandEnd) -> Subject:
    from lowtide.reports.schema import Subject

    end = ended.end
    outcome = "leak" if end.findings else "unsupported" if end.not_measured else "clean"
    reason = f"the command ended with exit code {ended.status}" if ended.status else ""
    return Subject(
        id=f"exec[{os.path.basename(program)}]",  # noqa: PTH119 - it need not be a path
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        findings=end.findings,
        not_measured=(*end.not_measured, *end.not_judged),
    )


def _report(
    subject: Subject, status: int, driver: Driver, folder: Path | None, as_json: bool, known: Suppressions
) -> int:
    from lowtide.leakcheck.suppressions.entries import problems
    from lowtide.reports import schema
    from lowtide.reports.escaping import escape_json
    from lowtide.reports.hanging_text import HangingText
    from lowtide.reports.terminal import render

    today = datetime.date.today()
    subject, used = known.judge(subject, today)
    written = make_report(subject, driver)
    # The command's own output is on stdout, for whoever reads it.
    console = find_console(sys.stderr)
    where, unwritten = write_report(written, folder)
    console.print(render(written, *(() if where is None else (f"report: {where}",))))
    if as_json:
        write(escape_json(schema.encode(written).decode()))
    wrong = problems(known.entries, used, today, subject.findings, ran_all=not status)
    for problem in wrong:
        console.print(HangingText(f"SUPPRESSION {problem}", style="red"))
    return ended_with(schema.exit_code(written) or (1 if wrong else status), unwritten)
