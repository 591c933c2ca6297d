"""Trends as one HTML page that needs nothing else: no network, no scripts, no fonts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.leakcheck.history.trends import Trend
from lowtide.reports.escaping import one_line

MOST = 500
"""Trends that are drawn."""

_WIDTH, _HEIGHT = 720, 120


class Mark(NamedTuple):
    """A change of the level in a drawing."""

    x: float
    text: str


class Drawing(NamedTuple):
    """A trend as an image of 720 by 120 units.

    Attributes:
        trend: what it shows.
        steps: the path of its values, in the language of SVG.
        zero: the height of the line of zero.
        highest: the largest value, or zero.
        lowest: the smallest value, or zero.
        marks: where its level changed.
    """

    trend: Trend
    steps: str
    zero: float
    highest: str
    lowest: str
    marks: list[Mark]


def render_page(trends: Sequence[Trend]) -> str:
    """The page, with the changes of levels first, and a drawing of each trend."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.leakcheck.history"),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("history.html.j2").render(
        sentences=[sentence for trend in trends for sentence in trend.sentences()],
        drawings=[draw(trend) for trend in trends[:MOST]],
        left_out=max(len(trends) - MOST, 0),
        runs=len({run.id for trend in trends for run in trend.runs}),
        width=_WIDTH,
        height=_HEIGHT,
    )


def draw(trend: Trend) -> Drawing:
    """A trend as steps: a value holds until the next run."""
    values = trend.values
    lowest, highest = min(0, *values), max(0, *values)
    span = (highest - lowest) or 1
    wide = _WIDTH / len(values)

    def height(value: int) -> float:
        return round(_HEIGHT - (value - lowest) / span * _HEIGHT, 1)

    # What stays the same takes no room, however many runs there are.
    steps = [place for place in range(1, len(values)) if values[place] != values[place - 1]]
    parts = [f"H{place * wide:.1f}V{height(values[place])}" for place in steps]
    path = "".join([f"M0 {height(values[0])}", *parts, f"H{_WIDTH}"])
    marks = [
        Mark(round(change.place * wide, 1), sentence)
        for change, sentence in zip(trend.changes, trend.sentences(), strict=True)
    ]
    return Drawing(trend, path, height(0), trend.amount(highest), trend.amount(lowest), marks)
