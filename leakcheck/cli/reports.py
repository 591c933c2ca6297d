"""The commands on a report that there is: it is shown (`report`, `open`), compared (`diff`), excused (`suppress`).

And added to a history of reports, whose trends are shown (`history`).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import date
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.leakcheck.cli.console import (
    Wide,
    check_positive,
    ended_with,
    find_console,
    refuse,
    say,
    write,
    write_report,
)
from lowtide.reports import schema, terminal
from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.sizes import format_amount
from lowtide.reports.terminal.sparkline import sparkline

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from lowtide.leakcheck.gate.history import Trend
    from lowtide.leakcheck.suppressions.toml import Added


_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a report.")]


def report(
    folder: _Folder,
    wide: Wide = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show all of a long report; on a terminal it is the worst 20 findings.")
    ] = False,
) -> None:
    """Show a report on the terminal, and make all files beside its leakcheck.json from it again.

    Of a run that has not come to its end, whatever ended it, these are what it had finished.

    Exit codes: those of the run that wrote it: 0 clean, 1 leak, 2 something could not be measured, or bad input.
    """
    from lowtide.reports.markdown import verdict

    try:
        read = schema.read(folder)
    except schema.ReportError as error:
        refuse(str(error))
    console, page = find_console(), folder / "index.html"
    is_part = console.is_terminal and not show_all and terminal.is_long(read)
    if is_part:
        rest = f"lowtide report {shlex.quote(str(folder))} --all, or {page}"
        console.print(terminal.render_worst(read, rest, wide=wide))
        console.print(f"report: {page}", verdict(read), sep="\n", markup=False, highlight=False)
    # Of a long report its files take longer than what is shown. A run that has not come to its end may still go on.
    with console.status(f"making the files in {folder} again") if is_part else nullcontext():
        _, unwritten = write_report(read, folder, is_final=False)
    if not is_part:
        notes = () if unwritten else (f"report: {page}",)
        console.print(terminal.render(read, *notes, wide=wide))
    raise typer.Exit(ended_with(schema.exit_code(read), unwritten))


def open_page(
    folder: _Folder,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page on this machine until Ctrl-C; it follows a life that runs there."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: where; 0 takes a free one.")] = 0,
) -> None:
    """Open a report's page in the browser; it is made from leakcheck.json first where it is not there.

    With --serve the page shows the life that `lowtide run --report DIR` or `lowtide check --report DIR` goes through,
    stage by stage, and then its report. Only this machine can reach it, and only with the token in its address.

    Exit codes: 0 opened, 2 bad input, or there is no browser.
    """
    from lowtide.reports.folder import write_folder

    if serve:
        _serve(folder, port)
        return
    page = folder / "index.html"
    try:
        if not page.exists():
            write_folder(schema.read(folder), folder, is_final=False)
    except schema.ReportError as error:
        refuse(str(error))
    if not webbrowser.open(page.resolve().as_uri()):
        refuse(f"no browser can be opened here: open {page.resolve()}")
    say(str(page))


def _serve(folder: Path, port: int) -> None:
    from lowtide.reports.live.server import PageServer

    try:
        server = PageServer(folder, port)
    except OSError as error:
        refuse(f"{folder} cannot be served on port {port}: {error.strerror or error}")
    # Said first: the browser may be on another machine, behind a tunnel.
    say(server.url)
    # One in a terminal, as w3m, returns when it is closed, and waits for the page before.
    page = server.forwarder.resolve().as_uri()
    # However it ends, nothing stays in the folder.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    try:
        server.serve()
    except KeyboardInterrupt:
        say("lowtide: the page is served no longer", err=True)
    finally:
        server.close()


class As(str, Enum):
    """How a comparison is written."""

    text = "text"
    markdown = "markdown"
    html = "html"


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="The folder of the earlier report.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The folder of the later one.")],
    output: Annotated[
        As, typer.Option("--format", help="How it is printed; a page goes into a file with `>`.")
    ] = As.text,
) -> None:
    """Compare two reports, finding by finding; the same fingerprint is the same leak.

    Exit codes: 0 no worse, 1 a leak is new or has grown and no suppression knows it, 2 bad input, or a subject that
    leaked before was not judged since.
    """
    from lowtide.reports.comparison.changes import (
        compare_reports,
        render_as_markdown,
        render_as_page,
        render_for_terminal,
    )

    try:
        changes = compare_reports(schema.read(before), schema.read(after))
    except schema.ReportError as error:
        refuse(str(error))
    if output is As.text:
        find_console().print(render_for_terminal(changes))
    elif output is As.markdown:
        write(render_as_markdown(changes).encode())
    else:
        # As bytes: the page says that it is UTF-8, whatever the locale is.
        write(f"{render_as_page(changes, str(before), str(after))}\n".encode())
    if any(change.fails for change in changes):
        raise typer.Exit(1)
    if any(change.kind == "not judged" for change in changes):
        raise typer.Exit(2)


def suppress(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="The folder of a report; with --check files of suppressions.")
    ],
    file: Annotated[Path, typer.Option(help="Where to: a file of suppressions, or a pyproject.toml.")] = (
        Path("lowtide.toml")
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say which entries cannot be used, or have expired.")
    ] = False,
) -> None:
    """Write an entry for each leak of a report into a file of suppressions; why it may stay is left to you to say.

    Exit codes: 0 written, or nothing to write; 2 bad input, and the file is as it was. With --check 0 all entries are
    in force; 2 some are not.
    """
    from lowtide.leakcheck.suppressions.toml import SuppressionError, append_entries

    if check:
        lines = [line for path in paths for line in _not_in_force(path)]
        if lines:
            say(*lines, err=True)
            raise typer.Exit(2)
        return
    if len(paths) > 1:
        refuse(f"{len(paths)} folders are too many: name that of one report, or use --check with files of suppressions")
    folder = paths[0]
    try:
        subjects = schema.read(folder).subjects
        added = append_entries(file, [finding for subject in subjects for finding in subject.findings])
    except (schema.ReportError, SuppressionError) as error:
        refuse(str(error))
    for line in _lines(added, folder, file):
        say(line)


def _not_in_force(path: Path) -> list[str]:
    """Return what is wrong with the entries of a file as it stands, a line each."""
    from lowtide.leakcheck.suppressions.entries import load, problems
    from lowtide.leakcheck.suppressions.toml import SuppressionError

    try:
        entries = load(path).entries
    except SuppressionError as error:
        return [f"lowtide: {error}"]
    # Whether one is still needed only a run can tell.
    used = {entry.id for entry in entries}
    return [f"lowtide: {path}{line.removeprefix(path.name)}" for line in problems(entries, used, date.today())]


def _lines(added: Added, folder: Path, file: Path) -> Iterator[str]:
    """Yield what to say of what was written."""
    already = f"{format_amount(added.known, 'leaks')} already listed in {file}" if added.known else ""
    if not added.entries:
        yield f"nothing to write: {already or f'{folder} has no leak that is not suppressed'}"
        return
    for line, finding in added.entries:
        what = f"{finding.resource}/{finding.cause}: {finding.message}"
        yield f"{file}:{line}: {finding.fingerprint} {what}"
    yield f"{len(added.entries)} written to {file}" + (f"; {already}" if already else "")
    yield f"Now say in the reason of each why it may stay: {file} does not load before."


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
        yield HangingText("no level changed" if trends else "no run is there yet: add its report with --add DIR")
    if not trends:
        return
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
