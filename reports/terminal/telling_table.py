"""A table of figures cut down to the columns that say most, where not all of them fit beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult

from lowtide.reports.figure_table import Column, FigureTable

MOST_COLUMNS = 100
"""Columns of a terminal that a table takes at most, so that it can be read in a log, an issue, a mail."""


@dataclass(frozen=True)
class TellingTable:
    """Shows of a table as many figures as fit, and names the others.

    Attributes:
        whole: all that there is.
    """

    whole: FigureTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, as wide as the terminal and `MOST_COLUMNS` allow."""
        width = min(options.max_width, MOST_COLUMNS)
        yield from console.render(most_telling(self.whole, width), options.update(max_width=width))


def most_telling(table: FigureTable, width: int) -> FigureTable:
    """The table with those figures that change most in bytes, as many as fit; the note below names the others.

    Args:
        table: all figures; those without a `change` are always shown.
        width: columns of the terminal.
    """
    if table.fits(width):
        return table
    # A long label is folded sooner than a figure is left out.
    named = replace(table, figures=tuple(_numbered(table.figures)), most_label=width // 2)
    shown = {turn for turn, column in enumerate(named.figures) if column.change is None}
    for turn in sorted(range(len(named.figures)), key=lambda turn: -(named.figures[turn].change or 0)):
        if _with(named, shown | {turn}).fits(width):
            shown.add(turn)
    left_out = [column.name for turn, column in enumerate(named.figures) if turn not in shown]
    if not left_out:
        return replace(table, most_label=named.most_label)
    return replace(_with(named, shown), notes=(*table.notes, f"left out: {', '.join(left_out)} (--wide shows them)"))


def _with(table: FigureTable, shown: Collection[int]) -> FigureTable:
    return replace(table, figures=tuple(column for turn, column in enumerate(table.figures) if turn in shown))


def _numbered(figures: Sequence[Column]) -> Iterator[Column]:
    """`infer 1` and `infer 2` where there are two: else nobody could tell which of them is left out."""
    counts = Counter(column.name for column in figures)
    seen: Counter[str] = Counter()
    for column in figures:
        seen[column.name] += 1
        yield replace(column, name=f"{column.name} {seen[column.name]}") if counts[column.name] > 1 else column
