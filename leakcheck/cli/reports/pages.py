"""`lowtide report` and `lowtide open`: a report's pages, made again or shown."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a report.")]


def report(folder: _Folder) -> None:
    """Show a report on the terminal, and make all files beside its leakcheck.json from it again.

    Exit codes: those of the run that wrote it: 0 clean, 1 leak, 2 something could not be measured, or bad input.
    """
    from lowtide.reports import schema, terminal
    from lowtide.reports.folder import write_folder

    try:
        read = schema.read(folder)
        write_folder(read, folder)
    except schema.ReportError as error:
        refuse(str(error))
    find_console().print(terminal.render(read, f"report: {folder / 'index.html'}"))
    raise typer.Exit(schema.exit_code(read))


def open_page(folder: _Folder) -> None:
    """Open a report's page in the browser; it is made from leakcheck.json first where it is not there.

    Exit codes: 0 opened, 2 bad input, or there is no browser.
    """
    from lowtide.reports import schema
    from lowtide.reports.folder import write_folder

    page = folder / "index.html"
    try:
        if not page.exists():
            write_folder(schema.read(folder), folder)
    except schema.ReportError as error:
        refuse(str(error))
    if not webbrowser.open(page.resolve().as_uri()):
        refuse(f"no browser can be opened here: open {page.resolve()}")
    typer.echo(page)
