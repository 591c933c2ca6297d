"""A finding about host memory: which objects of the program are that memory, and who holds them.

Large arrays are told by their sizes; what C code of a library has, and tells nobody, by what has come with the memory.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import msgspec

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.explaining.library_objects import is_installed
from lowtide.leakcheck.findings.item_findings import HeldMemory, ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.probes.heap.holders import census_of
from lowtide.probes.heap.stand_ins import of_libraries
from lowtide.probes.host.fragments import fragments
from lowtide.probes.memory.buffers import Buffer, large_buffers
from lowtide.probes.objects.foreign import type_name
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import HolderFacts, Note, noted, restated, with_holder

_NEAR = 0.1
"""By what share the arrays may differ from the host memory that they are said to be."""

_TELLING_PART = 0.25
"""The part of the memory that must be free in a heap to be worth saying."""

MOST = 64
"""How many of the largest are looked at."""

_MOST_NAMED = 3

_INDEX = re.compile(r"\[(\d+)\]$")


@dataclass(frozen=True)
class HeldArray:
    """A large array, its identity, its length in bytes, its type, and who holds it."""

    item: int
    bytes: int
    kind: str
    explanation: Explanation

    @property
    def container(self) -> Hashable:
        """Return what is the same for all arrays that lie in one container."""
        return tuple(hop.edge for hop in self.explanation.path[:-1])

    @property
    def turn(self) -> int:
        """Its place in a list; 0 elsewhere."""
        indices = [_INDEX.search(hop.edge) for hop in self.explanation.path[-1:]]
        return next((int(index[1]) for index in indices if index is not None), 0)


def with_array_holder(leak: ItemLeak, context: Context) -> ItemLeak:
    """Say of host memory which arrays are as large, and who holds them; else what of it is free in the heaps.

    When they were made is known only of those that were there at an earlier look, since Python does not track them: the
    evidence is their size, that of one alone, of all in one container, or of the last in a list. The message says no
    more than that they are there. The fingerprint becomes the former one where a holder is found.
    """
    if leak.key != "host-memory" or not leak.finding.bytes:
        return leak
    found = _held_by_arrays(leak.finding.bytes, context)
    if found is None:
        return replace(leak, finding=with_fragments(leak.finding))
    held, (facts, explanation) = found
    return _with_facts(leak, HeldMemory(frozenset(each.item for each in held)), facts, explanation)


def _with_facts(leak: ItemLeak, held: HeldMemory, facts: HolderFacts, explanation: Explanation) -> ItemLeak:
    finding = msgspec.structs.replace(with_holder(leak.finding, facts), former_fingerprint=leak.finding.fingerprint)
    return with_fingerprint(replace(leak, finding=finding, explanation=explanation, held=held), leak.module)


def with_native_holder(leak: ItemLeak, context: Context) -> ItemLeak:
    """Say of host memory that is no array's which objects of libraries' C code have come with it, and who holds them.

    How much these have is not known: the evidence is that nothing else of the kind came, so where they are many nothing
    is said.
    """
    if leak.key != "host-memory" or leak.explanation is not None or context.born is None:
        return leak
    items = of_libraries(census_of(context.walk), context.born, lambda kind: True, of_any_age=False)
    held = [each for each in held_arrays([Buffer(item, 0) for item in items], context) if not _is_library_s(each)]
    by_holder = {each.explanation.holder: each for each in reversed(held)}
    if not 0 < len(by_holder) <= _MOST_NAMED:
        return leak
    kinds = ", ".join(dict.fromkeys(each.kind for each in by_holder.values()))
    ways = [each.explanation for each in by_holder.values()]
    memory = HeldMemory(frozenset(each.item for each in held), with_fragments(leak.finding))
    return _with_facts(leak, memory, *_facts(f"; it may be what C code of a library has for {kinds} held by ", ways))


def held_again(memory: HeldMemory, context: Context) -> list[Explanation]:
    """Return who holds what some host memory is said to be of, as far as that is there still."""
    arrays = [buffer for buffer in large_buffers() if id(buffer.item) in memory.items]
    others = of_libraries(census_of(context.walk), memory.items, lambda kind: True, of_any_age=False)
    known = {id(buffer.item) for buffer in arrays}
    buffers = arrays + [Buffer(item, 0) for item in others if id(item) not in known]
    return [each.explanation for each in held_arrays(buffers, context)]


def _is_library_s(held: HeldArray) -> bool:
    return is_installed(held.explanation.path[0].edge)


def with_fragments(finding: Finding) -> Finding:
    """Say of host memory how much of it is free, where that is a good part, and what is in use around it."""
    parts = [each for each in fragments() if each.bytes >= finding.bytes * _TELLING_PART]
    for heap, size, blocks in parts:
        finding = noted(finding, f"; up to {format_bytes(size)} of {heap} are free between {blocks:,} blocks in use")
    if parts and not finding.advice:
        changes = {"advice": "make what is to stay before what is temporary, so that it lies in memory of its own"}
        finding = restated(finding, changes)
    return finding


def held_by_arrays(size: int, context: Context) -> tuple[HolderFacts, Explanation] | None:
    """Return who holds arrays of so many bytes, one alone or several in one place; None where none are."""
    found = _held_by_arrays(size, context)
    return None if found is None else found[1]


def _held_by_arrays(size: int, context: Context) -> tuple[Sequence[HeldArray], tuple[HolderFacts, Explanation]] | None:
    found = _arrays(size, context)
    if not found:
        return None
    first, amount = found[0], sum(each.bytes for each in found)
    arrays = f"{format_bytes(amount)} in {'a' if len(found) == 1 else len(found)} {first.kind}{'s' * (len(found) > 1)}"
    ways: dict[Hashable, Explanation] = {}
    for each in found:
        ways.setdefault(each.container, each.explanation)
    return found, _facts(f"; {arrays} held by ", [*ways.values()])


def _facts(said: str, ways: Sequence[Explanation]) -> tuple[HolderFacts, Explanation]:
    """Return who holds some objects by these ways, with the first of them."""
    explanation = ways[0]
    holders = first_of([way.holder for way in ways], _MOST_NAMED)
    facts = HolderFacts(
        note=Note(said, explanation.holder, holders.removeprefix(explanation.holder)),
        cause=explanation.cause,
        verdict=explanation.verdict,
        path=explanation.path,
        advice="; ".join(map(_advice, ways[:_MOST_NAMED])),
    )
    return facts, explanation


def _advice(explanation: Explanation) -> str:
    if explanation.cut is not None and explanation.cut.is_code:
        return explanation.cut.code
    return explanation.advice or f"let go of {explanation.holder} in teardown"


def _arrays(wanted: int, context: Context) -> Sequence[HeldArray]:
    """Return the arrays that together are about so many bytes; none if no sum matches."""
    buffers = [buffer for buffer in large_buffers() if (id(buffer.item), buffer.bytes) not in context.old_arrays]
    buffers = sorted(buffers, key=lambda buffer: -buffer.bytes)[:MOST]
    buffers = [buffer for buffer in buffers if buffer.bytes <= wanted * (1 + _NEAR)]
    held = held_arrays(buffers, context)
    by_container: dict[Hashable, list[HeldArray]] = {}
    for each in held:
        by_container.setdefault(each.container, []).append(each)
    # Of several of that size in a list, the last is the latest.
    alone = [[each] for each in sorted(held, key=lambda each: -each.turn)]
    for group in [*alone, *by_container.values()]:
        if _is_near(sum(each.bytes for each in group), wanted):
            return group
    for group in by_container.values():
        latest = sorted(group, key=lambda each: -each.turn)
        for count in range(2, len(latest)):
            if _is_near(sum(each.bytes for each in latest[:count]), wanted):
                return latest[:count]
    # Of two leaks each has a part: no choice among them would be evidence, but all that there are.
    return held if _is_near(sum(each.bytes for each in held), wanted) else ()


def _is_near(amount: int, wanted: int) -> bool:
    return abs(amount - wanted) <= _NEAR * wanted


def held_arrays(buffers: Sequence[Buffer], context: Context) -> list[HeldArray]:
    """Return who holds some arrays, without those that nobody of the program holds."""
    items = [buffer.item for buffer in buffers]
    explanations = context.explain(items, ignore=set(map(id, buffers)))
    return [
        HeldArray(id(buffer.item), buffer.bytes, type_name(type(buffer.item)), found)
        for buffer, found in zip(buffers, explanations, strict=True)
        if found.path and not _is_own(found)
    ]


def _is_own(explanation: Explanation) -> bool:
    """Return whether this checker itself holds it."""
    return any(
        f"{hop.type}.".startswith("lowtide.") or f"{hop.edge}.".startswith("lowtide.") for hop in explanation.path
    )
