"""`lowtide snapshot`: what snapshots of torch's allocator say, one by itself or several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot
    from lowtide.leakcheck.snapshots.allocator_snapshot import By as ComparedBy


class By(str, Enum):
    """What several files are, and what is added up."""

    cycle = "cycle"
    rank = "rank"
    stage = "stage"


def snapshot(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Pickles that torch.cuda.memory._dump_snapshot has written."),
    ],
    by: Annotated[
        By,
        typer.Option(
            help="What several files are: one process at later and later moments (cycle), or ranks at the same one "
            "(rank). With stage, one process; what is in use is added up by stage, not by stack."
        ),
    ] = By.cycle,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 20,
) -> None:
    """Show what is in use by allocating stack and stage, and how free memory lies; of several files what differs.

    The stage is what torch.cuda.memory._set_memory_metadata had set when a block was allocated, or else the innermost
    torch.profiler.record_function; "not known" where the history in the file does not have the allocation, or has no
    stages.

    Nothing in a file is executed: whatever is more than plain data is refused by its name.

    Exit codes: 0 shown, 2 a file is no snapshot.
    """
    from lowtide.leakcheck.snapshots.allocator_snapshot import SnapshotError
    from lowtide.leakcheck.snapshots.separate_reader import read_apart

    try:
        read = [replace(read_apart(file), name=name) for file, name in zip(files, _names(files), strict=True)]
    except SnapshotError as error:
        refuse(str(error))
    console = find_console()
    for part in _shown(read, by.value, top):
        console.print(part)


def _names(files: Sequence[Path]) -> list[str]:
    """What to call each: as much of the end of its path as tells them apart."""
    longest = max(len(file.parts) for file in files)
    for length in range(1, longest + 1):
        names = [str(Path(*file.parts[-length:])) for file in files]
        if len(set(names)) == len(set(files)):
            break
    return names


def _shown(read: Sequence[AllocatorSnapshot], by: ComparedBy, top: int) -> Iterator[RenderableType]:
    from lowtide.leakcheck.cli.reports.snapshot_tables import (
        differences_table,
        pools_table,
        segments_table,
        stack_lines,
        stages_table,
        survivors_table,
    )

    for each in read:
        yield pools_table(each)
    if len(read) > 1:
        yield differences_table(read, by, top)
        return
    (only,) = read
    yield from segments_table(only.segments, top)
    if by == "stage":
        yield stages_table(only, top)
    else:
        yield survivors_table(only.survivors, top)
        yield from stack_lines(only.survivors[:top])
