"""What is new, gone or grown from one report to a later one, finding by finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec
from rich.console import Group, RenderableType

from lowtide.reports.hanging_text import HangingText
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.html.scripts import security_policy
from lowtide.reports.markdown import MOST, as_code, as_text
from lowtide.reports.schema import Finding, Report, Subject
from lowtide.reports.sizes import format_amount, format_bytes

Kind = Literal["new", "grown", "not judged", "shrunk", "same", "gone"]

_ORDER: dict[Kind, int] = {"new": 0, "grown": 1, "not judged": 2, "shrunk": 3, "same": 4, "gone": 5}

_NOISY = ("host-memory", "driver", "reserved", "pinned")
"""Resources whose bytes are a level of the whole process, and differ a little from run to run."""

_NOISE = 0.05
_LEAST_NOISE = 1 << 20


class Side(msgspec.Struct, frozen=True):
    """A leak in one report: all findings of one fingerprint.

    Attributes:
        finding: the largest of them.
        bytes: of all of them.
        count: of all of them.
        subjects: those that have it.
        known: whether all of them are suppressed.
    """

    finding: Finding
    bytes: int
    count: int
    subjects: tuple[str, ...]
    known: bool


class LeakChange(msgspec.Struct, frozen=True):
    """What became of one leak.

    Attributes:
        kind: `not judged`: none of the subjects that had it was judged later, so that nobody knows whether it is gone.
        before: in the earlier report; None where it was not there.
        after: in the later one; None where it is not there.
    """

    kind: Kind
    before: Side | None
    after: Side | None

    @property
    def side(self) -> Side:
        """The later side, or the earlier one of what is not there any more."""
        side = self.after or self.before
        assert side is not None
        return side

    @property
    def fails(self) -> bool:
        """Whether it is worse than before, and nobody has said that it may be."""
        return self.kind in ("new", "grown") and not self.side.known


def compare_reports(before: Report, after: Report) -> list[LeakChange]:
    """Return what became of each leak, the worst first; findings are the same where their fingerprints are.

    A finding of today's whose `former_fingerprint` an older version of lowtide wrote is the same, too.

    Args:
        before: the earlier report.
        after: the later one.
    """
    marks = {finding.fingerprint for subject in before.subjects for finding in subject.findings}
    earlier, later = _sides(before.subjects, set()), _sides(after.subjects, marks)
    judged = {subject.id for subject in after.subjects if subject.outcome in ("clean", "leak")}
    changes = [
        LeakChange(_kind(earlier.get(mark), later.get(mark), judged), earlier.get(mark), later.get(mark))
        for mark in dict.fromkeys((*later, *earlier))
    ]
    return sorted(changes, key=lambda change: (_ORDER[change.kind], change.side.known, -change.side.bytes))


def _sides(subjects: Iterable[Subject], former: Collection[str]) -> dict[str, Side]:
    """Return the leaks by fingerprint; by the former one where that is in `former`, and the one of today is not."""
    groups: dict[str, list[tuple[str, Finding]]] = {}
    for subject in subjects:
        for finding in subject.findings:
            # What was one leak to an older version may be several today.
            older = finding.former_fingerprint
            is_older = bool(older) and older in former and finding.fingerprint not in former
            mark = older if is_older else finding.fingerprint
            groups.setdefault(mark, []).append((subject.id, finding))
    return {mark: _side(group) for mark, group in groups.items()}


def _side(group: Sequence[tuple[str, Finding]]) -> Side:
    findings = [finding for _, finding in group]
    return Side(
        finding=max(findings, key=lambda finding: finding.bytes),
        bytes=sum(finding.bytes for finding in findings),
        count=sum(finding.count for finding in findings),
        subjects=tuple(dict.fromkeys(name for name, _ in group)),
        known=all(finding.suppressed_by is not None for finding in findings),
    )


def _kind(before: Side | None, after: Side | None, judged: set[str]) -> Kind:
    if before is None:
        return "new"
    if after is None:
        return "gone" if judged.intersection(before.subjects) else "not judged"
    was, now = (before.bytes, after.bytes) if before.bytes or after.bytes else (before.count, after.count)
    noise = max(_LEAST_NOISE, int(was * _NOISE)) if after.finding.resource in _NOISY else 0
    if abs(now - was) <= noise:
        return "same"
    return "grown" if now > was else "shrunk"


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
    """Return `WORSE: 1 new, 2 grown, 1 gone`; one line."""
    counts = Counter(change.kind for change in changes)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in _STYLES if counts[kind]) or "no findings in either"
    known = sum(change.kind in ("new", "grown") and not change.fails for change in changes)
    said += f"; {known} of them known" if known else ""
    if any(change.fails for change in changes):
        return f"WORSE: {said}"
    return f"NOT KNOWN: {said}" if counts["not judged"] else f"NO WORSE: {said}"


def render_for_terminal(changes: Sequence[LeakChange]) -> RenderableType:
    """Return a line for each change, and the verdict."""
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
    """Return the verdict and a table of the first `MOST` changes, which are the worst."""
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
    """Return a page of its own.

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
    """Return `8.0 MiB → 12.0 MiB`, or `8.0 MiB (+512 B)` where both read the same; in things for what has no bytes."""
    if change.before is None or change.after is None:
        return _amount(change.side)
    was, now = _amount(change.before), _amount(change.after)
    if was != now:
        return f"{was} → {now}"
    return now if change.kind == "same" else f"{now} ({change.after.bytes - change.before.bytes:+,} B)"


def subjects(side: Side) -> str:
    """Return `test_a`; `test_a and 3 more`."""
    more = len(side.subjects) - 1
    return f"{side.subjects[0]} and {more} more" if more else side.subjects[0]


def _amount(side: Side) -> str:
    return format_bytes(side.bytes) if side.bytes else format_amount(side.count, side.finding.resource)
