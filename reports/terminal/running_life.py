"""A life that runs, for a terminal: how far it is, and a line of bars for each size that is read after its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowtide.reports.escaping import one_line
from lowtide.reports.sizes import format_bytes
from lowtide.reports.terminal.sparkline import sparkline

_BAR_WIDTH = 20
_MOST_NAME = 32
_LEAST_BARS = 8
"""Below this a line of bars says nothing, and stays away for the figures."""


class RunningLife(msgspec.Struct, frozen=True):
    """One drawing.

    Attributes:
        doing: what is being done, for example `cycle 1/2: sleep(1)`.
        done: stages that are done.
        total: stages that there are to be.
        since: when that began, as a clock shows it.
        sizes: bytes at each reading so far, by name.
    """

    doing: str
    done: int = 0
    total: int = 1
    since: str = ""
    sizes: Mapping[str, Sequence[int]] = msgspec.field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the line of progress first: a terminal that is too low loses lines from the end."""
        yield self._progress()
        yield from self._series(options)

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        # What is done gives way to the figures where both do not fit.
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        cells: list[Text | ProgressBar] = [Text(one_line(self.doing))]
        if self.total > 0:
            line.add_column(width=_BAR_WIDTH)
            line.add_column(no_wrap=True, justify="right")
            cells += [ProgressBar(total=self.total, completed=self.done), Text(f"{self.done}/{self.total}")]
        if self.since:
            line.add_column(no_wrap=True)
            cells.append(Text(f"since {self.since}", style="dim"))
        line.add_row(*cells)
        return line

    def _series(self, options: ConsoleOptions) -> Iterator[Text]:
        # Always in the same order, though arenas come and go; what is summed up in others comes after them.
        names = sorted((name for name in self.sizes if any(self.sizes[name])), key=str.casefold)
        held = {one_line(name): self.sizes[name] for name in names}
        amounts = {name: format_bytes(sizes[-1]) for name, sizes in held.items()}
        most_name = min(_MOST_NAME, max(map(cell_len, held), default=0))
        most_amount = max(map(len, amounts.values()), default=0)
        room = options.max_width - most_name - most_amount - 2
        for name, sizes in held.items():
            line = Text(name)
            line.truncate(most_name, overflow="ellipsis", pad=True)
            if room >= _LEAST_BARS and not options.ascii_only:
                line.append(f" {sparkline(sizes, room)}", style="cyan")
            line.append(f" {amounts[name]:>{most_amount}}")
            yield line
