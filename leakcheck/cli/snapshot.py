"""`lowtide snapshot`: what snapshots of torch's allocator say, one by itself or several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.text import Text

from lowtide.leakcheck.cli.console import find_console, refuse
from lowtide.probes.memory.stack_frames import StackFrame, telling_frames
from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.hanging_text import HangingText

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.leakcheck.snapshots.allocator_snapshot import AllocatorSnapshot, Compared, Survivors
    from lowtide.leakcheck.snapshots.allocator_snapshot import By as ComparedBy
    from lowtide.leakcheck.snapshots.blocks_and_events import Reserved, Segment

_MOST_FRAMES = 4
"""Of a stack that is shown below the tables."""


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
    from lowtide.leakcheck.snapshots.allocator_snapshot import SnapshotError, read_apart

    try:
        read = [replace(read_apart(file), name=name) for file, name in zip(files, _names(files), strict=True)]
    except SnapshotError as error:
        refuse(str(error))
    console = find_console()
    for part in _shown(read, by.value, top):
        console.print(part)


def _names(files: Sequence[Path]) -> list[str]:
    """Return what to call each file: as much of the end of its path as tells them apart."""
    longest = max(len(file.parts) for file in files)
    for length in range(1, longest + 1):
        names = [str(Path(*file.parts[-length:])) for file in files]
        if len(set(names)) == len(set(files)):
            break
    return names


def _shown(read: Sequence[AllocatorSnapshot], by: ComparedBy, top: int) -> Iterator[RenderableType]:
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


def pools_table(read: AllocatorSnapshot) -> FigureTable:
    """Show how free memory lies in the pools of each card."""
    pools = read.pools
    return FigureTable(
        title=f"{read.name}: pools (MiB)",
        labels=_places(pools),
        figures=(
            Column("segments", tuple(str(pool.segments) for pool in pools)),
            *_figures("reserved", pools),
            Column("empty_cache() gives back", tuple(_mib(pool.returnable) for pool in pools)),
            _fragmentation(pools),
        ),
        notes=tuple(
            f"the file contradicts itself: of cuda:{pool.device} it says that {_mib(pool.said)} MiB are in use, "
            f"and its blocks are {_mib(pool.used)}"
            for pool in pools
            if pool.said is not None and pool.said != pool.used
        ),
    )


def segments_table(segments: Sequence[Segment], top: int) -> Iterator[FigureTable]:
    """Yield how free memory lies in the segments that have some; no table where none has."""
    with_free = [each for each in segments if each.free]
    if not with_free:
        return
    shown = with_free[:top]
    addresses = tuple(f"{each.address:#x}{', expandable' * each.expandable}" for each in shown)
    yield FigureTable(
        title="Segments with the most free bytes (MiB)",
        labels=(*_places(shown), Column("segment", addresses)),
        figures=(*_figures("size", shown), _fragmentation(shown)),
        notes=_more(len(with_free), len(shown)),
    )


def _places(shown: Sequence[Reserved]) -> tuple[Column, ...]:
    pools = ("default" if each.pool == (0, 0) else str(each.pool) for each in shown)
    return Column("device", tuple(f"cuda:{each.device}" for each in shown)), Column("pool", tuple(pools))


def _figures(size: str, shown: Sequence[Reserved]) -> tuple[Column, ...]:
    figures = {
        size: [each.size for each in shown],
        "in use": [each.used for each in shown],
        "free": [each.free for each in shown],
        "largest free block": [each.largest_free for each in shown],
    }
    return tuple(Column(name, tuple(map(_mib, sizes))) for name, sizes in figures.items())


def _fragmentation(shown: Sequence[Reserved]) -> Column:
    return Column("fragmentation", tuple(f"{each.fragmentation:.0%}" for each in shown))


def survivors_table(survivors: Sequence[Survivors], top: int) -> FigureTable:
    """Show what is in use by allocating stack, and by stage where any is known."""
    from lowtide.leakcheck.snapshots.allocator_snapshot import texts_of

    shown = survivors[:top]
    stages = (
        (Column("stage", tuple(_stage(each) for each in shown)),)
        if any(each.stage is not None for each in survivors)
        else ()
    )
    return FigureTable(
        title="In use, by the function that allocated it (MiB)",
        labels=(
            Column("device", tuple(each.device for each in shown)),
            Column("fingerprint", tuple(each.fingerprint for each in shown)),
            *stages,
            Column("allocated by", tuple(texts_of(shown))),
        ),
        figures=(
            Column("MiB", tuple(_mib(each.bytes) for each in shown)),
            Column("blocks", tuple(str(each.count) for each in shown)),
        ),
        left=len(stages) + 1,
        notes=_more(len(survivors), len(shown)),
    )


def stages_table(read: AllocatorSnapshot, top: int) -> FigureTable:
    """Show what is in use by the stage in which it was allocated."""
    from lowtide.leakcheck.snapshots.allocator_snapshot import sum_stages

    stages = sum_stages(read)
    shown = stages[:top]
    return FigureTable(
        title="In use, by the stage that allocated it (MiB)",
        labels=(
            Column("device", tuple(each.survivors.device for each in shown)),
            Column("stage", tuple(_stage(each.survivors) for each in shown)),
        ),
        figures=(
            Column("MiB", tuple(_mib(each.bytes[0]) for each in shown)),
            Column("blocks", tuple(str(each.counts[0]) for each in shown)),
        ),
        notes=_more(len(stages), len(shown)),
    )


def stack_lines(survivors: Sequence[Survivors]) -> Iterator[RenderableType]:
    """Yield, of each stack, the innermost frame and the first ones that are not torch's or Python's."""
    # One stack stands in the table once for each stage; two of one fingerprint may be in other files.
    sizes: dict[tuple[str, tuple[StackFrame, ...]], int] = {}
    for each in survivors:
        key = (each.fingerprint, each.stack)
        sizes[key] = sizes.get(key, 0) + each.bytes
    for (mark, stack), size in sizes.items():
        if stack:
            yield HangingText(f"{mark}  {_mib(size)} MiB", style="bold")
            yield from _frames(stack)


def _frames(stack: Sequence[StackFrame]) -> Iterator[HangingText]:
    shown = sorted({0, *telling_frames(stack)[:_MOST_FRAMES]})[:_MOST_FRAMES]
    for turn, after in zip(shown, [*shown[1:], len(stack)], strict=True):
        frame = stack[turn]
        yield HangingText(f"  {frame.function}, {frame.file}:{frame.line}")
        if after > turn + 1:
            yield HangingText(f"  … {after - turn - 1} more", style="dim")


def differences_table(read: Sequence[AllocatorSnapshot], by: ComparedBy, top: int) -> RenderableType:
    """Show what differs between several snapshots, by stack or by stage."""
    from lowtide.leakcheck.snapshots.allocator_snapshot import compare, texts_of

    differing = compare(read, by)
    if not differing:
        return Text(f"in use is the same in all of them, {'stage by stage' if by == 'stage' else 'stack by stack'}")
    shown = differing[:top]
    last = Column("spread", tuple(_mib(each.spread) for each in shown))
    if by != "rank":
        last = Column("growth", tuple(f"{_mib(each.growth)} {_trend(each)}" for each in shown))
    if by == "stage":
        title = "What differs from file to file, by the stage that allocated it (MiB)"
        labels = (
            Column("device", tuple(each.survivors.device for each in shown)),
            Column("stage", tuple(_stage(each.survivors) for each in shown)),
        )
    else:
        title = f"What differs from {by} to {by}, by the function that allocated it (MiB)"
        labels = (
            Column("fingerprint", tuple(each.survivors.fingerprint for each in shown)),
            Column("allocated by", tuple(texts_of([each.survivors for each in shown]))),
        )
    files = (Column(each.name, tuple(_mib(row.bytes[turn]) for row in shown)) for turn, each in enumerate(read))
    return FigureTable(title=title, labels=labels, figures=(*files, last), notes=_more(len(differing), len(shown)))


def _trend(compared: Compared) -> str:
    return "grows always" if compared.grows_always else compared.trend


def _more(count: int, shown: int) -> tuple[str, ...]:
    return (f"{count - shown} more: --top {count}",) if count > shown else ()


def _stage(survivors: Survivors) -> str:
    from lowtide.leakcheck.snapshots.blocks_and_events import OUTSIDE

    if survivors.stage is None:
        return "not known"
    return "outside of all" if survivors.stage == OUTSIDE else survivors.stage


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"
