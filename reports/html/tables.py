"""The tables of a subject: its stages on both sides, and a ledger for each device, as cells of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lowtide.reports.schema import Readings, Stage, Subject

MOST_ROWS = 200
"""Rows of one subject's stages: a soak test has thousands, and the last ones matter."""

_COUNTS: dict[str, Callable[[Readings], int]] = {
    "frozen": lambda readings: readings.frozen_objects,
    "threads": lambda readings: readings.threads,
    "native threads": lambda readings: readings.native_threads,
    "processes": lambda readings: readings.processes,
    "descriptors": lambda readings: readings.descriptors,
}


class FigureCell(NamedTuple):
    """One figure before and after a stage, as shown and exactly."""

    text: str
    exact: str
    moved: bool


class StageTable(NamedTuple):
    """A subject's stages; `left_out` says how many earlier ones are not in `rows`."""

    columns: tuple[str, ...]
    rows: list[tuple[Stage, list[FigureCell]]]
    left_out: int


class LedgerTable(NamedTuple):
    """One device's ledger over one cycle, in MiB; a column per moment."""

    device: str
    source: str
    cycle: int
    moments: list[str]
    rows: list[tuple[str, list[str]]]


def stage_table(subject: Subject) -> StageTable:
    """Return each of the last stages with its readings on both sides; sizes in MiB."""
    shown = subject.stages[-MOST_ROWS:]
    tags = sorted({tag for stage in shown for side in (stage.before, stage.after) for tag in side.arenas})
    rows = []
    for stage in shown:
        before, after = (sizes_of(side, tags) for side in (stage.before, stage.after))
        cells = [_size_cell(before[name], after[name]) for name in before]
        cells += [_count_cell(count(stage.before), count(stage.after)) for count in _COUNTS.values()]
        rows.append((stage, cells))
    columns = (*sizes_of(shown[0].before, tags), *_COUNTS) if shown else ()
    return StageTable(columns, rows, len(subject.stages) - len(shown))


def ledger_tables(subject: Subject) -> list[LedgerTable]:
    """Return one ledger per device over the subject's last cycle: before its first stage, and after each."""
    if not subject.stages:
        return []
    cycle = subject.stages[-1].cycle
    stages = [stage for stage in subject.stages if stage.cycle == cycle][-MOST_ROWS:]
    moments = [f"before {stages[0].name}", *(stage.name for stage in stages)]
    sides = [stages[0].before, *(stage.after for stage in stages)]
    devices = dict.fromkeys(ledger.device for side in sides for ledger in side.ledgers)
    return [_ledger_table(device, cycle, moments, sides) for device in devices]


def _ledger_table(device: str, cycle: int, moments: list[str], sides: Sequence[Readings]) -> LedgerTable:
    # A device that only part of the stages know (a card that came up in between) has gaps, not zeros.
    ledgers = [next((ledger for ledger in side.ledgers if ledger.device == device), None) for side in sides]
    known = [ledger for ledger in ledgers if ledger is not None]
    rows: list[tuple[str, list[str]]] = []
    for name in dict.fromkeys(line.name for ledger in known for line in ledger.lines):
        sizes = [
            None if ledger is None else sum(line.bytes for line in ledger.lines if line.name == name)
            for ledger in ledgers
        ]
        # A line that never held anything says nothing.
        if any(sizes):
            rows.append((name, _mib_all(sizes)))
    rows.append(("unexplained", _mib_all(None if ledger is None else ledger.unexplained for ledger in ledgers)))
    rows.append(("total", _mib_all(None if ledger is None else ledger.total for ledger in ledgers)))
    return LedgerTable(device, known[0].source, cycle, moments, rows)


def sizes_of(readings: Readings, tags: Sequence[str]) -> dict[str, int | None]:
    """Return the figures in bytes of some readings, by name; None for what is not known."""
    return {
        "tensors": readings.tensors,
        "allocated": readings.allocated,
        "reserved": readings.reserved,
        **{f"arena {tag}": readings.arenas.get(tag, 0) for tag in tags},
        "pinned": readings.pinned,
        "host pools": readings.host_pools,
        "driver": readings.driver,
        "RSS": readings.rss,
        "shared memory": readings.shared_memory,
        "caches": readings.cache_bytes,
    }


def _size_cell(before: int | None, after: int | None) -> FigureCell:
    if before == after:
        return FigureCell(mib(after), "" if after is None else f"{after:,} bytes", moved=False)
    exact = " → ".join("unknown" if size is None else f"{size:,}" for size in (before, after))
    return FigureCell(f"{mib(before)} → {mib(after)}", f"{exact} bytes", moved=True)


def _count_cell(before: int, after: int) -> FigureCell:
    return (
        FigureCell(str(after), "", moved=False)
        if before == after
        else FigureCell(f"{before} → {after}", "", moved=True)
    )


def _mib_all(sizes: Iterable[int | None]) -> list[str]:
    return [mib(size) for size in sizes]


def mib(size: int | None) -> str:
    """Return the bytes in MiB; a dash for what is not known."""
    return "—" if size is None else f"{size / (1 << 20):.1f}"
