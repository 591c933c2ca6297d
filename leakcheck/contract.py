"""What must hold after each stage of an engine's life, besides the baseline after shutdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest

from lowtide.leakcheck.fingerprints import fingerprint
from lowtide.leakcheck.metrics import MIB
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Cause, Finding, Resource
from lowtide.reports.sizes import format_bytes

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

SLEEPING_ARENAS = ("weights", "kv_cache", "workspace")
"""What a sleep of either level gives up; `runtime` stays."""

ASLEEP_DRIVER_TOLERANCE = 64 * MIB
"""Bytes that the driver may count for a process whose engine sleeps at level 2, above what it counted before create."""


def after_sleep(stage: str, device: str, baseline: Snapshot, after: Snapshot) -> list[Finding]:
    """After any sleep the arenas of weights, KV cache and workspaces have no pages beyond those before create.

    (An earlier engine may have left some; that is the finding of its own shutdown.)
    """
    findings = []
    for tag in SLEEPING_ARENAS:
        left = after.arena_mapped(tag, device) - baseline.arena_mapped(tag, device)
        if left > 0:
            message = f"arena {tag!r} still has {format_bytes(left)} mapped after {stage}"
            findings.append(_finding("arena", stage=stage, device=device, amount=left, suspect=tag, message=message))
    return findings


def after_deep_sleep(stage: str, device: str, baseline: Snapshot, after: Snapshot) -> list[Finding]:
    """After a level 2 sleep the driver counts no more for the process than before create, within the tolerance."""
    before, now = baseline.driver_bytes(device), after.driver_bytes(device)
    if before is None or now is None or now - before <= ASLEEP_DRIVER_TOLERANCE:
        return []
    return [
        _finding(
            "driver",
            stage=stage,
            device=device,
            amount=now - before,
            suspect="asleep",
            message=f"the driver counts {format_bytes(now - before)} more after {stage} than before create",
        )
    ]


def after_wake(stage: str, device: str, before_sleep: Snapshot, after: Snapshot) -> list[Finding]:
    """After a wake weights, KV cache and runtime have the pages that they had before the sleep."""
    findings = []
    for tag in ("weights", "kv_cache", "runtime"):
        was, now = before_sleep.arena_mapped(tag, device), after.arena_mapped(tag, device)
        if was != now:
            findings.append(
                _finding(
                    "arena",
                    stage=stage,
                    device=device,
                    amount=abs(now - was),
                    suspect=tag,
                    cause="not-restored",
                    message=f"arena {tag!r} has {format_bytes(now)} mapped after {stage}, {format_bytes(was)} before",
                )
            )
    return findings


def after_infer(stage: str, expected: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[Finding]:
    """The same prompts give the same tokens at every point of a life: contents came back too."""
    if not any(expected):
        return [
            _finding("contents", stage=stage, device="", amount=0, suspect="none", message=f"{stage} gave no token")
        ]
    pairs = zip_longest(expected, tokens, fillvalue=())
    wrong = [index for index, (then, now) in enumerate(pairs) if list(then) != list(now)]
    if not wrong:
        return []
    return [
        _finding(
            "contents",
            stage=stage,
            device="",
            amount=0,
            count=len(wrong),
            suspect="tokens",
            cause="not-restored",
            message=f"{len(wrong)} of {len(expected)} prompts give other tokens after a wake than before any sleep",
        )
    ]


def failed_teardown(stage: str, error: BaseException) -> Finding:
    """A shutdown that raised: each step that failed is named, and what it skipped shows in the other findings."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    reasons = [f"{type(part).__name__}: {part}" for part in parts]
    return _finding(
        "teardown",
        stage=stage,
        device="",
        amount=0,
        count=len(parts),
        suspect=type(parts[0]).__name__,
        message=f"{stage} raised: {'; '.join(reasons)}",
    )


def _finding(
    resource: Resource,
    *,
    stage: str,
    device: str,
    amount: int,
    suspect: str,
    message: str,
    cause: Cause = "unknown",
    count: int = 1,
) -> Finding:
    return Finding(
        resource=resource,
        cause=cause,
        bytes=amount,
        count=count,
        device=device,
        stage=stage,
        message=message,
        fingerprint=fingerprint(resource=resource, device=device, stage=stage, suspects=(suspect, cause)),
    )
