"""`lowtide bisect-step`: one step of `git bisect run`, whether a commit has the leak with a certain fingerprint.

A leak that shows in some lives only is looked for in several. A life that could not be measured is neither good nor
bad, so that a commit that does not build never passes for the culprit.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

import typer

from lowtide.leakcheck.cli.console import say
from lowtide.reports import schema
from lowtide.reports.schema import Report

STOPS_BISECT = 128
"""Exit code for bad input: `git bisect run` takes 2 for a bad commit, and stops at 128 and above."""

REPORT_VARIABLE = "LOWTIDE_REPORT"
"""The environment variable that gives the command its report folder."""

PLACEHOLDER = "{report}"
"""What is replaced by the report folder in the command's arguments."""

EXIT_CODES = {"absent": 0, "present": 1, "unknown": 125}
"""As `git bisect run` reads them: good, bad, to be skipped."""

Answer = Literal["absent", "present", "unknown"]


def bisect_step(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="Builds and judges the commit; gets its report folder as $LOWTIDE_REPORT and in place of {report}.",
        ),
    ],
    fingerprint: Annotated[str, typer.Option(help="The leak's, as in a report.")],
    lives: Annotated[int, typer.Option(help="How often the command is run at most.")] = 1,
    needed: Annotated[int, typer.Option(help="In how many of them the leak must show.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one run; then its processes are ended.")] = 3600.0,
) -> None:
    """Judge whether the checked-out commit has a leak, for `git bisect run`.

    Exit codes: 0 it has not, 1 it has, 125 it could not be measured (git skips the commit), 128 bad input (git stops).
    """
    if not re.fullmatch(r"[0-9a-f]{16}", fingerprint):
        _refuse(f"--fingerprint {fingerprint} is none: take the sixteen hex digits from a report")
    if not 1 <= needed <= lives:
        _refuse(f"--needed {needed} of --lives {lives} is not possible: use 1 to {max(lives, 1)}")
    if not 0 < timeout < float("inf"):
        _refuse(f"--timeout {timeout:g} is not possible: use seconds above 0")
    answer = judge_commit(command, fingerprint, _show, lives=lives, needed=needed, timeout=timeout)
    say(f"lowtide: the leak {fingerprint} is {answer} in this commit", err=True)
    raise typer.Exit(EXIT_CODES[answer])


def _show(life: CommandRun) -> None:
    say(f"lowtide: {life.answer}: {life.why}", err=True)


def _refuse(message: str) -> NoReturn:
    say(f"lowtide: {message}", err=True)
    raise typer.Exit(STOPS_BISECT)


class CommandRun(NamedTuple):
    """What one run of the command showed: whether the leak was there, `unknown` if nothing says so, and why."""

    answer: Answer
    why: str


def judge_commit(
    command: Sequence[str],
    fingerprint: str,
    listener: Callable[[CommandRun], None],
    *,
    lives: int = 1,
    needed: int = 1,
    timeout: float = 3600.0,
) -> Answer:
    """Run a command until it is certain whether a leak shows in as many lives as are needed.

    Args:
        command: what builds and judges the commit, and writes a report.
        fingerprint: that of the leak.
        listener: called after each life.
        lives: how often the command is run at most.
        needed: in how many of them the leak must show.
        timeout: seconds after which a run's processes are ended.
    """
    present = absent = 0
    for _ in range(lives):
        life = _run(command, fingerprint, timeout)
        listener(life)
        present += life.answer == "present"
        absent += life.answer == "absent"
        if present >= needed:
            return "present"
        # Not even if it showed in all that are left, and in those that could not be measured.
        if absent > lives - needed:
            return "absent"
    return "unknown"


def _run(command: Sequence[str], fingerprint: str, timeout: float) -> CommandRun:
    from lowtide.leakcheck.gate.cells import run_guarded

    with tempfile.TemporaryDirectory(prefix="lowtide-bisect-") as name:
        folder = Path(name) / "report"
        folder.mkdir()
        # Outside of the report folder, which some commands empty.
        command = [argument.replace(PLACEHOLDER, str(folder)) for argument in command]
        env = {**os.environ, REPORT_VARIABLE: str(folder)}
        ended = run_guarded(command, Path(name) / "end.json", timeout, env)
        if not ended:
            return CommandRun("unknown", f"{command[0]} could not be started, or was killed")
        if ended["timed_out"]:
            return CommandRun("unknown", f"the command was ended after {timeout:g} s, its time limit")
        return _judge(folder, ended["code"], fingerprint)


def _judge(folder: Path, code: int, fingerprint: str) -> CommandRun:
    """Judge a run that has ended by itself by its report and its exit code."""
    if not schema.is_in(folder):
        return CommandRun("unknown", f"the command ended with exit code {code} and wrote no report")
    try:
        report = schema.read(folder)
    except schema.ReportError as error:
        return CommandRun("unknown", str(error))
    found = _found(report, fingerprint)
    if found:
        return CommandRun("present", found)
    failed = [subject for subject in report.subjects if subject.outcome in ("error", "unsupported")]
    if failed:
        return CommandRun("unknown", f"{failed[0].id} was not judged: {failed[0].reason}")
    if not any(subject.outcome in ("clean", "leak") for subject in report.subjects):
        return CommandRun("unknown", "the report judges nothing")
    if code not in (0, schema.exit_code(report)):
        return CommandRun("unknown", f"the command ended with exit code {code}, which its report does not explain")
    return CommandRun("absent", f"{fingerprint} is not in the report")


def _found(report: Report, fingerprint: str) -> str:
    """Return the message of the leak, known or not; "" if it is not there."""
    for subject in report.subjects:
        for finding in subject.findings:
            for each in (finding, *finding.parts):
                # An older lowtide gave it the former one.
                if fingerprint in (each.fingerprint, each.former_fingerprint):
                    return f"{subject.id}: {each.message}"
    return ""
