"""Findings that have one cause, reported as one with the others as its parts.

So is what belongs to a captured CUDA graph: its pool, tensors that its holder keeps, the state of its random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

import msgspec

from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.resources import RESOURCES
from lowtide.probes.device.graphs import any_graph_alive
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.reports import schema
from lowtide.reports.schema import Finding, Hop
from lowtide.reports.statement import noted

_CAPTURE = re.compile(r"(?:^|[\\/])torch[\\/]cuda[\\/]graphs\.py$")
_BEGINS = ("capture_begin", "CUDAGraph.capture_begin")

_MODES = ("__torch_dispatch__", "__torch_function__")
"""What may stand between: the modes under which a compiler captures."""

_CONTAINERS = ("dict", "list", "tuple", "set", "collections.OrderedDict", "collections.defaultdict")
"""Two things in one of these need have no more in common than that."""

Draft = Union[Finding, TensorLeak, ItemLeak]  # noqa: UP007 - evaluated


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
    if first.path:
        # One that was explained by itself knows more of its way.
        return msgspec.structs.replace(first, parts=tuple(parts), advice=advice)
    kind = first.cause if first.cause != "unknown" else cause.kind
    return noted(first, ", held by ", cause.holder, parts=tuple(parts), path=cause.path, advice=advice, cause=kind)


def _rank(finding: Finding) -> tuple[int, bool, bool, bool]:
    resource = BELONGING.index(finding.resource) if finding.resource in BELONGING else -1
    if finding.resource in ("host-memory", "globals"):
        resource = len(BELONGING)
    # A tensor has a path, and bytes; what native code holds has none.
    return resource, finding.cause != "autograd", finding.resource == "lru-cache", finding.cause == "native"


@dataclass
class GraphParts:
    """Which findings of one subject are about the same graphs, each group by the place of its first finding.

    Attributes:
        names: things by their metric's key and their name.
        places: findings about tensors, by their places.
    """

    names: dict[tuple[str, str], int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)


def graph_parts(found: Sequence[Draft], context: Context) -> GraphParts:
    """Finds out what belongs to the graphs that a subject has left.

    Args:
        found: its findings.
        context: what is known around them.
    """
    pools = [turn for turn, draft in enumerate(found) if isinstance(draft, ItemLeak) and _is_of_graph(draft)]
    kept = [turn for turn, draft in enumerate(found) if isinstance(draft, TensorLeak) and _is_of_graph(draft)]
    parts = GraphParts()
    for turn in pools:
        beside = [other for other in kept if _have_one_holder(found[other], found[turn])]
        for other in beside:
            parts.places.setdefault(other, turn)
        if beside:
            _add(parts, found[turn], turn)
    main: dict[str, int] = {}
    for turn in (*pools, *kept):
        main.setdefault(_finding(found[turn]).device, turn)
    if main:
        _with_state(parts, found, main, context)
    return parts


def _with_state(parts: GraphParts, found: Sequence[Draft], main: dict[str, int], context: Context) -> None:
    """And the state of the graphs' random numbers, which lives as long as any of them does."""
    state: list[tuple[int, list[str]]] = []
    for turn, draft in enumerate(found):
        device = _finding(draft).device
        if device not in main or isinstance(draft, Finding):
            continue
        if isinstance(draft, ItemLeak) and draft.key == f"native {device}":
            at = {name: int(name.rpartition(" ")[2], 16) for name in draft.names}
            stacks = context.stacks(device, list(at.values()))
            state.append((turn, [name for name, address in at.items() if _is_of_capture(stacks.get(address, ()))]))
        elif isinstance(draft, TensorLeak) and draft.finding.verdict == "native-held":
            stacks = context.stacks(device, [address for _, address in draft.sizes])
            if draft.sizes and all(_is_of_capture(stacks.get(address, ())) for _, address in draft.sizes):
                state.append((turn, []))
    state = [(turn, names) for turn, names in state if names or isinstance(found[turn], TensorLeak)]
    if not state or not any_graph_alive():
        return
    for turn, names in state:
        device = _finding(found[turn]).device
        group = parts.places.get(main[device], main[device])
        if names:
            parts.names.update(((f"native {device}", name), group) for name in names)
        else:
            parts.places[turn] = group
        if isinstance(found[main[device]], ItemLeak):
            _add(parts, found[main[device]], group)
        else:
            parts.places[main[device]] = group


def _add(parts: GraphParts, draft: Draft, group: int) -> None:
    if isinstance(draft, ItemLeak):
        parts.names.update(((draft.key, name), group) for name in draft.names)


def _is_of_graph(draft: TensorLeak | ItemLeak) -> bool:
    is_pool = isinstance(draft, ItemLeak) and draft.finding.resource == "reserved"
    return draft.finding.cause == "cuda-graph" and (is_pool or isinstance(draft, TensorLeak))


def _finding(draft: Draft) -> Finding:
    return draft if isinstance(draft, Finding) else draft.finding


def _is_of_capture(stack: Sequence[StackFrame]) -> bool:
    """Whether it was torch's beginning of a capture that allocated."""
    site = next((frame for frame in stack if frame.function.rpartition(".")[2] not in _MODES), None)
    return site is not None and site.function in _BEGINS and _CAPTURE.search(site.file) is not None


def _have_one_holder(one: Draft, other: Draft) -> bool:
    """Whether the ways to both lead through the same object that should be gone, and that is more than a container."""
    first, second = _finding(one), _finding(other)
    return first.device == second.device and any(
        hop.suspect and hop.type not in _CONTAINERS for hop in _common(first.path, second.path)
    )


def _common(one: Sequence[Hop], other: Sequence[Hop]) -> list[Hop]:
    found = []
    for hop, twin in zip(one, other):  # noqa: B905 - the shorter one ends it
        if (hop.edge, hop.type) != (twin.edge, twin.type):
            break
        found.append(hop)
    return found
