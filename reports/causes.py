"""One cause, one entry: what many tests, tries of a test or processes leave is written once, with all of these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowtide.reports.schema import Finding, Subject
from lowtide.reports.sizes import first_of

_OTHER_SUBJECTS = 3
"""How many subjects an entry names besides the first one that its cause was seen in."""

_NUMBERS = re.compile(r"[0-9a-f-]*\d[0-9a-f-]*")
"""What changes in a holder's name from one time to the next: a number, an address, a UUID."""


class Sighting(NamedTuple):
    """A finding, and where it was found.

    Attributes:
        subject: the subject that it is one of.
        finding: the finding.
        turn: the subject's place among all.
        place: the finding's place in the subject.
    """

    subject: Subject
    finding: Finding
    turn: int
    place: int


class Cause(NamedTuple):
    """What left something behind, once or many times.

    Attributes:
        first: where it was seen first.
        again: where it was seen after that.
    """

    first: Sighting
    again: Sequence[Sighting]

    @property
    def subjects(self) -> list[str]:
        """The names of all subjects that it was seen in, each once."""
        return list(dict.fromkeys(seen.subject.id for seen in (self.first, *self.again)))

    @property
    def elsewhere(self) -> str:
        """How often it was seen, and where else: `; 3 times; also in a, b and 2 more`; empty where it was seen once."""
        names = self.subjects
        times = 1 + len(self.again)
        more = f"; {times} times" if times > len(names) else ""
        return more + (f"; also in {first_of(names[1:], _OTHER_SUBJECTS)}" if len(names) > 1 else "")

    def by_largest(self) -> Cause:
        """Return the same, with the largest finding as the first."""
        seen = [self.first, *self.again]
        largest = max(seen, key=lambda each: each.finding.bytes)
        return Cause(largest, [each for each in seen if each is not largest])


def causes_of(subjects: Iterable[Subject]) -> list[Cause]:
    """Return the causes of all findings, in the order in which they were seen first."""
    found: dict[tuple[bool, str, str], list[Sighting]] = {}
    for turn, subject in enumerate(subjects):
        for place, finding in enumerate(subject.findings):
            # A fingerprint goes without who holds a descriptor.
            holder = _NUMBERS.sub("*", finding.holder or "")
            key = (finding.suppressed_by is not None, finding.fingerprint, holder)
            found.setdefault(key, []).append(Sighting(subject, finding, turn, place))
    return [Cause(first, again) for first, *again in found.values()]


def seen_before(subjects: Sequence[Subject]) -> list[dict[int, Sighting]]:
    """Return for each subject where causes of its findings were seen before: of those that were, by their places."""
    found: list[dict[int, Sighting]] = [{} for _ in subjects]
    for cause in causes_of(subjects):
        for seen in cause.again:
            found[seen.turn][seen.place] = cause.first
    return found
