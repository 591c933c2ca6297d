"""What a filter looks through: each finding of a report, and each subject without one, with the part of the page it is.

A page with ten thousand findings as elements takes a browser half a minute. So the first ones are elements from the
start, and all of them are data, of which the page shows what a filter leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import amount, holder_text
from lowtide.reports.schema import Finding, Subject

CHUNK = 250
"""Entries that are unpacked together when one of them is opened."""

LONGEST = 300
"""Characters of one text of an entry."""


class Entry(NamedTuple):
    """A finding, or a subject that has none.

    Attributes:
        place: its anchor on the page.
        outcome: of its subject; `suppressed` for a finding that a suppression knows.
        subject: the subject's name.
        title: what a list shows of it.
        details: what else a filter looks through.
    """

    place: str
    outcome: str
    subject: str
    title: str
    details: str


def entries_of(numbered: Sequence[tuple[int, Subject]]) -> Iterator[tuple[Entry, Subject, Finding | None]]:
    """Yield the entries of all subjects, in order; with the subject, and the finding if it is about one."""
    for turn, subject in numbered:
        name = _short(subject.id)
        for place, finding in enumerate(subject.findings):
            outcome = subject.outcome if finding.suppressed_by is None else "suppressed"
            title = f"{finding.resource}/{finding.cause} · {amount(finding)} · since {finding.stage}"
            yield Entry(f"s{turn}f{place}", outcome, name, _short(title), _details(finding)), subject, finding
        if not subject.findings:
            yield Entry(f"s{turn}", subject.outcome, name, _short(subject.reason), ""), subject, None


def _details(finding: Finding) -> str:
    path = "".join(hop.edge for hop in finding.path)
    process = "" if finding.process is None else finding.process.text
    told = (finding.message, holder_text(finding), path, finding.device, process, finding.fingerprint)
    return " ".join(map(_short, filter(None, told)))


def _short(text: str) -> str:
    return one_line(text[:LONGEST])[:LONGEST]


def chunks(written: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield some values, `CHUNK` at a time."""
    for first in range(0, len(written), CHUNK):
        yield written[first : first + CHUNK]


def filterable(
    numbered: Sequence[tuple[int, Subject]], write: Callable[[Subject, Finding | None, str], str]
) -> dict[str, Any]:
    """Return the data of a filter: under `index` the entries, under `entries-0` and so on the parts of the page.

    Args:
        numbered: the subjects, with the numbers that their anchors have.
        write: gives the part of the page of a subject, or of one of its findings; with its anchor.
    """
    index, parts = [], []
    for entry, subject, finding in entries_of(numbered):
        index.append(entry)
        parts.append(write(subject, finding, entry.place))
    return {"index": {"chunk": CHUNK, "entries": index}} | {
        f"entries-{turn}": chunk for turn, chunk in enumerate(chunks(parts))
    }
