"""`lowtide diff`: what is new, gone or grown from one report to a later one."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse, write


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
    from lowtide.reports import schema
    from lowtide.reports.comparison.changes import compare_reports
    from lowtide.reports.comparison.renderings import render_as_markdown, render_as_page, render_for_terminal

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
