"""`lowtide bisect-step`: one step of `git bisect run`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lowtide.leakcheck.cli.console import say

if TYPE_CHECKING:
    from lowtide.leakcheck.gate.bisection import CommandRun

STOPS_BISECT = 128
"""Exit code for bad input: `git bisect run` takes 2 for a bad commit, and stops at 128 and above."""


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
    from lowtide.leakcheck.gate.bisection import EXIT_CODES, BisectStep

    answer = BisectStep(command, fingerprint, lives, needed, timeout).run(_show)
    say(f"lowtide: the leak {fingerprint} is {answer} in this commit", err=True)
    raise typer.Exit(EXIT_CODES[answer])


def _show(life: CommandRun) -> None:
    say(f"lowtide: {life.answer}: {life.why}", err=True)


def _refuse(message: str) -> NoReturn:
    say(f"lowtide: {message}", err=True)
    raise typer.Exit(STOPS_BISECT)
