"""`lowtide bisect-step`: one step of `git bisect run`, whether a commit has the leak with a certain fingerprint.

A leak that shows in some lives only is looked for in several. A life that could not be measured is neither good nor
bad, so that a commit that does not build never passes for the culprit.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

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
    answer = BisectStep(command, fingerprint, lives, needed, timeout).run(_show)
    say(f"lowtide: the leak {fingerprint} is {answer} in this commit", err=True)
    raise typer.Exit(EXIT_CODES[answer])


def _show(life: CommandRun) -> None:
    say(f"lowtide: {life.answer}: {life.why}", err=True)


def _refuse(message: str) -> NoReturn:
    say(f"lowtide: {message}", err=True)
    raise typer.Exit(STOPS_BISECT)


@dataclass(frozen=True)
class CommandRun:
    """What one run of the command showed.

    Attributes:
        answer: whether the leak was there; `unknown` if nothing says so.
        why: what was found, or why it could not be measured.
    """

    answer: Answer
    why: str


@dataclass(frozen=True)
class BisectStep:
    """What is asked of each commit.

    Attributes:
        command: what builds and judges the commit, and writes a report.
        fingerprint: that of the leak.
        lives: how often the command is run at most.
        needed: in how many of them the leak must show.
        timeout: seconds after which a run's processes are ended.
    """

    command: Sequence[str]
    fingerprint: str
    lives: int = 1
    needed: int = 1
    timeout: float = 3600.0

    def run(self, listener: Callable[[CommandRun], None]) -> Answer:
        """Run the command until it is certain whether the leak shows in as many lives as are needed.

        Args:
            listener: called after each life.
        """
        present = absent = 0
        for _ in range(self.lives):
            life = self._live()
            listener(life)
            present += life.answer == "present"
            absent += life.answer == "absent"
            if present >= self.needed:
                return "present"
            # Not even if it showed in all that are left, and in those that could not be measured.
            if absent > self.lives - self.needed:
                return "absent"
        return "unknown"

    def _live(self) -> CommandRun:
        from lowtide.leakcheck.gate.cells import run_guarded

        with tempfile.TemporaryDirectory(prefix="lowtide-bisect-") as name:
            folder = Path(name) / "report"
            folder.mkdir()
            # Outside of the report folder, which some commands empty.
            command = [argument.replace(PLACEHOLDER, str(folder)) for argument in self.command]
            env = {**os.environ, REPORT_VARIABLE: str(folder)}
            ended = run_guarded(command, Path(name) / "end.json", self.timeout, env)
            return _judge(folder, ended, self)


def _judge(folder: Path, ended: Mapping[str, Any], step: BisectStep) -> CommandRun:
    if not ended:
        return CommandRun("unknown", f"{step.command[0]} could not be started, or was killed")
    if ended["timed_out"]:
        return CommandRun("unknown", f"the command was ended after {step.timeout:g} s, its time limit")
    if not schema.is_in(folder):
        return CommandRun("unknown", f"the command ended with exit code {ended['code']} and wrote no report")
    try:
        report = schema.read(folder)
    except schema.ReportError as error:
        return CommandRun("unknown", str(error))
    found = _found(report, step.fingerprint)
    if found:
        return CommandRun("present", found)
    failed = [subject for subject in report.subjects if subject.outcome in ("error", "unsupported")]
    if failed:
        return CommandRun("unknown", f"{failed[0].id} was not judged: {failed[0].reason}")
    if not any(subject.outcome in ("clean", "leak") for subject in report.subjects):
        return CommandRun("unknown", "the report judges nothing")
    if ended["code"] not in (0, schema.exit_code(report)):
        return CommandRun(
            "unknown", f"the command ended with exit code {ended['code']}, which its report does not explain"
        )
    return CommandRun("absent", f"{step.fingerprint} is not in the report")


def _found(report: Report, fingerprint: str) -> str:
    """Return the message of the leak, known or not; "" if it is not there."""
    for subject in report.subjects:
        for finding in subject.findings:
            for each in (finding, *finding.parts):
                # An older lowtide gave it the former one.
                if fingerprint in (each.fingerprint, each.former_fingerprint):
                    return f"{subject.id}: {each.message}"
    return ""
