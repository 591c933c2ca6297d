"""`lowtide snapshot`: what snapshots of torch's allocator say, one by itself or several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import find_console, refuse

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, Survivors
    from lowtide.reports.figure_table import FigureTable

_MOST_FRAMES = 4


class By(str, Enum):
    """What several files are."""

    cycle = "cycle"
    rank = "rank"


def snapshot(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Pickles that torch.cuda.memory._dump_snapshot has written."),
    ],
    by: Annotated[
        By,
        typer.Option(help="What several files are: one process at later and later moments, or ranks at the same one."),
    ] = By.cycle,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 20,
) -> None:
    """Show what is in use by allocating stack, and how free memory lies; of several files what differs.

    Nothing in a file is executed: whatever is more than plain data is refused by its name. The history of allocations
    in it is not read.

    Exit codes: 0 shown, 2 a file is no snapshot.
    """
    from lowtide.leakcheck.snapshots.allocator_snapshot import SnapshotError, read_snapshot

    try:
        read = [read_snapshot(file) for file in files]
    except SnapshotError as error:
        refuse(str(error))
    console = find_console()
    for part in _shown(read, by.value, top):
        console.print(part)


def _shown(read: Sequence[AllocatorSnapshot], by: str, top: int) -> Iterator[RenderableType]:
    for each in read:
        yield _pools(each)
    if len(read) == 1:
        yield _survivors(read[0].survivors, top)
        yield from _stacks(read[0].survivors[:top])
    else:
        yield from _differences(read, by, top)


def _pools(read: AllocatorSnapshot) -> FigureTable:
    from lowtide.reports.figure_table import Column, FigureTable
    from lowtide.reports.finding_lines import one_line

    pools = read.pools
    figures = {
        "segments": [str(pool.segments) for pool in pools],
        "reserved": [_mib(pool.reserved) for pool in pools],
        "in use": [_mib(pool.used) for pool in pools],
        "free": [_mib(pool.free) for pool in pools],
        "largest free block": [_mib(pool.largest_free) for pool in pools],
        "in empty segments": [_mib(pool.empty) for pool in pools],
        "fragmentation": [f"{pool.fragmentation:.0%}" for pool in pools],
    }
    return FigureTable(
        title=f"{one_line(read.name)}: pools (MiB)",
        labels=(
            Column("device", tuple(pool.device for pool in pools)),
            Column("pool", tuple("default" if pool.id == (0, 0) else str(pool.id) for pool in pools)),
        ),
        figures=tuple(Column(name, tuple(cells)) for name, cells in figures.items()),
    )


def _survivors(survivors: Sequence[Survivors], top: int) -> FigureTable:
    from lowtide.reports.figure_table import Column, FigureTable
    from lowtide.reports.finding_lines import one_line

    shown = survivors[:top]
    more = len(survivors) - len(shown)
    return FigureTable(
        title="In use, by the function that allocated it (MiB)",
        labels=(
            Column("device", tuple(each.device for each in shown)),
            Column("fingerprint", tuple(each.fingerprint for each in shown)),
            Column("allocated by", tuple(one_line(each.text) for each in shown)),
        ),
        figures=(
            Column("MiB", tuple(_mib(each.bytes) for each in shown)),
            Column("blocks", tuple(str(each.count) for each in shown)),
        ),
        notes=(f"{more} more: --top {len(survivors)}",) if more else (),
    )


def _stacks(survivors: Sequence[Survivors]) -> Iterator[RenderableType]:
    from rich.text import Text

    from lowtide.reports.finding_lines import one_line

    for each in survivors:
        if each.stack:
            yield Text(f"{each.fingerprint}  {_mib(each.bytes)} MiB", style="bold")
            for frame in each.stack[:_MOST_FRAMES]:
                yield Text(one_line(f"  {frame.function}, {frame.file}:{frame.line}"))
            if len(each.stack) > _MOST_FRAMES:
                yield Text(f"  … {len(each.stack) - _MOST_FRAMES} more", style="dim")


def _differences(read: Sequence[AllocatorSnapshot], by: str, top: int) -> Iterator[RenderableType]:
    from rich.text import Text

    from lowtide.leakcheck.snapshots.comparison import compare
    from lowtide.reports.figure_table import Column, FigureTable
    from lowtide.reports.finding_lines import one_line

    by_rank = by == "rank"
    differing = compare(read, by_rank=by_rank)
    if not differing:
        yield Text("in use is the same in all of them, stack by stack")
        return
    shown = differing[:top]
    more = len(differing) - len(shown)
    last = Column("spread", tuple(_mib(each.spread) for each in shown))
    if not by_rank:
        words = ("grows always" if each.grows_always else each.trend for each in shown)
        last = Column("growth", tuple(f"{_mib(each.growth)} {word}" for each, word in zip(shown, words, strict=True)))
    yield FigureTable(
        title=f"What differs from {by} to {by}, by the function that allocated it (MiB)",
        labels=(
            Column("fingerprint", tuple(each.survivors.fingerprint for each in shown)),
            Column("allocated by", tuple(one_line(each.survivors.text) for each in shown)),
        ),
        figures=(
            *(
                Column(one_line(each.name), tuple(_mib(row.bytes[turn]) for row in shown))
                for turn, each in enumerate(read)
            ),
            last,
        ),
        notes=(f"{more} more: --top {len(differing)}",) if more else (),
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"
