"""A report as SARIF 2.1.0 (OASIS), which code scanning reads: a result per cause, at the line of its holder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from lowtide.reports.causes import Cause, causes_of
from lowtide.reports.escaping import one_line
from lowtide.reports.finding_lines import finding_lines, first_line
from lowtide.reports.markdown import not_measured
from lowtide.reports.schema import Finding, Report, json_bytes
from lowtide.reports.source_places import SourcePlace, SourcePlaces

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_LONGEST = 4000
"""Characters of one text."""

_MOST_SUBJECTS = 100
"""Subjects that a result names: GitHub refuses files of more than 10 MB."""


def render_sarif(report: Report, root: Path | None = None) -> str:
    """Return one run with a result per cause of findings; suppressed ones carry their suppression.

    Args:
        report: the report.
        root: the folder of the sources, below which holders are looked for; None uses only what the report names.
    """
    places = SourcePlaces(root)
    results = [
        _result(cause, places.find(cause.first.subject, cause.first.finding)) for cause in causes_of(report.subjects)
    ]
    run = {
        "tool": {
            "driver": {"name": "lowtide", "semanticVersion": _text(report.version), "rules": list(_rules(report))}
        },
        "automationDetails": {"id": "lowtide/"},
        "invocations": [_invocation(report)],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(json_bytes(log), indent=2).decode() + "\n"


def _rules(report: Report) -> Iterator[Mapping[str, Any]]:
    kinds = {(finding.resource, finding.cause) for subject in report.subjects for finding in subject.findings}
    for resource, cause in sorted(kinds):
        text = f"{resource} did not come back (cause: {cause})"
        text = "memory rose by more than it may" if resource == "peak" else text
        yield {"id": f"{resource}/{cause}", "shortDescription": {"text": text}, "properties": {"tags": ["memory-leak"]}}


def _result(cause: Cause, place: SourcePlace | None) -> dict[str, Any]:
    subject, finding, *_ = cause.first
    lines = [f"{subject.id}: {first_line(finding)}{cause.elsewhere}", *(line.text for line in finding_lines(finding))]
    marks = {"lowtideFingerprint/v1": finding.fingerprint}
    if place is not None:
        # GitHub follows a result by this name alone; without it, it hashes the line, which moves.
        marks["primaryLocationLineHash"] = finding.fingerprint
    result: dict[str, Any] = {
        "ruleId": f"{finding.resource}/{finding.cause}",
        "level": "error" if finding.suppressed_by is None else "note",
        "message": {"text": "\n".join(map(_message, lines))},
        "partialFingerprints": {name: _text(mark) for name, mark in marks.items()},
        "locations": [_location(finding, place)],
        "properties": {
            "subject": _text(subject.id),
            "stage": _text(finding.stage),
            "device": _text(finding.device),
            "bytes": finding.bytes,
            "count": finding.count,
        },
    }
    if cause.again:
        result["occurrenceCount"] = 1 + len(cause.again)
        result["properties"]["subjects"] = [_text(name) for name in cause.subjects[:_MOST_SUBJECTS]]
    if finding.allocated_at:
        frames = [
            {
                "location": {
                    "physicalLocation": _physical(SourcePlace(frame.file, max(frame.line, 1))),
                    "logicalLocations": [{"fullyQualifiedName": _text(frame.function)}],
                }
            }
            for frame in finding.allocated_at
        ]
        result["stacks"] = [{"message": {"text": "allocated at"}, "frames": frames}]
    if finding.suppressed_by is not None:
        result["suppressions"] = [{"kind": "external", "justification": _text(finding.suppressed_by)}]
    return result


def _location(finding: Finding, place: SourcePlace | None) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if place is not None:
        location["physicalLocation"] = _physical(place)
    if finding.holder:
        location["logicalLocations"] = [{"fullyQualifiedName": _text(finding.holder)}]
    return location


def _physical(place: SourcePlace) -> dict[str, Any]:
    # An URI holds bytes; what is no Unicode text is replaced before.
    path = one_line(place.file)
    if path.startswith("/"):
        artifact = {"uri": f"file://{quote(path)}"}
    else:
        artifact = {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    return {"artifactLocation": artifact, "region": {"startLine": place.line}}


def _invocation(report: Report) -> dict[str, Any]:
    """Return how the run went: what could not be judged is a notification, and makes it no success."""
    failed = [subject for subject in report.subjects if subject.outcome in ("error", "unsupported")]
    notes = [
        {"level": "error", "message": {"text": _message(f"{subject.id}: {subject.outcome}: {subject.reason}")}}
        for subject in failed
    ]
    notes += [
        {"level": "note", "message": {"text": _message(f"not measured: {missing.what}: {missing.why}")}}
        for missing in not_measured(report.subjects)
    ]
    return {
        "executionSuccessful": not failed,
        "commandLine": _text(report.command),
        "toolExecutionNotifications": notes,
    }


def _message(text: str) -> str:
    # Sections 3.11.5 and 3.11.6: braces are placeholders unless doubled, `[text](target)` is a link.
    return _text(text).replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _text(text: str) -> str:
    return one_line(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
