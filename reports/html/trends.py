"""How a subject's memory goes from cycle to cycle and turn to turn: what was held after each occurrence of a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import amount, holder_text, trend_text
from lowtide.reports.html.life_pictures import lasting_name
from lowtide.reports.schema import Finding, Readings, ResourceName, Stage, Subject, TypeGrowth

FEWEST = 3
"""Occurrences of a stage from which on they show a trend."""

MOST_TYPES = 30
"""Types of which a picture shows how many more objects there are."""

MOST_SERIES = 12
"""Series of one stage: those that move most."""

LONGEST = 200
"""Characters of one name."""

_SERIES_OF: dict[ResourceName, str] = {
    "tensors": "tensors",
    "reserved": "reserved",
    "driver": "driver",
    "pinned": "pinned",
    "host-memory": "RSS",
    "lru-cache": "caches",
    "shared-memory": "shared memory",
}


class Series(msgspec.Struct, frozen=True):
    """What one figure was after each occurrence, in bytes; None where it is not known."""

    name: str
    bytes: tuple[int | None, ...]


class TrendVerdict(msgspec.Struct, frozen=True):
    """What was found about a figure from occurrence to occurrence.

    Attributes:
        series: the name of the figure; empty where none of the trend's series is it.
        trend: `growth`, `residue` or `bounded`.
        text: what it means, how much it is, and who holds it.
    """

    series: str
    trend: str
    text: str


class TrendPlot(msgspec.Struct, frozen=True):
    """The figures after each occurrence of a stage.

    Attributes:
        stage: its name.
        occurrences: of each point, as `3` for the third cycle, or `3.2` for the second time in it.
        series: those that moved, the one that moved most first.
        judged: what was found.
    """

    stage: str
    occurrences: tuple[str, ...]
    series: tuple[Series, ...]
    judged: tuple[TrendVerdict, ...]


def draw_trends(subject: Subject) -> list[TrendPlot]:
    """Return a trend for each stage that a subject went through `FEWEST` times and in which some figure moved.

    The stages about which something was found come first, and then the last ones of a life.
    """
    findings = [finding for finding in subject.findings if finding.trend is not None]
    by_name: dict[str, list[Stage]] = {}
    for stage in subject.stages:
        by_name.setdefault(stage.name, []).append(stage)
    trends = [_trend(name, stages, findings) for name, stages in by_name.items() if len(stages) >= FEWEST]
    about = {finding.stage for finding in findings}
    trends.reverse()
    trends.sort(key=lambda trend: trend.stage not in about)
    return [trend for trend in trends if trend.series]


def draw_growth(subject: Subject) -> list[TypeGrowth]:
    """Return the first types that became more, with names that a chart can have."""
    shown = subject.type_growth[:MOST_TYPES]
    return [
        TypeGrowth(
            type=one_line(grown.type[:LONGEST])[:LONGEST],
            since=one_line(grown.since[:LONGEST])[:LONGEST],
            until=one_line(grown.until[:LONGEST])[:LONGEST],
            before=grown.before,
            after=grown.after,
        )
        for grown in shown
    ]


def _trend(name: str, stages: Sequence[Stage], findings: Sequence[Finding]) -> TrendPlot:
    sides = [{**_sizes(stage.after), **_of_processes(stage)} for stage in stages]
    names = dict.fromkeys(name for side in sides for name in side)
    series = [Series(one_line(name), tuple(side.get(name) for side in sides)) for name in names]
    moved = sorted((each for each in series if _movement(each)), key=_movement, reverse=True)[:MOST_SERIES]
    shown = {each.name for each in moved}
    # A finding about no stage in particular (its stage is a cycle, or another one) is told with each.
    own = [finding for finding in findings if finding.stage == name] or findings
    return TrendPlot(one_line(name), tuple(_occurrences(stages)), tuple(moved), tuple(_judged(own, shown)))


def _movement(series: Series) -> int:
    known = [size for size in series.bytes if size is not None]
    return max(known) - min(known) if known else 0


def _sizes(readings: Readings) -> dict[str, int | None]:
    return {
        "tensors": readings.tensors,
        "reserved": readings.reserved,
        "driver": readings.driver,
        "pinned": readings.pinned,
        "RSS": readings.rss,
        "caches": readings.cache_bytes,
        "shared memory": readings.shared_memory,
    }


def _of_processes(stage: Stage) -> Mapping[str, int | None]:
    sizes: dict[str, int | None] = {}
    for each in stage.processes:
        name = lasting_name(each.process)
        sizes[f"{name}, host"] = each.host
        sizes |= {f"{name}, {device}": size for device, size in each.cards.items()}
    return sizes


def _occurrences(stages: Sequence[Stage]) -> Iterator[str]:
    in_cycle = Counter(stage.cycle for stage in stages)
    seen: Counter[int] = Counter()
    for stage in stages:
        seen[stage.cycle] += 1
        yield f"{stage.cycle}.{seen[stage.cycle]}" if in_cycle[stage.cycle] > 1 else str(stage.cycle)


def _judged(findings: Sequence[Finding], shown: set[str]) -> Iterator[TrendVerdict]:
    for finding in findings:
        if finding.trend is None:
            continue
        series = _SERIES_OF.get(finding.resource, "")
        if finding.process is not None:
            of_host = finding.resource == "host-memory"
            series = f"{lasting_name(finding.process)}, {'host' if of_host else finding.device}"
        held = holder_text(finding)
        text = f"{finding.resource}: {trend_text(finding)}, {amount(finding)}{f', {held}' if held else ''}"
        yield TrendVerdict(one_line(series) if one_line(series) in shown else "", finding.trend, one_line(text))
