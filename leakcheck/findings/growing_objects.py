"""What becomes more in the heap with every turn: containers, objects behind each other, single values; with holders.

A type of which there is an object more with every turn is read as a container is. Its new objects are a chain, or a
tree (linked nodes, closures that nest, errors with those before), if the way to them leads through others of the type:
then who holds the first of these holds all.
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings.kept_bytes import KeptBytes, hides_memory, is_of_a_module, kept_by, own_size
from lowtide.leakcheck.growth.bounds import bound_in_code, is_asked_for_length, places_that_fill
from lowtide.leakcheck.growth.containers import Course, together
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.storages import is_tensor
from lowtide.leakcheck.resources.resource import function_name
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.heap.container_lengths import last_entries, read_lengths
from lowtide.probes.heap.holders import SharedWalk, sharing_walk, trace
from lowtide.probes.heap.large_values import OF_ITEMS, OF_TYPE, UNIT, count_of, items_of, read_values, size_of_value
from lowtide.probes.heap.roots import is_library
from lowtide.probes.host.settings import is_of_library
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.described import owner_of_call
from lowtide.probes.objects.foreign import (
    is_a,
    module_of_class,
    mro_of,
    type_name,
)
from lowtide.probes.objects.identities import identities, object_at, types_of
from lowtide.probes.objects.listed import CHECKER, all_instances
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, sys, weakref
from lowtide.reports.schema import Finding, Hop, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes
from lowtide.reports.statement import HolderFacts, Note, Statement

ADVICE = "remove entries once they are no longer needed, or bound the container"

_ONCE = "make each context variable once, at the top of a module: a context keeps all that were ever set in it"

_SHORTER = "give it a bound, or begin a new one now and then: it only becomes longer"

_RAISED_ANEW = "raise another error each time, or `error.with_traceback(None)`: each raise adds to the traceback it has"

_LEAST_A_TURN = 1024
"""Bytes that a turn must add: a test's own notes, as a name or a number each, are no leak to speak of,"""

_LEAST_IN_ALL = 512 << 10
"""unless so many turns have added some that these are the bytes of all."""

_OF_A_REFERENCE = 512
"""Bytes by which a weak reference has more than itself and a key: a subclass's attributes, or what it calls."""

_LARGEST_WINDOW = 32 << 20
"""Bytes of a full cache or window that grows until then."""

_SHOWN_PLACES = 2
"""Places in code that are named."""

_SAMPLE = 20
"""Things of which it is told what all are."""

_TURNS = 3
"""Of the things of so many turns at least, all over its course, the size is taken: late ones may be larger,"""

_SIZED = 200
"""and of so many of them, as of objects behind each other,"""

_MOST_SIZED = 4000
"""or of so many, where the finding is made,"""

_OBJECTS = 40_000
"""as long as they lead to no more objects than these, at some microseconds each."""

_MOST_PART = 0.9
"""The part of what a container has taken that must be there anyway, so that its growth is none of memory; and of what
some values have more that one of them must have: else several grow a little."""

_LONG_PART = 0.25
"""The part of what an object's tuples have taken that one of them must have, if it grows."""

_STEPS = 3
"""References from an entry of a registry of Python's to what it is for: of a record, a bound method, its function."""

_STEPS_TO_NAME = 5
"""The same where it is only named: of a future that somebody waits for, its callback, the task, its coroutine."""

RUNNERS = ("_pytest.", "pytest.", "pluggy.", "xdist.", *CHECKER, "lowtide.reports.")
"""What the names of test runners' modules, and of this checker's, begin with."""

_TRIED = 16
"""New objects of a type at most to which the ways are looked at."""

_BEHIND_PART = 0.75
"""The part of those that must lie behind others of their type."""

_SHARED_PART = 0.3
"""The part that must begin at one of them: a chain may be held at both ends."""

_EXPLAINED = 100
"""Objects on a way of which it is worth knowing what leads to each."""

_DEEP = 0.25
"""The part of all that the longest way must lead through where it is not known which are new."""

_LINKED_PART = 0.5
"""The part of the turns of which it must lead through a new one where these are what everybody makes."""

_MOST_EXPLAINED = 500
"""Containers that grow in some of the turns of which it is asked who holds them."""

_ONE = 2 / 3
"""Items with each turn below which it is said in how many turns there is one."""

_MOST_IN_COPY = 100_000
"""Things of a container that are gone through to see how many of them are new, the latest first."""

PLAIN = (list, dict, tuple)
"""What everybody makes, some of it in some."""


class Stretch(msgspec.Struct, frozen=True):
    """What is known of the turns in which something has grown.

    Attributes:
        turns: what a turn is, in the plural: `tests`.
        module_of: gives the module to which a course's turns belong; empty if to none.
        roots: what is held, by name, where no path can see it.
        by_frames: whether what a running function of this thread holds is the program's.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which it has grown, where nobody has counted the turns.
        tensors: whether memory under tensors counts: where nobody else follows these.
        fixed: the containers that have not changed their lengths meanwhile: what lies in one is there anyway.
        earlier: the identities of objects that were there after some turn of it, in their order, by their type's.
    """

    turns: str
    module_of: Callable[[Course], str] = lambda _: ""
    roots: Sequence[tuple[str, object]] = ()
    by_frames: bool = False
    seconds: float = 0.0
    since: str = ""
    tensors: bool = False
    fixed: Collection[int] = ()
    earlier: Mapping[int, Ints] = msgspec.field(default_factory=dict)


def growth_in_heap(
    courses: Sequence[Course], there: Mapping[int, Any], stretch: Stretch, values: Sequence[Course] = ()
) -> dict[int, Finding]:
    """Return a finding on each container, chain and value that grows and that the program holds, by identity.

    Args:
        courses: how containers, and the numbers of objects of some types, have grown.
        there: the containers and types that are there, by identity.
        stretch: in which turns.
        values: how many KiB of values, and things in tuples, some objects have had that refer to them.
    """
    fixed = _growing_items([course for course in values if course.identity & OF_ITEMS])
    values = [course for course in values if not course.identity & OF_ITEMS]
    given, there = there, {**there, **{id(item): item for _, item in fixed}}
    courses = [*courses, *(course for course, _ in fixed)]
    types = [(course, there[course.identity]) for course in courses if is_a(there.get(course.identity), type)]
    of_types = {course.identity for course, _ in types}
    types = [(course, cls) for course, cls in types if course.is_regular or not course.by_turns]
    others = [course for course in courses if course.identity not in of_types]
    with sharing_walk() as walk:
        heap = _Heap(walk, stretch.roots, [given, there, types, fixed, *fixed])
        others = _each_or_together(_without_copies(others, there), there, stretch, heap)
        found = _growing_containers(others, there, stretch, heap)
        # What lies in a container that grows is judged with that.
        found |= _growing_chains(types, {course.identity for course in others}, stretch, heap)
        of_values = _growing_values(values, stretch, heap, found.keys())
        found = of_values | _without_parts(found, [*of_values.values()])
    # Who reads one of them reads the one that takes most.
    return dict(sorted(found.items(), key=lambda each: -each[1].bytes))


def _without_parts(found: Mapping[int, Finding], values: Sequence[Finding]) -> dict[int, Finding]:
    """Return findings without lists that C alone holds and that are as large as a value that is told.

    Until Python 3.11 a `StringIO` has what was written into it in a list.
    """
    sizes = [each.bytes for each in values]

    def is_part(finding: Finding) -> bool:
        least, most = _MOST_PART * finding.bytes, finding.bytes / _MOST_PART
        return not finding.path and any(least <= size <= most for size in sizes)

    return {identity: finding for identity, finding in found.items() if not is_part(finding)}


class _Heap(msgspec.Struct, frozen=True):
    """One walk over the heap for all that grows.

    Attributes:
        walk: the walk.
        roots: as of a `Stretch`.
        own: what holds the objects here, and is on no path to them.
    """

    walk: SharedWalk
    roots: Sequence[tuple[str, object]]
    own: list[object]

    @property
    def ignored(self) -> set[int]:
        """Return the identities of what no path leads through."""
        return {id(self.own), *map(id, self.own)}

    def explained(self, targets: Sequence[object], *, are_roots_known: bool = True) -> list[Explanation]:
        """Return who holds each of some objects."""
        self.own.append(targets)
        roots = self.roots if are_roots_known else ()
        return explain(targets, ignore=self.ignored, roots=roots, living=True, walk=self.walk)


def ids_of(classes: Iterable[type]) -> dict[int, Ints]:
    """Return the identities of all objects of some types, in their order, by the type's."""
    wanted = [cls for cls in classes if _may_be_linked(cls)]
    if not wanted:
        return {}
    ids = identities(all_instances(*wanted))
    kinds = types_of(ids)
    return {id(cls): np.sort(ids[kinds == id(cls)]) for cls in wanted}


def is_worth_a_look(course: Course, item: Any, *, tensors: bool, at_a_glance: bool = False) -> bool:
    """Return whether what a container takes, or what comes of a type, is the program's, and enough.

    Memory under tensors counts as in a `Stretch`.

    Args:
        course: how it has grown.
        item: the container or type.
        tensors: whether memory under tensors counts.
        at_a_glance: whether it is enough that a few of its entries keep much.
    """
    if is_a(item, type):
        return _may_be_linked(item) and not _is_plain(item)
    if type(item) is deque and item.maxlen is not None:
        return False
    entries = _over_its_course(course, item, _SAMPLE)
    entries = [entry for entry in entries if not _is_runners(entry[-1])]
    are_references = all(is_a(part, weakref.ref) for *_, part in entries)
    if not entries or (are_references and kept_by(entries).bytes < _OF_A_REFERENCE * len(entries)):
        return False
    # Of most that is not little a few entries show it, and not all that these keep has to be gone through.
    enough = min(_LEAST_A_TURN, _LEAST_IN_ALL / course.span) * course.span / course.items * len(entries)
    if at_a_glance and kept_by(entries, besides=(item,), enough=enough).bytes >= enough:
        return True
    return _is_enough(course, _bytes_a_turn(course, item, tensors=tensors)[0])


def _is_enough(course: Course, each: int) -> bool:
    """Return whether so many bytes with each turn are a leak to speak of."""
    return each >= _LEAST_A_TURN or each * course.span >= _LEAST_IN_ALL


def _is_of_runner(cls: type) -> bool:
    """Return whether a class is of a test runner, or of this checker."""
    return f"{module_of_class(cls)}.".startswith(RUNNERS)


def _is_runners(item: object) -> bool:
    """Return whether something is an object or a function of a test runner, or calls one, as what ends a fixture."""
    owner: Any = owner_of_call(item)
    return _is_of_runner(owner) if is_a(owner, type) else f"{_module_of(owner)}.".startswith(RUNNERS)


def _bytes_a_turn(course: Course, container: Any, *, tensors: bool, exactly: bool = False) -> tuple[int, str]:
    """Return the bytes that a container takes in a turn, and the device where most of them are under tensors there."""
    rate = course.items / course.span
    entries = _over_its_course(course, container, max(_SAMPLE, min(round(_TURNS * rate), _SIZED)))
    if not entries:
        # Another one is where it was.
        return 0, ""
    kept = kept_by(entries, besides=(container,))
    wanted = min(_MOST_SIZED if exactly else _SIZED, _OBJECTS * len(entries) // max(1, kept.objects))
    if len(entries) < min(wanted, course.items):
        entries = _over_its_course(course, container, wanted)
        kept = kept_by(entries, besides=(container,))
    size, device = _with_tensors(kept, tensors=tensors)
    places = own_size(container) / max(1, course.lengths[-1])
    return round((size / len(entries) + places) * rate), device


def _with_tensors(kept: KeptBytes, *, tensors: bool) -> tuple[int, str]:
    """Return bytes with those under tensors, if these count, and the device where most of them are; else empty."""
    under = Counter[str]()
    for storage in survey_storages(kept.tensors).storages if tensors and kept.tensors else ():
        under[storage.device] += storage.bytes
    size = kept.bytes + under.total()
    ((device, most),) = under.most_common(1) or (("", 0),)
    return size, device if 2 * most > size else ""


def _over_its_course(course: Course, container: Any, most: int) -> list[tuple[Any, ...]]:
    """Return so many of the things that a container has taken, those of whole turns: they may share what they keep."""
    run = max(1, min(round(course.items / course.span), most // _TURNS))
    return last_entries(container, course.items, -(-course.items // most) * run, run)


def _may_be_linked(cls: type) -> bool:
    """Return whether objects of a type may be links: all but classes, and what is a test runner's."""
    return not _is_of_runner(cls) and not any(base is type for base in mro_of(cls))


def _is_plain(cls: type) -> bool:
    return any(cls is each for each in PLAIN)


def _without_copies(courses: Sequence[Course], there: Mapping[int, Any]) -> list[Course]:
    """Return the courses without those of containers that each turn copies from one that grows: it is told itself."""
    courses = [course for course in courses if course.identity in there]
    growing = [there[course.identity] for course in courses if not (course.by_turns or course.is_remade)]
    latest = {id(item) for container in growing for *_, item in last_entries(container, _SAMPLE)}

    def is_copy(course: Course) -> bool:
        return any(id(item) in latest for *_, item in last_entries(there[course.identity], 1))

    return [course for course in courses if not (course.is_remade and is_copy(course))]


def kept_of_c(courses: Sequence[Course], there: Mapping[int, Any], stretch: Stretch) -> HolderFacts | None:
    """Return which container has taken something with memory in C in each turn; None where the program has none.

    Args:
        courses: how containers have grown.
        there: the containers that are there, by identity.
        stretch: in which turns.
    """
    items = [(course, there[course.identity]) for course in courses if course.identity in there]
    taken = [
        (item, f"{max(1, round(course.items / course.span))} {name}")
        for course, item in items
        if (name := takes_of_c(course, item))
    ]
    with sharing_walk() as walk:
        heap = _Heap(walk, stretch.roots, [items, taken, there, *items, *taken])
        explained = zip(heap.explained([item for item, _ in taken]), taken, strict=True) if taken else ()
        held = [
            (each, name)
            for each, (item, name) in explained
            if _is_of_program(each, last_entries(item, _SAMPLE), stretch)
        ]
    if not held:
        return None
    holder, name = min(held, key=lambda each: len(each[0].path))
    note = Note("; ", holder.holder, f" takes {name} with each, which may have it in C")
    return HolderFacts(note=note, cause=holder.cause, verdict=holder.verdict, path=holder.path, advice=ADVICE)


def takes_of_c(course: Course, container: Any) -> str:
    """Return the name of the type of what a container takes that may have memory in C; empty where it takes none."""
    if is_a(container, type):
        return ""
    entries = _over_its_course(course, container, _SAMPLE)
    # What all refer to is none that each turn adds.
    found = {id(item): item for entry in entries if (item := _first_of_c(entry)) is not None}
    return type_name(type(next(iter(found.values())))) if 2 * len(found) > len(entries) else ""


def _first_of_c(entry: Iterable[Any]) -> object:
    level = list(entry)
    for _ in range(_STEPS):
        level = [item for item in level[:_SAMPLE] if not (is_a(item, type) or is_of_a_module(item) or is_tensor(item))]
        found = next((item for item in level if hides_memory(type(item))), None)
        if found is not None:
            return found
        level = gc.get_referents(*level)
    return None


def _each_or_together(
    courses: Sequence[Course], there: Mapping[int, Any], stretch: Stretch, heap: _Heap
) -> list[Course]:
    """Return the courses of containers that grow in every turn, and of those that do by turns, at one place or alone.

    As the shards of a table, or the lists that a dict has for each user: on the way to them only entries differ.
    """
    slow = [course for course in courses if course.by_turns]
    slow = sorted(slow, key=lambda course: -course.items)[:_MOST_EXPLAINED]
    each = itertools.accumulate(
        _bytes_a_turn(course, there[course.identity], tensors=stretch.tensors)[0] for course in slow
    )
    if not any(_is_enough(slow[0], size) for size in each):
        slow = []
    alone = {course.identity for course in courses if course.is_regular or not course.by_turns}
    explained = heap.explained([there[course.identity] for course in slow]) if slow else []
    places: dict[tuple[str, ...], list[Course]] = {}
    for course, explanation in zip(slow, explained, strict=True):
        # What lies in one that grows is told with that.
        if explanation.path and alone.isdisjoint(explanation.through - {course.identity}):
            edges = ("[*]" if _is_entry(hop) else hop.edge for hop in explanation.path)
            places.setdefault(tuple(edges), []).append(course)
    found = [course for course in courses if not course.by_turns]
    return [*found, *(all_ for all_ in map(together, places.values()) if all_.is_of_every_turn or all_.is_regular)]


def _growing_containers(
    courses: Sequence[Course], containers: Mapping[int, Any], stretch: Stretch, heap: _Heap
) -> dict[int, Finding]:
    """Return a finding on each container that grows and that the program holds, by identity."""
    there = ((course, containers[course.identity]) for course in courses if course.identity in containers)
    wanted = [(course, item) for course, item in there if is_worth_a_look(course, item, tensors=stretch.tensors)]
    wanted = _of_new_things(wanted, stretch.fixed)
    if not wanted:
        return {}
    caches = caches_by_table()
    bounded = {table for table, cache in caches.items() if cache.cache_parameters()["maxsize"] is not None}
    wanted = [(course, table) for course, table in wanted if id(table) not in bounded]
    # Of a cache's table no expression is known.
    targets = [caches.get(id(container), _held_in(container)) for _, container in wanted]
    heap.own.extend((wanted, caches, *wanted))
    explained = heap.explained(targets)
    if any(map(_is_of_a_functions_module, explained)):
        # A function that somebody is given does not make its module's globals theirs.
        others = heap.explained(targets, are_roots_known=False)
        pairs = zip(explained, others, strict=True)
        explained = [other if _is_of_a_functions_module(each) and other.path else each for each, other in pairs]
    held = [
        (course, container, explanation)
        for (course, container), explanation in zip(wanted, explained, strict=True)
        if _is_of_program(explanation, last_entries(container, _SAMPLE), stretch)
    ]
    return {
        course.identity: _of_container(course, container, explanation, stretch, is_cache=id(container) in caches)
        for course, container, explanation in held
        if not _is_of_garbage(container, heap)
        and not _is_part_of_another(course, container, explanation, held)
        and not _waits_for_another(course, container, explanation, held)
        and not _is_filling(course, container, explanation, stretch)
    }


def _is_part_of_another(
    course: Course, container: Any, explanation: Explanation, held: Sequence[tuple[Course, Any, Explanation]]
) -> bool:
    """Return whether what a container takes lies in one, too, by which it is held itself: it has an index of that."""
    around = [(other, table) for other, table, _ in held if table is not container and id(table) in explanation.through]
    return any(set(map(id, _taken(course, container))) & set(map(id, _taken(other, table))) for other, table in around)


def _is_of_garbage(container: Any, heap: _Heap) -> bool:
    """Return whether what a container has by weak references is garbage: that goes with the next collection."""
    references = [part for entry in last_entries(container, _SAMPLE) for part in entry if is_a(part, weakref.ref)]
    referents = [item for each in references if (item := weakref.ref.__call__(each)) is not None]
    return bool(referents) and not any(each.path for each in heap.explained(referents[:_TRIED]))


def _waits_for_another(
    course: Course, container: Any, explanation: Explanation, held: Sequence[tuple[Course, Any, Explanation]]
) -> bool:
    """Return whether a library has it for itself, and what it takes is there for what another one takes.

    As those who wait in an `asyncio.Event` are there for tasks: they go with these.
    """
    path = explanation.path
    if len(path) < 2 or not path[-1].edge.startswith("._") or not is_library(path[-2].type):
        return False
    others = [(other, table) for other, table, _ in held if table is not container]
    taken = {id(part) for other, table in others for entry in _over_its_course(other, table, _SAMPLE) for part in entry}
    entries = _over_its_course(course, container, _SAMPLE)
    level = [part for entry in entries for part in entry]
    for _ in range(_STEPS):
        level = gc.get_referents(*level[:_SIZED])
        if sum(id(item) in taken for item in level) * 2 > len(entries):
            return True
    return False


def _is_filling(course: Course, container: Any, explanation: Explanation, stretch: Stretch) -> bool:
    """Return whether code bounds the container, and it is neither full nor much then: it is a cache, or a window.

    Where the bound is not known, it must be little by now.
    """
    bound = bound_in_code(explanation.path, explanation.through, container)
    if bound is None:
        return False
    each, _ = _bytes_a_turn(course, container, tensors=stretch.tensors)
    if math.isnan(bound):
        return each * course.span < _LEAST_IN_ALL
    return course.lengths[-1] <= bound and each * course.span / course.items * bound <= _LARGEST_WINDOW


def _held_in(container: Any) -> Any:
    """Return what shows who holds a container; of one in C, which nothing but an entry can show, the last one's own."""
    if type(container) is not ModuleType:
        return container
    function, *arguments = last_entries(container, 1)[0]
    return next(filter(None, arguments), function)


def _of_new_things(wanted: list[tuple[Course, Any]], fixed: Collection[int]) -> list[tuple[Course, Any]]:
    """Return the containers of which most of what they have taken lies in none that stays as long as it is.

    A table of a pool's blocks takes blocks that the pool has had from the beginning: all that grows is the table.
    """
    taken = {course.identity: _taken(course, container) for course, container in wanted}
    sampled = [item for items in taken.values() for item in items]
    if not fixed or not sampled:
        return wanted
    wanted_ids = set(map(id, sampled))
    # By their identities: what `gc.freeze()` hides has referrers that nobody tells.
    _, tables = read_lengths(fixed)
    # A list that has gone since may have left its place to one of these.
    own = {id(sampled), *map(id, taken.values())}
    others = [table for identity, table in tables.items() if identity not in own]
    there = set[int]().union(*(wanted_ids.intersection(map(id, _things_in(table))) for table in others))
    return [
        (course, container)
        for course, container in wanted
        if sum(id(item) in there for item in taken[course.identity]) < _MOST_PART * len(taken[course.identity])
    ]


def _taken(course: Course, container: Any) -> list[Any]:
    """Return some of the things that a container has taken, from all of its course; of an entry what counts.

    That is what refers to others rather than a number, a name or `None`, which lie in other tables, too, or a function.
    """
    return [max(entry, key=_rank_in_entry) for entry in _over_its_course(course, container, _SAMPLE)]


def _rank_in_entry(item: Any) -> tuple[bool, bool, int]:
    is_own = type(item) is CodeType or not is_of_a_module(item)
    return is_own, gc.is_tracked(item), own_size(item)


def _things_in(holder: Any) -> Iterable[Any]:
    """Return the things in a table: a deque, or a set, may have been emptied and filled meanwhile."""
    cls = type(holder)
    return dict.values(holder) if issubclass(cls, dict) else list.__iter__(holder) if issubclass(cls, list) else ()


def caches_by_table() -> dict[int, Any]:
    """Return every `lru_cache` by the identity of the dict that its entries are in."""
    caches = all_instances(LRU_CACHE)
    return {id(table): cache for cache in caches for table in gc.get_referents(cache) if type(table) is dict}


def _is_of_a_functions_module(explanation: Explanation) -> bool:
    """Return whether a path leads from what a name of the caller's holds to the globals of a function behind it."""
    path = explanation.path
    return bool(path) and path[0].type == "object" and any("__globals__" in hop.edge for hop in path[1:])


def _is_of_program(explanation: Explanation, entries: Sequence[tuple[Any, ...]], stretch: Stretch) -> bool:
    """Return whether the program holds what grows, or has Python's library hold what is the program's.

    A test runner keeps what it has to report, and libraries a lot. Of what each turn adds, `entries` are some.
    """
    if not explanation.path:
        # C holds it: of a test runner's, or of the program. In a frozen heap nobody knows who does.
        return stretch.by_frames and explanation.verdict == "native-held"
    if not explanation.holder or any(f"{hop.type}.".startswith(RUNNERS) for hop in explanation.path):
        return False
    root = explanation.path[0]
    if root.type == "frame":
        return stretch.by_frames or bool(explanation.thread)
    if root.type in ("module", "class", "interpreter") and is_library(root.edge):
        if _is_bounded_by(explanation.path):
            return False
        # Turns that do the same ask for nothing new, as tests do: what a library takes in each of them has no end.
        of_python = root.edge.partition(".")[0] in sys.stdlib_module_names
        return stretch.by_frames or (of_python and bool(_programs_in(entries)))
    return True


def _is_bounded_by(path: Sequence[Hop]) -> bool:
    """Return whether a module's own code asks for the length of a table that is its global."""
    module = sys.modules.get(path[0].edge)
    return type(module) is ModuleType and len(path) == 2 and is_asked_for_length(module, path[1].edge.removeprefix("."))


def _programs_in(entries: Sequence[tuple[Any, ...]], steps: int = _STEPS) -> str:
    """Return what most of the last things of a container are for: a function, or a class, of the program's.

    Python's library calls it, as `weakref.finalize` does, once something else is over. It is looked for by so many
    steps from each.
    """
    names = Counter(name for entry in entries if (name := _first_of_program(entry, steps)))
    ((name, count),) = names.most_common(1) or (("", 0),)
    return name if 2 * count > len(entries) else ""


def _first_of_program(entry: Iterable[Any], steps: int) -> str:
    """Return the name of the function or class of the program's that an entry of a container leads to; "" for none.

    Where an engine is installed as a library, all may be its own.
    """
    level = list(entry)
    installed = ""
    for _ in range(steps):
        level = [item for item in level if not issubclass(type(item), type) and type(item) is not ModuleType]
        tracked = [item for item in level[:_SIZED] if gc.is_tracked(item)]
        own = [item for item in tracked if not is_of_library(item)]
        if own:
            return function_name(own[0])
        engines = (item for item in tracked if not is_library(_module_of(item)))
        installed = installed or next(map(function_name, engines), "")
        level = gc.get_referents(*level[:_SIZED])
    return installed


def _module_of(item: Any) -> str:
    module = item.__module__ if type(item) is FunctionType else module_of_class(type(item))
    return module if type(module) is str else "builtins"


def _name_of(explanation: Explanation, container: Any) -> str:
    """Return the container's name: the holder alone names a thread, or a variable's last attribute."""
    if container is atexit:
        return explanation.holder.removesuffix(" with")
    if container is contextvars:
        return "contextvars.copy_context()"
    if not explanation.path:
        return f"a {type_name(type(container))} of {explanation.holder}"
    root, *hops = explanation.path
    names_root = root.type == "thread" and explanation.holder == root.edge
    unsaid = hops if names_root else []
    if root.type in ("frame", "thread") and not names_root:
        while hops[1:] and not hops[-1].edge.startswith("."):
            unsaid.insert(0, hops.pop())
    below = way_text(unsaid)
    if not below and len(hops) > 1 and not _says(explanation.holder, hops[-1]):
        below = _end_of(hops)
    return f"{below} of {explanation.holder}" if below else explanation.holder


def _says(holder: str, last: Hop) -> bool:
    """Return whether a holder's name reaches the end of its path: at a closure, say, it ends."""
    return holder.rstrip(")").endswith(last.edge.strip(".<>")) or (last.edge.startswith(".") and last.edge in holder)


def _end_of(hops: Sequence[Hop]) -> str:
    """Return a path from the last object on it that has what follows in an attribute: one of the program's, if any.

    What runs holds it in no variable, and no code leads to it; or the way to it leads through a loop's own tables.
    """
    attributes = [turn for turn, hop in enumerate(hops) if turn and hop.edge.startswith(".")]
    own = [turn for turn in attributes if "." in (kind := hops[turn - 1].type) and not is_library(kind)]
    begin = (own or attributes or [len(hops) - 1])[-1]
    way = way_text(hops[begin:])
    return hops[begin - 1].type.rpartition(".")[2] + (way if way.startswith((".", "[")) else f" {way}")


def _said(rate: float, size: float) -> str:
    """Return how many items something takes, and their bytes."""
    said = f"{rate:.0f}" if rate >= 10 or abs(rate - round(rate)) < 0.05 else f"{rate:.1f}"
    unit = format_amount(1 if said == "1" else 2, "items").split()[1]
    return f"{said} {unit} ({format_bytes(round(size))})"


def _of_container(
    course: Course, container: Any, explanation: Explanation, stretch: Stretch, *, is_cache: bool
) -> Finding:
    entries = _over_its_course(course, container, _SAMPLE)
    items = (_largest_in(entry) if is_cache or _is_of_key(entry) else entry[-1] for entry in entries)
    kinds = Counter(type_name(type(item)) for item in items)
    ((kind, _),) = kinds.most_common(1)
    of_kind = f"{course.lengths[-1]} {'callbacks' if container is atexit else f'of {kind}'}"
    root = explanation.path[0].type if explanation.path else ""
    is_of_library = root in ("module", "class") and is_library(explanation.path[0].edge)
    # As the timers of asyncio's loop, which an application holds; or tasks, of which it matters what they run.
    is_of_library |= is_library(kind) or (len(explanation.path) > 1 and is_library(explanation.path[-2].type))
    if is_of_library:
        of = _programs_in(last_entries(container, _SAMPLE), _STEPS_TO_NAME)
        of_kind += f", for {of}" if of else ""
    places = places_that_fill(explanation.path, explanation.through, container)
    of_kind += f", added in {first_of(places, _SHOWN_PLACES)}" if places else ""
    name = _name_of(explanation, container)
    if course.together > 1:
        name = _of_any_entry(name, explanation.path)
        of_kind += f" in {course.together} of them"
        explanation = replace(explanation, holder=_of_any_entry(explanation.holder, explanation.path))
    explanation = replace(
        explanation,
        cause="lru-cache" if is_cache else explanation.cause,
        # A thread has many containers, and so has C.
        holder=name if root in ("", "thread") or type(container) is ModuleType else explanation.holder,
    )
    each = _bytes_a_turn(course, container, tensors=stretch.tensors, exactly=True)
    if container is contextvars:
        # Of any variable, whatever its name.
        explanation = replace(explanation, suspects=(name,))
        return _stated(course, explanation, stretch, name=name, each=each, what=of_kind, advice=_ONCE)
    return _stated(course, explanation, stretch, name=name, each=each, what=of_kind)


def _is_of_key(entry: tuple[Any, ...]) -> bool:
    """Return whether an entry of a dict is there for its key: of texts that were said, say, each with `True`."""
    return len(entry) == 2 and any(type(entry[1]) is each for each in (bool, type(None)))


def _largest_in(entry: tuple[Any, ...]) -> object:
    """Return what keeps most of an entry of a cache or dict: an argument, a part of the key, or the value."""
    key, value = entry
    return max((*(key if type(key) is tuple else (key,)), value), key=lambda part: kept_by([(part,)]).bytes)


def _is_entry(hop: Hop) -> bool:
    """Return whether something lies in a container, under whatever key: that may have brackets itself."""
    return hop.edge.startswith("[")


def _of_any_entry(name: str, path: Sequence[Hop]) -> str:
    """Return the name of what lies in a container without the keys on its path."""
    for hop in filter(_is_entry, path):
        name = name.replace(hop.edge, "[*]", 1)
    return name


class _Came(NamedTuple):
    """What there is of a type that grows.

    Attributes:
        course: how it does.
        cls: the type.
        objects: all that there are of it, by their identities.
        new: those that were not there earlier; all where that is not known.
        tried: some of these, to which the ways are looked at.
    """

    course: Course
    cls: type
    objects: Mapping[int, Any]
    new: Sequence[Any]
    tried: Sequence[Any]


class _Way(NamedTuple):
    """How an object is reached.

    Attributes:
        item: its identity.
        before: the identities of what is on the way, in their order.
        like: those of them that are of its type.
    """

    item: int
    before: Sequence[int]
    like: Sequence[int]

    @property
    def through(self) -> frozenset[int]:
        """Return the identities of what is on the way, and of the object."""
        return frozenset([*self.before, self.item])

    @property
    def near(self) -> int:
        """Return the object, or the last of its type on the way that is not too far from the root to be explained."""
        if len(self.before) <= _EXPLAINED:
            return self.item
        near = set(self.before[:_EXPLAINED])
        return next((one for one in reversed(self.like) if one in near), self.item)


class _Chained(NamedTuple):
    """How an object is reached through others of its type.

    Attributes:
        head: the edges up to the first of these.
        links: what leads from each to the next, as far as it is explained.
        members: the identities of these, from the first to the last before the object.
        through: those of all that is on the way, and of the object.
        chain: those of these that come from the first of its type on: others may lead to other chains, too.
        item: the object's.
    """

    head: tuple[str, ...]
    links: tuple[str, ...]
    members: Sequence[int]
    through: frozenset[int]
    chain: frozenset[int]
    item: int


def _growing_chains(
    types: Sequence[tuple[Course, type]], told: Collection[int], stretch: Stretch, heap: _Heap
) -> dict[int, Finding]:
    """Return a finding on each chain of objects of types that grow, by the type's identity.

    What lies in something that is told already is not told again.
    """
    came = [_came(course, cls, stretch) for course, cls in types if _may_be_linked(cls)]
    tried = [item for each in came for item in each.tried]
    if not tried:
        return {}
    heap.own.extend((tried, came))
    for each in came:
        heap.own.extend((each, each.objects, each.new, each.tried))
    with trace(tried, ignore=heap.ignored, roots=heap.roots, thorough=True, walk=heap.walk) as traces:
        ways = iter([traces.way(place) for place in range(len(tried))])
    ways_of = [[_way_of(item, next(ways), each) for item in each.tried] for each in came]
    near = [each.objects[way.near] for each, own in zip(came, ways_of, strict=True) for way in own]
    explained = iter(heap.explained(near))
    known = [(each, [(next(explained), way) for way in own]) for each, own in zip(came, ways_of, strict=True)]
    found: dict[int, Finding] = {}
    # Of a chain of two kinds of objects both grow: the one that is held is told, and what everybody makes comes last.
    nearest = [min((len(way.before) for _, way in of_each), default=0) for _, of_each in known]
    places = sorted(range(len(known)), key=lambda place: (_is_plain(known[place][0].cls), nearest[place]))
    for each, of_each in map(known.__getitem__, places):
        answer = _of_chain(each, of_each, stretch, told, heap)
        if answer is not None:
            found[each.course.identity], through = answer
            told = {*told, *through}
    return found


def _came(course: Course, cls: type, stretch: Stretch) -> _Came:
    objects = [item for item in all_instances(cls) if type(item) is cls]
    earlier = stretch.earlier.get(course.identity, np.zeros(0, np.int64))
    came = itertools.compress(objects, ~np.isin(identities(objects), earlier))
    new = [item for item in came if not _is_runners(item)]
    return _Came(course, cls, {id(item): item for item in objects}, new, _spread(new, _TRIED))


def _way_of(item: object, before: Sequence[int], came: _Came) -> _Way:
    return _Way(id(item), before, [each for each in before if each in came.objects])


def _of_chain(
    came: _Came,
    explained: Sequence[tuple[Explanation, _Way]],
    stretch: Stretch,
    told: Collection[int],
    heap: _Heap,
) -> tuple[Finding, frozenset[int]] | None:
    """Return the finding on new objects of a type that lie behind each other, and what is on the ways within these."""
    course, cls, objects, new, _ = came
    # What is garbage only was not collected yet.
    held = [(each, way) for each, way in explained if each.path]
    chained = [one for each, way in held if (one := _chained(each, way, type_name(cls))) is not None]
    chained = [one for one in chained if one.through.isdisjoint(told)]
    is_known, count = course.identity in stretch.earlier, len(held)
    if is_known and _is_plain(cls):
        # What else has come of such has nothing to do with these.
        are_new = {id(item): item for item in new}
        heap.own.append(are_new)
        chained = _of_one_nest([_to_its_end(one, are_new) for one in chained], are_new, _LINKED_PART * course.span)
        count = len(chained)
    if len(chained) < _BEHIND_PART * count or not chained:
        return _at_one_place(came, [each for each, way in held if way.near == way.item], stretch, told)
    ((head, sharing),) = Counter(one.head for one in chained).most_common(1)
    longest = max((one for one in chained if one.head == head), key=lambda one: len(one.members))
    depth = len(longest.members)
    is_deep = depth >= _DEEP * len(new) and depth >= _DEEP * course.items
    if sharing < _SHARED_PART * count or not (is_deep or is_known):
        return None
    chain = frozenset[int]().union(*(one.chain for one in chained))
    linked = [item for item in new if id(item) in chain]
    if _is_plain(cls):
        # Others that have come have nothing to do with these.
        lengths = [course.lengths[-1] - len(linked), course.lengths[-1]]
        course = replace(course, turns=[course.turns[0], course.turns[-1]], lengths=lengths)
        came = came._replace(course=course)
    entries = [(item,) for item in _spread(linked, _SIZED)]
    heap.own.append(entries)
    (holder,) = heap.explained([objects[longest.members[0]]])
    if not holder.path or not _is_of_program(holder, entries, stretch):
        return None
    each = _bytes_of_new(came, entries, stretch)
    if each is None:
        return None
    links = " or ".join(link for link, _ in Counter(longest.links).most_common(2))
    what = f"{type_name(cls)} behind each other by {links}, {depth + 1} deep or more"
    advice = _RAISED_ANEW if cls is TracebackType else ADVICE
    return _stated(course, holder, stretch, each=each, what=what, advice=advice), chain


def _to_its_end(one: _Chained, are_new: Mapping[int, Any]) -> _Chained:
    """Follow a nest on to its innermost new one: where much else comes, it is chance which of them were tried."""
    at, inner = one.item, dict[int, None]()
    while at in are_new and at not in inner:
        inner[at] = None
        at = next((id(item) for item in gc.get_referents(are_new[at]) if id(item) in are_new), 0)
    return one._replace(members=[*one.members, *[*inner][:-1]], chain=one.chain.union(inner))


def _of_one_nest(chained: Sequence[_Chained], are_new: Mapping[int, Any], least: float) -> list[_Chained]:
    """Return those with the head of the one that lies behind the most new ones; none where these are fewer."""
    behind = [(len(are_new.keys() & one.members), one.head) for one in chained]
    deepest, head = max(behind, default=(0, ()))
    return [one for one in chained if one.head == head] if deepest >= least else []


def _at_one_place(
    came: _Came, held: Sequence[Explanation], stretch: Stretch, told: Collection[int]
) -> tuple[Finding, frozenset[int]] | None:
    """Return the finding on new objects that lie in one container which is another one in each turn: a longer copy."""
    if _is_plain(came.cls) or came.course.identity not in stretch.earlier:
        return None
    in_containers = [each for each in held if each.path[-1].edge.startswith("[") and each.through.isdisjoint(told)]
    # Through the same objects, which end with that container: of each callback the arguments lie in one of its own.
    ways = Counter(each.through for each in in_containers)
    ((through, count),) = ways.most_common(1) or ((frozenset[int](), 0),)
    if not count or count < _BEHIND_PART * len(held):
        return None
    are_new = set(map(id, came.new))
    latest = (last_entries(object_at(each), _MOST_IN_COPY, _MOST_IN_COPY, _MOST_IN_COPY) for each in through)
    most = max(len(are_new & {id(part) for entry in entries for part in entry}) for entries in latest)
    # Of garbage that was not collected yet one or the other may be held, by what has no more of it.
    if most < _BEHIND_PART * min(len(are_new), came.course.items):
        return None
    explanation = next(each for each in in_containers if each.through == through)
    path = explanation.path[:-1]
    holder = replace(explanation, path=path, holder=way_text(path))
    entries = [(item,) for item in _spread(came.new, _SIZED)]
    each = _bytes_of_new(came, entries, stretch)
    if each is None or not _is_of_program(holder, entries, stretch):
        return None
    what = f"{came.course.lengths[-1]} of {type_name(came.cls)}"
    return _stated(came.course, holder, stretch, each=each, what=what), explanation.through


def _bytes_of_new(came: _Came, entries: Sequence[tuple[Any, ...]], stretch: Stretch) -> tuple[int, str] | None:
    """Return the bytes that come with each turn, and the device where most of them are; None if that is too little."""
    sized = {id(item) for (item,) in entries}
    kept = kept_by(entries, besides=[item for identity, item in came.objects.items() if identity not in sized])
    size, device = _with_tensors(kept, tensors=stretch.tensors)
    each = round(size / len(entries) * came.course.items / came.course.span)
    return (each, device) if _is_enough(came.course, each) else None


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    return items[:: max(1, -(-len(items) // most))]


def _chained(explanation: Explanation, way: _Way, kind: str) -> _Chained | None:
    """Return how an object is reached through others of its type; None where it is not."""
    edges = [re.sub(r"\[\d+\]", "[*]", hop.edge) for hop in explanation.path]
    edges = [edge if edge.startswith((".", "[")) else f" {edge}" for edge in edges]
    places = [place for place, hop in enumerate(explanation.path) if hop.type == kind and place]
    if len(places) < 2:
        return None
    links = ("".join(edges[here + 1 : there + 1]).strip() for here, there in itertools.pairwise(places))
    # The dict of a module's names is on a way, and no hop of it.
    members = way.like[max(0, [*way.like, way.item].index(way.near) + 1 - len(places)) :]
    chain = frozenset([*way.before[way.before.index(members[0]) :], way.item])
    return _Chained(tuple(edges[: places[0] + 1]), tuple(links), members, way.through, chain, way.item)


def _growing_items(courses: Sequence[Course]) -> list[tuple[Course, Any]]:
    """Return what takes nothing and has each time taken the place of shorter ones, and objects of C that take things.

    An object may have several that grow. Where none is long, it has come to have more of them.
    """
    there = read_values({course.identity for course in courses})[1] if courses else {}
    found: dict[int, tuple[Course, Any]] = {}
    for course in sorted(courses, key=_is_of_type):
        # Of a cache the table is read.
        items = [items_of(each) for each in there.get(course.identity, ()) if type(each) is not LRU_CACHE]
        long = [item for item in items if count_of(item) >= _LONG_PART * course.items]
        if _is_of_type(course):
            long = long[:1]
        all_ = max(course.items, sum(map(count_of, long)))
        for item in long:
            since = [count_of(item) - (course.lengths[-1] - each) * count_of(item) // all_ for each in course.lengths]
            found.setdefault(id(item), (replace(course, identity=id(item), lengths=since, is_remade=True), item))
    return [*found.values()]


def _is_of_type(course: Course) -> bool:
    """Return whether it is that of the largest value that any object of a type has."""
    return course.identity & OF_TYPE > 0


def _growing_values(
    courses: Sequence[Course], stretch: Stretch, heap: _Heap, told: Collection[int]
) -> dict[int, Finding]:
    """Return a finding on each value that grows and that the program holds, by the identity of who refers to it.

    What a container takes are several, of which none has grown: that is told by the container.
    """
    courses = [course for course in courses if course.items * UNIT >= _LEAST_IN_ALL]
    if not courses:
        return {}
    _, values = read_values({course.identity for course in courses})
    there = sorted((course for course in courses if course.identity in values), key=_is_of_type)
    wanted = [values[course.identity][0] for course in there]
    heap.own.extend((values, *values.values(), there))
    explained = heap.explained(wanted) if wanted else []
    found: dict[int, Finding] = {}
    # What one record of C has in several parts is one.
    known = set[object]()
    for course, value, explanation in zip(there, wanted, explained, strict=True):
        own: set[object] = {id(value), *([explanation.holder] if _is_of_type(course) else [])}
        if size_of_value(value) < _MOST_PART * course.items * UNIT or not own.isdisjoint(known):
            continue
        if _is_of_type(course) and not explanation.through.isdisjoint(told):
            continue
        if not _is_of_program(explanation, [(value,)], stretch):
            continue
        known |= own
        size = round(course.items * UNIT / course.span)
        what = f"{type_name(type(value))} of {format_bytes(size_of_value(value))}"
        found[course.identity] = _stated(
            course, explanation, stretch, each=(size, ""), what=what, advice=_SHORTER, is_value=True
        )
    return found


def _stated(
    course: Course,
    explanation: Explanation,
    stretch: Stretch,
    *,
    each: tuple[int, str],
    what: str,
    name: str = "",
    advice: str = ADVICE,
    is_value: bool = False,
) -> Finding:
    """Return the finding on what takes something in each turn, or is a value that grows.

    Args:
        course: how it has grown.
        explanation: who holds it.
        stretch: in which turns.
        each: the bytes that it takes in a turn, and the device where most of them are; empty if on none.
        what: what it holds, or is.
        name: its name, where that is not its holder's.
        advice: what to do about it.
        is_value: whether it is a value.
    """
    size, device = each
    resource: ResourceName = "tensors" if device else "host-memory"
    rate = course.items / course.span
    name = name or explanation.holder
    said = (lambda _, size: format_bytes(round(size))) if is_value else _said
    grows = "grows by" if is_value else "takes"
    every = round(1 / rate) if 0 < rate < _ONE and not is_value else 1
    each_of = f"in each of {course.span}" if every == 1 else f"in one of {every} of {course.span}"
    amount = f"{name} {grows} {said(rate * every, size * every)} {each_of} {stretch.turns}"
    kept = Note(f", {format_bytes(size * course.span)} in all: {what}")
    if stretch.since:
        amount = f"{name} has {said(course.items, size * course.span)} more than at {stretch.since}"
        kept = Note(f": {what}")
    seconds, module = stretch.seconds, stretch.module_of(course)
    in_time = (Note(f"; that is {said(rate / seconds, size / seconds)} a second"),) if seconds else ()
    return finding_of(
        resource,
        cause=explanation.cause,
        bytes=size * course.span,
        count=course.span if is_value else course.items,
        device=device,
        stage=f"{stretch.turns} of {module}" if module else stretch.turns,
        statement=Statement(amount=amount, came=None, notes=(kept, *in_time)),
        suspects=("growth", *explanation.suspects),
        known_by={"stage": stretch.turns},
        verdict=explanation.verdict,
        holder=explanation.holder,
        path=explanation.path,
        advice=advice,
        trend="growth",
    )
