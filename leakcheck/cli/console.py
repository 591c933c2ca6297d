"""What all commands share: where they print, their progress line, and how they end where there is nothing to judge."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from traceback import format_exception
from typing import Annotated, NoReturn, TextIO

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""

_EXTRAS = {"torch": "engine", "hypothesis": "fuzz"}
"""What some commands need beside the others, and the extra with which it comes."""

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
    # What stands in brackets, or between colons, is a name's and no markup.
    console = partial(Console, file=output, markup=False, emoji=False, highlight=False)
    if (output or sys.stdout).isatty():
        made = console(color_system=None if colors_are_off() else "auto")
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else WITHOUT_TERMINAL
        made = console(width=width, soft_wrap=True, force_terminal=False)
    made.push_render_hook(_EscapesLines())
    return made


class _EscapesLines(RenderHook):
    """Escapes what is printed when its lines are laid out: a cell that was folded may begin one."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


@dataclass(frozen=True)
class _Escaped:
    shown: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from lowtide.reports.escaping import escape_characters, one_line

        begun = ""
        for segment in console.render(self.shown, options):
            if segment.control:
                yield segment
                continue
            shown = []
            for turn, text in enumerate(segment.text.split("\n")):
                begun = begun if turn == 0 else ""
                shown.append(escape_characters(text) if begun.strip() else one_line(text))
                begun += text
            yield segment._replace(text="\n".join(shown))


def colors_are_off() -> bool:
    """Whether the user wants none: https://no-color.org."""
    return os.environ.get("NO_COLOR", "") != ""


def progress_line(console: Console) -> Progress:
    """A line with what is being done, how far it is and since when; only on a terminal, and gone when it is done."""
    return Progress(
        SpinnerColumn(),
        # What is done gives way to the figures where both do not fit.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        console=console,
        disable=not sys.stdout.isatty() or console.is_dumb_terminal,
        transient=True,
        expand=True,
    )


def say(*lines: str, err: bool = False) -> None:
    """Print lines. A line break within one is data, and shown as such: it may be of a file, or name one."""
    from lowtide.reports.escaping import one_line

    typer.echo("\n".join(map(one_line, lines)), err=err)


def write(text: str | bytes) -> None:
    """Write to standard output what is in a format with escapes of its own: JSON, Markdown, a page, a CI's commands."""
    typer.echo(text, nl=False)


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    say(f"lowtide: {message}", err=True)
    raise typer.Exit(2)


def report_own_error(error: BaseException) -> None:
    """Say in one line what went wrong in lowtide itself, and where its traceback is."""
    say(f"lowtide: {_described(error)}", err=True)


def _described(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        remedy = f'pip install "lowtide[{_EXTRAS[package]}]"' if package in _EXTRAS else f"install {package}"
        return f"this command needs {package}, which cannot be imported ({error}): {remedy}"
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
        say(*traceback.splitlines(), err=True)
        return f"{said}; please report it with this traceback"
    return f"{said}; please report it with the traceback in {file.name}"
