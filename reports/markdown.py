"""A report as a short Markdown summary, for the page that a CI system shows beside a job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from lowtide.reports.causes import Cause, causes_of
from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import (
    GROWTH_HEAD,
    GROWTH_TITLE,
    DetailLine,
    advice_text,
    amount,
    finding_lines,
    growth_cells,
    remedy_effect,
)
from lowtide.reports.out_of_memory import TITLE, out_of_memory_lines
from lowtide.reports.outcomes import ENDED
from lowtide.reports.schema import Finding, NotMeasured, Outcome, Report, Subject
from lowtide.reports.sizes import format_amount

MOST = 100
"""Entries of one list; CI systems refuse summaries of more than about a MiB."""

MOST_DETAILED = 20
"""Leaks whose paths are shown: the largest."""

_LONGEST = 160
"""Characters of one cell."""

# Entities where a renderer might act on the character before or after it looks at backslashes: table cells are split
# first, and formulas are found last.
_ESCAPES = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        "|": "&#124;",
        "$": "&#36;",
        **{char: f"\\{char}" for char in "\\`*_[]~#!"},
    }
)
_LIST_MARK = re.compile(r"(?:[-+]|\d{1,9}[.)])(?= |$)")
"""What begins a list, were it the first of a text: the others of those marks are escaped everywhere."""

_TABLE_HEAD = (
    "| subject | resource | cause | bytes | since stage | holder | remedy |",
    "|---|---|---|---:|---|---|---|",
)
_GROWTH_HEAD = (f"| subject | {' | '.join(GROWTH_HEAD)} |", "|---|---|---:|---:|---:|---|")


def render_markdown(report: Report) -> str:
    """Verdict, counts, the largest leaks, who holds them, and what was not measured."""
    leaks = open_causes(report.subjects)
    parts = ["## lowtide", f"**{verdict(report)}**", _counts(report)]
    if leaks:
        parts.append("\n".join([*_TABLE_HEAD, *map(_row, leaks[:MOST])]))
        parts += _rest(len(leaks), "leaks")
    parts += _details(leaks)
    parts += _out_of_memory(report)
    parts += _growth(report)
    missing = list(_missing(report))
    if missing:
        parts += ["### Not measured", "\n".join(missing[:MOST]), *_rest(len(missing), "lines")]
    notes = [
        f"- {as_code(subject.id)}: {as_text(subject.reason)}"
        for subject in report.subjects
        if subject.outcome == "clean" and subject.reason
    ]
    if notes:
        parts += ["### Notes", "\n".join(notes[:MOST]), *_rest(len(notes), "lines")]
    machine = report.machine
    devices = ", ".join(machine.devices) or "no card"
    parts.append(
        f"lowtide {as_text(report.version)} · torch {as_text(machine.torch or 'not loaded')} · {as_text(devices)}"
    )
    return "\n\n".join(parts) + "\n"


def verdict(report: Report) -> str:
    """Return the outcome of a whole report in one line of plain text."""
    counts = count_outcomes(report)
    total = len(report.subjects)
    if counts["leak"]:
        return f"LEAK: {counts['leak']} of {format_amount(total, 'subjects')} leaked"
    failed = counts["error"] + counts["unsupported"]
    if failed:
        return f"NOT MEASURED: {failed} of {format_amount(total, 'subjects')} failed or could not be measured"
    if not counts["clean"]:
        return (
            f"NOTHING JUDGED: {format_amount(total, 'subjects')}, all skipped"
            if total
            else "NOTHING JUDGED: no subjects"
        )
    what = "everything that was judged came back" if not_measured(report.subjects) else "everything came back"
    known = _known(report)
    but = f" but {format_amount(known, 'known findings')}" if known else ""
    return f"CLEAN: {format_amount(counts['clean'], 'subjects')}, {what}{but}"


def count_outcomes(report: Report) -> dict[Outcome, int]:
    """Return how many subjects had each outcome; every outcome has its entry."""
    counts = Counter(subject.outcome for subject in report.subjects)
    return {outcome: counts[outcome] for outcome in get_args(Outcome)}


def open_causes(subjects: Iterable[Subject]) -> list[Cause]:
    """Return the causes of the findings that no suppression covers, that of the largest one first."""
    found = (cause.by_largest() for cause in causes_of(subjects) if cause.first.finding.suppressed_by is None)
    return sorted(found, key=lambda cause: cause.first.finding.bytes, reverse=True)


def not_measured(subjects: Iterable[Subject]) -> dict[NotMeasured, int]:
    """Return what could not be judged, and in how many subjects; all processes that have ended as one."""
    missing = [dict.fromkeys(subject.not_measured) for subject in subjects]
    ended = {each for of_subject in missing for each in of_subject if each.why == ENDED}
    if len(ended) > 1:
        all_ended = NotMeasured(what=f"whether {len(ended)} processes grew while they ran", why=ENDED)
        missing = [dict.fromkeys(all_ended if each in ended else each for each in of_subject) for of_subject in missing]
    return dict(Counter(each for of_subject in missing for each in of_subject))


def _known(report: Report) -> int:
    """Return how many findings a suppression covers."""
    return sum(finding.suppressed_by is not None for subject in report.subjects for finding in subject.findings)


def _counts(report: Report) -> str:
    counts = [f"{count} {outcome}" for outcome, count in count_outcomes(report).items() if count]
    hidden = _known(report)
    if hidden:
        counts.append(format_amount(hidden, "suppressed findings"))
    return " · ".join(counts) or "0 subjects"


def _row(cause: Cause) -> str:
    finding = cause.first.finding
    remedy = as_text(advice_text(finding))
    if finding.remedy is not None:
        remedy = f"{as_code(finding.remedy.action)} {remedy_effect(finding.remedy, finding)}"
    holder = as_code(finding.holder) if finding.holder else ""
    cells = (
        _seen_in(cause),
        finding.resource,
        finding.cause,
        amount(finding),
        as_text(finding.stage),
        holder,
        remedy,
    )
    return f"| {' | '.join(cells)} |"


def _seen_in(cause: Cause) -> str:
    """Return where a cause was seen first, how often, and where else."""
    return as_code(cause.first.subject.id) + as_text(cause.elsewhere)


def _details(leaks: Sequence[Cause]) -> Iterator[str]:
    """Yield a list for each of the largest leaks of which more is known than its row says."""
    detailed = [leak for leak in leaks if _has_details(leak.first.finding)]
    if detailed:
        yield "### Who holds it"
    for cause in detailed[:MOST_DETAILED]:
        finding = cause.first.finding
        lines = finding_lines(finding, whole=False, rest="in leakcheck.json")
        yield f"{_seen_in(cause)}: {finding.resource}/{finding.cause}, {amount(finding)}"
        yield "\n".join(f"- {_detail(line)}" for line in lines)
    if len(detailed) > MOST_DETAILED:
        yield f"… and {len(detailed) - MOST_DETAILED} more; all are in `leakcheck.json`"


def _has_details(finding: Finding) -> bool:
    known = (finding.path, finding.allocated_at, finding.shared_bytes, finding.tried, finding.changed, finding.trend)
    return any(known)


def _detail(line: DetailLine) -> str:
    if not line.edge:
        return as_text(line.before)
    edge = f"<ins>{as_code(line.edge)}</ins>" if line.suspect else as_code(line.edge)
    return " ".join(part for part in (as_text(line.before), edge, as_text(line.after)) if part)


def _growth(report: Report) -> Iterator[str]:
    grown = [(subject, item) for subject in report.subjects for item in subject.type_growth]
    if not grown:
        return
    yield f"### {GROWTH_TITLE}"
    rows = (
        f"| {' | '.join((as_code(subject.id), *map(as_text, growth_cells(item))))} |" for subject, item in grown[:MOST]
    )
    yield "\n".join([*_GROWTH_HEAD, *rows])
    yield from _rest(len(grown), "rows")


def _out_of_memory(report: Report) -> Iterator[str]:
    found = [(subject.id, subject.out_of_memory) for subject in report.subjects if subject.out_of_memory is not None]
    for name, out_of_memory in found[:MOST_DETAILED]:
        first, *lines = out_of_memory_lines(out_of_memory)
        yield f"### {TITLE}: {as_code(name)}"
        yield "\n".join([as_text(first), "", *(f"- {as_text(line.strip())}" for line in lines)])


def _missing(report: Report) -> Iterator[str]:
    for subject in report.subjects:
        if subject.outcome in ("error", "unsupported"):
            yield f"- {as_code(subject.id)}: {subject.outcome}: {as_text(subject.reason or 'no reason given')}"
    reasons = [subject.reason for subject in report.subjects if subject.outcome == "unsupported"]
    for missing, subjects in not_measured(report.subjects).items():
        if missing.process is not None and any(missing.what in reason for reason in reasons):
            continue
        yield f"- {as_text(missing.what)} in {format_amount(subjects, 'subjects')}: {as_text(missing.why)}"


def _rest(total: int, what: str) -> Sequence[str]:
    return [f"… and {format_amount(total - MOST, f'more {what}')}; all are in `leakcheck.json`"] if total > MOST else []


def as_code(text: str) -> str:
    """Return one short line as code."""
    # Not between backticks: there a pipe can be escaped only in ways that renderers disagree about.
    return f"<code>{as_text(text)}</code>"


def as_text(text: str) -> str:
    """Return one short line in which nothing is markup."""
    # Cut first: joining the words of a text without end would cost more than the rest of the summary.
    line = " ".join(one_line(text[: 4 * _LONGEST]).split())
    if len(line) > _LONGEST or len(text) > 4 * _LONGEST:
        line = line[: _LONGEST - 1] + "…"
    mark = _LIST_MARK.match(line)
    if mark is not None:
        end = mark.end() - 1
        return f"{line[:end]}\\{line[end:].translate(_ESCAPES)}"
    return line.translate(_ESCAPES)
