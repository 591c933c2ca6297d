"""Suppressions: which findings are known and may stay, for which reason, until when, and under which versions."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from typing import get_args

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from lowtide.leakcheck.suppressions.toml import (
    OWN_TABLE,
    PYPROJECT_TABLE,
    Written,
    parse_document,
    read_text,
    table_of,
    value_at,
    written_entries,
)
from lowtide.probes.objects.described import constant_text
from lowtide.reports.outcomes import judged_as
from lowtide.reports.schema import Cause, Finding, ResourceName, Subject, as_written
from lowtide.reports.sizes import first_of
from lowtide.reports.statement import StatedFinding

KEYS = ("fingerprint", "path", "resource", "cause", "reason", "owner", "expires", "when")
"""What an entry may say; the shipped list also has `evidence`."""

_SHIPPED = "shipped_suppressions.toml"

_SHOWN = 5
"""Fingerprints that are proposed for a replaced entry; a report has all of them."""


class Suppression(msgspec.Struct, frozen=True):
    """One entry; a finding must match all that it names.

    Attributes:
        id: file and line, as `lowtide.toml:12`; the same in every process that loads the file.
        fingerprint: the one finding that is meant, or None.
        path: a pattern in which `*` stands for any text and all else for itself, or None; it must fit the whole of the
            holder or of the path as text (all edges, joined).
        resource: likewise; None fits all.
        cause: likewise; None fits all.
        reason: why it may stay.
        owner: who to ask.
        expires: the last day on which it counts.
        applies: whether its version predicates hold here.
        evidence: what a shipped entry rests on; "" in anybody else's.
    """

    id: str
    reason: str
    fingerprint: str | None = None
    path: str | None = None
    resource: str | None = None
    cause: str | None = None
    owner: str | None = None
    expires: date | None = None
    applies: bool = True
    evidence: str = ""

    @property
    def note(self) -> str:
        """What a report says of a finding that it suppresses, as one line."""
        return f"{self.id}: {' '.join(self.reason.split())}"

    def is_expired(self, today: date) -> bool:
        """Return whether its last day is over."""
        return self.expires is not None and self.expires < today

    def matches(self, finding: Finding) -> bool:
        """Return whether a finding is what the entry describes."""
        if self.fingerprint not in (None, finding.fingerprint):
            return False
        if self.resource not in (None, finding.resource) or self.cause not in (None, finding.cause):
            return False
        if self.path is None:
            return True
        # Edges are full of brackets (`['kv'][3]`), which `fnmatch` would read as sets of characters.
        pattern = re.compile(".*".join(map(re.escape, re.split(r"\*+", self.path))), re.DOTALL)
        texts = (finding.holder or "", "".join(hop.edge for hop in finding.path))
        return any(pattern.fullmatch(text) for text in texts)


class Applied(msgspec.Struct, frozen=True):
    """What suppressions did to some findings.

    Attributes:
        findings: in the same order, `suppressed_by` set where an entry matched.
        used: the ids of all entries that matched; those of several processes are merged by union.
    """

    findings: tuple[Finding, ...]
    used: frozenset[str]


class Suppressions(msgspec.Struct, frozen=True):
    """Entries in the order in which they are asked: the first that matches gives its reason."""

    entries: tuple[Suppression, ...] = ()

    def apply(self, findings: Iterable[Finding], today: date) -> Applied:
        """Mark the findings that an entry in force matches; one that is suppressed already stays as it is."""
        in_force = [entry for entry in self.entries if entry.applies and not entry.is_expired(today)]
        used: set[str] = set()
        marked = tuple(_marked(finding, in_force, used) for finding in findings)
        return Applied(marked, frozenset(used))

    def judge(self, subject: Subject, today: date) -> tuple[Subject, frozenset[str]]:
        """Mark the findings that an entry matches; return the subject with the outcome of the others, and who matched.

        What is known is no leak; but what failed for another reason too is not clean either.
        """
        applied = self.apply(subject.findings, today)
        outcome, reason = subject.outcome, subject.reason
        is_known = bool(applied.findings) and all(finding.suppressed_by is not None for finding in applied.findings)
        if outcome == "leak" and is_known and reason:
            outcome = "error"
        elif outcome == "leak" and is_known:
            outcome, reason = judged_as("clean", subject.not_measured)
        judged = msgspec.structs.replace(subject, findings=applied.findings, outcome=outcome, reason=reason)
        return judged, applied.used


def _marked(finding: Finding, in_force: Sequence[Suppression], used: set[str]) -> Finding:
    """Mark a finding with why it is known, and its parts; what is known of a part says nothing of the rest."""
    open_to = in_force if finding.suppressed_by is None else ()
    matching = [[entry for entry in open_to if entry.matches(each)] for each in _each_of(finding)]
    # Not only the first: an entry that another one hides is still one that matches something.
    used.update(entry.id for entries in matching for entry in entries)
    note = matching[0][0].note if all(matching) else finding.suppressed_by
    parts = [_marked(part, in_force, used) for part in finding.parts]
    if note is not None:
        parts = [msgspec.structs.replace(part, suppressed_by=part.suppressed_by or note) for part in parts]
    return msgspec.structs.replace(finding, suppressed_by=note, parts=tuple(parts))


def _each_of(finding: Finding) -> list[Finding]:
    """Return a finding about several settings as one about each: what is known of one says nothing of the others."""
    if finding.resource != "globals" or finding.count < 2:
        return [finding]
    names: Sequence[str] = finding.statement.names if isinstance(finding, StatedFinding) else ()
    if not names:
        names = (finding.holder or "").split(", ")
        # Where not all are named, or one has a comma in its name, no pattern is known to fit them all.
        names += [] if len(names) == finding.count else [""]
    return [msgspec.structs.replace(as_written(finding), holder=name, path=()) for name in names]


def problems(
    entries: Iterable[Suppression],
    used: Collection[str],
    today: date,
    findings: Iterable[Finding] = (),
    *,
    ran_all: bool = True,
) -> tuple[str, ...]:
    """Return what is wrong with the entries after a run: expired, replaced, or matching nothing; a line each.

    Args:
        entries: all that were loaded.
        used: the ids of those that matched something, in any process.
        today: the day of the run.
        findings: all of the run, which say what replaces an entry with a former fingerprint.
        ran_all: whether everything was run, so that an entry that matched nothing has nothing to match.
    """
    replacements: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        for item in (finding, *finding.parts):
            replacements.setdefault(item.former_fingerprint, {}).setdefault(item.fingerprint, item)
    lines = []
    for entry in entries:
        owner = f" (owner: {entry.owner})" if entry.owner else ""
        if entry.is_expired(today):
            lines.append(f"{entry.id}: expired on {entry.expires}{owner}: fix the leak, or renew the entry")
        elif not entry.applies or entry.evidence or entry.id in used:
            continue
        elif entry.fingerprint is not None and (known := replacements.get(entry.fingerprint)) is not None:
            lines.append(f"{entry.id}: replaced{owner}: {_replaced(entry.fingerprint, list(known.values()))}")
        elif ran_all:
            lines.append(f"{entry.id}: unused{owner}: no finding matches it, delete the entry")
    return tuple(lines)


def _replaced(former: str, findings: Sequence[Finding]) -> str:
    texts = [
        f"{finding.fingerprint} ({finding.resource}: {textwrap.shorten(finding.message, 80, placeholder=' …')})"
        for finding in findings
    ]
    return f"each leak has a fingerprint of its own now; write instead of {former}: {first_of(texts, _SHOWN)}"


def load(path: Path) -> Suppressions:
    """Read the entries of a file: `[[suppressions]]`, or `[[tool.lowtide.suppressions]]` in a `pyproject.toml`.

    Raises:
        SuppressionError: the file cannot be read, or an entry in it cannot be used.
    """
    return _parse(read_text(path), str(path), table_of(path))


def shipped() -> Suppressions:
    """Read what libraries are known to leave behind: each entry with its evidence, and never unused."""
    text = resources.files("lowtide.leakcheck.suppressions").joinpath(_SHIPPED).read_text(encoding="utf-8")
    return _parse(text, _SHIPPED, OWN_TABLE, (*KEYS, "evidence"))


def find(start: Path) -> Path | None:
    """Return the file of suppressions that belongs to a folder: its own, or that of the nearest folder above with one.

    Raises:
        SuppressionError: a `pyproject.toml` on the way cannot be read.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        own, project = folder / "lowtide.toml", folder / "pyproject.toml"
        if own.is_file():
            return own
        if project.is_file() and _has_entries(project):
            return project
    return None


def _has_entries(project: Path) -> bool:
    return value_at(parse_document(read_text(project), str(project)), PYPROJECT_TABLE) is not None


def _parse(text: str, file: str, table: tuple[str, ...], allowed: Collection[str] = KEYS) -> Suppressions:
    return Suppressions(tuple(_suppression(entry, allowed) for entry in written_entries(text, file, table)))


def _suppression(written: Written, allowed: Collection[str]) -> Suppression:
    for key in written.values:
        if key not in allowed:
            raise written.error(f"unknown key {key!r}; allowed: {', '.join(allowed)}", key)
    named = [key for key in ("fingerprint", "path") if key in written.values]
    if len(named) != 1:
        raise written.error(f"an entry needs either fingerprint or path; it has {'both' if named else 'neither'}")
    reason = written.required("reason", "why this may stay")
    if re.match(r"todo\b", reason, re.IGNORECASE):
        shown = textwrap.shorten(reason, 60, placeholder=" …")
        raise written.error(f"the reason is still to be filled in: {shown!r}; say why this may stay", "reason")
    return Suppression(
        id=f"{Path(written.file).name}:{written.line}",
        fingerprint=_fingerprint(written),
        path=written.text("path"),
        resource=written.one_of("resource", get_args(ResourceName)),
        cause=written.one_of("cause", get_args(Cause)),
        reason=reason,
        owner=written.text("owner"),
        expires=_expires(written),
        applies=_applies(written),
        evidence=written.required("evidence", "where it was seen") if "evidence" in allowed else "",
    )


def _fingerprint(written: Written) -> str | None:
    text = written.text("fingerprint")
    if text is not None and not re.fullmatch(r"[0-9a-fA-F]{16}", text):
        raise written.error(f"fingerprint {text!r} is not 16 hex digits, as a report gives them", "fingerprint")
    return None if text is None else text.lower()


def _expires(written: Written) -> date | None:
    value = written.values.get("expires")
    # A time of day is a date to Python, but no day to expire on.
    if value is None or type(value) is date:
        return value
    try:
        # `date.fromisoformat` alone takes more forms on newer Pythons.
        if isinstance(value, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            return date.fromisoformat(value)
    except ValueError:
        pass
    given = constant_text(value) if type(value) is int else str(value)
    raise written.error(f"expires must be a day such as 2027-01-31; it is {given!r}", "expires")


def _applies(written: Written) -> bool:
    text = written.text("when")
    # All of them are read, so that one that does not hold cannot hide one that is wrong.
    answers = [] if text is None else [_holds(written, part.strip()) for part in text.split(",")]
    return all(answers)


def _holds(written: Written, predicate: str) -> bool:
    """Return whether a version predicate is true here; it is not where the distribution is not installed."""
    try:
        wanted = Requirement(predicate)
    except InvalidRequirement:
        wanted = None
    if wanted is None or not wanted.specifier or wanted.extras or wanted.marker:
        raise written.error(
            f"when must be version predicates such as torch<2.14, python>=3.12; {predicate!r} is none", "when"
        )
    try:
        version = _version(wanted.name)
    except (metadata.PackageNotFoundError, InvalidVersion):
        return False
    # A pre-release that is installed is a version like any other.
    return wanted.specifier.contains(version, prereleases=True)


def _version(distribution: str) -> Version:
    if distribution.lower() == "python":
        # `platform.python_version()` may have a suffix that is no version: 3.12.1+.
        return Version(".".join(map(str, sys.version_info[:3])))
    return Version(metadata.version(distribution))
