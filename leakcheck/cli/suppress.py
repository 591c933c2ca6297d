"""`lowtide suppress`: entries for the leaks of a report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import refuse, say

if TYPE_CHECKING:
    from lowtide.leakcheck.suppressions.toml import Added


def suppress(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a report.")],
    file: Annotated[Path, typer.Option(help="Where to: a file of suppressions, or a pyproject.toml.")] = (
        Path("lowtide.toml")
    ),
) -> None:
    """Write an entry for each leak of a report into a file of suppressions; why it may stay is left to you to say.

    Exit codes: 0 written, or nothing to write; 2 bad input, and the file is as it was.
    """
    from lowtide.leakcheck.suppressions.toml import SuppressionError, append_entries
    from lowtide.reports import schema

    try:
        subjects = schema.read(folder).subjects
        added = append_entries(file, [finding for subject in subjects for finding in subject.findings])
    except (schema.ReportError, SuppressionError) as error:
        refuse(str(error))
    for line in _lines(added, folder, file):
        say(line)


def _lines(added: Added, folder: Path, file: Path) -> Iterator[str]:
    """Yield what to say of what was written."""
    already = f"{added.known} leak(s) have an entry in {file} already" if added.known else ""
    if not added.entries:
        yield f"nothing to write: {already or f'{folder} has no leak that is not suppressed'}"
        return
    for line, finding in added.entries:
        what = f"{finding.resource}/{finding.cause}: {finding.message}"
        yield f"{file}:{line}: {finding.fingerprint} {what}"
    yield f"{len(added.entries)} written to {file}" + (f"; {already}" if already else "")
    yield f"Now say in the reason of each why it may stay: {file} does not load before."
