"""Trends in a terminal: the runs at which levels changed, and a line of bars for each trend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.leakcheck.history.trends import Trend
from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.terminal.sparkline import sparkline

MOST = 40
"""Trends that are shown; all are on the page."""

_WIDTH = 40


def trend_lines(trends: Sequence[Trend]) -> Iterator[RenderableType]:
    """What to print, from the newest change of a level to the trends that stayed as they were."""
    sentences = [sentence for trend in trends for sentence in trend.sentences()]
    for sentence in sentences[:MOST]:
        yield HangingText(sentence, style="bold")
    if not sentences:
        yield HangingText("no level changed")
    table = Table("subject", "what", "hardware", "trend, oldest first", "last", box=None, header_style="dim")
    for trend in trends[:MOST]:
        cells = (trend.subject, trend.what, trend.hardware)
        table.add_row(
            *(Text(one_line(cell)) for cell in cells), sparkline(trend.values, _WIDTH), trend.amount(trend.values[-1])
        )
    yield table
    if len(trends) > MOST:
        yield HangingText(f"… and {len(trends) - MOST} more; --page FILE writes all")
