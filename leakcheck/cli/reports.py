"""The commands on a report that there is: it is shown (`report`, `open`), compared (`diff`), excused (`suppress`)."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import Wide, ended_with, find_console, refuse, say, write, write_report
from lowtide.reports import schema, terminal
from lowtide.reports.sizes import format_amount

if TYPE_CHECKING:
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
