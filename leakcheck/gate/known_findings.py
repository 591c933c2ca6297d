"""The committed baseline of a gate: findings that are known, each with its reason, owner and expiry.

New findings fail the gate; known ones that no longer appear are reported, and `--update` removes them.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lowtide.leakcheck.suppressions.entries import Suppression, Suppressions
from lowtide.reports.reading.json_files import UnreadableError, decode_json, read_bounded
from lowtide.reports.schema import Finding, Subject
from lowtide.reports.whole_texts import json_bytes

SCHEMA = "lowtide-baseline/1"


class KnownFindingsError(ValueError):
    """A baseline that cannot be read, written or updated; one line with the file and what to do."""


class KnownFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finding that may stay for now.

    Attributes:
        fingerprint: the finding's, as a report gives it.
        reason: why it may stay.
        owner: who answers for it.
        expires: the last day on which it is known.
        cells: the cells in which it was found.
        resource: what is retained, for readers.
        message: the finding's, for readers.
    """

    fingerprint: str
    reason: str
    owner: str
    expires: datetime.date
    cells: tuple[str, ...] = ()
    resource: str = ""
    message: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    findings: tuple[KnownFinding, ...]


@dataclass(frozen=True)
class KnownFindingsUpdate:
    """What `--update` does: which entries come, and which go."""

    added: tuple[KnownFinding, ...]
    removed: tuple[KnownFinding, ...]

    def lines(self) -> list[str]:
        """Return the difference, a line per entry."""
        return [
            *(f"- {entry.fingerprint} {entry.resource}: {entry.message}" for entry in self.removed),
            *(f"+ {entry.fingerprint} {entry.resource}: {entry.message}" for entry in self.added),
        ]


@dataclass(frozen=True)
class KnownFindings:
    """A baseline.

    Attributes:
        file: where it is committed.
        entries: in the order of the file.
    """

    file: Path
    entries: tuple[KnownFinding, ...] = ()

    @classmethod
    def load(cls, file: Path) -> KnownFindings:
        """Read the baseline of a file; it is empty if there is none yet.

        Raises:
            KnownFindingsError: it cannot be read.
        """
        if not file.exists():
            return cls(file)
        try:
            data = read_bounded(file)
        except UnreadableError as error:
            raise KnownFindingsError(f"{file} {error}") from error
        try:
            content = decode_json(data, _File)
        except UnreadableError as error:
            raise KnownFindingsError(f"{file} is not a {SCHEMA} baseline: {error}") from error
        if content.schema != SCHEMA:
            raise KnownFindingsError(f"{file} has the schema {content.schema!r}; this version reads {SCHEMA}")
        for entry in content.findings:
            if not entry.reason.strip() or not entry.owner.strip():
                raise KnownFindingsError(f"{file}: {entry.fingerprint} needs a reason and an owner")
        return cls(file, content.findings)

    def save(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            KnownFindingsError: it cannot be written.
        """
        content = _File(schema=SCHEMA, findings=tuple(sorted(self.entries, key=lambda entry: entry.fingerprint)))
        partial = self.file.with_name(f"{self.file.name}.partial")
        try:
            partial.write_bytes(msgspec.json.format(json_bytes(content), indent=2) + b"\n")
            partial.replace(self.file)
        except OSError as error:
            raise KnownFindingsError(f"{self.file} cannot be written: {error.strerror}") from error

    def mark(self, subjects: Iterable[Subject], today: datetime.date) -> list[Subject]:
        """Return the subjects with each known finding marked as suppressed by its entry."""
        known = Suppressions(
            tuple(
                Suppression(
                    id=self.file.name,
                    reason=f"{entry.reason} (owner {entry.owner}, until {entry.expires})",
                    fingerprint=entry.fingerprint,
                    expires=entry.expires,
                )
                for entry in self.entries
            )
        )
        return [known.judge(subject, today)[0] for subject in subjects]

    def expired(self, today: datetime.date) -> list[KnownFinding]:
        """Return the entries whose last day is over; their findings fail the gate again."""
        return [entry for entry in self.entries if entry.expires < today]

    def gone(self, subjects: Sequence[Subject], judged: Collection[str]) -> list[KnownFinding]:
        """Return the entries that no longer have a finding, and can be removed.

        Args:
            subjects: all of the gate.
            judged: the names of the cells that ran to their end; an entry of a cell that did not run stays.
        """
        found = {each.fingerprint for subject in subjects for finding in subject.findings for each in _parts(finding)}
        return [entry for entry in self.entries if entry.fingerprint not in found and set(entry.cells) <= set(judged)]

    def updated(
        self,
        subjects: Sequence[Subject],
        judged: Collection[str],
        *,
        reason: str,
        owner: str,
        expires: datetime.date,
    ) -> tuple[KnownFindings, KnownFindingsUpdate]:
        """Return the baseline with the findings that nothing knows added and those that are gone removed.

        Raises:
            KnownFindingsError: something is to be added, and reason or owner is missing.
        """
        removed = self.gone(subjects, judged)
        cells: dict[str, list[str]] = {}
        new: dict[str, Finding] = {}
        for subject in subjects:
            for finding in subject.findings:
                cells.setdefault(finding.fingerprint, []).append(subject.id.partition("/")[0])
                if finding.suppressed_by is None:
                    new.setdefault(finding.fingerprint, finding)
        if new and not (reason.strip() and owner.strip()):
            count = f"{len(new)} new finding{'s' if len(new) > 1 else ''}"
            raise KnownFindingsError(f"{count} would be added: give --reason TEXT and --owner NAME as well")
        added = tuple(
            KnownFinding(
                fingerprint=mark,
                reason=reason,
                owner=owner,
                expires=expires,
                cells=tuple(dict.fromkeys(cells[mark])),
                resource=finding.resource,
                message=finding.message,
            )
            for mark, finding in new.items()
        )
        # An expired entry is replaced by the one that is added for the same finding.
        kept = tuple(entry for entry in self.entries if entry not in removed and entry.fingerprint not in new)
        return replace(self, entries=kept + added), KnownFindingsUpdate(added, tuple(removed))


def _parts(finding: Finding) -> tuple[Finding, ...]:
    return (finding, *finding.parts)
