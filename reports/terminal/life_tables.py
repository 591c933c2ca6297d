"""The tables of a life's stages and ledgers; each of their columns knows by how much it changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.processes.tree_table import TreeTable
from lowtide.reports.schema import Ledger, Readings, Stage
from lowtide.reports.sizes import format_bytes

_ARENAS = ("weights", "kv_cache", "runtime", "workspace")
_UNKNOWN = "—"


def stage_table(stages: Sequence[Stage]) -> FigureTable:
    """Return one row per stage, with the readings after it; what no stage changes is named below."""
    sizes, rates = _size_columns(stages), _rate_columns(stages)
    varying, notes = _varying([*sizes, *rates])
    seconds = Column("seconds", tuple(f"{stage.seconds:.3f}" for stage in stages))
    others = [_process_column(name, stages) for name in _process_names(stages)]
    return FigureTable(
        title="After each stage (MiB)",
        labels=(
            Column("cycle", tuple(str(stage.cycle) for stage in stages)),
            Column("stage", tuple(stage.name for stage in stages)),
        ),
        figures=(
            *(column for column in varying if column not in rates),
            *others,
            seconds,
            *(column for column in varying if column in rates),
        ),
        notes=(*notes, *_pinned_note(stages)),
        sections=frozenset(turn for turn, stage in enumerate(stages) if turn and stage.cycle != stages[turn - 1].cycle),
    )


_MUCH_PINNED = 8 << 20
"""Bytes of page-locked memory beyond what tensors have of it, which are worth a note."""


def _pinned_note(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return what to know where torch pins much more than its tensors have (sglang#37285, vllm#56410)."""
    most = max(stages, key=lambda stage: stage.after.pinned_beside_tensors)
    beside = most.after.pinned_beside_tensors
    if beside < _MUCH_PINNED:
        return ()
    return (
        f"pinned: {format_bytes(beside)} more than torch's tensors have after {most.name}: it takes the next power of "
        "two for each, and keeps what is given back (from torch 2.13 on, none above 64 MiB is rounded up with "
        "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64)",
    )


def _size_columns(stages: Sequence[Stage]) -> list[Column]:
    """Return what a stage changes in this process; by how much is measured from what there was before the first one."""
    moments = [stages[0].before, *(stage.after for stage in stages)]
    tags = [*_ARENAS, *sorted({tag for moment in moments for tag in moment.arenas} - set(_ARENAS))]
    held: list[tuple[str, Sequence[int | None]]] = [
        ("tensors", [moment.tensors for moment in moments]),
        ("allocated", [moment.allocated for moment in moments]),
        ("reserved", [moment.reserved for moment in moments]),
        *((tag.replace("_", " "), [moment.arenas.get(tag, 0) for moment in moments]) for tag in tags),
        ("pinned", [moment.pinned for moment in moments]),
        ("host", [moment.host_pools for moment in moments]),
        ("driver", [moment.driver for moment in moments]),
        ("RSS", [moment.rss for moment in moments]),
        ("caches", [moment.cache_bytes for moment in moments]),
    ]
    columns = [Column(name, tuple(map(_mib, sizes[1:])), change=_spread(sizes)) for name, sizes in held]
    # Counted, not measured: no number of bytes says by how much it changes.
    frozen = Column("frozen", tuple(str(stage.after.frozen_objects) for stage in stages), change=0)
    return [*columns[:-1], frozen, columns[-1]]


def _rate_columns(stages: Sequence[Stage]) -> list[Column]:
    moved = ("" if stage.bytes_per_second is None else f"{stage.bytes_per_second / 1e9:.1f}" for stage in stages)
    tokens = ("" if stage.tokens_per_second is None else f"{stage.tokens_per_second:.0f}" for stage in stages)
    return [Column("GB/s", tuple(moved), change=0), Column("tok/s", tuple(tokens), change=0)]


def _process_names(stages: Sequence[Stage]) -> list[str]:
    """Return the names of those that held something; a process without tensors is in the table of processes alone."""
    return list(dict.fromkeys(each.process.name for stage in stages for each in stage.processes if each.bytes))


def _process_column(name: str, stages: Sequence[Stage]) -> Column:
    """Return what the engine's processes of one name held in tensors and arenas; blank where there was none."""
    held = [[each.bytes for each in stage.processes if each.process.name == name] for stage in stages]
    cells = tuple(_mib(sum(sizes)) if sizes else "" for sizes in held)
    return Column(f"in {name}", cells, change=_spread([0, *map(sum, held)]))


def ledger_table(cycle: int, names: Sequence[str], ledgers: Sequence[Ledger]) -> FigureTable:
    """Return one device's ledger: a row per line, the largest first, a column per stage, which adds up to its total.

    Lines that no stage changes are named below; they are in the totals.
    """
    first = next((ledger for ledger in ledgers if ledger.source != "none"), ledgers[0])
    source = "this process, " + first.source if first.source != "none" else "no driver says what this process holds"
    sizes: dict[str, list[int | None]] = {}
    for turn, ledger in enumerate(ledgers):
        for line in ledger.lines:
            sizes.setdefault(line.name, [0] * len(ledgers))[turn] = line.bytes
    # A line that never held anything says nothing.
    held = sorted((name for name in sizes if any(sizes[name])), key=lambda name: -max(map(_known, sizes[name])))
    lines, notes = _varying([Column(name, tuple(map(_mib, sizes[name]))) for name in held])
    rows = [
        *lines,
        Column("unexplained", tuple(_mib(ledger.unexplained) for ledger in ledgers)),
        Column("total", tuple(_mib(ledger.total) for ledger in ledgers)),
    ]
    changes = changes_by_stage([*(sizes[name] for name in held), [ledger.unexplained for ledger in ledgers]])
    return FigureTable(
        title=f"Ledger of {first.device}, cycle {cycle} (MiB; {source})",
        labels=(Column("line", tuple(row.name for row in rows)),),
        figures=tuple(
            Column(name, cells, change)
            for name, cells, change in zip(names, zip(*(row.cells for row in rows), strict=True), changes, strict=True)
        ),
        notes=notes,
        sections=frozenset({len(rows) - 1}),
        bold=frozenset({len(rows) - 2, len(rows) - 1}),
    )


def process_table(table: TreeTable) -> FigureTable:
    """Return what an engine's processes hold on one device: a row per process, a column per stage."""
    # Where none holds anything there is the sum alone.
    processes = [row for row in table.rows[:-1] if not row.is_part] or table.rows
    changes = changes_by_stage([row.sizes for row in processes])
    return FigureTable(
        title=table.title,
        labels=(Column("process", tuple(row.name for row in table.rows)),),
        figures=tuple(
            Column(stage, tuple(_mib_or_blank(row.sizes[turn]) for row in table.rows), change)
            for turn, (stage, change) in enumerate(zip(table.stages, changes, strict=True))
        ),
        sections=frozenset({len(table.rows) - 1}),
        bold=frozenset({len(table.rows) - 1}),
    )


def changes_by_stage(rows: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Return by how many bytes all rows together differ from the stage before, for each stage.

    None for the first and the last one, without which nobody sees whether memory came back.

    Args:
        rows: bytes after each stage, None where they are not known.
    """
    moments = list(zip(*rows, strict=True))
    inner = [
        sum(abs(_known(now) - _known(then)) for then, now in zip(earlier, later, strict=True))
        for earlier, later in pairwise(moments[:-1])
    ]
    return [None, *inner, None][: len(moments)] if len(moments) > 1 else [None] * len(moments)


def ledgers_by_device(stages: Sequence[Stage]) -> Iterable[tuple[list[str], list[Ledger]]]:
    """Yield for each device the moments of one life, `before` and its stages, with the ledger at each of them."""
    sides = [stages[0].before, *(stage.after for stage in stages)]
    for device in dict.fromkeys(ledger.device for side in sides for ledger in side.ledgers):
        yield ["before", *(stage.name for stage in stages)], [_ledger_of(device, side) for side in sides]


def _ledger_of(device: str, readings: Readings) -> Ledger:
    """Return a device's ledger; one in which nothing is known where a reading has none, as before a card came up."""
    unknown = Ledger(device=device, source="none", total=None, lines=(), unexplained=None)
    return next((ledger for ledger in readings.ledgers if ledger.device == device), unknown)


def _varying(figures: Sequence[Column]) -> tuple[list[Column], tuple[str, ...]]:
    """Return the figures to show, and the notes on those that this machine does not have or that never change."""
    if all(len(figure.cells) < 2 for figure in figures):
        # Of a single stage nothing can be said to change, and what is left out would not make it easier to read.
        return list(figures), ()
    absent = [figure for figure in figures if {*figure.cells} <= {_UNKNOWN, ""}]
    rest = [figure for figure in figures if not {*figure.cells} <= {_UNKNOWN, ""}]
    constant = [figure for figure in rest if len({*figure.cells}) == 1]
    notes = []
    if absent:
        notes.append(f"not measured here: {', '.join(figure.name for figure in absent)}")
    if constant:
        notes.append(f"never changed: {'; '.join(f'{figure.name} {figure.cells[0]}' for figure in constant)}")
    return [figure for figure in rest if figure not in constant], tuple(notes)


def _spread(sizes: Sequence[int | None]) -> int:
    known = [size for size in sizes if size is not None]
    return max(known) - min(known) if known else 0


def _known(size: int | None) -> int:
    return size or 0


def _mib(size: int | None) -> str:
    return _UNKNOWN if size is None else f"{size / (1 << 20):.1f}"


def _mib_or_blank(size: int | None) -> str:
    return "" if size is None else _mib(size)
