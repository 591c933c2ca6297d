"""What all commands share: where they print, their progress line, and how they end where there is nothing to judge."""

from __future__ import annotations

import os
import sys
import tempfile
from traceback import format_exception
from typing import Annotated, NoReturn, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""

WITHOUT_TERMINAL = 100
"""Columns of a table where nobody says how wide the output is shown, as in a log of a CI."""

Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, not only the most telling ones that fit.")]


def find_console(output: TextIO | None = None) -> Console:
    """Where to print: as wide as its terminal; elsewhere tables take `COLUMNS`, or 100, and prose is not folded.

    Without a terminal no control code is printed, whatever the environment forces; with `NO_COLOR` neither colours nor
    other styles.

    Args:
        output: None for standard output.
    """
    if (output or sys.stdout).isatty():
        return Console(file=output, color_system=None if colors_are_off() else "auto")
    reported = os.environ.get("COLUMNS", "")
    width = int(reported) if reported.isdecimal() and int(reported) else WITHOUT_TERMINAL
    return Console(file=output, width=width, soft_wrap=True, force_terminal=False)


def colors_are_off() -> bool:
    """Whether the user wants none: https://no-color.org."""
    return os.environ.get("NO_COLOR", "") != ""


def progress_line(console: Console) -> Progress:
    """A line with what is being done, how far it is and since when; only on a terminal, and gone when it is done."""
    return Progress(
        SpinnerColumn(),
        # What is done gives way to the figures where both do not fit.
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        console=console,
        disable=not sys.stdout.isatty() or console.is_dumb_terminal,
        transient=True,
        expand=True,
    )


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    from lowtide.reports.finding_lines import one_line

    # A message may quote a file or name one, and both may have anything in them.
    typer.echo(one_line(f"lowtide: {message}"), err=True)
    raise typer.Exit(2)


def report_own_error(error: BaseException) -> None:
    """Say in one line what went wrong in lowtide itself, and where its traceback is."""
    from lowtide.reports.finding_lines import one_line

    typer.echo(one_line(f"lowtide: {_described(error)}"), err=True)


def _described(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"this command needs {package}, which cannot be imported ({error}): install {package}"
    if isinstance(error, SystemExit):
        return f"nothing was judged: the program that ran ended the process by sys.exit({error.code!r})"
    said = f"an error of lowtide itself: {type(error).__name__}: {error}"
    traceback = "".join(format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lowtide-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(traceback)
    except OSError:
        typer.echo(traceback, err=True)
        return f"{said}; please report it with this traceback"
    return f"{said}; please report it with the traceback in {file.name}"
