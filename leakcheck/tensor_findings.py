"""From storages that did not come back to findings: one per holder, with the path to it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lowtide.leakcheck.explain import Explanation, explain
from lowtide.leakcheck.fingerprints import fingerprint
from lowtide.leakcheck.judge import CAUSE_OF_RUNG, VERDICT_OF_RUNG
from lowtide.leakcheck.ladder import ACTIONS, Rung
from lowtide.leakcheck.storages import Held, Key, is_tensor, storage_keys, tensors_over
from lowtide.probes.objects import Census, all_objects
from lowtide.probes.reach import reach
from lowtide.probes.tensors import plain_tensors
from lowtide.reports.schema import Finding, Hop, Remedy
from lowtide.reports.sizes import format_bytes

_SHOWN_HOLDERS = 4


@dataclass(frozen=True)
class _Reason:
    """Why a storage is still there: at which rung it came back, or who holds it."""

    rung: Rung | None
    explanation: Explanation | None


def tensor_findings(
    held: Sequence[Sequence[Held]],
    rungs: Sequence[Rung],
    hints: Sequence[tuple[str, object]] = (),
    born: Collection[int] | None = None,
) -> list[Finding]:
    """The findings for the storages of one device that are left at the first of some steps.

    Args:
        held: the storages left at each step.
        rungs: the rung of each step.
        hints: advice for what is reached from the object beside it, which the test runner keeps by design.
        born: the identities of all objects born since the baseline: who was there before is not to blame; None if that
            is not known.
    """
    left = [{storage.key for storage in row} for row in held]
    advised = _advised(hints, left[0]) if left[0] else {}
    explained = _together(_explained(left[-1] & left[0], _Older(born)))
    groups: dict[str, list[tuple[Held, _Reason]]] = {}
    for storage in held[0]:
        back = next((turn for turn, keys in enumerate(left) if storage.key not in keys), None)
        reason = _Reason(None if back is None else rungs[back], explained.get(storage.key))
        groups.setdefault(_fingerprint(storage, reason), []).append((storage, reason))
    findings = [_finding(key, group, advised) for key, group in groups.items()]
    return sorted(findings, key=lambda finding: -finding.bytes)


def _advised(hints: Sequence[tuple[str, object]], keys: set[Key]) -> dict[Key, str]:
    """The advice for those storages that are reached from what a hint is about."""
    found: dict[Key, str] = {}
    for advice, root in hints:
        objects, _ = reach([root], max_objects=20_000)
        found.update(dict.fromkeys(storage_keys(item for item in objects if is_tensor(item)) & keys, advice))
    return found


def restaged(finding: Finding, stage: str) -> Finding:
    """The same finding, said to be there since `stage`."""
    if finding.stage == stage:
        return finding
    message = finding.message.replace(f" did not come back at {finding.stage}", f" did not come back, since {stage}")
    parts = (finding.cause, finding.verdict or "")
    return msgspec.structs.replace(
        finding,
        stage=stage,
        message=message,
        fingerprint=fingerprint(resource=finding.resource, device=finding.device, stage=stage, suspects=parts),
    )


class _Older:
    """The identities of what was alive before the test: all but those of what was born since; none if nobody knows."""

    def __init__(self, born: Collection[int] | None) -> None:
        self._born = born

    def __contains__(self, identity: object) -> bool:
        return self._born is not None and identity not in self._born


def _explained(keys: set[Key], older: _Older) -> dict[Key, Explanation]:
    """The best explanation of each storage: the shortest path among its tensors'."""
    tensors = tensors_over(keys)
    explanations = explain(tensors, ignore={id(tensors)}, innocent=older)
    lost = [tensor for tensor, told in zip(tensors, explanations, strict=True) if not told.path]
    gradients = _as_gradients(lost, older) if lost else {}
    found: dict[Key, Explanation] = {}
    for tensor, told in zip(tensors, explanations, strict=True):
        explanation = gradients.get(id(tensor), told)
        for key in storage_keys([tensor]):
            known = found.get(key)
            if known is None or _rank(explanation) < _rank(known):
                found[key] = explanation
    return found


def _as_gradients(lost: Sequence[Any], older: _Older) -> dict[int, Explanation]:
    """Of tensors that no path leads to, by identity: those that are gradients, explained by the tensor they belong to.

    Python's graph does not have this edge: a tensor holds its gradient in C++.
    """
    torch: Any = sys.modules["torch"]
    wanted = {id(tensor) for tensor in lost}
    owners = {}
    with plain_tensors(torch):
        for tensor in Census(all_objects()).instances_of(torch.Tensor):
            if tensor.is_leaf and tensor.requires_grad and id(tensor.grad) in wanted:
                owners[id(tensor.grad)] = tensor
    holding = list(owners.values())
    found = {}
    for gradient, tensor, told in zip(
        owners, holding, explain(holding, ignore={id(holding)}, innocent=older), strict=True
    ):
        hop = Hop(type="torch.Tensor", edge=".grad", suspect=True)
        was_there = id(tensor) in older
        found[gradient] = Explanation(
            verdict=told.verdict,
            cause="instance-attribute" if was_there else told.cause,
            holder=f"{told.holder}.grad",
            path=(*(msgspec.structs.replace(step, suspect=step.suspect and not was_there) for step in told.path), hop),
            suspects=(".grad",) if was_there else told.suspects,
        )
    return found


def _rank(explanation: Explanation) -> tuple[bool, int]:
    return not explanation.path, len(explanation.path)


def _together(explained: dict[Key, Explanation]) -> dict[Key, Explanation]:
    """One explanation for all that has no path and is not frozen: it is one knot that Python's collector cannot see."""
    loose = [key for key, found in explained.items() if not found.path and found.verdict != "frozen-garbage"]
    holders = sorted({explained[key].holder for key in loose} - {""})
    if len(holders) < 2:
        return explained
    nodes = [holder for holder in holders if holder.startswith("autograd")]
    told = [holder for holder in (nodes or holders) if holder != "native code"]
    shown = ", ".join(told[:_SHOWN_HOLDERS]) + (
        f" and {len(told) - _SHOWN_HOLDERS} more" if len(told) > _SHOWN_HOLDERS else ""
    )
    knot = Explanation(
        verdict="native-held",
        cause="autograd" if nodes else "native",
        holder=f"a cycle through C++ ({shown})",
        path=(),
        suspects=tuple(told),
    )
    return {**explained, **dict.fromkeys(loose, knot)}


def _fingerprint(storage: Held, reason: _Reason) -> str:
    if reason.rung is not None:
        suspects: tuple[str, ...] = (reason.rung.value,)
    elif reason.explanation is not None:
        # What hangs on one suspect edge is one finding, however much it is.
        suspects = (reason.explanation.cause, *reason.explanation.suspects[:1])
    else:
        suspects = ("unknown",)
    return fingerprint(resource="tensors", device=storage.key[0], stage=storage.stage, suspects=suspects)


def _finding(mark: str, group: Sequence[tuple[Held, _Reason]], advised: Mapping[Key, str]) -> Finding:
    first, reason = group[0]
    device = first.key[0]
    size = sum(storage.bytes for storage, _ in group)
    largest = max((storage for storage, _ in group), key=lambda storage: storage.bytes)
    things = "1 tensor" if len(group) == 1 else f"{len(group)} tensors"
    message = f"{format_bytes(size)} in {things} on {device}, since {first.stage} ({largest.text})"
    if reason.rung is not None:
        action = ACTIONS[reason.rung]
        return Finding(
            resource="tensors",
            cause=CAUSE_OF_RUNG[reason.rung],
            bytes=size,
            count=len(group),
            device=device,
            stage=first.stage,
            message=f"{message}; {action} returns {format_bytes(size)}",
            fingerprint=mark,
            verdict=VERDICT_OF_RUNG.get(reason.rung),
            remedy=Remedy(action=action, returns_bytes=size),
        )
    explanation = reason.explanation
    advice = "".join(f"; {text}" for text in sorted({advised[held.key] for held, _ in group if held.key in advised}))
    if explanation is None:
        return Finding(
            resource="tensors",
            cause="unknown",
            bytes=size,
            count=len(group),
            device=device,
            stage=first.stage,
            message=message,
            fingerprint=mark,
            verdict="unexplained",
        )
    return Finding(
        resource="tensors",
        cause=explanation.cause,
        bytes=size,
        count=len(group),
        device=device,
        stage=first.stage,
        message=message + (f", held by {explanation.holder}" if explanation.holder else "") + advice,
        fingerprint=mark,
        verdict=explanation.verdict,
        holder=explanation.holder,
        path=explanation.path,
    )
