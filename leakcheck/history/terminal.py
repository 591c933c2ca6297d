"""Trends in a terminal: the runs at which levels changed, and a line of bars for each trend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.leakcheck.history.trends import Trend
from lowtide.reports.finding_lines import one_line

MOST = 40
"""Trends that are shown; all are on the page."""

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def trend_lines(trends: Sequence[Trend]) -> Iterator[RenderableType]:
    """What to print, from the newest change of a level to the trends that stayed as they were."""
    sentences = [sentence for trend in trends for sentence in trend.sentences()]
    for sentence in sentences[:MOST]:
        yield Text(one_line(sentence), style="bold")
    if not sentences:
        yield Text("no level changed")
    table = Table("subject", "what", "hardware", "trend, oldest first", "last", box=None, header_style="dim")
    for trend in trends[:MOST]:
        cells = (trend.subject, trend.what, trend.hardware)
        table.add_row(*(Text(one_line(cell)) for cell in cells), bars(trend.values), trend.amount(trend.values[-1]))
    yield table
    if len(trends) > MOST:
        yield Text(f"… and {len(trends) - MOST} more; --page FILE writes all")


def bars(values: Sequence[int]) -> str:
    """One bar for each of up to forty equal parts of a series, as high as the largest value in it."""
    parts = min(_WIDTH, len(values))
    bounds = [len(values) * turn // parts for turn in range(parts + 1)]
    # From zero, so that noise on a high level does not fill the line.
    lowest, highest = min(0, *values), max(0, *values)
    largest = [max(values[start:end], key=abs) for start, end in pairwise(bounds)]
    span = (highest - lowest) or 1
    return "".join(_BARS[round((value - lowest) / span * (len(_BARS) - 1))] for value in largest)
