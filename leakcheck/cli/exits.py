"""How a command ends where there is nothing to judge."""

from __future__ import annotations

from typing import NoReturn

import typer

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    typer.echo(f"lowtide: {message}", err=True)
    raise typer.Exit(2)
