"""A report on the terminal: pure functions from a report to what rich prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.reports.figure_table import Column, FigureTable
from lowtide.reports.finding_lines import (
    GROWTH_HEAD,
    GROWTH_TITLE,
    DetailLine,
    first_line,
    growth_cells,
    one_line,
    terminal_lines,
)
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.processes.tree_table import as_figures, tree_tables
from lowtide.reports.schema import Finding, Ledger, NotMeasured, Readings, Report, Stage, Subject, TypeGrowth
from lowtide.reports.sizes import format_bytes

_ARENAS = ("weights", "kv_cache", "runtime", "workspace")
_MOST_TYPES = 20
_UNKNOWN = "—"


def render(report: Report, *notes: str) -> RenderableType:
    """The whole report: machine, one table of stages and one ledger per device for each subject, notes, verdict.

    Args:
        report: what is shown.
        notes: lines for above the last verdict, which ends the output.
    """
    parts: list[RenderableType] = [HangingText(_machine_line(report))]
    for subject in report.subjects:
        parts += render_subject(subject)
    end = len(parts) - 1 if report.subjects else len(parts)
    parts[end:end] = [HangingText(Text(note)) for note in notes]
    return Group(*parts)


def render_subject(subject: Subject) -> list[RenderableType]:
    """One subject's tables and verdict."""
    parts: list[RenderableType] = []
    if subject.stages:
        parts.append(stage_table(subject.stages))
        last = subject.stages[-1].cycle
        of_last = [stage for stage in subject.stages if stage.cycle == last]
        parts += [ledger_table(last, *ledgers) for ledgers in _ledgers_by_device(of_last)]
        parts += [as_figures(table) for table in tree_tables(of_last)]
    parts += verdict_lines(subject)
    return parts


def stage_table(stages: Sequence[Stage]) -> FigureTable:
    """One row per stage, with the readings after it; what no stage changes is named below."""
    arenas = [*_ARENAS, *sorted({tag for stage in stages for tag in stage.after.arenas} - set(_ARENAS))]
    rows = [tuple(_stage_cells(stage, arenas)) for stage in stages]
    sizes = ("tensors", "allocated", "reserved", *arenas, "pinned", "host", "driver", "RSS")
    names = (*sizes, "frozen", "caches", "GB/s", "tok/s")
    varying, notes = _varying(
        [
            Column(one_line(name.replace("_", " ")), cells)
            for name, cells in zip(names, zip(*rows, strict=True), strict=True)
        ]
    )
    seconds = Column("seconds", tuple(f"{stage.seconds:.3f}" for stage in stages))
    rates = [column for column in varying if column.name in ("GB/s", "tok/s")]
    others = [_process_column(name, stages) for name in _process_names(stages)]
    return FigureTable(
        title="After each stage (MiB)",
        labels=(
            Column("cycle", tuple(str(stage.cycle) for stage in stages)),
            Column("stage", tuple(one_line(stage.name) for stage in stages)),
        ),
        figures=(*(column for column in varying if column not in rates), *others, seconds, *rates),
        notes=notes,
        sections=frozenset(turn for turn, stage in enumerate(stages) if turn and stage.cycle != stages[turn - 1].cycle),
    )


def _process_names(stages: Sequence[Stage]) -> list[str]:
    """Of those that held something; a process without tensors is in the table of processes alone."""
    return list(dict.fromkeys(each.process.name for stage in stages for each in stage.processes if each.bytes))


def _process_column(name: str, stages: Sequence[Stage]) -> Column:
    """What the engine's processes of one name held in tensors and arenas; blank where there was none."""
    held = [[each.bytes for each in stage.processes if each.process.name == name] for stage in stages]
    return Column(one_line(f"in {name}"), tuple(_mib(sum(sizes)) if sizes else "" for sizes in held))


def _stage_cells(stage: Stage, arenas: Sequence[str]) -> Iterator[str]:
    after: Readings = stage.after
    yield from map(_mib, (after.tensors, after.allocated, after.reserved))
    yield from (_mib(after.arenas.get(tag, 0)) for tag in arenas)
    yield from map(_mib, (after.pinned, after.host_pools, after.driver, after.rss))
    yield str(after.frozen_objects)
    yield _mib(after.cache_bytes)
    yield "" if stage.bytes_per_second is None else f"{stage.bytes_per_second / 1e9:.1f}"
    yield "" if stage.tokens_per_second is None else f"{stage.tokens_per_second:.0f}"


def ledger_table(cycle: int, names: Sequence[str], ledgers: Sequence[Ledger]) -> FigureTable:
    """One device's ledger: a row per line, the largest first, a column per stage; each column adds up to its total.

    Lines that no stage changes are named below; they are in the totals.
    """
    first = ledgers[0]
    source = "this process, " + first.source if first.source != "none" else "no driver says what this process holds"
    sizes: dict[str, list[int | None]] = {}
    for turn, ledger in enumerate(ledgers):
        for line in ledger.lines:
            sizes.setdefault(line.name, [0] * len(ledgers))[turn] = line.bytes
    # A line that never held anything says nothing.
    held = sorted((name for name in sizes if any(sizes[name])), key=lambda name: -max(map(_known, sizes[name])))
    lines, notes = _varying([Column(one_line(name), tuple(map(_mib, sizes[name]))) for name in held])
    rows = [
        *lines,
        Column("unexplained", tuple(_mib(ledger.unexplained) for ledger in ledgers)),
        Column("total", tuple(_mib(ledger.total) for ledger in ledgers)),
    ]
    return FigureTable(
        title=f"Ledger of {first.device}, cycle {cycle} (MiB; {source})",
        labels=(Column("line", tuple(row.name for row in rows)),),
        figures=tuple(
            Column(one_line(name), cells)
            for name, cells in zip(names, zip(*(row.cells for row in rows), strict=True), strict=True)
        ),
        notes=notes,
        sections=frozenset({len(rows) - 1}),
        bold=frozenset({len(rows) - 2, len(rows) - 1}),
    )


def _varying(figures: Sequence[Column]) -> tuple[list[Column], tuple[str, ...]]:
    """The figures to show, and the notes on those that this machine does not have or that never change."""
    if all(len(figure.cells) < 2 for figure in figures):
        # Of a single stage nothing can be said to change, and what is left out would not make it easier to read.
        return list(figures), ()
    absent = [figure for figure in figures if {*figure.cells} <= {_UNKNOWN, ""}]
    rest = [figure for figure in figures if not {*figure.cells} <= {_UNKNOWN, ""}]
    constant = [figure for figure in rest if len({*figure.cells}) == 1]
    notes = []
    if absent:
        notes.append(f"not measured here: {', '.join(figure.name for figure in absent)}")
    if constant:
        notes.append(f"never changed: {'; '.join(f'{figure.name} {figure.cells[0]}' for figure in constant)}")
    return [figure for figure in rest if figure not in constant], tuple(notes)


def _known(size: int | None) -> int:
    return size or 0


def verdict_lines(subject: Subject) -> list[RenderableType]:
    """What came back and where, what did not, what could not be judged, and the outcome in one line."""
    lines: list[RenderableType] = []
    for item in subject.returns:
        what = f"{item.resource} on {item.device}" if item.device else item.resource
        if item.bytes:
            what += f" ({format_bytes(item.bytes)})"
        came = f"came back at rung {item.rung}, {item.seconds:.2f} s after {item.stage}"
        lines.append(HangingText(Text(f"cycle {item.cycle}: {what} {came}")))
    # A reason that names other processes says all of them.
    missed = [missing for missing in subject.not_measured if missing.process is None or not subject.reason]
    lines += [HangingText(not_judged_text(missing)) for missing in missed]
    lines += [HangingText(finding_text(finding)) for finding in subject.findings]
    if subject.type_growth:
        lines.append(growth_table(subject.type_growth))
    if subject.reason:
        lines.append(HangingText(Text(one_line(subject.reason), style="red" if subject.outcome != "clean" else "")))
    lines.append(HangingText(_outcome_text(subject)))
    return lines


def not_judged_text(missing: NotMeasured) -> Text:
    """One thing that could not be judged, and why."""
    why = f" ({missing.why})" if missing.process is None else f"; {missing.why}"
    return Text(one_line(f"not judged: {missing.what}{why}"), style="yellow")


def finding_text(finding: Finding) -> Text:
    """One finding: what, how much, why, what gives it back; one that is suppressed is known, and no alarm."""
    known = finding.suppressed_by is not None
    text = Text()
    text.append("known " if known else "", style="yellow")
    text.append(f"{finding.resource}/{finding.cause}", style="yellow" if known else "bold red")
    text.append(f" {first_line(finding)}")
    for line in terminal_lines(finding, "in the report (--report DIR)"):
        text.append("\n    ")
        text.append(_detail_text(line))
    return text


def _detail_text(line: DetailLine) -> Text:
    text = Text(style="dim" if line.quiet else "")
    text.append(one_line(line.before))
    text.append(one_line(line.edge), style="underline" if line.suspect else "")
    text.append(one_line(line.after))
    return text


def growth_table(growth: Sequence[TypeGrowth]) -> Table:
    """A row per type of which there are more objects than before."""
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


def _outcome_text(subject: Subject) -> Text:
    cycles = len({stage.cycle for stage in subject.stages})
    known = sum(finding.suppressed_by is not None for finding in subject.findings)
    if subject.outcome == "clean":
        what = "everything that was judged came back" if subject.not_measured else "everything came back"
        but = f" but {known} known finding(s)" if known else ""
        return Text(f"CLEAN: {f'{cycles} cycle(s), ' if cycles else ''}{what}{but}", style="bold green")
    if subject.outcome == "leak":
        also = f", and {known} known" if known else ""
        counted = len(subject.findings) - known
        where = f" in {cycles} cycle(s)" if cycles else ""
        return Text(f"LEAK: {counted} finding(s){where}{also}", style="bold red")
    word = "NOT JUDGED" if subject.outcome == "unsupported" else subject.outcome.upper()
    return Text(f"{word}: nothing can be concluded", style="bold yellow")


def _machine_line(report: Report) -> Text:
    machine = report.machine
    counted = Counter(machine.devices)
    devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items()) or "no card"
    return Text(
        f"lowtide {report.version} · Python {machine.python} · torch {machine.torch} · {machine.cpus} cores, "
        f"{format_bytes(machine.memory)}\n{devices} (driver figures: {machine.driver})",
        style="dim",
    )


def _ledgers_by_device(stages: Sequence[Stage]) -> Iterable[tuple[list[str], list[Ledger]]]:
    devices = [ledger.device for ledger in stages[0].after.ledgers]
    for turn, _ in enumerate(devices):
        ledgers = [stages[0].before.ledgers[turn], *(stage.after.ledgers[turn] for stage in stages)]
        yield ["before", *(stage.name for stage in stages)], ledgers


def _mib(size: int | None) -> str:
    return _UNKNOWN if size is None else f"{size / (1 << 20):.1f}"
