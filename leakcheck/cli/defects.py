"""`lowtide defects`: the historical bugs, listed or verified."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse, say
from lowtide.leakcheck.targets.target import Device, device_name


def defects(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run each, and its twin without it; print what was found as Markdown."),
    ] = False,
    device: Annotated[Device, typer.Option(help="With --verify: where; what cannot show there runs on the CPU.")] = (
        Device.AUTO
    ),
    jobs: Annotated[int, typer.Option(help="With --verify: processes at the same time.")] = 2,
    engine_process: Annotated[
        bool,
        typer.Option("--engine-process", help="With --verify: the engine's core, and the bug, in another process."),
    ] = False,
) -> None:
    """List the historical bugs that the reference engine can switch on.

    Exit codes of --verify: 0 each was found as it must be and nothing without it, 1 not so, 2 could not be measured.
    """
    from rich.table import Column, Table

    from lowtide.engine.defects import DEFECTS

    if verify:
        if jobs < 1:
            refuse(f"--jobs {jobs} is not possible: use 1 or more")
        raise typer.Exit(_verify(device, jobs, engine_process))
    table = Table(
        Column("name", no_wrap=True),
        Column("where it happened", overflow="fold"),
        Column("what went wrong", overflow="fold"),
        box=None,
    )
    for known in DEFECTS.values():
        table.add_row(known.name, known.source, known.summary)
    find_console().print(table)


def _verify(device: Device, jobs: int, engine_process: bool) -> int:
    from lowtide.engine.defects import DEFECTS
    from lowtide.engine.errors import ConfigError
    from lowtide.leakcheck.cli.verify import table, verify

    done = []
    try:
        kind = device_name(device).partition(":")[0]
    except ConfigError as error:
        refuse(str(error))
    for verified in verify(DEFECTS.values(), kind, jobs=jobs, in_core=engine_process):
        done.append(verified)
        if sys.stderr.isatty():
            say(f"{len(done)}/{len(DEFECTS)} {verified.defect.name}: {verified.note or 'as it must be'}", err=True)
    say(*table(done))
    wrong = [item for item in done if item.note and item.bug is not None]
    skipped = sum(item.bug is None for item in done)
    right = len(done) - len(wrong) - skipped
    say("", f"{right} of {len(done)} found as they must be, {len(wrong)} not, {skipped} need a card")
    if any(run is not None and run.subject is None for item in done for run in (item.bug, item.twin)):
        return 2
    return 1 if wrong else 0
