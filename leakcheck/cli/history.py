"""`lowtide history`: adds reports to the history, and shows the trends in it."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse

_FILE = "lowtide-history.sqlite"
_VARIABLE = "LOWTIDE_HISTORY"


def history(
    database: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help=f"A file of SQLite, or postgresql://HOST/NAME [default: ${_VARIABLE}, or {_FILE}].",
        ),
    ] = None,
    add: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="Add this report first; repeatable.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="With --add: what was judged [default: $GITHUB_SHA, or git's HEAD].")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all trends as one HTML page.")] = None,
    subject: Annotated[str, typer.Option(metavar="PATTERN", help="Show the subjects whose names match.")] = "*",
    last: Annotated[int, typer.Option(help="Runs that are shown, of each kind of hardware.")] = 400,
) -> None:
    """Show how residues went from run to run, and name the runs at which a level changed.

    Exit codes: 0 shown, whatever it shows; 2 bad input, or the history cannot be used.
    """
    if last < 1:
        refuse(f"--last {last} is not possible: use 1 or more")
    if commit is not None and not add:
        refuse("--commit belongs to --add: add it, or leave it out")
    address = database or os.environ.get(_VARIABLE) or _FILE
    try:
        from lowtide.leakcheck.history.database import open_database
        from lowtide.leakcheck.history.page import render_page
        from lowtide.leakcheck.history.terminal import trend_lines
        from lowtide.leakcheck.history.trends import read_trends
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lowtide"):
            raise
        refuse(f'{error.name} is not installed: pip install "lowtide[history]"')
    from lowtide.leakcheck.history.errors import HistoryError
    from lowtide.reports.folder import write_whole
    from lowtide.reports.hanging_text import HangingText
    from lowtide.reports.schema import ReportError

    if not add and "://" not in address and not Path(address).exists():
        refuse(f"there is no history in {address}: add a report with --add DIR")
    console = find_console()
    try:
        with ExitStack() as stack:
            engine = open_database(address)
            stack.callback(engine.dispose)
            for folder in add or ():
                console.print(HangingText(_add(engine, folder, _commit() if commit is None else commit)))
            trends = read_trends(engine, subject, last)
        for line in trend_lines(trends):
            console.print(line, soft_wrap=False)
        if page is not None:
            write_whole(page, render_page(trends))
            console.print(HangingText(f"page: {page}"))
    except (HistoryError, ReportError) as error:
        refuse(str(error))


def _add(engine: object, folder: Path, commit: str) -> str:
    from sqlalchemy.engine import Engine

    from lowtide.leakcheck.history.store import add_report
    from lowtide.reports import schema

    assert isinstance(engine, Engine)
    run = add_report(engine, schema.read(folder), commit)
    return f"{folder} is in the history already" if run is None else f"{folder} is run {run}"


def _commit() -> str:
    """The commit of this CI job, else that of the working folder; "" where there is none."""
    named = os.environ.get("GITHUB_SHA")
    if named:
        return named
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
