"""`lowtide init`: the first configuration and the first nightly workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import refuse, say


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The project's folder.")] = Path(),
    target: Annotated[str | None, typer.Option(metavar="MODULE:FACTORY", help="Your engine's target.")] = None,
    pytest: Annotated[
        str | None, typer.Option(metavar="ARGS", help="What pytest runs [default: tests, if there is such a folder].")
    ] = None,
) -> None:
    """Write a first lowtide.toml and a nightly workflow for GitHub; a file that is there stays as it is.

    Exit codes: 0 written, or all there already; 2 bad input.
    """
    from lowtide.leakcheck.gate.settings import GateError
    from lowtide.leakcheck.gate.starter_files import CONFIGURATION, WORKFLOW, write_starter_files

    if not folder.is_dir():
        refuse(f"{folder} is no folder: give the project's")
    try:
        written, kept = write_starter_files(folder, target, pytest)
    except GateError as error:
        refuse(str(error))
    for path in written:
        say(f"{path} written")
    for path in kept:
        hint = ": add a [gate] table if it has none" if path.name == CONFIGURATION.name else ""
        say(f"{path} is there already and stays as it is{hint}")
    if folder / WORKFLOW in written:
        say(f"Put lowtide's git address into {folder / WORKFLOW}: there is no release yet that pip could find.")
    if written:
        say("Now try it: `lowtide gate --list` shows the cells, `lowtide gate` runs them.")
