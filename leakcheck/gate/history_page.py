"""The history as one HTML page that needs nothing else: no network, no scripts, no fonts."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lowtide.reports.escaping import one_line
from lowtide.reports.sizes import format_amount

if TYPE_CHECKING:
    from jinja2 import Template

    from lowtide.leakcheck.gate.history import Trend
    from lowtide.leakcheck.processes.held_series import HeldCourse

MOST_DRAWN = 500
"""Trends that are drawn, and courses of watches."""

_WIDTH, _HEIGHT = 720, 120


class Mark(NamedTuple):
    """A change of the level in a drawing."""

    x: float
    text: str


class Drawing(NamedTuple):
    """A series as an image of 720 by 120 units.

    Attributes:
        title: what it shows.
        about: what more is to be known of it.
        steps: the path of its values, in the language of SVG.
        zero: the height of the line of zero; None where that is not in the image.
        highest: the largest value, or zero.
        lowest: the smallest value, or zero.
        extent: from when to when.
        marks: where its level changed.
    """

    title: str
    about: str
    steps: str
    zero: float | None
    highest: str
    lowest: str
    extent: str
    marks: Sequence[Mark] = ()


class PastWatch(msgspec.Struct, frozen=True):
    """A watch, and those before it of the same processes, as they are shown.

    Attributes:
        name: what it is called.
        began: when, in UTC.
        outcome: as of a subject; empty while it goes on, and of one that was killed.
        findings: their messages.
        courses: what its processes held, in the watches before, too.
    """

    name: str
    began: datetime.datetime
    outcome: str = ""
    findings: Sequence[str] = ()
    courses: Sequence[HeldCourse] = ()

    @property
    def said(self) -> list[str]:
        """Return how it has ended, and what it has found."""
        return [self.outcome or "no verdict yet", *self.findings]


class DrawnWatch(NamedTuple):
    """A watch, and the images of what its processes held."""

    watch: PastWatch
    drawings: Sequence[Drawing]


def render_page(trends: Sequence[Trend] = (), watches: Iterable[PastWatch] = (), reload_s: int = 0) -> str:
    """Render the page, with the changes of levels first, and a drawing of each trend; then the watches."""
    return _template().render(
        sentences=[sentence for trend in trends for sentence in trend.sentences()],
        drawings=[draw(trend) for trend in trends[:MOST_DRAWN]],
        left_out=max(len(trends) - MOST_DRAWN, 0),
        trends=len(trends),
        runs=len({run.id for trend in trends for run in trend.runs}),
        watches=[DrawnWatch(watch, [*map(draw_course, watch.courses[:MOST_DRAWN])]) for watch in watches],
        reload_s=reload_s,
        width=_WIDTH,
        height=_HEIGHT,
    )


@cache
def _template() -> Template:
    """Return the compiled template of the page."""
    # Not at the top: whoever loads this module may never render.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.leakcheck.gate"),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("history.html.j2")


def draw(trend: Trend) -> Drawing:
    """Draw a trend as steps: a value holds until the next run."""
    values = trend.values
    lowest, highest = min(0, *values), max(0, *values)
    wide = _WIDTH / len(values)
    marks = [
        Mark(round(change.place * wide, 1), sentence)
        for change, sentence in zip(trend.changes, trend.sentences(), strict=True)
    ]
    last = trend.runs[-1]
    return Drawing(
        f"{trend.subject}: {trend.what}",
        f"{trend.hardware}; last {trend.amount(values[-1])}; driver {last.driver}, torch {last.torch}, "
        f"lowtide {last.lowtide}",
        _steps([(place * wide, value) for place, value in enumerate(values)], _WIDTH, lowest, highest),
        _height(0, lowest, highest),
        trend.amount(highest),
        trend.amount(lowest),
        f"{trend.runs[0].title} to {last.title}",
        marks,
    )


def draw_course(course: HeldCourse) -> Drawing:
    """Draw what a process held over time as steps: a value holds until the next reading, in each watch by itself."""
    points = [*chain.from_iterable(course.stretches)]
    # As they were read: a clock may be set back.
    begins, ends = min(point.at for point in points), max(point.at for point in points)
    lowest, highest = min(point.amount for point in points), max(point.amount for point in points)

    wide = _WIDTH / ((ends - begins) or 1)
    stretches = [[((point.at - begins) * wide, point.amount) for point in stretch] for stretch in course.stretches]
    path = "".join(_steps(stretch, stretch[-1][0], lowest, highest) for stretch in stretches)
    resource, count = course.key.resource, len(course.stretches)
    unit = {"file-descriptors": "descriptors", "threads": "threads"}.get(resource, "bytes")
    on = f" on {course.key.device}" if course.key.device else ""
    return Drawing(
        f"{course.process}: {resource}{on}",
        f"last {format_amount(points[-1].amount, unit)}, {format_amount(len(points), 'readings')} in "
        f"{count} watch{'es' if count > 1 else ''}",
        path,
        None,
        format_amount(highest, unit),
        format_amount(lowest, unit),
        f"{_moment(begins)} to {_moment(ends)}",
    )


def _steps(points: Sequence[tuple[float, int]], end: float, lowest: int, highest: int) -> str:
    """Return the path of values in the language of SVG: each holds until the next one, the last until `end`.

    What stays the same takes no room, however many values there are.
    """
    first, value = points[0]
    path = f"M{first:.1f} {_height(value, lowest, highest)}"
    for (_, before), (place, value) in pairwise(points):
        if value != before:
            path += f"H{place:.1f}V{_height(value, lowest, highest)}"
    return f"{path}H{end:.1f}"


def _height(value: int, lowest: int, highest: int) -> float:
    return round(_HEIGHT - (value - lowest) / ((highest - lowest) or 1) * _HEIGHT, 1)


def _moment(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
