"""What is known of a finding in plain lines: the same words on every terminal and in every kind of report.

Nothing here is escaped: each medium does that in its own way when it writes a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowtide.reports.causes import Sighting
from lowtide.reports.escaping import escape_toml
from lowtide.reports.schema import Finding, Hop, Remedy, Subject, TypeGrowth
from lowtide.reports.sizes import format_amount, format_bytes

SHOWN_HOPS = 12
"""Hops of a path that is not shown whole."""

MOST_LINES = 12
"""Lines that a finding takes on a terminal, the first with its message included."""

SHOWN_FRAMES = 3
"""Frames of an allocation stack that is not shown whole."""

GROWTH_TITLE = "Objects that became more"
GROWTH_HEAD = ("type", "before", "after", "growth", "between")
"""Of the table of a subject's `type_growth`."""

_PLACEHOLDER = "TODO: say why this may stay"
_LONGEST_MESSAGE = 1000
_MEMORY = ("tensors", "host-memory")
"""Characters of a message in an entry: an `assert` of a large value may have millions."""

_MARKS = {"innocent": "expected to stay", "holding": "should be gone"}
_TRENDS = {
    "growth": "growth (kept growing)",
    "residue": "residue (once, and no more)",
    "bounded": "bounded (replaced or limited)",
}


class DetailLine(NamedTuple):
    """One line of a finding's details.

    Attributes:
        before: what stands before the edge; the whole line where it is about none.
        edge: how an object of the path is held, as code.
        after: what stands behind the edge.
        suspect: whether cutting the edge may be the fix; underlined where the medium can.
        quiet: whether it is there to be looked up and not to be read.
    """

    before: str
    edge: str = ""
    after: str = ""
    suspect: bool = False
    quiet: bool = False

    @property
    def text(self) -> str:
        """The whole line."""
        return self.before + self.edge + self.after


def finding_lines(finding: Finding, *, whole: bool = True, rest: str = "") -> list[DetailLine]:
    """Return all that is known of a finding beside its first line.

    Args:
        finding: the finding.
        whole: whether to show every hop and every frame, or only the most significant ones.
        rest: where those are that are left out, as `with -v`.
    """
    lines = [DetailLine(text) for text in _before_path(finding)]
    if finding.path:
        lines.append(DetailLine("path:"))
        lines += _path_lines(finding.path, len(finding.path) if whole else SHOWN_HOPS, rest)
    lines += _frame_lines(finding, len(finding.allocated_at) if whole else SHOWN_FRAMES, rest)
    lines += [DetailLine(text) for text in _after_path(finding)]
    lines.append(DetailLine(f"fingerprint {finding.fingerprint}", quiet=True))
    return lines


def terminal_lines(finding: Finding, rest: str, *, whole: bool = False) -> list[DetailLine]:
    """Return what a terminal shows of a finding below its first line: with that `MOST_LINES` lines at most.

    Args:
        finding: the finding.
        rest: where the hops, frames and other things are that are left out, as `with -v`.
        whole: whether to show everything, however long it is.
    """
    if whole:
        return finding_lines(finding)
    for hops, frames in [*((hops, SHOWN_FRAMES) for hops in range(SHOWN_HOPS, 3, -1)), (4, 1), (3, 1), (3, 0)]:
        lines = _short_lines(finding, rest, hops, frames)
        if len(lines) < MOST_LINES:
            break
    # The fingerprint stays: it is what a suppression names.
    return [*lines[: MOST_LINES - 2], lines[-1]] if len(lines) >= MOST_LINES else lines


def _short_lines(finding: Finding, rest: str, hops: int, frames: int) -> list[DetailLine]:
    lines = [DetailLine(text) for text in _before_path(finding)]
    if finding.path:
        lines.append(DetailLine("path:"))
        lines += _path_lines(finding.path, hops, rest)
    lines += _frame_lines(finding, frames, rest) if frames else []
    lines += [DetailLine(text) for text in _after_path(finding, most=2)]
    lines.append(DetailLine(f"fingerprint {finding.fingerprint}", quiet=True))
    return lines


def lines_again(finding: Finding, first: Sighting, subject: Subject) -> list[DetailLine]:
    """Return what is said of a finding below its first line where all else was said of its cause before.

    Args:
        finding: the finding.
        first: where its cause was seen first.
        subject: whose finding it is.
    """
    where = "above" if first.subject.id == subject.id else f"in {first.subject.id}"
    is_known = finding.cause != "unknown" or finding.holder or finding.allocated_at
    return [
        DetailLine(f"the same cause as {where}" if is_known else f"who holds it is not known, as {where}"),
        DetailLine(f"fingerprint {finding.fingerprint}", quiet=True),
    ]


def first_line(finding: Finding) -> str:
    """Return what did not come back, and what to change, where the message does not say that already."""
    advice = advice_text(finding)
    return finding.message if not advice or advice in finding.message else f"{finding.message}; {advice}"


def amount(finding: Finding) -> str:
    """Return `1.5 MiB`; `3 threads` for what has no bytes."""
    return format_bytes(finding.bytes) if finding.bytes else format_amount(finding.count, finding.resource)


def holder_text(finding: Finding) -> str:
    """Return `held by helper.CACHE`; the bare names of what is no memory (threads, descriptors); empty if unknown."""
    if not finding.holder:
        return ""
    return f"held by {finding.holder}" if finding.path or finding.resource in _MEMORY else finding.holder


def hop_facts(hop: Hop) -> str:
    """Return what is known of a hop beside its edge and type: `should be gone, retains 32.0 MiB`."""
    facts = [_MARKS[hop.mark]] if hop.mark is not None else []
    if hop.retains_bytes is not None:
        facts.append(f"retains {format_bytes(hop.retains_bytes)}")
    return ", ".join(facts)


def remedy_effect(remedy: Remedy, finding: Finding) -> str:
    """Return what the remedy did when it was tried: `gives back 32.0 MiB of 32.0 MiB`."""
    if finding.bytes:
        return f"gives back {format_bytes(remedy.returns_bytes)} of {format_bytes(finding.bytes)}"
    return f"gives back {format_bytes(remedy.returns_bytes)}" if remedy.returns_bytes else "gives it back"


def advice_text(finding: Finding) -> str:
    """Return what to change, as far as that was not tried; empty where something that was tried gave it back."""
    # To let go of a loss gives its graph back, and yet the next loss is to be kept without one.
    return finding.advice or "" if finding.remedy is None or finding.cause == "autograd" else ""


def next_step(finding: Finding) -> str:
    """Return what to do about a finding: what is advised, or what gave it back when it was tried; empty for neither."""
    advice, remedy = advice_text(finding), finding.remedy
    return advice if advice or remedy is None else f"{remedy.action} {remedy_effect(remedy, finding)}"


def tried_effect(tried: Remedy) -> str:
    """Return what something that is not the remedy did: `gives nothing back`."""
    return f"gives back {format_bytes(tried.returns_bytes)}" if tried.returns_bytes else "gives nothing back"


def in_vain(finding: Finding) -> list[Remedy]:
    """Return what was tried and is not the remedy, nor a part of it that nobody measured alone."""
    chosen = "" if finding.remedy is None else finding.remedy.action
    # What is only counted came back by all of them together.
    helped = {chosen} if finding.bytes else {chosen, *chosen.split("; ")}
    return [tried for tried in finding.tried if tried.action not in helped]


def shared_text(finding: Finding) -> str:
    """Return `8.0 MiB of it is held by others too`; empty if none of it is."""
    return f"{format_bytes(finding.shared_bytes)} of it is held by others too" if finding.shared_bytes else ""


def trend_text(finding: Finding) -> str:
    """Return the trend and what it means; empty if it is not known."""
    return "" if finding.trend is None else _TRENDS[finding.trend]


def growth_cells(grown: TypeGrowth) -> tuple[str, str, str, str, str]:
    """Return a row under `GROWTH_HEAD`."""
    more = grown.after - grown.before
    return grown.type, str(grown.before), str(grown.after), f"{more:+d}", f"{grown.since} → {grown.until}"


def suppression_entry(finding: Finding, header: str = "[[suppressions]]") -> str:
    """TOML that suppresses one finding, with the reason left to a person.

    Args:
        finding: what is known.
        header: the line above the entry: the name of the table in which the file has its entries.
    """
    message = finding.message
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    values = {
        "fingerprint": finding.fingerprint,
        "resource": finding.resource,
        "cause": finding.cause,
        "reason": f"{_PLACEHOLDER} ({message})",
    }
    return "\n".join([header, *(f"{key} = {_quoted(value)}" for key, value in values.items()), ""])


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's; but TOML has no halves of surrogate pairs.
    encodable = text.encode(errors="backslashreplace").decode()
    return escape_toml(json.dumps(encodable, ensure_ascii=False))


def _before_path(finding: Finding) -> Iterator[str]:
    if finding.suppressed_by is not None:
        yield f"suppressed by {finding.suppressed_by}"
    # Most messages name the holder and the number already.
    holder = holder_text(finding)
    if holder and holder not in finding.message:
        yield holder if holder != finding.holder else f"{finding.resource}: {holder}"
    # A number of bytes is no number of things.
    counted = re.compile(rf"(?<![\d.]){finding.count} (?!(?:[KMGT]i)?B\b)")
    if finding.bytes and finding.count > 1 and not counted.search(finding.message):
        yield f"count: {finding.count}"


def _path_lines(path: Sequence[Hop], most: int, rest: str) -> Iterator[DetailLine]:
    """Yield a line per hop that is shown, and one for each gap between them."""
    shown = _telling(path, most)
    following = 0
    for turn in [*shown, len(path)]:
        if turn > following:
            yield _left_out(turn - following, rest, indent="   ")
        if turn < len(path):
            yield _hop_line(path[turn])
        following = turn + 1


def _telling(path: Sequence[Hop], most: int) -> list[int]:
    """Return the places of the hops to show: the suspects, then the others from the root on."""
    return sorted(sorted(range(len(path)), key=lambda turn: not path[turn].suspect)[:most])


def _hop_line(hop: Hop) -> DetailLine:
    facts = hop_facts(hop)
    after = f"  ({hop.type})" + (f"  {facts}" if facts else "")
    return DetailLine("-> " if hop.suspect else "   ", hop.edge, after, suspect=hop.suspect)


def hop_lines(path: Sequence[Hop]) -> Iterator[DetailLine]:
    """Yield a line for each hop of a whole path."""
    yield from map(_hop_line, path)


def _frame_lines(finding: Finding, most: int, rest: str) -> Iterator[DetailLine]:
    for frame in finding.allocated_at[:most]:
        yield DetailLine(f"allocated in {frame.function}, {frame.file}:{frame.line}")
    if len(finding.allocated_at) > most:
        yield _left_out(len(finding.allocated_at) - most, rest)


def _left_out(count: int, rest: str, indent: str = "") -> DetailLine:
    return DetailLine(f"{indent}… {count} more {rest}".rstrip(), quiet=True)


def _after_path(finding: Finding, most: int | None = None) -> Iterator[str]:
    """Yield what is known beside the path; of what was tried, what that changed and of the parts, `most` lines each."""
    shared, trend = shared_text(finding), trend_text(finding)
    if shared:
        yield shared
    if trend:
        yield f"trend: {trend}"
    if finding.remedy is not None:
        yield f"remedy: {finding.remedy.action} {remedy_effect(finding.remedy, finding)}"
    yield from _at_most([f"tried: {tried.action} {tried_effect(tried)}" for tried in in_vain(finding)], most)
    yield from _at_most([f"changed by trying: {change}" for change in finding.changed], most)
    parts = [f"includes {part.resource}/{part.cause}: {first_line(part)}" for part in finding.parts]
    yield from _at_most(parts, most and most + 1)


def _at_most(lines: Sequence[str], most: int | None) -> Iterator[str]:
    """Yield the first lines, the last one with how many more there are; all of them if `most` is None."""
    if most is None or len(lines) <= most:
        yield from lines
        return
    yield from lines[: most - 1]
    yield f"{lines[most - 1]} … and {len(lines) - most} more"
