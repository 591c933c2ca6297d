"""The one progress line of the commands: only where somebody watches, and gone when it is done."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def progress_line(console: Console) -> Progress:
    """A line with what is being done, how far it is, and since when."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not sys.stdout.isatty(),
        transient=True,
    )
