"""Findings that have one cause, reported as one with the others as its parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lowtide.leakcheck.resources import RESOURCES
from lowtide.reports import schema
from lowtide.reports.schema import Finding, Hop

BELONGING = tuple(resource.rule.key for resource in RESOURCES)
"""The resources that belong together, that which says most of the cause first."""


@dataclass(frozen=True)
class CommonCause:
    """What several findings have in common.

    Attributes:
        key: the same for all of them.
        holder: the object that should be gone, as code; empty if there is none.
        path: the way to it.
        advice: what to do about it.
        kind: what the first suspect edge on that way is.
        ending: the call that ends the holder, as `close()`; empty where its class has none.
        is_thing: whether the holder is what the findings are about, and not an object that has it among others.
    """

    key: Hashable
    holder: str = ""
    path: tuple[Hop, ...] = ()
    advice: str = ""
    kind: schema.Cause = "unknown"
    ending: str = ""
    is_thing: bool = False


def by_cause(findings: Iterable[Finding], causes: Mapping[int, CommonCause | None]) -> tuple[Finding, ...]:
    """The findings, those with one cause as one with the others as its parts, where the first of them stood.

    Args:
        findings: those of one subject.
        causes: the cause of each, by the finding's identity; a finding without one stays as it is.
    """
    groups: dict[Hashable, list[Finding]] = {}
    known: dict[Hashable, CommonCause] = {}
    for finding in findings:
        cause = causes.get(id(finding))
        key = id(finding) if cause is None else cause.key
        groups.setdefault(key, []).append(finding)
        if cause is not None:
            known[key] = cause
    return tuple(_as_one(group, known.get(key)) for key, group in groups.items())


def _as_one(group: Sequence[Finding], cause: CommonCause | None) -> Finding:
    if cause is None:
        return group[0]
    first, *parts = sorted(group, key=_rank)
    of_setting = next((part.advice for part in parts if part.resource == "globals"), None)
    advice = first.advice or cause.advice or of_setting
    if not cause.holder:
        return msgspec.structs.replace(first, parts=tuple(parts), advice=advice)
    # One that was explained by itself knows more of its way.
    message = first.message if first.path else f"{first.message}, held by {cause.holder}"
    path = first.path or cause.path
    holder = first.holder if first.path else cause.holder
    kind = first.cause if first.path or first.cause != "unknown" else cause.kind
    return msgspec.structs.replace(
        first, parts=tuple(parts), message=message, holder=holder, path=path, advice=advice, cause=kind
    )


def _rank(finding: Finding) -> tuple[int, bool, bool, bool]:
    resource = BELONGING.index(finding.resource) if finding.resource in BELONGING else -1
    if finding.resource in ("host-memory", "globals"):
        resource = len(BELONGING)
    # A tensor has a path, and bytes; what native code holds has none.
    return resource, finding.cause != "autograd", finding.resource == "lru-cache", finding.cause == "native"
