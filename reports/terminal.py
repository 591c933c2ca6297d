"""A report on the terminal: pure functions from a report to what rich prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.reports.finding_lines import (
    GROWTH_HEAD,
    GROWTH_TITLE,
    DetailLine,
    finding_lines,
    growth_cells,
    one_line,
)
from lowtide.reports.schema import Finding, Ledger, Readings, Report, Stage, Subject, TypeGrowth
from lowtide.reports.sizes import format_bytes

_ARENAS = ("weights", "kv_cache", "runtime", "workspace")
_MOST_TYPES = 20


def render(report: Report) -> RenderableType:
    """The whole report: machine, one table of stages and one ledger per device for each subject, verdict."""
    parts: list[RenderableType] = [_machine_line(report)]
    for subject in report.subjects:
        parts += render_subject(subject)
    return Group(*parts)


def render_subject(subject: Subject) -> list[RenderableType]:
    """One subject's tables and verdict."""
    parts: list[RenderableType] = []
    if subject.stages:
        parts.append(stage_table(subject.stages))
        last = subject.stages[-1].cycle
        of_last = [stage for stage in subject.stages if stage.cycle == last]
        parts += [ledger_table(last, *ledgers) for ledgers in _ledgers_by_device(of_last)]
    parts += verdict_lines(subject)
    return parts


def stage_table(stages: Sequence[Stage]) -> Table:
    """One row per stage, with the readings after it."""
    table = Table(title="After each stage (MiB)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("cycle", justify="right")
    table.add_column("stage", no_wrap=True)
    arenas = [*_ARENAS, *sorted({tag for stage in stages for tag in stage.after.arenas} - set(_ARENAS))]
    sizes = ("tensors", "allocated", "reserved", *arenas, "pinned", "host", "driver", "RSS")
    for name in (*sizes, "frozen", "caches", "seconds", "GB/s", "tok/s"):
        table.add_column(name.replace("_", " "), justify="right")
    cycle = 0
    for stage in stages:
        if cycle and stage.cycle != cycle:
            table.add_section()
        cycle = stage.cycle
        table.add_row(str(stage.cycle), stage.name, *_stage_cells(stage, arenas))
    return table


def _stage_cells(stage: Stage, arenas: Sequence[str]) -> Iterator[str]:
    after: Readings = stage.after
    yield from map(_mib, (after.tensors, after.allocated, after.reserved))
    yield from (_mib(after.arenas.get(tag, 0)) for tag in arenas)
    yield from map(_mib, (after.pinned, after.host_pools, after.driver, after.rss))
    yield str(after.frozen_objects)
    yield _mib(after.cache_bytes)
    yield f"{stage.seconds:.3f}"
    yield "" if stage.bytes_per_second is None else f"{stage.bytes_per_second / 1e9:.1f}"
    yield "" if stage.tokens_per_second is None else f"{stage.tokens_per_second:.0f}"


def ledger_table(cycle: int, names: Sequence[str], ledgers: Sequence[Ledger]) -> Table:
    """One device's ledger: a row per line, a column per stage; each column adds up to its total."""
    first = ledgers[0]
    source = "this process, " + first.source if first.source != "none" else "no driver says what this process holds"
    table = Table(
        title=f"Ledger of {first.device}, cycle {cycle} (MiB; {source})",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    table.add_column("line", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    rows: dict[str, list[int | None]] = {}
    for turn, ledger in enumerate(ledgers):
        for line in ledger.lines:
            rows.setdefault(line.name, [0] * len(ledgers))[turn] = line.bytes
    for name, sizes in rows.items():
        # A line that never held anything says nothing.
        if any(sizes):
            table.add_row(name, *map(_mib, sizes))
    table.add_row("unexplained", *(_mib(ledger.unexplained) for ledger in ledgers), style="bold")
    table.add_section()
    table.add_row("total", *(_mib(ledger.total) for ledger in ledgers), style="bold")
    return table


def verdict_lines(subject: Subject) -> list[RenderableType]:
    """What came back and where, what did not, what could not be judged, and the outcome in one line."""
    lines: list[RenderableType] = []
    for item in subject.returns:
        what = f"{item.resource} on {item.device}" if item.device else item.resource
        if item.bytes:
            what += f" ({format_bytes(item.bytes)})"
        came = f"came back at rung {item.rung}, {item.seconds:.2f} s after {item.stage}"
        lines.append(Text(f"cycle {item.cycle}: {what} {came}"))
    lines += [Text(f"not judged: {missing.what} ({missing.why})", style="yellow") for missing in subject.not_measured]
    lines += [finding_text(finding) for finding in subject.findings]
    if subject.type_growth:
        lines.append(growth_table(subject.type_growth))
    if subject.reason:
        lines.append(Text(subject.reason, style="red" if subject.outcome != "clean" else ""))
    lines.append(_outcome_text(subject))
    return lines


def finding_text(finding: Finding) -> Text:
    """One finding: what, how much, why, what gives it back; one that is suppressed is known, and no alarm."""
    known = finding.suppressed_by is not None
    text = Text()
    text.append("known " if known else "", style="yellow")
    text.append(f"{finding.resource}/{finding.cause}", style="yellow" if known else "bold red")
    text.append(f" {finding.message}")
    for line in finding_lines(finding):
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
        table.add_column(name, justify="left" if name in ("type", "between") else "right")
    for grown in growth[:_MOST_TYPES]:
        # As text, not as a string: what stands in brackets is no markup.
        table.add_row(*(Text(one_line(cell)) for cell in growth_cells(grown)))
    return table


def _outcome_text(subject: Subject) -> Text:
    judged = {stage.cycle for stage in subject.stages}
    known = sum(finding.suppressed_by is not None for finding in subject.findings)
    if subject.outcome == "clean":
        what = "everything that was judged came back" if subject.not_measured else "everything came back"
        but = f" but {known} known finding(s)" if known else ""
        return Text(f"CLEAN: {len(judged)} cycle(s), {what}{but}", style="bold green")
    if subject.outcome == "leak":
        also = f", and {known} known" if known else ""
        counted = len(subject.findings) - known
        return Text(f"LEAK: {counted} finding(s) in {len(judged)} cycle(s){also}", style="bold red")
    return Text(f"{subject.outcome.upper()}: nothing can be concluded", style="bold yellow")


def _machine_line(report: Report) -> Text:
    machine = report.machine
    devices = ", ".join(machine.devices) or "no card"
    return Text(
        f"lowtide {report.version} · Python {machine.python} · torch {machine.torch} · {machine.cpus} cores, "
        f"{format_bytes(machine.memory)} · {devices} (driver figures: {machine.driver})",
        style="dim",
    )


def _ledgers_by_device(stages: Sequence[Stage]) -> Iterable[tuple[list[str], list[Ledger]]]:
    devices = [ledger.device for ledger in stages[0].after.ledgers]
    for turn, _ in enumerate(devices):
        ledgers = [stages[0].before.ledgers[turn], *(stage.after.ledgers[turn] for stage in stages)]
        yield ["before", *(stage.name for stage in stages)], ledgers


def _mib(size: int | None) -> str:
    return "—" if size is None else f"{size / (1 << 20):.1f}"
