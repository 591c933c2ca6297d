"""A report as one HTML page that needs nothing else: no network, no fonts; its pictures are drawn from data in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowtide.reports.finding_lines import (
    GROWTH_HEAD,
    GROWTH_TITLE,
    advice_text,
    amount,
    growth_cells,
    hop_facts,
    in_vain,
    remedy_effect,
    shared_text,
    suppression_entry,
    trend_text,
)
from lowtide.reports.html.life_pictures import draw_life
from lowtide.reports.html.scripts import as_data, copying, drawing, security_policy
from lowtide.reports.markdown import count_outcomes, not_measured, verdict
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import Finding, Outcome, Readings, Report, Stage, Subject
from lowtide.reports.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

DETAILED = 100
"""Subjects whose stages and ledgers are on the page; findings are on it always."""

MOST_ROWS = 200
"""Rows of one subject's stages: a soak test has thousands, and the last ones matter."""

MOST_OCCURRENCES = 20
"""Other places of one leak that are linked from it."""

LONGEST = 2000
"""Characters of one text; an `assert` of a large value in a reason can have millions."""

# Other control characters are errors in HTML, and lone surrogates cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_URGENCY: dict[Outcome, int] = {"leak": 0, "error": 1, "unsupported": 2, "skipped": 3, "clean": 4}
_COUNTS: dict[str, Callable[[Readings], int]] = {
    "frozen": lambda readings: readings.frozen_objects,
    "threads": lambda readings: readings.threads,
    "native threads": lambda readings: readings.native_threads,
    "processes": lambda readings: readings.processes,
    "descriptors": lambda readings: readings.descriptors,
}


class Cell(NamedTuple):
    """One figure before and after a stage, as shown and exactly."""

    text: str
    exact: str
    moved: bool


class StageTable(NamedTuple):
    """A subject's stages; `left_out` says how many earlier ones are not in `rows`."""

    columns: tuple[str, ...]
    rows: list[tuple[Stage, list[Cell]]]
    left_out: int


class LedgerTable(NamedTuple):
    """One device's ledger over one cycle, in MiB; a column per moment."""

    device: str
    source: str
    cycle: int
    moments: list[str]
    rows: list[tuple[str, list[str]]]


def environment() -> Environment:
    """What renders templates: every text in it is escaped, and what no page may have is replaced."""
    # Not at the top: whoever loads this module may never render.
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.reports.html"),
        autoescape=True,
        finalize=_printable,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render_html(report: Report) -> str:
    """The whole page: verdict, what leaked or failed, everything else folded, and what was not measured."""
    from markupsafe import Markup

    templates = environment()
    templates.filters |= {
        "size": format_bytes,
        "amount": amount,
        "facts": hop_facts,
        "shared": shared_text,
        "trend": trend_text,
        "in_vain": in_vain,
        "cells": growth_cells,
        "entry": suppression_entry,
    }
    ordered = sorted(report.subjects, key=lambda subject: (_URGENCY[subject.outcome], not subject.findings))
    # Numbered, because an id may hold what no anchor may.
    numbered = list(enumerate(ordered))
    pictures = {
        turn: picture for turn, subject in numbered[:DETAILED] if (picture := draw_life(subject.stages)) is not None
    }
    findings = [finding for subject in ordered for finding in subject.findings]
    run = (*(drawing() if pictures else ()), *(copying() if findings else ()))
    return templates.get_template("report.html.j2").render(
        policy=Markup(security_policy(run)),
        scripts=[Markup(text) for text in run],
        pictures=pictures,
        data=Markup(as_data(pictures)),
        report=report,
        verdict=verdict(report),
        counts=count_outcomes(report),
        urgent=[(turn, subject) for turn, subject in numbered if subject.outcome in ("leak", "error")],
        others=[(turn, subject) for turn, subject in numbered if subject.outcome not in ("leak", "error")],
        not_measured=not_measured(report.subjects),
        detailed=DETAILED,
        stage_table=stage_table,
        ledger_tables=ledger_tables,
        remedy_effect=remedy_effect,
        occurrences=_occurrences(numbered),
        advice_text=advice_text,
        growth_title=GROWTH_TITLE,
        growth_head=GROWTH_HEAD,
        tree_tables=tree_tables,
        mib=_mib,
        most_rows=MOST_ROWS,
        seconds=lambda subject: sum(stage.seconds for stage in subject.stages),
    )


def _occurrences(numbered: Sequence[tuple[int, Subject]]) -> Callable[[Finding, str], list[tuple[str, str]]]:
    """What gives the other places of a finding on the page, with their subjects: those of the same fingerprint."""
    places: dict[str, list[tuple[str, str]]] = {}
    for turn, subject in numbered:
        for place, finding in enumerate(subject.findings):
            places.setdefault(finding.fingerprint, []).append((f"s{turn}f{place}", subject.id))

    def elsewhere(finding: Finding, place: str) -> list[tuple[str, str]]:
        return [(other, name) for other, name in places[finding.fingerprint] if other != place][:MOST_OCCURRENCES]

    return elsewhere


def stage_table(subject: Subject) -> StageTable:
    """Each of the last stages with its readings on both sides; sizes in MiB."""
    shown = subject.stages[-MOST_ROWS:]
    tags = sorted({tag for stage in shown for side in (stage.before, stage.after) for tag in side.arenas})
    rows = []
    for stage in shown:
        before, after = (_sizes(side, tags) for side in (stage.before, stage.after))
        cells = [_size_cell(before[name], after[name]) for name in before]
        cells += [_count_cell(count(stage.before), count(stage.after)) for count in _COUNTS.values()]
        rows.append((stage, cells))
    columns = (*_sizes(shown[0].before, tags), *_COUNTS) if shown else ()
    return StageTable(columns, rows, len(subject.stages) - len(shown))


def ledger_tables(subject: Subject) -> list[LedgerTable]:
    """One ledger per device over the subject's last cycle: before its first stage, and after each."""
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


def _sizes(readings: Readings, tags: Sequence[str]) -> dict[str, int | None]:
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


def _size_cell(before: int | None, after: int | None) -> Cell:
    if before == after:
        return Cell(_mib(after), "" if after is None else f"{after:,} bytes", moved=False)
    exact = " → ".join("unknown" if size is None else f"{size:,}" for size in (before, after))
    return Cell(f"{_mib(before)} → {_mib(after)}", f"{exact} bytes", moved=True)


def _count_cell(before: int, after: int) -> Cell:
    return Cell(str(after), "", moved=False) if before == after else Cell(f"{before} → {after}", "", moved=True)


def _mib_all(sizes: Iterable[int | None]) -> list[str]:
    return [_mib(size) for size in sizes]


def _mib(size: int | None) -> str:
    return "—" if size is None else f"{size / (1 << 20):.1f}"


def _printable(value: object) -> object:
    """Each text on its way into the page; what the template itself made (`Markup`) is left alone."""
    if type(value) is not str:
        return value
    if len(value) > LONGEST:
        value = f"{value[:LONGEST]}… ({len(value):,} characters)"
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
