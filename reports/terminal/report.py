"""A report on the terminal: pure functions from a report to what rich prints.

A table of figures is cut down to the columns that say most, where not all of them fit beside each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lowtide.reports.causes import Cause, Sighting, causes_of, seen_before
from lowtide.reports.escaping import one_line
from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.finding_lines import (
    GROWTH_HEAD,
    GROWTH_TITLE,
    DetailLine,
    first_line,
    growth_cells,
    lines_again,
    next_step,
    terminal_lines,
)
from lowtide.reports.hanging_text import HangingText, Parts
from lowtide.reports.out_of_memory import out_of_memory_lines
from lowtide.reports.processes.tree_table import tree_tables
from lowtide.reports.schema import END_OF_RUN, Finding, NotMeasured, Report, Stage, Subject, TypeGrowth
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.terminal.life_tables import ledger_table, ledgers_by_device, process_table, stage_table

MOST_COLUMNS = 100
"""Columns of a terminal that a table takes at most, so that it can be read in a log, an issue, a mail."""


class TellingTable(msgspec.Struct, frozen=True):
    """Shows of a table as many figures as fit, and names the others.

    Attributes:
        whole: all that there is.
    """

    whole: FigureTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the table, as wide as the terminal and `MOST_COLUMNS` allow."""
        width = min(options.max_width, MOST_COLUMNS)
        yield from console.render(most_telling(self.whole, width), options.update(max_width=width))


def most_telling(table: FigureTable, width: int) -> FigureTable:
    """Return the table with those figures that change most in bytes, as many as fit; the note below names the others.

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
    """Yield `infer 1` and `infer 2` where there are two: else nobody could tell which of them is left out."""
    counts = Counter(column.name for column in figures)
    seen: Counter[str] = Counter()
    for column in figures:
        seen[column.name] += 1
        yield replace(column, name=f"{column.name} {seen[column.name]}") if counts[column.name] > 1 else column


_MOST_TYPES = 8

MOST_SHOWN = 20
"""Findings, and subjects without any that were not judged, of a report that is shown in part."""

_MOST_STAGES = 60
"""Of a life that is shown in part: the last ones."""

_NOTHING: Mapping[int, Sighting] = {}

_OUTCOMES = ("leak", "error", "unsupported")
"""Of subjects that a report in part shows, the worst first."""


def render(report: Report, *notes: str, wide: bool = False) -> RenderableType:
    """Return the whole report: machine, one table of stages and one ledger per device for each subject, notes, verdict.

    Args:
        report: what is shown.
        notes: lines for above the last verdict, which ends the output.
        wide: whether tables have all their columns, instead of the most telling ones that fit.
    """
    parts: list[RenderableType] = [_machine_lines(report)]
    for subject, before in zip(report.subjects, seen_before(report.subjects), strict=True):
        if len(report.subjects) > 1:
            parts.append(HangingText(subject.id, style="bold"))
        parts += [*_stage_tables(subject.stages, wide=wide), *verdict_lines(subject, before)]
    end = len(parts) - 1 if report.subjects else len(parts)
    parts[end:end] = [HangingText(note) for note in notes]
    return Group(*parts)


def is_long(report: Report) -> bool:
    """Return whether a whole report is more than anybody reads on a terminal."""
    lines = sum(max(1, len(subject.findings)) for subject in report.subjects)
    return lines > MOST_SHOWN or sum(len(subject.stages) for subject in report.subjects) > _MOST_STAGES


def render_worst(report: Report, rest: str, *, wide: bool = False) -> RenderableType:
    """Return a part of a long report, without its verdict: the worst findings, and of a single life its last stages.

    Args:
        report: what is shown.
        rest: where the rest can be seen.
        wide: as that of `render`.
    """
    parts: list[RenderableType] = [_machine_lines(report)]
    if len(report.subjects) == 1:
        parts += _stage_tables(report.subjects[0].stages[-_MOST_STAGES:], wide=wide)
    subjects = [each for each in report.subjects if each.findings or each.outcome in _OUTCOMES]
    subjects.sort(key=_badness)
    causes = [list[Cause]() for _ in subjects]
    for cause in (each.by_largest() for each in causes_of(subjects)):
        causes[cause.first.turn].append(cause)
    room, more = MOST_SHOWN, Counter[str]()
    for subject, own in zip(subjects, causes, strict=True):
        if subject.findings and not own:
            continue  # with the subject that its causes were seen in first
        shown = sorted(own, key=_smallness)[:room]
        if room:
            reason = f": {subject.reason}" if subject.reason else ""
            parts.append(HangingText(f"{subject.id}{reason}", style="bold"))
            parts += [finding_text(cause.first.finding, more=cause.elsewhere) for cause in shown]
            room -= max(1, len(shown))
        elif not subject.findings:
            more["subjects that were not judged"] += 1
        more["findings"] += len(own) - len(shown)
    if len(report.subjects) == 1:
        more["earlier stages"] = max(0, len(report.subjects[0].stages) - _MOST_STAGES)
    counted = [format_amount(count, what) for what, count in more.items() if count]
    if counted:
        parts.append(HangingText(f"… {', '.join(counted)} more: {rest}"))
    return Group(*parts)


def _badness(subject: Subject) -> tuple[int, int]:
    order = _OUTCOMES.index(subject.outcome) if subject.outcome in _OUTCOMES else len(_OUTCOMES)
    if subject.id == END_OF_RUN:
        order = -1
    return order, -max((finding.bytes for finding in subject.findings if finding.suppressed_by is None), default=0)


def _smallness(cause: Cause) -> tuple[bool, int, int]:
    finding = cause.first.finding
    return finding.suppressed_by is not None, -finding.bytes, -finding.count


def render_subject(subject: Subject, *, wide: bool = False) -> list[RenderableType]:
    """Return one subject's tables and verdict.

    Args:
        subject: what is shown.
        wide: whether tables have all their columns, instead of the most telling ones that fit.
    """
    return [*_stage_tables(subject.stages, wide=wide), *verdict_lines(subject)]


def _stage_tables(stages: Sequence[Stage], *, wide: bool) -> list[RenderableType]:
    if not stages:
        return []
    of_last = [stage for stage in stages if stage.cycle == stages[-1].cycle]
    tables = [
        stage_table(stages),
        *(ledger_table(stages[-1].cycle, *ledgers) for ledgers in ledgers_by_device(of_last)),
        *map(process_table, tree_tables(of_last)),
    ]
    return [*(tables if wide else map(TellingTable, tables))]


def verdict_lines(subject: Subject, before: Mapping[int, Sighting] = _NOTHING) -> list[RenderableType]:
    """Return what came back and where, what could not be judged, what did not come back, and the outcome in one line.

    The last screen is what is read: the largest finding comes last, and what to do about it with the outcome. Which
    types became more is shown where nobody is known to hold what stays.

    Args:
        subject: what was judged.
        before: by their places those of its findings whose causes were seen before, and where.
    """
    lines: list[RenderableType] = []
    for item in subject.returns:
        what = f"{item.resource} on {item.device}" if item.device else item.resource
        if item.bytes:
            what += f" ({format_bytes(item.bytes)})"
        came = f"came back at rung {item.rung}, {item.seconds:.2f} s after {item.stage}"
        lines.append(HangingText(f"cycle {item.cycle}: {what} {came}"))
    # A reason that names other processes says all of them.
    missed = [missing for missing in subject.not_measured if missing.process is None or not subject.reason]
    lines += map(not_judged_text, missed)
    if subject.out_of_memory is not None:
        lines += map(HangingText, out_of_memory_lines(subject.out_of_memory))
    if any(finding.suppressed_by is None and not next_step(finding) for finding in subject.findings):
        lines += [growth_table(subject.type_growth)] if subject.type_growth else []
    lines += [
        finding_text(finding, lines_again(finding, before[place], subject) if place in before else None)
        for place, finding in _largest_last(subject.findings)
    ]
    if subject.reason:
        lines.append(HangingText(subject.reason, style="red" if subject.outcome != "clean" else ""))
    lines.append(_outcome_text(subject))
    return lines


def _largest_last(findings: Sequence[Finding]) -> list[tuple[int, Finding]]:
    """Return findings with their places; those of one cause stay together, as they were found."""
    largest: dict[str, Finding] = {}
    for finding in findings:
        largest[finding.fingerprint] = max(largest.get(finding.fingerprint, finding), finding, key=_size)
    return sorted(enumerate(findings), key=lambda found: _size(largest[found[1].fingerprint]))


def _size(finding: Finding) -> tuple[bool, int, int]:
    return finding.suppressed_by is None, finding.bytes, finding.count


def not_judged_text(missing: NotMeasured) -> HangingText:
    """Return one thing that could not be judged, and why."""
    why = f" ({missing.why})" if missing.process is None else f"; {missing.why}"
    return HangingText(f"not judged: {missing.what}{why}", style="yellow")


def finding_text(finding: Finding, details: Sequence[DetailLine] | None = None, more: str = "") -> HangingText:
    """Return one finding: what, how much, why, what gives it back; one that is suppressed is known, and no alarm.

    Args:
        finding: the finding.
        details: what is said below the first line, if that is not all that is known.
        more: what follows on the first line.
    """
    known = finding.suppressed_by is not None
    first = [
        ("known " if known else "", "yellow"),
        (f"{finding.resource}/{finding.cause}", "yellow" if known else "bold red"),
        (f" {first_line(finding)}{more}", ""),
    ]
    if details is None:
        details = terminal_lines(finding, "in the report (--report DIR)")
    return HangingText(first, *map(_detail_parts, details))


def _detail_parts(line: DetailLine) -> Parts:
    style = "dim" if line.quiet else ""
    edge = "underline" if line.suspect else style
    return [("    ", ""), (line.before, style), (line.edge, edge), (line.after, style)]


def growth_table(growth: Sequence[TypeGrowth]) -> Table:
    """Return a row per type of which there are more objects than before."""
    more = len(growth) - _MOST_TYPES
    caption = f"… {more} more are in the report" if more > 0 else None
    table = Table(
        title=GROWTH_TITLE,
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for name in GROWTH_HEAD:
        if name in ("type", "between"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for grown in growth[:_MOST_TYPES]:
        # As text, not as a string: what stands in brackets is no markup.
        table.add_row(*(Text(one_line(cell)) for cell in growth_cells(grown)))
    return table


def _outcome_text(subject: Subject) -> HangingText:
    if subject.id == END_OF_RUN:
        return HangingText("NOT FINISHED: only what was finished is judged", style="bold yellow")
    cycles = len({stage.cycle for stage in subject.stages})
    known = sum(finding.suppressed_by is not None for finding in subject.findings)
    if subject.outcome == "clean":
        what = "everything that was judged came back" if subject.not_measured else "everything came back"
        but = f" but {format_amount(known, 'known findings')}" if known else ""
        lived = f"{format_amount(cycles, 'cycles')}, " if cycles else ""
        return HangingText(f"CLEAN: {lived}{what}{but}", style="bold green")
    if subject.outcome == "leak":
        also = f", and {known} known" if known else ""
        counted = len(subject.findings) - known
        where = f" in {format_amount(cycles, 'cycles')}" if cycles else ""
        largest = max(subject.findings, key=_size) if subject.findings else None
        step = next_step(largest) if largest else ""
        # One of several: what is advised need not say of which holder.
        of = largest.holder if largest and largest.path and largest.remedy is None and counted > 1 else ""
        first = f"; to do first{f', for {of}' if of and of not in step else ''}: {step}" if step else ""
        return HangingText(f"LEAK: {format_amount(counted, 'findings')}{where}{also}{first}", style="bold red")
    if subject.outcome == "error" and cycles > 1:
        # Only the last one did not come to its end.
        return HangingText("NOT FINISHED: everything that was judged came back", style="bold yellow")
    word = "NOT JUDGED" if subject.outcome == "unsupported" else subject.outcome.upper()
    return HangingText(f"{word}: nothing can be concluded", style="bold yellow")


def _machine_lines(report: Report) -> HangingText:
    machine = report.machine
    counted = Counter(machine.devices)
    devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items()) or "no card"
    return HangingText(
        f"lowtide {report.version} · Python {machine.python} · torch {machine.torch or 'not loaded'} · "
        f"{machine.cpus} cores, {format_bytes(machine.memory)}",
        f"{devices} (driver figures: {machine.driver})",
        style="dim",
    )
