"""A table of figures that fits its width: a figure is never cut, what does not fit goes into a further table below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText

_GAP = 2
"""Blanks between two columns: one of the box and one of the padding."""

_LEAST_LABEL = 8
"""Below this a label is not folded any further, however narrow the terminal is."""

_MOST_HEAD = 32
"""A head that is longer is folded: it may be a command with all its arguments."""


class Column(msgspec.Struct, frozen=True, dict=True):
    """One column.

    Attributes:
        name: its head.
        cells: one per row.
        change: by how many bytes its figures change, where it may be left out for others; None where it may not.
    """

    name: str
    cells: tuple[str, ...]
    change: int | None = None

    def __post_init__(self) -> None:
        # Here, so that it is as wide as what is shown of it.
        msgspec.structs.force_setattr(self, "name", one_line(self.name))
        msgspec.structs.force_setattr(self, "cells", tuple(map(one_line, self.cells)))

    @cached_property
    def width(self) -> int:
        """Cells of a terminal that the column takes beside others."""
        return max(self._cells_width, min(cell_len(self.name), _MOST_HEAD))

    @cached_property
    def whole_width(self) -> int:
        """Cells of a terminal that the column takes where nothing of it is folded."""
        return max(self._cells_width, cell_len(self.name))

    @property
    def _cells_width(self) -> int:
        return max(map(cell_len, self.cells), default=0)


class FigureTable(msgspec.Struct, frozen=True):
    """Rows with labels on the left and figures on the right, as many tables as the width needs.

    Attributes:
        title: what stands above the first of them.
        labels: the columns that say what a row is; each of the tables has them.
        figures: the columns of figures, in the order in which they are shown.
        notes: what stands below, for example which columns are left out.
        sections: rows before which there is a blank line.
        bold: rows that are sums.
        left: how many of the labels are set to the left, from the right end on; these may be folded.
        most_label: cells of a terminal that the last label takes at most; None where only figures make it give way.
    """

    title: str
    labels: tuple[Column, ...]
    figures: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    sections: frozenset[int] = frozenset()
    bold: frozenset[int] = frozenset()
    left: int = 1
    most_label: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the title, the tables one below the other, and the notes."""
        yield from self._folded(HangingText(self.title, style="italic"), console, options)
        for turn, figures in enumerate(self.blocks(options.max_width)):
            if turn:
                yield Text()
            yield self._table(figures, console, options.max_width)
        for note in self.notes:
            yield from self._folded(HangingText(note, style="dim"), console, options)
        yield Text()

    def fits(self, width: int) -> bool:
        """Return whether one table is enough."""
        return self._labels_width(width) + sum(_GAP + column.width for column in self.figures) <= width

    def blocks(self, width: int) -> list[list[Column]]:
        """Return the figures of each table: as few tables as fit `width` beside the labels, and all about as wide."""
        room = width - self._labels_width(width)
        blocks = self._filled(room)
        # A lone last column would be hard to compare with the others.
        while room > 0 and len(narrower := self._filled(room - 1)) == len(blocks):
            room, blocks = room - 1, narrower
        return blocks

    def _folded(self, text: HangingText, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Also where prose is not folded: it belongs to a table, and is as wide as that."""
        yield from console.render(text, options.update(no_wrap=False))

    def _filled(self, room: int) -> list[list[Column]]:
        """Return as many columns into each table as there is room for, and one at least."""
        blocks: list[list[Column]] = []
        left = 0
        for column in self.figures:
            taken = _GAP + column.width
            if blocks and taken <= left:
                blocks[-1].append(column)
            else:
                blocks.append([column])
                left = room
            left -= taken
        return blocks

    def _labels_width(self, width: int) -> int:
        return sum(self._label_widths(width)) + _GAP * (len(self.labels) - 1)

    def _label_widths(self, width: int) -> list[int]:
        """Widths of the labels; those set to the left are folded where the widest figure would not fit beside them."""
        widths = [label.whole_width for label in self.labels]
        whole = widths[: len(widths) - self.left]
        figure = max((column.width for column in self.figures), default=0)
        room = width - figure - sum(whole) - _GAP * len(widths)
        folded = _narrowed(widths[len(whole) :], room)
        if self.most_label is not None:
            folded[-1] = min(folded[-1], max(_LEAST_LABEL, self.most_label))
        return [*whole, *folded]

    def _table(self, figures: Sequence[Column], console: Console, width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        set_right = len(self.labels) - self.left
        first_width = self._label_widths(width)[0]
        for turn, (label, label_width) in enumerate(zip(self.labels, self._label_widths(width), strict=True)):
            justify: JustifyMethod = "right" if turn < set_right else "left"
            table.add_column(Text(label.name), justify=justify, width=label_width, overflow="fold")
        for figure in figures:
            # Figures are as wide as their column at most; a head may be wider.
            table.add_column(Text(figure.name), justify="right", width=figure.width, overflow="fold")
        columns = [*self.labels, *figures]
        for row in range(len(self.labels[0].cells)):
            if row in self.sections:
                table.add_section()
            # As text, not as a string: what stands in brackets is no markup.
            first, *cells = (Text(column.cells[row]) for column in columns)
            table.add_row(
                _hanging(first, console, first_width), *cells, style=Style(bold=True) if row in self.bold else None
            )
        return table


def _hanging(cell: Text, console: Console, width: int) -> Text:
    """Fold what stands at a line's beginning so that only its own beginning does.

    Else a name could be chosen so that a line of the terminal begins with a verdict.
    """
    if cell.cell_len <= width:
        return cell
    return Text("\n ").join(cell.wrap(console, width - 1))


def _narrowed(widths: Sequence[int], room: int) -> list[int]:
    """Widths that fit into `room` together, the widest ones made as wide as each other; `_LEAST_LABEL` at least."""
    found = list(widths)
    while sum(found) > room and (widest := max(found)) > _LEAST_LABEL:
        # From the right: who reads from the left knows the row sooner.
        found[len(found) - 1 - found[::-1].index(widest)] -= 1
    return found
