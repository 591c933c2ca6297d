"""From storages that did not come back to findings: one per holder, with the path to it and what it retains."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.storage_holders import UNEXPLAINED, Context, Explained, common_holder, explain_storages
from lowtide.leakcheck.growth.series import trend_of
from lowtide.leakcheck.judging.fingerprints import fingerprint, whereabouts
from lowtide.leakcheck.judging.ladder import MEANINGS
from lowtide.leakcheck.judging.owners import held_in_all
from lowtide.leakcheck.judging.storages import HeldStorage, Key, storage_keys
from lowtide.leakcheck.resources.resource import Rung, without_numbers
from lowtide.probes.device.torch_allocator import free_beside
from lowtide.probes.heap.reach import reach
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function
from lowtide.probes.objects.listed import Census
from lowtide.probes.originals import lines_of, loaded
from lowtide.reports.schema import Cause, Finding, Frame, Hop, Remedy
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement, noted, restated

_LEAST_FREE = 2 << 20
"""Bytes that are reported as free beside a leak; small tensors share segments of this size with all others."""

_SHOWN_PART = 2
"""What part of a storage its tensors show at most, where a copy of that would be better kept than a view."""

_LEAST_HIDDEN = 64 << 10
"""Bytes that such copies must save to be advised."""

_RUNNERS = ("/_pytest/", "/pluggy/", "/unittest/")

_LONGEST_LINE = 200
"""Characters of a line of code in a report."""


class TensorLeak(msgspec.Struct, frozen=True, eq=False):
    """A finding with what it takes to prove a remedy; holds no tensor, but its holders: drop it soon.

    Attributes:
        finding: as far as it is known without trying anything.
        sizes: bytes of the storages that are still there, by storage.
        explanations: why each of them is.
        keys: all storages that the finding is about, those that came back at a rung included.
    """

    finding: Finding
    sizes: Mapping[Key, int]
    explanations: Mapping[Key, Explanation]
    keys: frozenset[Key] = frozenset()

    def sizes_by(self, turns: Mapping[Key, int]) -> dict[int, int]:
        """Return the bytes by when they appeared, which `turns` says of each storage."""
        found: dict[int, int] = {}
        for key, size in self.sizes.items():
            found[turns[key]] = found.get(turns[key], 0) + size
        return found


def leaks_of(held: Sequence[HeldStorage], context: Context) -> list[TensorLeak]:
    """Return the findings for storages that are there, on any device: who holds them, the largest of a device first."""
    return leaks_at_rungs({Rung.RAW: held}, explain_storages({storage.key for storage in held}, context), context)


def leaks_at_rungs(
    held: Mapping[Rung, Sequence[HeldStorage]], explained: Explained, context: Context
) -> list[TensorLeak]:
    """Return the same for storages that are left at the first of some rungs, by what is left at each."""
    found: list[TensorLeak] = []
    for device in sorted({storage.key[0] for row in held.values() for storage in row}):
        rows = [[storage for storage in row if storage.key[0] == device] for row in held.values()]
        found += tensor_leaks(rows, list(held), explained, context)
    return found


def with_free_beside(leaks: Sequence[TensorLeak]) -> list[TensorLeak]:
    """Return one subject's leaks, each with what more it keeps reserved: the free part of the segments around it.

    What is free in a segment is reported with the first leak in it.
    """
    by_identity = {id(leak): leak for leak in leaks}
    cards = {leak.finding.device for leak in leaks if leak.finding.device.startswith("cuda:")}
    for device in sorted(cards):
        here = [leak for leak in leaks if leak.finding.device == device]
        groups = [[address for of, address in leak.sizes if of == device] for leak in here]
        for leak, free in zip(here, free_beside(int(device.partition(":")[2]), groups), strict=True):
            if free >= _LEAST_FREE:
                finding = noted(leak.finding, f"; {format_bytes(free)} more stay reserved in its segments")
                by_identity[id(leak)] = replace(leak, finding=finding)
    return [by_identity[id(leak)] for leak in leaks]


_MANY_ENTRIES = 4
"""Entries of one table, or attributes of one instance, that are told together, whatever their names."""


class _Row(msgspec.Struct, frozen=True):
    """A storage and why it is still there: at which rung it came back, or who holds it."""

    held: HeldStorage
    rung: Rung | None
    explanation: Explanation
    stack: tuple[StackFrame, ...]


def tensor_leaks(
    held: Sequence[Sequence[HeldStorage]], rungs: Sequence[Rung], explained: Explained, context: Context
) -> list[TensorLeak]:
    """Return the findings for storages of one device that are left at the first of some rungs, the largest first.

    `held` has those that are left at each.
    """
    left = [{storage.key for storage in row} for row in held]
    if not left[0]:
        return []
    advised = _advised(context.hints, left[0] & explained.by_key.keys())
    device = held[0][0].key[0]
    stacks = context.stacks(device, [address for _, address in left[0]])
    rows = []
    for storage in held[0]:
        back = next((turn for turn, keys in enumerate(left) if storage.key not in keys), None)
        rows.append(
            _Row(
                storage,
                None if back is None else rungs[back],
                explained.by_key.get(storage.key, UNEXPLAINED),
                tuple(stacks.get(storage.key[1], ())),
            )
        )
    sizes = {storage.key: storage.bytes for storage in held[0]}
    groups: dict[str, tuple[_Marks, list[_Row]]] = {}
    for edge in _by_edge(rows):
        marks = _fingerprint(edge, context.module)
        groups.setdefault(marks.now, (marks, []))[1].extend(edge)
    leaks = [_leak(marks, group, explained, advised, sizes, context) for marks, group in groups.values()]
    return sorted(leaks, key=lambda leak: -leak.finding.bytes)


def with_stage(finding: Finding, stage: str) -> Finding:
    """Return a finding, said to be there since `stage`; its former fingerprint is that which it had for that."""
    if finding.stage == stage:
        return msgspec.structs.replace(finding, former_fingerprint=finding.former_fingerprint or finding.fingerprint)
    parts: tuple[str, ...] = (finding.cause, finding.verdict or "")
    former = fingerprint(**whereabouts(finding) | {"stage": stage}, suspects=parts, by_phase=True)
    return restated(finding, {"stage": stage, "former_fingerprint": former}, is_since=True)


def frames(stack: Sequence[StackFrame]) -> tuple[Frame, ...]:
    """Return a stack as a report has it: up to the test, without those who called it."""
    own = list(itertools.takewhile(lambda frame: not any(name in frame.file for name in _RUNNERS), stack))
    return tuple(
        Frame(file=frame.file, line=frame.line, function=frame.function, source=_source(frame))
        for frame in own or stack
    )


def _source(frame: StackFrame) -> str:
    """Return the text of a frame's line; not from `linecache`, which would keep the file in the judged process."""
    try:
        return lines_of(frame.file)[max(0, frame.line - 1)].strip()[:_LONGEST_LINE]
    except (OSError, ValueError, IndexError):  # made at run time, or gone
        return ""


def _advised(hints: Sequence[tuple[str, object]], keys: set[Key]) -> dict[Key, str]:
    """Return the advice for those storages that are reached from what a hint is about."""
    torch: Any = loaded("torch")
    found: dict[Key, str] = {}
    for advice, root in hints:
        objects, _ = reach([root], max_objects=20_000)
        found.update(dict.fromkeys(storage_keys(held_in_all(torch, Census(objects))) & keys, advice))
    return found


def _by_edge(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Group what is one thing: what hangs on one suspect edge, came back at one rung, or has no path.

    So are the entries of one table, or the attributes of one instance, where they are many: one method sets them.
    """
    groups: dict[tuple[Any, ...], list[_Row]] = {}
    tables: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in rows:
        explanation = row.explanation
        first = next((turn for turn, hop in enumerate(explanation.path) if hop.suspect), len(explanation.path))
        key: tuple[Any, ...] = (row.held.stage, explanation.cause, *(hop.edge for hop in explanation.path[: first + 1]))
        if not explanation.path:
            # Without a known holder, only the allocation site distinguishes two leaks.
            key = (row.held.stage, row.rung, explanation.suspects[:1], allocating_function(row.stack))
        elif key not in groups and first and _is_one_of_many(explanation.cause, explanation.path[first:]):
            tables.setdefault(key[:-1], []).append(key)
        groups.setdefault(key, []).append(row)
    for entries in tables.values():
        if len(entries) >= _MANY_ENTRIES:
            groups[entries[0]] = [row for key in entries for row in groups.pop(key)]
    return list(groups.values())


def _is_one_of_many(cause: Cause, path: Sequence[Hop]) -> bool:
    """Return whether a way goes on by an entry or an instance's attribute, of which there may be any number."""
    return bool(path) and (path[0].edge[:1] == "[" or (path[0].edge[:1] == "." and cause == "instance-attribute"))


class _Marks(NamedTuple):
    """A finding's fingerprint, and the one that it had in lowtide 0.1; empty if that is the same."""

    now: str
    former: str


def _fingerprint(group: Sequence[_Row], module: str) -> _Marks:
    """Return the fingerprint of what hangs on one edge; the largest thing says where it was allocated."""
    row = max(group, key=lambda row: row.held.bytes)
    explanation = row.explanation
    # What hangs on one suspect edge is one finding, however much it is; so are the entries of a table.
    named = explanation.suspects[:1]
    if len({row.explanation.suspects[:1] for row in group}) > 1:
        named = tuple(f"{edge.partition(' [')[0].partition(' .')[0]} *" for edge in named)
    suspects: tuple[str, ...] = (explanation.cause, *named)
    if row.rung is not None and not explanation.path:
        suspects = (row.rung.value,)
    elif explanation.verdict == "frozen-garbage":
        # The same as what has come back by unfreezing.
        suspects = (Rung.UNFREEZE.value,)
    mark = functools.partial(
        fingerprint,
        resource="tensors",
        device=row.held.key[0],
        stage=row.held.stage,
        suspects=suspects,
        allocated_in=allocating_function(row.stack),
    )
    former = mark(by_phase=True)
    if explanation.path:
        return _Marks(mark(), former if former != mark() else "")
    # Nothing names it: by its data type and its number of dimensions.
    dtype, _, shape = row.held.text.partition(" ")
    return _Marks(mark(kind=f"{dtype} {without_numbers(shape)}", module=module), former)


def _leak(
    marks: _Marks,
    group: Sequence[_Row],
    explained: Explained,
    advised: Mapping[Key, str],
    sizes: Mapping[Key, int],
    context: Context,
) -> TensorLeak:
    largest, *_ = by_size = sorted(group, key=lambda row: -row.held.bytes)
    device = largest.held.key[0]
    keys = frozenset(row.held.key for row in group)
    size = sum(row.held.bytes for row in group)
    stage = largest.held.stage
    others = dict.fromkeys(row.held.stage for row in by_size if row.held.stage != stage)
    since = f"; some of it since {', '.join(others)}" if others else ""
    statement = Statement(
        amount=f"{format_bytes(size)} in {format_amount(len(group), 'tensors')} on {device}",
        came="",
        is_since=True,
        notes=(Note(f" ({largest.held.text}{since})"),),
    )
    explanation, known = _whole(largest, group), [row for row in by_size if row.held.key in explained.by_key]
    advice = sorted({advised[row.held.key] for row in group if row.held.key in advised})
    # Where one stands for all, it is that of the largest, whose path is shown.
    holder = common_holder([row.explanation for row in known or by_size])
    finding: Finding = StatedFinding(
        resource="tensors",
        cause=explanation.cause,
        bytes=size,
        count=len(group),
        device=device,
        stage=stage,
        statement=statement,
        fingerprint=marks.now,
        former_fingerprint=marks.former,
        verdict=explanation.verdict,
        path=_with_sizes(explanation, explained, sizes),
        shared_bytes=_shared(group, explained),
        advice=explanation.advice or None,
        allocated_at=frames(largest.stack),
        trend=trend_of([row.held.turn for row in group], context.turns.get(stage, context.lives)),
    )
    if holder or advice:
        finding = noted(finding, ", held by " if holder else "", holder, "".join(f"; {text}" for text in advice))
    views = [
        (row.held.bytes - shown, shown, row.held.bytes)
        for row in group
        if 0 < (shown := explained.shown.get(row.held.key, 0)) <= row.held.bytes // _SHOWN_PART
    ]
    if sum(hidden for hidden, _, _ in views) >= _LEAST_HIDDEN:
        _, shown, whole = max(views)
        finding = noted(finding, f"; a view of {format_bytes(shown)} keeps {format_bytes(whole)}: keep a clone() of it")
    if largest.rung is not None:
        return TensorLeak(_returned_at(finding, largest.rung, is_held=bool(explanation.path)), {}, {}, keys)
    return TensorLeak(
        finding,
        {row.held.key: row.held.bytes for row in group},
        {row.held.key: row.explanation for row in group if row.held.key in explained.by_key},
        keys,
    )


def _whole(largest: _Row, group: Sequence[_Row]) -> Explanation:
    """Return the explanation of the largest thing; where only a part of its path is known, that of another one."""
    if not largest.explanation.is_part:
        return largest.explanation
    return next((row.explanation for row in group if not row.explanation.is_part), largest.explanation)


def _returned_at(finding: Finding, rung: Rung, *, is_held: bool) -> Finding:
    """Return a finding about storages that came back at a rung of the ladder, by which it is known why, if not held."""
    meaning = MEANINGS[rung]
    finding = msgspec.structs.replace(finding, holder=finding.holder or meaning.holder)
    return noted(
        finding,
        f"; {meaning.action} returns {format_bytes(finding.bytes)}",
        cause=finding.cause if is_held else meaning.cause,
        verdict=finding.verdict if is_held else meaning.verdict,
        remedy=Remedy(action=meaning.action, returns_bytes=finding.bytes),
    )


def _with_sizes(explanation: Explanation, explained: Explained, sizes: Mapping[Key, int]) -> tuple[Hop, ...]:
    """Return the path, with the bytes that would be free if one edge of it were cut."""
    hops = list(explanation.path)
    freed = [each if hop.suspect else None for each, hop in zip(explanation.freed, hops, strict=False)]
    for place, bytes_ in enumerate(explained.bytes_retained(freed, sizes)):
        if bytes_ is not None:
            hops[place] = msgspec.structs.replace(hops[place], retains_bytes=bytes_)
    return tuple(hops)


def _shared(group: Sequence[_Row], explained: Explained) -> int:
    """Return the bytes that stay even if the edge is cut behind which they were found: another one holds them too."""
    shared = 0
    for row in group:
        explanation = row.explanation
        first = next((turn for turn, hop in enumerate(explanation.path) if hop.suspect), None)
        freed = explanation.freed[first] if first is not None and first < len(explanation.freed) else None
        if freed is not None and not explained.is_retained(row.held.key, freed):
            shared += row.held.bytes
    return shared
