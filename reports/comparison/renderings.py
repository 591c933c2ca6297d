"""A comparison of two reports as text: for a terminal, as Markdown and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType

from lowtide.reports.comparison.changes import Kind, LeakChange, Side
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.html.scripts import security_policy
from lowtide.reports.markdown import MOST, as_code, as_text
from lowtide.reports.sizes import format_amount, format_bytes

_STYLES: dict[Kind, str] = {
    "new": "bold red",
    "grown": "bold red",
    "not judged": "yellow",
    "gone": "green",
    "shrunk": "green",
    "same": "",
}

_VERDICT_STYLES = {"WORSE": "bold red", "NOT KNOWN": "bold yellow", "NO WORSE": "bold green"}


def verdict_of(changes: Sequence[LeakChange]) -> str:
    """`WORSE: 1 new, 2 grown, 1 gone`; one line."""
    counts = Counter(change.kind for change in changes)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in _STYLES if counts[kind]) or "no findings in either"
    known = sum(change.kind in ("new", "grown") and not change.fails for change in changes)
    said += f"; {known} of them known" if known else ""
    if any(change.fails for change in changes):
        return f"WORSE: {said}"
    return f"NOT KNOWN: {said}" if counts["not judged"] else f"NO WORSE: {said}"


def render_for_terminal(changes: Sequence[LeakChange]) -> RenderableType:
    """A line for each change, and the verdict."""
    lines: list[RenderableType] = []
    for change in changes:
        first = [
            (f"{change.kind} ", _STYLES[change.kind]),
            (f"{amounts(change)}  {change.side.finding.message}", ""),
        ]
        fingerprint = [(f"    fingerprint {change.side.finding.fingerprint}", "dim")]
        lines.append(HangingText(first, f"    in {subjects(change.side)}", fingerprint))
    verdict = verdict_of(changes)
    return Group(*lines, HangingText(verdict, style=_VERDICT_STYLES[verdict.partition(":")[0]]))


def render_as_markdown(changes: Sequence[LeakChange]) -> str:
    """The verdict and a table of the first `MOST` changes, which are the worst."""
    parts = ["## lowtide diff", f"**{verdict_of(changes)}**"]
    if changes:
        rows = [
            f"| {change.kind} | {amounts(change)} | {as_text(change.side.finding.message)} "
            f"| {as_code(subjects(change.side))} | {as_code(change.side.finding.fingerprint)} |"
            for change in changes[:MOST]
        ]
        parts.append("\n".join(["| | how much | what | in | fingerprint |", "|---|---|---|---|---|", *rows]))
        if len(changes) > MOST:
            parts.append(f"… and {len(changes) - MOST} more; `lowtide diff` shows all of them")
    return "\n\n".join(parts) + "\n"


def render_as_page(changes: Sequence[LeakChange], before: str, after: str) -> str:
    """A page of its own.

    Args:
        changes: what changed.
        before: where the earlier report is.
        after: where the later one is.
    """
    return (
        environment()
        .get_template("diff.html.j2")
        .render(
            verdict=verdict_of(changes),
            changes=changes,
            before=before,
            after=after,
            amounts=amounts,
            subjects=subjects,
            policy=security_policy(()),
        )
    )


def amounts(change: LeakChange) -> str:
    """`8.0 MiB → 12.0 MiB`, or `8.0 MiB (+512 B)` where both read the same; in things for what has no bytes."""
    if change.before is None or change.after is None:
        return _amount(change.side)
    was, now = _amount(change.before), _amount(change.after)
    if was != now:
        return f"{was} → {now}"
    return now if change.kind == "same" else f"{now} ({change.after.bytes - change.before.bytes:+,} B)"


def subjects(side: Side) -> str:
    """`test_a`; `test_a and 3 more`."""
    more = len(side.subjects) - 1
    return f"{side.subjects[0]} and {more} more" if more else side.subjects[0]


def _amount(side: Side) -> str:
    return format_bytes(side.bytes) if side.bytes else format_amount(side.count, side.finding.resource)
