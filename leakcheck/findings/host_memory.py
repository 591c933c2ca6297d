"""A finding about host memory: which objects of the program are that memory, and who holds them.

Large arrays are told by their sizes, a container of many small things by what its entries keep, a tuple, a tree or a
chain by what it leads to; what C code of a library has, and tells nobody, by what has come with the memory.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.cut import Cut
from lowtide.leakcheck.explaining.explain import Explanation, expressions_to
from lowtide.leakcheck.explaining.library_objects import is_installed
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings.growing_objects import RUNNERS, caches_by_table
from lowtide.leakcheck.findings.item_findings import HeldMemory, ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.kept_bytes import is_namespace, is_of_a_module, kept_by, own_size
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.container_lengths import MANY, last_entries, long_containers, read_lengths
from lowtide.probes.heap.holders import SharedWalk, census_of, objects_of, sharing_walk
from lowtide.probes.heap.new_parts import largest_parts
from lowtide.probes.heap.stand_ins import of_libraries
from lowtide.probes.host.memory_parts import fragments
from lowtide.probes.memory.buffers import Buffer, large_buffers, large_storages, tells_its_size
from lowtide.probes.objects.foreign import is_a, type_name
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import gc, sys
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import HolderFacts, Note, noted, restated, with_holder

_NEAR = 0.1
"""By what share the arrays may differ from the host memory that they are said to be."""

_TELLING_PART = 0.25
"""The part of the memory that must be free in a heap to be worth saying."""

MOST = 64
"""How many of the largest are looked at."""

_LEAST_OF_A_TURN = 64 << 10
_MOST_OF_TURNS = 1000
"""The arrays that turns may have added: how large they are at least, and how many of the largest are looked at."""

_MOST_NAMED = 3

_INDEX = re.compile(r"\[(\d+)\]$")

_ENTRY = re.compile(r"\[.*\]$", re.DOTALL)

_ABOUT = 0.3
"""By what share what the entries of a container keep may differ from it: a few of them are looked at."""

_MOST_CONTAINERS = 64

_MOST_SAMPLED = 500

_SAMPLE, _FEWER = 64, 4
"""Entries that are looked at; fewer where they lead to more objects than these:"""

_OBJECTS = 100_000

_BUILT_IN = frozenset(dir(builtins))


class HeldArray(msgspec.Struct, frozen=True):
    """A large array, or a container of many things, and who holds it.

    Attributes:
        item: its identity.
        bytes: of the array, or about what the container has taken.
        kind: what it is.
        explanation: who holds it.
        taken: which entries a container has taken; None for an array.
        leads_on: whether the bytes are not its own, but of what it leads to.
        emptying: what takes these out again, where the container was there before; None for what goes itself.
    """

    item: int
    bytes: int
    kind: str
    explanation: Explanation
    taken: range | None = None
    emptying: Cut | None = None
    leads_on: bool = False

    @property
    def container(self) -> Hashable:
        """Return what is the same for all arrays that lie in one container."""
        path = self.explanation.path if self.taken is not None else self.explanation.path[:-1]
        return tuple(hop.edge for hop in path)

    @property
    def place(self) -> tuple[str, ...]:
        """Return the way to it, which is the same for all that lie alike in the entries of one container."""
        return tuple(_ENTRY.sub("[]", hop.edge) for hop in self.explanation.path)

    @property
    def turn(self) -> int:
        """Its place in a list; 0 elsewhere."""
        indices = [_INDEX.search(hop.edge) for hop in self.explanation.path[-1:]]
        return next((int(index[1]) for index in indices if index is not None), 0)

    @property
    def cuts(self) -> Sequence[Cut]:
        """Return the changes that give it back."""
        return self.explanation.cuts if self.emptying is None else (self.emptying,)

    @property
    def advice(self) -> str:
        """Return the change in words or code."""
        cut = self.emptying or self.explanation.cut
        if cut is not None and cut.is_code:
            return cut.code
        return self.explanation.advice or f"let go of {self.explanation.holder} in teardown"


def with_memory_holder(leak: ItemLeak, context: Context, *, may_be_of_libraries: bool = False) -> ItemLeak:
    """Say of host memory which arrays are as large, and who holds them; else what of it is free in the heaps.

    When they were made is known only of those that were there at an earlier look, since Python does not track them: the
    evidence is their size, that of one alone, of all in one container, or of the last in a list. The message says no
    more than that they are there. The fingerprint becomes the former one where a holder is found.

    Args:
        leak: the leak.
        context: what is known when it is explained.
        may_be_of_libraries: whether a card's libraries may have taken it: what a first use of theirs builds of Python's
            objects is then no evidence, and is not gone through.
    """
    if leak.key != "host-memory" or not leak.finding.bytes:
        return leak
    found = _held_memory(leak.finding.bytes, context, of_parts=not may_be_of_libraries)
    if not found:
        return replace(leak, finding=with_fragments(leak.finding))
    return _with_facts(leak, found, *_said_of(found), is_guess=found[0].taken is not None or found[0].leads_on)


def _with_facts(
    leak: ItemLeak, found: Sequence[HeldArray], facts: HolderFacts, explanation: Explanation, *, is_guess: bool
) -> ItemLeak:
    otherwise = with_fragments(leak.finding) if is_guess else None
    held = HeldMemory({each.item: each.taken if each.emptying else None for each in found}, otherwise)
    finding = msgspec.structs.replace(with_holder(leak.finding, facts), former_fingerprint=leak.finding.fingerprint)
    return with_fingerprint(replace(leak, finding=finding, explanation=explanation, held=held), leak.module)


def with_native_holder(leak: ItemLeak, context: Context) -> ItemLeak:
    """Say of host memory that is no array's which objects of libraries' C code have come with it, and who holds them.

    How much these have is not known: the evidence is that nothing else of the kind came, so where they are in many
    places nothing is said. All in the entries of one container are in one place.
    """
    if leak.key != "host-memory" or leak.explanation is not None or context.born is None:
        return leak
    items = of_libraries(census_of(context.walk), context.born, lambda kind: not tells_its_size(kind), of_any_age=False)
    held = [each for _, each in held_arrays([Buffer(item, 0) for item in items], context) if not _is_library_s(each)]
    places = {each.place for each in held}
    # What is in another one of them goes with it.
    held = [each for each in held if not any(each.place[:end] in places for end in range(1, len(each.place)))]
    by_holder = {each.explanation.holder: each for each in reversed(held)}
    if not 0 < len({each.place for each in held}) <= _MOST_NAMED:
        return leak
    kinds = ", ".join(dict.fromkeys(each.kind for each in by_holder.values()))
    said = f"; it may be what C code of a library has for {kinds} held by "
    return _with_facts(leak, held, *_facts(said, [*by_holder.values()]), is_guess=True)


def held_again(memory: HeldMemory, context: Context) -> list[Cut]:
    """Return what gives back what some host memory is said to be of, as far as that is there still."""
    emptied = {item: entries for item, entries in memory.items.items() if entries is not None}
    others = memory.items.keys() - emptied.keys()
    items = objects_of(others, context.walk) if others else []
    found = {id(item): Buffer(item, 0) for item in items}
    # What the collector does not track.
    if found.keys() < others:
        found |= {id(buffer.item): buffer for buffer in large_buffers() if id(buffer.item) in others}
    if found.keys() < others:
        untracked = of_libraries(census_of(context.walk), (), lambda kind: True)
        found |= {id(item): Buffer(item, 0) for item in untracked if id(item) in others}
        untracked.clear()
    _, there = read_lengths(emptied) if emptied else (None, {})
    held = [each for _, each in held_arrays([*found.values()], context, besides=(items,))]
    held += _emptied(there, {}, emptied, context)
    return [cut for each in held if not _is_runner_s(each) for cut in each.cuts]


def _is_runner_s(held: HeldArray) -> bool:
    """Return whether what has it, or has the containers that it lies in, is a test runner's."""
    names = [hop.edge if hop.type == "module" else hop.type for hop in held.explanation.path[:-1]]
    of_program = [name for name in names if name not in _BUILT_IN and not name.startswith("collections.")]
    return f"{of_program[-1]}.".startswith(RUNNERS) if of_program else False


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


def bytes_of_new_arrays(context: Context) -> int:
    """Return the bytes of the large arrays that were not there at an earlier look and that the program holds."""
    buffers = [buffer for buffer in large_buffers() if (id(buffer.item), buffer.bytes) not in context.old_arrays]
    buffers = sorted(buffers, key=lambda buffer: -buffer.bytes)[:MOST]
    held = [each for _, each in held_arrays(buffers, context)]
    return sum(each.bytes for each in held if not _is_library_s(each) and not _is_runner_s(each))


def memory_holder(size: int, context: Context, *, grown: int = 0) -> tuple[HolderFacts, Explanation] | None:
    """Return who holds so many bytes: arrays, one or several in one place, or containers; None where none do.

    Where each of several turns has added so many, `grown` bytes in all, those of all turns in one container come first.
    """
    found = (_of_all_turns(size, grown, context) if grown else ()) or _held_memory(size, context)
    return _said_of(found) if found else None


_UNREAD = 2
"""Turns at most of which nothing is read before what they have added is."""


def _of_all_turns(step: int, grown: int, context: Context) -> Sequence[HeldArray]:
    """Return the arrays in one container to which each turn has added some, with those of the first ones or without.

    A process that began in a turn is first read after the next one.
    """
    buffers = [each for each in large_buffers(_LEAST_OF_A_TURN) if each.bytes <= step * (1 + _NEAR)]
    buffers = sorted(buffers, key=lambda buffer: -buffer.bytes)[:_MOST_OF_TURNS]
    by_container: dict[Hashable, list[HeldArray]] = {}
    for _, each in held_arrays(buffers, context):
        by_container.setdefault(each.container, []).append(each)
    # A turn takes pages more than the arrays have.
    likely = [
        group
        for group in by_container.values()
        if len(group) > 1
        and grown * (1 - _ABOUT) <= sum(each.bytes for each in group) <= (grown + _UNREAD * step) * (1 + _ABOUT)
    ]
    return likely[0] if len(likely) == 1 else ()


def _held_memory(size: int, context: Context, *, of_parts: bool = True) -> Sequence[HeldArray]:
    with sharing_walk(context.walk) as walk:
        context = replace(context, walk=walk)
        buffers = _new_arrays(context, walk)
        found = _arrays(size, buffers, context) or _containers(size, context)
        if not found and of_parts:
            old = {item for item, _ in context.old_arrays} - {id(each.item) for each in buffers}
            found = _new_parts(size, context, walk, old)
        return found or _arrays(size, _longer(buffers, context), context)


def _said_of(found: Sequence[HeldArray]) -> tuple[HolderFacts, Explanation]:
    first, amount = found[0], sum(each.bytes for each in found)
    if first.taken is not None:
        entries = sum(len(each.taken) for each in found if each.taken is not None)
        of = f"a {first.kind}" if len(found) == 1 else f"{len(found)} containers"
        return _facts(f"; about {format_bytes(amount)} in {entries:,} entries of {of} held by ", found)
    if first.leads_on:
        objects = f"a {first.kind} leads" if len(found) == 1 else f"{len(found)} objects lead"
        return _facts(f"; about {format_bytes(amount)} in what {objects} to, held by ", found)
    few = f"a {first.kind}" if len(found) == 1 else f"{len(found)} of {first.kind}"
    ways: dict[Hashable, HeldArray] = {}
    for each in found:
        ways.setdefault(each.container, each)
    named = [_as_container(each) if len(found) > len(ways) else each for each in ways.values()]
    return _facts(f"; {format_bytes(amount)} in {few} held by ", named)


def _as_container(held: HeldArray) -> HeldArray:
    """Return what an array in it says of a container of several, by the container's name."""
    root, *way = held.explanation.path[:-1]
    if root.type in ("frame", "thread", "context"):
        # The holder of what lies in a variable of these is named by that.
        return held
    return replace(held, explanation=replace(held.explanation, holder=way_text((root, *way))))


def _facts(said: str, held: Sequence[HeldArray]) -> tuple[HolderFacts, Explanation]:
    """Return who holds some objects, with the way to the first of them."""
    explanation = held[0].explanation
    holders = first_of([each.explanation.holder for each in held], _MOST_NAMED)
    facts = HolderFacts(
        note=Note(said, explanation.holder, holders.removeprefix(explanation.holder)),
        cause=explanation.cause,
        verdict=explanation.verdict,
        path=explanation.path,
        advice="; ".join(each.advice for each in held[:_MOST_NAMED]),
    )
    return facts, explanation


def _new_arrays(context: Context, walk: SharedWalk) -> list[Buffer]:
    """Return the large arrays that were not there with that size at an earlier look."""
    # New tensors are findings of their own.
    born = context.born or ()
    storages = [each for each in large_storages() if id(each.item) not in born]
    new = [each for each in storages if (id(each.item), each.bytes) not in context.old_arrays]
    return [*walk.buffers_besides(context.old_arrays), *new]


def _longer(buffers: Sequence[Buffer], context: Context) -> list[Buffer]:
    """Return those arrays that have become larger since that look, by how much."""
    before = dict(context.old_arrays)
    sizes = [(buffer, before.get(id(buffer.item), buffer.bytes)) for buffer in buffers]
    return [replace(buffer, bytes=buffer.bytes - size) for buffer, size in sizes if buffer.bytes > size]


def _arrays(wanted: int, buffers: Sequence[Buffer], context: Context) -> Sequence[HeldArray]:
    """Return those of some arrays that together are about so many bytes; none if no sum matches."""
    buffers = sorted(buffers, key=lambda buffer: -buffer.bytes)[:MOST]
    buffers = [buffer for buffer in buffers if buffer.bytes <= wanted * (1 + _NEAR)]
    held = [each for _, each in held_arrays(buffers, context)]
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


def _is_near(amount: int, wanted: int, share: float = _NEAR) -> bool:
    return abs(amount - wanted) <= share * wanted


def with_largest_containers(finding: Finding, taken: Mapping[int, int]) -> Finding:
    """Say of what has come of host memory over a while which containers have most of it.

    How many entries long containers have taken meanwhile is `taken`, by identity.
    """
    there = long_containers() if taken else {}
    ranges = {item: range(max(there[item] - count, 0), there[item]) for item, count in taken.items() if item in there}
    # What was taken is new.
    held = _held_containers(ranges, Context(living=True), finding.bytes * _NEAR)
    largest = [each for each in held if each.bytes <= finding.bytes * (1 + _ABOUT)]
    if not largest:
        return finding
    facts, _ = _said_of(largest[:_MOST_NAMED])
    return with_holder(finding, facts)


def _containers(wanted: int, context: Context) -> Sequence[HeldArray]:
    """Return the containers whose new entries keep about so many bytes, each alone or all together; none if none do."""
    held = _grown_containers(context, _NEAR * wanted)
    alone = [each for each in held if _is_near(each.bytes, wanted, _ABOUT)]
    # An index of what another one has, too, holds it as well.
    return alone[:_MOST_NAMED] or (held if _is_near(sum(each.bytes for each in held), wanted, _ABOUT) else ())


def _new_parts(wanted: int, context: Context, walk: SharedWalk, old: Collection[int]) -> Sequence[HeldArray]:
    """Return who holds the objects that lead to about so many bytes of what is new; none if none do.

    Of what is not tracked, only what is in `old` is known to have been there before.
    """
    if context.born is None:
        return ()
    with collector_paused():
        parts = largest_parts(walk.graph(), context.born, least=int(wanted * _NEAR), old=old)[:_MOST_CONTAINERS]
        buffers = [Buffer(part.item, part.bytes) for part in parts]
        found = held_arrays(buffers, context, besides=(parts, *parts))
    known = {id(part.item) for part in parts if part.is_known}
    held = [
        replace(each, leads_on=True)
        for buffer, each in found
        if not _is_runner_s(each) and not _is_imported(each, buffer.item, context)
    ]
    # What may have been there before, only where nothing else is as large.
    return _parts_of(wanted, [each for each in held if each.item in known], _ABOUT) or _parts_of(wanted, held, _NEAR)


def _parts_of(wanted: int, held: Sequence[HeldArray], share: float) -> Sequence[HeldArray]:
    """Return what is about so many bytes of things that have nothing in common: one of them, else all of them."""
    nearest = sorted(held, key=lambda each: abs(each.bytes - wanted))[:1]
    return next((some for some in (nearest, held) if _is_near(sum(each.bytes for each in some), wanted, share)), ())


def _grown_containers(context: Context, least: float) -> list[HeldArray]:
    """Return who holds the containers that have taken many entries, the largest first; none if age is not known.

    Of those whose new entries keep so many bytes at least.
    """
    before = context.old_lengths
    if not before:
        return []
    born = context.born or ()
    taken = {item: range(before.get(item, 0), length) for item, length in long_containers().items()}
    # What was noted of them has not been read itself.
    grown = [(item, entries) for item, entries in taken.items() if len(entries) >= MANY and item != id(before)]
    # What is new itself may lie in one of the others.
    grown.sort(key=lambda each: (each[0] in born, -len(each[1])))
    return _held_containers(dict(grown[:_MOST_SAMPLED]), context, least)


def _held_containers(taken: Mapping[int, range], context: Context, least: float) -> list[HeldArray]:
    """Return who holds some containers, by identity those entries that they have taken, the largest first.

    Of those whose entries keep so many bytes at least.
    """
    _, there = read_lengths(taken) if taken else (None, {})
    sizes = {identity: _bytes_in(item, taken[identity], context) for identity, item in there.items()}
    largest = [identity for identity, size in sorted(sizes.items(), key=lambda each: -each[1]) if size > least]
    held = _emptied({each: there[each] for each in largest[:_MOST_CONTAINERS]}, sizes, taken, context)
    # What goes with a holder is not emptied, and what a test runner notes is its own.
    return [
        replace(each, emptying=None) if any(hop.suspect for hop in each.explanation.path[:-1]) else each
        for each in held
        if not _is_runner_s(each) and not _is_imported(each, there[each.item], context)
    ]


def _is_imported(held: HeldArray, container: Any, context: Context) -> bool:
    """Return whether an import has filled a container: with a module's names, or as a table of a library that came."""
    if is_a(container, dict) and is_namespace(container):
        return True
    root = held.explanation.path[0].edge
    return id(sys.modules.get(root)) in (context.born or ()) and is_installed(root)


def _emptied(
    there: Mapping[int, Any], sizes: Mapping[int, int], taken: Mapping[int, range], context: Context
) -> list[HeldArray]:
    """Return who holds some containers, with what takes out what they have taken."""
    caches = caches_by_table() if there else {}
    # Of a cache's table no expression is known.
    shown = {id(caches.get(identity, item)): identity for identity, item in there.items()}
    buffers = [Buffer(caches.get(identity, item), sizes.get(identity, 0)) for identity, item in there.items()]
    held = held_arrays(buffers, context, besides=(there, caches))
    codes = expressions_to([buffer.item for buffer, _ in held], context.walk) if held else []
    found = []
    for (buffer, each), code in zip(held, codes, strict=True):
        identity = shown[each.item]
        emptying = _emptying(buffer.item, taken[identity], code or "", each.explanation.holder)
        found.append(replace(each, item=identity, taken=taken[identity], emptying=emptying))
    return found


def _bytes_in(container: Any, taken: range, context: Context) -> int:
    """Return about how much some of a container's entries keep; 0 where most may have been there before."""
    entries = _some_of(container, taken, _SAMPLE)
    if not _are_new(entries, context):
        return 0
    kept = kept_by(entries, besides=(container,), most=_OBJECTS)
    if kept.objects >= _OBJECTS:
        entries = _some_of(container, taken, _FEWER)
        kept = kept_by(entries, besides=(container,), most=_OBJECTS)
    return round((kept.bytes / len(entries) + own_size(container) / max(taken.stop, 1)) * len(taken))


def _some_of(container: Any, taken: range, most: int) -> list[tuple[Any, ...]]:
    return last_entries(container, len(taken), -(-len(taken) // most))


def _are_new(entries: Sequence[tuple[Any, ...]], context: Context) -> bool:
    """Return whether most of what is in some entries was made since; a table of modules, classes or functions is not.

    Those are theirs who define these.
    """
    tracked = [item for entry in entries for item in entry if gc.is_tracked(item)]
    made = [item for item in tracked if not is_of_a_module(item)]
    new = [item for item in made if context.born is None or id(item) in context.born]
    return bool(entries) and len(new) * 2 >= len(made) and len(made) * 2 >= len(tracked)


def _emptying(container: Any, taken: range, code: str, holder: str) -> Cut:
    """Return what takes some entries out of a container, or cache, again; as it is written, by methods of its own."""
    holder, is_code = code or holder, bool(code)
    if is_a(container, LRU_CACHE):
        return Cut(f"{holder}.cache_clear()", f"{holder} is empty", container.cache_clear, is_code)
    effect = f"{holder} is without what it had taken"
    if is_a(container, list) and len(taken) < list.__len__(container):
        place = slice(taken.start, taken.stop)
        return Cut(f"del {holder}[{place.start}:{place.stop}]", effect, lambda: container.__delitem__(place), is_code)
    if is_a(container, dict) and len(taken) < dict.__len__(container):
        keys = f"list({holder})[{taken.start}:{taken.stop}]"
        delete = functools.partial(_delete_entries, container, taken)
        return Cut(f"for key in {keys}: del {holder}[key]", effect, delete, is_code)
    if is_a(container, deque) and taken.start and taken.stop == deque.__len__(container):
        pop = f"[{holder}.pop() for _ in range({len(taken)})]"
        return Cut(pop, effect, lambda: [container.pop() and None for _ in taken], is_code)
    return Cut(f"{holder}.clear()", f"{holder} is empty", lambda: container.clear(), is_code)


def _delete_entries(container: dict[Any, Any], taken: range) -> None:
    for key in list(container)[taken.start : taken.stop]:
        del container[key]


def held_arrays(
    buffers: Sequence[Buffer], context: Context, besides: Sequence[object] = ()
) -> list[tuple[Buffer, HeldArray]]:
    """Return who holds some arrays, with each, without those that nobody of the program holds.

    What the caller has the arrays in `besides` holds none.
    """
    items = [buffer.item for buffer in buffers]
    explanations = context.explain(items, ignore={*map(id, buffers), *map(id, besides), id(besides)})
    return [
        (buffer, HeldArray(id(buffer.item), buffer.bytes, type_name(type(buffer.item)), found))
        for buffer, found in zip(buffers, explanations, strict=True)
        if found.path and not _is_own(found)
    ]


def _is_own(explanation: Explanation) -> bool:
    """Return whether this checker itself holds it."""
    return any(
        f"{hop.type}.".startswith("lowtide.") or f"{hop.edge}.".startswith("lowtide.") for hop in explanation.path
    )
