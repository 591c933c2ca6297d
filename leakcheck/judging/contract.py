"""What must hold after each stage of an engine's life, besides the baseline after shutdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.metrics import (
    ALLOCATOR_HOLDER,
    DRIVER_ADVICE,
    DRIVER_HOLDER,
    unaccounted_driver_memory,
)
from lowtide.leakcheck.resources.rule import MIB
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Cause, Finding, Remedy, ResourceName
from lowtide.reports.sizes import format_bytes

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

PENDING = "pending transfers"
"""Who holds KV blocks whose copy to or from the host has not been taken in."""

SLEEPING_ARENAS = ("weights", "kv_cache", "workspace")
"""What a sleep of either level gives up; `runtime` stays."""

ASLEEP_DRIVER_TOLERANCE = 64 * MIB
"""Bytes that the driver may count for a process whose engine sleeps at level 2, above what it counted before create."""


_ARENAS = "mapped arenas"

_ADVICE_ASLEEP: Mapping[str, str] = {
    _ARENAS: "unmap in a sleep what only an engine at work needs",
    ALLOCATOR_HOLDER: "let go of its tensors in a sleep, and call torch.cuda.empty_cache() at its end",
    DRIVER_HOLDER: DRIVER_ADVICE,
}
"""Who may hold what a level 2 sleep should have given back, and what to do about it."""


def holders(usage: Any) -> dict[str, int]:
    """Who holds KV blocks, with how many, of a `kv_usage()`: no request does."""
    held = {PENDING: usage.pending_transfer, "no request": usage.held - usage.pending_transfer}
    return {who: blocks for who, blocks in held.items() if blocks}


def after_sleep(stage: str, device: str, baseline: Snapshot, after: Snapshot) -> list[Finding]:
    """After any sleep the arenas of weights, KV cache and workspaces have no pages beyond those before create.

    (An earlier engine may have left some; that is the finding of its own shutdown.)
    """
    findings = []
    for tag in SLEEPING_ARENAS:
        left = after.arena_mapped(tag, device) - baseline.arena_mapped(tag, device)
        if left > 0:
            message = f"arena {tag!r} still has {format_bytes(left)} mapped after {stage}"
            findings.append(
                _finding(
                    "arena",
                    stage=stage,
                    device=device,
                    amount=left,
                    suspect=tag,
                    holder=f"arena {tag!r}",
                    message=message,
                    advice=f"unmap arena {tag!r} in {stage}",
                )
            )
    return findings


def after_deep_sleep(stage: str, device: str, baseline: Snapshot, at_work: Snapshot, after: Snapshot) -> list[Finding]:
    """After a level 2 sleep the driver counts no more for the process than before create, within the tolerance.

    Besides what libraries hold for an engine that is at work, neither in arenas nor in torch's segments (a communicator
    of NCCL has 390 MiB on an H200): that is judged when the engine is shut down.
    """
    before, now = baseline.driver_bytes(device), after.driver_bytes(device)
    if before is None or now is None:
        return []
    outside = [unaccounted_driver_memory(snapshot, device) for snapshot in (baseline, at_work)]
    of_libraries = 0 if None in outside else max(0, outside[1] - outside[0])  # type: ignore[operator]
    if now - before - of_libraries <= ASLEEP_DRIVER_TOLERANCE:
        return []
    grown = {
        _ARENAS: after.arena_mapped(device=device) - baseline.arena_mapped(device=device),
        ALLOCATOR_HOLDER: (after.reserved(device) or 0) - (baseline.reserved(device) or 0),
    }
    grown[DRIVER_HOLDER] = now - before - sum(grown.values())
    holder = max(grown, key=lambda who: grown[who])
    parts = ", ".join(f"{who} {format_bytes(size)}" for who, size in grown.items() if size > 0)
    more = f"the driver counts {format_bytes(now - before)} more after {stage} than before create"
    return [
        _finding(
            "driver",
            stage=stage,
            device=device,
            amount=now - before,
            suspect="asleep",
            cause="driver",
            message=f"{more}, of it {parts}",
            holder=holder,
            advice=_ADVICE_ASLEEP[holder],
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
                    holder=f"arena {tag!r}",
                    message=f"arena {tag!r} has {format_bytes(now)} mapped after {stage}, {format_bytes(was)} before",
                    advice=f"map in {stage} what was mapped before the sleep, no more and no less",
                )
            )
    return findings


def after_failed_wake(stage: str, device: str, before: Snapshot, after: Snapshot) -> list[Finding]:
    """A wake that raised has mapped nothing: what was asleep still is, and its memory is where it was."""
    findings = []
    for tag in ("weights", "kv_cache", "runtime"):
        left = after.arena_mapped(tag, device) - before.arena_mapped(tag, device)
        if left > 0:
            findings.append(
                _finding(
                    "arena",
                    stage=stage,
                    device=device,
                    amount=left,
                    suspect=f"failed {tag}",
                    cause="not-restored",
                    holder=f"arena {tag!r}",
                    message=f"{format_bytes(left)} of arena {tag!r} stay mapped after a {stage} that failed",
                    advice=f"unmap in {stage} what it has mapped, where it fails, before its error leaves it",
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


def after_idle(
    stage: str, device: str, held: Mapping[str, int], after_a_step: Mapping[str, int] | None
) -> list[Finding]:
    """When no request runs, every KV block can be had: nobody else holds one for good.

    Args:
        stage: after which this is.
        device: where the blocks are.
        held: who holds blocks, with how many.
        after_a_step: the same after one more step of the engine, which shows whether it is the step that was missing;
            None where no step can be made.
    """
    findings = []
    for who, blocks in held.items():
        pending = who == PENDING
        remedy = None
        if after_a_step is not None and who not in after_a_step:
            remedy = Remedy(action="engine.step()", returns_bytes=0)
        gives = "; engine.step() returns them" if remedy is not None else ""
        message = f"{blocks} KV blocks are held by {who} after {stage}, and the prefix cache cannot be reset{gives}"
        findings.append(
            msgspec.structs.replace(
                _finding(
                    "kv-blocks",
                    stage=stage,
                    device=device,
                    amount=0,
                    count=blocks,
                    suspect=who,
                    cause="pending-transfer" if pending else "unknown",
                    holder=who,
                    message=message,
                ),
                remedy=remedy,
            )
        )
    return findings


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
        advice=f"run all steps of {stage} whichever of them fails, and raise what failed at its end",
    )


def _finding(
    resource: ResourceName,
    *,
    stage: str,
    device: str,
    amount: int,
    suspect: str,
    message: str,
    cause: Cause = "unknown",
    count: int = 1,
    holder: str | None = None,
    advice: str | None = None,
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
        holder=holder,
        advice=advice,
    )
