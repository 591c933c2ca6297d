"""`lowtide history`: adds reports to the history, and shows the trends in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.leakcheck.cli.console import check_positive, find_console, refuse
from lowtide.reports import schema
from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.terminal.sparkline import sparkline

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from lowtide.leakcheck.gate.history import Trend

_FILE = "lowtide-history.sqlite"
VARIABLE = "LOWTIDE_HISTORY"
"""Names the history where no option does: a command line can be read by other users, with a password in it."""

_FINGERPRINT = 16
"""The digits of one."""

_MOST_SHOWN = 40
"""Trends that are shown; all are on the page."""

_WIDTH = 40


def history(
    database: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help=f"A file of SQLite, or postgresql://HOST/NAME [default: ${VARIABLE}, or {_FILE}].",
        ),
    ] = None,
    add: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="Add this report first; repeatable.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="With --add: what was judged [default: $GITHUB_SHA, or git's HEAD].")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write trends and watches as one HTML page.")
    ] = None,
    subject: Annotated[str, typer.Option(metavar="PATTERN", help="Show the subjects whose names match.")] = "*",
    last: Annotated[int, typer.Option(help="Runs that are shown, of each kind of hardware.")] = 400,
) -> None:
    """Show how residues went from run to run, the runs at which a level changed, and what `lowtide watch` has read.

    Exit codes: 0 shown, whatever it shows; 2 bad input, or the history cannot be used.
    """
    check_positive(last=last)
    if commit is not None and not add:
        refuse("--commit belongs to --add: add it, or leave it out")
    address = database or os.environ.get(VARIABLE) or _FILE
    with needing_history():
        from lowtide.leakcheck.gate.history import HistoryError, open_database, read_trends
        from lowtide.leakcheck.gate.history_page import render_page
        from lowtide.leakcheck.gate.watch_history import read_watches
    from lowtide.reports.folder import write_whole

    if not add and "://" not in address and not Path(address).exists():
        refuse(f"there is no history in {address}: add a report with --add DIR")
    console = find_console()
    try:
        with ExitStack() as stack:
            engine = open_database(address)
            stack.callback(engine.dispose)
            for folder in add or ():
                console.print(HangingText(_add(engine, folder, _commit() if commit is None else commit)))
            trends, watches = read_trends(engine, subject, last), read_watches(engine, subject)
        for watch in watches:
            console.print(HangingText(f"{watch.name}, {watch.began:%Y-%m-%d %H:%M}: {'; '.join(watch.said)}"))
        for line in trend_lines(trends):
            console.print(line, soft_wrap=False)
        if page is not None:
            write_whole(page, render_page(trends, watches))
            console.print(HangingText(f"page: {page}"))
    except (HistoryError, schema.ReportError) as error:
        refuse(str(error))


@contextmanager
def needing_history() -> Iterator[None]:
    """End the command where a library that is imported within the block is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lowtide"):
            raise
        refuse(f'{error.name} is not installed: pip install "lowtide[history]"')


def _add(engine: Engine, folder: Path, commit: str) -> str:
    from lowtide.leakcheck.gate.history import add_report

    run = add_report(engine, schema.read(folder), commit)
    return f"{folder} is in the history already" if run is None else f"{folder} is run {run}"


def _commit() -> str:
    """Return the commit of this CI job, else that of the working folder; "" where there is none."""
    named = os.environ.get("GITHUB_SHA")
    if named:
        return named
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def trend_lines(trends: Sequence[Trend]) -> Iterator[RenderableType]:
    """Yield what to print, from the newest change of a level to the trends that stayed as they were."""
    sentences = [sentence for trend in trends for sentence in trend.sentences()]
    for sentence in sentences[:_MOST_SHOWN]:
        yield HangingText(sentence, style="bold")
    if not sentences:
        yield HangingText("no level changed")
    table = Table(box=None, header_style="dim")
    for name in ("subject", "what", "hardware", "trend, oldest first", "last"):
        # A suppression names a finding by its fingerprint: that is no good without its last digits.
        table.add_column(name, overflow="fold", min_width=_FINGERPRINT if name == "what" else None)
    for trend in trends[:_MOST_SHOWN]:
        cells = (trend.subject, trend.what, trend.hardware)
        table.add_row(
            *(Text(one_line(cell)) for cell in cells), sparkline(trend.values, _WIDTH), trend.amount(trend.values[-1])
        )
    yield table
    if len(trends) > _MOST_SHOWN:
        yield HangingText(f"… and {len(trends) - _MOST_SHOWN} more; --page FILE writes all")
