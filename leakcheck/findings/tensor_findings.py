"""From storages that did not come back to findings: one per holder, with the path to it and what it retains."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from lowtide.leakcheck.baseline.storages import Held, Key, is_tensor, storage_keys, tensors_in
from lowtide.leakcheck.explaining.cuts import Names, NamespaceSizes
from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.explaining.native_holders import as_gradients, held_by_nodes, saved_for_backward, together
from lowtide.leakcheck.judging.budget import Budget
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.judge import CAUSE_OF_RUNG, HOLDER_OF_RUNG, VERDICT_OF_RUNG
from lowtide.leakcheck.judging.ladder import ACTIONS, Rung
from lowtide.leakcheck.judging.stable_names import without_numbers
from lowtide.leakcheck.judging.trend import trend_of
from lowtide.probes.allocation_stacks import StackFrame, allocating_function
from lowtide.probes.device.torch_allocator import free_beside
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.heap.reach import reach
from lowtide.reports.schema import Finding, Frame, Hop, Remedy
from lowtide.reports.sizes import format_bytes

_LEAST_FREE = 2 << 20
"""Bytes that are told of as free beside a leak; small tensors share segments of this size with all others."""

_RUNNERS = ("/_pytest/", "/pluggy/", "/unittest/")

Stacks = Callable[[str, Collection[int]], Mapping[int, Sequence[StackFrame]]]
"""The stacks on which memory was allocated, by address, for a device and some addresses."""


@dataclass(frozen=True)
class Explained:
    """Who holds each of some storages.

    Attributes:
        by_key: the best explanation of each: the shortest path among its tensors'.
        places: by storage, the places among the explained tensors of those over it that a root reaches.
    """

    by_key: Mapping[Key, Explanation] = field(default_factory=dict)
    places: Mapping[Key, frozenset[int]] = field(default_factory=dict)

    def retained(self, freed: frozenset[int] | None) -> set[Key]:
        """The storages that are free when nothing holds these tensors any more."""
        return {key for key, places in self.places.items() if places and freed is not None and places <= freed}


@dataclass(frozen=True)
class Context:
    """What is known around some leaks, besides the leaks themselves.

    Attributes:
        born: the identities of all objects born since the baseline: who was there before is not to blame; None if that
            is not known.
        hints: advice for what is reached from the object beside it, which the test runner keeps by design.
        roots: what is held, by name, where no path can see it, and is meant to be.
        living: whether an engine that runs is meant to live.
        is_over: whether nothing of the program will run again, so that any name may be set to None to prove a remedy.
        stacks: where memory was allocated.
        turns: how often each stage has run.
        lives: how often every stage has, if all of them belong to one life that was repeated.
        namespaces: how many names each module had before the leak; None if that is not known.
        patience: seconds to wait for a thread to end, to prove that it is the holder.
        module: the test module, or the fixture's file, to which the leaks belong; empty if there is none.
        started: the line that started a thread, by the thread's identifier: `function, file.py:12`; empty if unknown.
        budget: how long may be spent on what can be left out.
        walk: the walk over the heap to ask who holds what, as long as nothing is changed; None: each asks its own.
    """

    born: Collection[int] | None = None
    hints: Sequence[tuple[str, object]] = ()
    roots: Sequence[tuple[str, object]] = ()
    living: bool = False
    is_over: bool = False
    stacks: Stacks = lambda device, addresses: {}
    turns: Mapping[str, int] = field(default_factory=dict)
    lives: int = 1
    namespaces: NamespaceSizes | None = None
    patience: float = 2.0
    module: str = ""
    started: Callable[[int], str] = lambda ident: ""
    budget: Budget = field(default_factory=Budget)
    walk: SharedWalk | None = None


@dataclass(frozen=True, eq=False)
class TensorLeak:
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


def with_free_beside(leaks: Sequence[TensorLeak]) -> list[TensorLeak]:
    """The same, each with what more it keeps reserved: the free part of the segments of torch's allocator around it.

    Args:
        leaks: of one subject; what is free in a segment is told of the first that is in it.
    """
    told = {id(leak): leak for leak in leaks}
    cards = {leak.finding.device for leak in leaks if leak.finding.device.startswith("cuda:")}
    for device in sorted(cards):
        here = [leak for leak in leaks if leak.finding.device == device]
        groups = [[address for of, address in leak.sizes if of == device] for leak in here]
        for leak, free in zip(here, free_beside(int(device.partition(":")[2]), groups), strict=True):
            if free >= _LEAST_FREE:
                message = f"{leak.finding.message}; {format_bytes(free)} more stay reserved in its segments"
                finding = msgspec.structs.replace(leak.finding, message=message)
                told[id(leak)] = dataclasses.replace(leak, finding=finding)
    return [told[id(leak)] for leak in leaks]


@dataclass(frozen=True)
class _Row:
    """A storage and why it is still there: at which rung it came back, or who holds it."""

    held: Held
    rung: Rung | None
    explanation: Explanation | None
    stack: tuple[StackFrame, ...]


def explain_storages(keys: Collection[Key], context: Context) -> Explained:
    """Finds out, by one walk over the heap, who holds each of some storages."""
    if not keys:
        return Explained()
    with sharing_walk(context.walk) as walk:
        return _explain_storages(keys, dataclasses.replace(context, walk=walk))


def _explain_storages(keys: Collection[Key], context: Context) -> Explained:
    older, names = older_than(context), names_known(context)
    found_in = tensors_in(keys, context.walk)
    tensors = [tensor for tensor, _ in found_in]
    storages = [of_tensor for _, of_tensor in found_in]
    del found_in
    told = explain(
        tensors,
        ignore={id(tensors)},
        innocent=older,
        roots=context.roots,
        living=context.living,
        names=names,
        budget=context.budget,
        walk=context.walk,
    )
    rooted = {id(tensor): found for tensor, found in zip(tensors, told, strict=True) if found.root}
    lost = [tensor for tensor, found in zip(tensors, told, strict=True) if not found.path or found.root]
    native = _natively_held(lost, rooted, older, names, context) if lost else {}
    by_key: dict[Key, Explanation] = {}
    parts: dict[Key, list[Explanation]] = {}
    places: dict[Key, set[int]] = {}
    for place, (tensor, found) in enumerate(zip(tensors, told, strict=True)):
        explanation = native.get(id(tensor), found)
        for key in storages[place]:
            if found.path:
                places.setdefault(key, set()).add(place)
            known = by_key.get(key)
            if known is None or _rank(explanation) < _rank(known):
                by_key[key] = explanation
        parted = storages[place] - storage_keys([tensor])
        for key in parted if found.path else ():
            parts.setdefault(key, []).append(found)
    for key, others in parts.items():
        by_key[key] = by_key[key].with_parts(others, _common_holder([by_key[key], *others]))
    return Explained(together(by_key), {key: frozenset(found) for key, found in places.items()})


def behind_frozen_holders(keys: Collection[Key], context: Context) -> frozenset[Key]:
    """Those of some storages whose path passes what `gc.freeze()` hides: to be asked before the heap is unfrozen."""
    told = explain_storages(keys, context).by_key
    return frozenset(key for key, explanation in told.items() if explanation.verdict == "frozen-holder")


def told_as_frozen(explained: Explained, keys: Collection[Key]) -> Explained:
    """The same, found in the meantime unfrozen heap, for storages that were `behind_frozen_holders`."""
    by_key = {
        key: dataclasses.replace(found, verdict="frozen-holder")
        if key in keys and found.verdict == "reachable"
        else found
        for key, found in explained.by_key.items()
    }
    return Explained(by_key, explained.places)


def tensor_leaks(
    held: Sequence[Sequence[Held]], rungs: Sequence[Rung], explained: Explained, context: Context
) -> list[TensorLeak]:
    """The findings for the storages of one device that are left at the first of some steps, the largest first.

    Args:
        held: the storages left at each step.
        rungs: the rung of each step.
        explained: who holds them.
        context: what else is known.
    """
    left = [{storage.key for storage in row} for row in held]
    if not left[0]:
        return []
    advised = _advised(context.hints, left[0])
    device = held[0][0].key[0]
    stacks = context.stacks(device, [address for _, address in left[0]])
    rows = []
    for storage in held[0]:
        back = next((turn for turn, keys in enumerate(left) if storage.key not in keys), None)
        rows.append(
            _Row(
                storage,
                None if back is None else rungs[back],
                explained.by_key.get(storage.key),
                tuple(stacks.get(storage.key[1], ())),
            )
        )
    sizes = {storage.key: storage.bytes for storage in held[0]}
    groups: dict[_Marks, list[_Row]] = {}
    for edge in _by_edge(rows):
        groups.setdefault(_fingerprint(edge, context.module), []).extend(edge)
    leaks = [_leak(mark, group, explained, advised, sizes, context) for mark, group in groups.items()]
    return sorted(leaks, key=lambda leak: -leak.finding.bytes)


def restaged(finding: Finding, stage: str) -> Finding:
    """The same finding, said to be there since `stage`; its former fingerprint is that which it had for that."""
    parts: tuple[str, ...] = (finding.cause, finding.verdict or "")
    message = finding.message.replace(f" did not come back at {finding.stage}", f" did not come back, since {stage}")
    former = fingerprint(resource=finding.resource, device=finding.device, stage=stage, suspects=parts)
    if finding.stage == stage:
        message, former = finding.message, finding.former_fingerprint or finding.fingerprint
    return msgspec.structs.replace(finding, stage=stage, message=message, former_fingerprint=former)


class Older(Container[int]):
    """The identities of what was alive before the leak: all but those of what was born since; none if nobody knows."""

    def __init__(self, born: Collection[int] | None) -> None:
        self._born = born

    def __contains__(self, identity: object) -> bool:
        return self._born is not None and identity not in self._born


def older_than(context: Context) -> Older:
    """What was alive before the leak."""
    return Older(context.born)


def names_known(context: Context) -> Names:
    """What is known of the program's names, for cuts that do no harm."""
    older = None if context.born is None else older_than(context)
    return Names(older, are_free=context.is_over, sizes=context.namespaces)


def frames(stack: Sequence[StackFrame]) -> tuple[Frame, ...]:
    """A stack as a report has it: up to the test, without those who called it."""
    own = list(itertools.takewhile(lambda frame: not any(name in frame.file for name in _RUNNERS), stack))
    return tuple(Frame(file=frame.file, line=frame.line, function=frame.function) for frame in own or stack)


def _natively_held(
    lost: Sequence[Any], rooted: Mapping[int, Explanation], older: Older, names: Names, context: Context
) -> dict[int, Explanation]:
    """What torch itself tells of tensors that Python's graph does not lead to, by identity.

    Args:
        lost: the tensors.
        rooted: of those whose path begins at what C++ holds, what is said of them.
        older: the identities of what was there before the leak.
        names: what is known of the program before it.
        context: what else is known.
    """

    def explained(items: Sequence[Any]) -> list[Explanation]:
        return explain(
            items,
            ignore={id(items)},
            innocent=older,
            roots=context.roots,
            living=context.living,
            names=names,
            walk=context.walk,
        )

    pathless = {id(tensor) for tensor in lost} - rooted.keys()

    def past_nodes(items: Sequence[Any]) -> list[Explanation]:
        told = explained(items)
        of_nodes = {id(item): found for item, found in zip(items, told, strict=True) if found.is_of_node}
        better = held_by_nodes({**rooted, **of_nodes}, pathless, explained, context.walk) if of_nodes else {}
        return [better.get(id(item), found) for item, found in zip(items, told, strict=True)]

    return {
        **held_by_nodes(rooted, pathless, explained, context.walk),
        **saved_for_backward(lost, pathless, past_nodes, context.walk),
        **as_gradients(lost, older, explained, context.walk),
    }


def _advised(hints: Sequence[tuple[str, object]], keys: set[Key]) -> dict[Key, str]:
    """The advice for those storages that are reached from what a hint is about."""
    found: dict[Key, str] = {}
    for advice, root in hints:
        objects, _ = reach([root], max_objects=20_000)
        found.update(dict.fromkeys(storage_keys(item for item in objects if is_tensor(item)) & keys, advice))
    return found


def _rank(explanation: Explanation) -> tuple[bool, int]:
    return not explanation.path, len(explanation.path)


def _by_edge(rows: Sequence[_Row]) -> list[list[_Row]]:
    """What hangs on one suspect edge, or came back at one rung, or has one story without a path: it is one thing."""
    groups: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        told = row.explanation
        if told is None or not told.path:
            suspects = () if told is None else told.suspects[:1]
            # Nothing but where it was made tells apart what nobody is known to hold.
            key: tuple[Any, ...] = (row.rung, suspects, allocating_function(row.stack))
        else:
            first = next((turn for turn, hop in enumerate(told.path) if hop.suspect), len(told.path))
            key = (told.cause, *(hop.edge for hop in told.path[: first + 1]))
        groups.setdefault((row.held.stage, *key), []).append(row)
    return list(groups.values())


class _Marks(NamedTuple):
    """A finding's fingerprint, and the one that it had in lowtide 0.1; empty if that is the same."""

    now: str
    former: str


def _fingerprint(group: Sequence[_Row], module: str) -> _Marks:
    """Of what hangs on one edge, the largest thing says where it was allocated."""
    row = max(group, key=lambda row: row.held.bytes)
    told = row.explanation
    if row.rung is not None and (told is None or not told.path):
        suspects: tuple[str, ...] = (row.rung.value,)
    elif told is not None:
        # What hangs on one suspect edge is one finding, however much it is.
        suspects = (told.cause, *told.suspects[:1])
    else:
        suspects = ("unknown",)
    mark = functools.partial(
        fingerprint,
        resource="tensors",
        device=row.held.key[0],
        stage=row.held.stage,
        suspects=suspects,
        allocated_in=allocating_function(row.stack),
    )
    if told is not None and told.path:
        return _Marks(mark(), "")
    # Nothing names it: by its data type and its number of dimensions.
    dtype, _, shape = row.held.text.partition(" ")
    return _Marks(mark(kind=f"{dtype} {without_numbers(shape)}", module=module), mark())


def _leak(
    marks: _Marks,
    group: Sequence[_Row],
    explained: Explained,
    advised: Mapping[Key, str],
    sizes: Mapping[Key, int],
    context: Context,
) -> TensorLeak:
    largest = max(group, key=lambda row: row.held.bytes)
    device = largest.held.key[0]
    keys = frozenset(row.held.key for row in group)
    size = sum(row.held.bytes for row in group)
    things = "1 tensor" if len(group) == 1 else f"{len(group)} tensors"
    stage = largest.held.stage
    message = f"{format_bytes(size)} in {things} on {device}, since {stage} ({largest.held.text})"
    told = largest.explanation
    finding = Finding(
        resource="tensors",
        cause="unknown",
        bytes=size,
        count=len(group),
        device=device,
        stage=stage,
        message=message,
        fingerprint=marks.now,
        former_fingerprint=marks.former,
        verdict="unexplained",
        allocated_at=frames(largest.stack),
        trend=trend_of([row.held.turn for row in group], context.turns.get(stage, context.lives)),
    )
    if told is not None:
        advice = "".join(
            f"; {text}" for text in sorted({advised[row.held.key] for row in group if row.held.key in advised})
        )
        holder = _common_holder([row.explanation for row in group if row.explanation is not None])
        finding = msgspec.structs.replace(
            finding,
            cause=told.cause,
            message=message + (f", held by {holder}" if holder else "") + advice,
            verdict=told.verdict,
            holder=holder,
            advice=told.advice or None,
            path=_with_sizes(told, explained, sizes),
            shared_bytes=_shared(group, explained),
        )
    if largest.rung is not None:
        action = ACTIONS[largest.rung]
        known = told is not None and bool(told.path)
        finding = msgspec.structs.replace(
            finding,
            cause=finding.cause if known else CAUSE_OF_RUNG[largest.rung],
            message=f"{finding.message}; {action} returns {format_bytes(size)}",
            verdict=finding.verdict if known else VERDICT_OF_RUNG.get(largest.rung),
            holder=finding.holder or HOLDER_OF_RUNG.get(largest.rung),
            remedy=Remedy(action=action, returns_bytes=size),
        )
        return TensorLeak(finding, {}, {}, keys)
    return TensorLeak(
        finding,
        {row.held.key: row.held.bytes for row in group},
        {row.held.key: row.explanation for row in group if row.explanation is not None},
        keys,
    )


def _common_holder(explanations: Sequence[Explanation]) -> str:
    """Who holds all of them: the holder of one, or the part of the way to several that they have in common."""
    holders = list(dict.fromkeys(told.holder for told in explanations))
    paths = [[(hop.type, hop.edge) for hop in told.path] for told in explanations]
    if len(holders) == 1 or not all(path and path[0] == paths[0][0] for path in paths):
        return holders[0]
    common = [hops[0] for hops in zip(*paths, strict=False) if all(hop == hops[0] for hop in hops)]
    way = "".join(edge for _, edge in common)
    # Where the holder is told in other words than as code, those of one of them must do.
    return way if all(told.holder.startswith(way) for told in explanations) else holders[0]


def _with_sizes(told: Explanation, explained: Explained, sizes: Mapping[Key, int]) -> tuple[Hop, ...]:
    """The path, with the bytes that would be free if one edge of it were cut."""
    hops = list(told.path)
    for place, freed in enumerate(told.freed[: len(hops)]):
        if freed is not None and hops[place].suspect:
            bytes_ = sum(sizes.get(key, 0) for key in explained.retained(freed))
            hops[place] = msgspec.structs.replace(hops[place], retains_bytes=bytes_)
    return tuple(hops)


def _shared(group: Sequence[_Row], explained: Explained) -> int:
    """Bytes that stay even if the edge behind which they were found is cut, because another one holds them too."""
    shared = 0
    # One answer for all that hang on one edge: they may be thousands.
    retained: dict[frozenset[int], set[Key]] = {}
    for row in group:
        told = row.explanation
        if told is None:
            continue
        first = next((turn for turn, hop in enumerate(told.path) if hop.suspect), None)
        freed = told.freed[first] if first is not None and first < len(told.freed) else None
        if freed is None:
            continue
        if freed not in retained:
            retained[freed] = explained.retained(freed)
        if row.held.key not in retained[freed]:
            shared += row.held.bytes
    return shared
