"""What grows one behind the other and in no container: linked nodes, closures that nest, errors with those before.

A type of which there is an object more with every turn is read as a container is. Its new objects are a chain, or a
tree, if the way to them leads through others of the type: then who holds the first of these holds all.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import CoroutineType, FunctionType, GeneratorType
from typing import Any, NamedTuple

import numpy.typing as npt

from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.findings import growing_containers
from lowtide.leakcheck.findings.growing_containers import (
    LEAST_A_TURN,
    LEAST_IN_ALL,
    Stretch,
    growth_of_containers,
    is_of_program,
    is_of_runner,
    stated,
    with_tensors,
)
from lowtide.leakcheck.findings.kept_bytes import kept_by
from lowtide.leakcheck.growth.containers import Course
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import flags_of, is_a, mro_of, type_name
from lowtide.probes.objects.identities import identities, types_of
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.original_numpy import np
from lowtide.reports.schema import Finding

_TRIED = 16
"""New objects of a type at most to which the ways are looked at."""

_SIZED = 200
"""Of so many of them it is known what each keeps."""

_MOST_PART = 0.75
"""The part of those that must lie behind others of their type."""

_SHARED_PART = 0.3
"""The part that must begin at one of them: a chain may be held at both ends."""

_DEEP = 0.25
"""The part of the new ones that the longest way must lead through where these are what everybody makes."""

_HEAP_TYPE = 1 << 9

_PLAIN = (list, dict, tuple)
"""What everybody makes, some of it in some."""


class _Way(NamedTuple):
    """How an object is reached through others of its type.

    Attributes:
        head: the edges up to the first of these.
        links: what leads from each to the next.
        through: the identities of what is on the way, and of the object.
    """

    head: tuple[str, ...]
    links: tuple[str, ...]
    through: frozenset[int]


class _Came(NamedTuple):
    """What there is of a type that grows.

    Attributes:
        course: how it does.
        cls: the type.
        objects: all that there are of it.
        new: those that were not there earlier; all where that is not known.
        tried: some of these, to which the ways are looked at.
    """

    course: Course
    cls: type
    objects: Sequence[Any]
    new: Sequence[Any]
    tried: Sequence[Any]


def growth_in_heap(courses: Sequence[Course], there: Mapping[int, Any], stretch: Stretch) -> dict[int, Finding]:
    """Return a finding on each container and each chain that grows and that the program holds, by identity.

    Args:
        courses: how containers, and the numbers of objects of some types, have grown.
        there: the containers and types that are there, by identity.
        stretch: in which turns.
    """
    types = [(course, there[course.identity]) for course in courses if is_a(there.get(course.identity), type)]
    of_types = {course.identity for course, _ in types}
    found = growth_of_containers([course for course in courses if course.identity not in of_types], there, stretch)
    came = [_came(course, cls, stretch) for course, cls in types if may_be_linked(cls)]
    tried = [item for each in came for item in each.tried]
    passed = {id(tried), id(came)}
    for each in came:
        passed |= {id(each), id(each.objects), id(each.new), id(each.tried)}
    explained = iter(explain(tried, ignore=passed, roots=stretch.roots, living=True) if tried else ())
    ways = [(each, list(itertools.islice(explained, len(each.tried)))) for each in came]
    passed.add(id(ways))
    # What lies in a container that grows is judged with that.
    told = {course.identity for course in courses}
    # Of a chain of two kinds of objects both grow: the one that is held is told.
    for each, of_each in sorted(ways, key=lambda way: min((len(one.path) for one in way[1]), default=0)):
        answer = _finding(each, of_each, stretch, told, passed)
        if answer is not None:
            found[each.course.identity], through = answer
            told |= through
    return found


def ids_of(classes: Iterable[type]) -> dict[int, Ints]:
    """Return the identities of all objects of some types, in their order, by the type's."""
    wanted = [cls for cls in classes if may_be_linked(cls)]
    if not wanted:
        return {}
    ids = identities(all_instances(*wanted))
    kinds = types_of(ids)
    return {id(cls): np.sort(ids[kinds == id(cls)]) for cls in wanted}


def is_worth_a_look(course: Course, item: Any, *, tensors: bool) -> bool:
    """Return whether what a container takes, or what comes of a type, is the program's, and enough.

    Args:
        course: how it has grown.
        item: the container, or the type.
        tensors: as of `Stretch`.
    """
    if is_a(item, type):
        return may_be_linked(item) and not _is_plain(item)
    return growing_containers.is_worth_a_look(course, item, tensors=tensors)


def may_be_linked(cls: type) -> bool:
    """Return whether objects of a type may be links: what is written in Python, what it runs, and errors."""
    is_made = flags_of(cls) & _HEAP_TYPE or any(base is BaseException for base in mro_of(cls))
    is_run = any(cls is each for each in (*_PLAIN, FunctionType, GeneratorType, CoroutineType))
    return bool(is_made or is_run) and not is_of_runner(cls) and not any(base is type for base in mro_of(cls))


def _is_plain(cls: type) -> bool:
    return any(cls is each for each in _PLAIN)


def _came(course: Course, cls: type, stretch: Stretch) -> _Came:
    objects = [item for item in all_instances(cls) if type(item) is cls]
    earlier = stretch.earlier.get(course.identity, np.zeros(0, np.int64))
    new = list(itertools.compress(objects, ~_among(identities(objects), earlier)))
    return _Came(course, cls, objects, new, _spread(new, _TRIED))


def _finding(
    came: _Came,
    explained: Sequence[Explanation],
    stretch: Stretch,
    told: Collection[int],
    passed: Collection[int],
) -> tuple[Finding, frozenset[int]] | None:
    """Return the finding on new objects of a type that lie behind each other, and what is on the ways to them."""
    course, cls, objects, new, _ = came
    # What is garbage only was not collected yet.
    held = [(each, item) for each, item in zip(explained, came.tried, strict=True) if each.path]
    ways = [way for each, item in held if (way := _way_through(each, item, type_name(cls))) is not None]
    ways = [way for way in ways if way.through.isdisjoint(told)]
    if len(ways) < _MOST_PART * len(held) or not ways:
        return _at_one_place(came, [each for each, _ in held], stretch, told)
    ((head, count),) = Counter(way.head for way in ways).most_common(1)
    longest = max((way for way in ways if way.head == head), key=lambda way: len(way.links))
    is_deep = len(longest.links) >= _DEEP * len(new) and len(longest.links) >= _DEEP * course.items
    are_telling = course.identity in stretch.earlier and not _is_plain(cls)
    if count < _SHARED_PART * len(held) or not (is_deep or are_telling):
        return None
    through = frozenset[int]().union(*(way.through for way in ways))
    entries = [(item,) for item in _spread([item for item in new if id(item) in through], _SIZED)]
    before = [item for item in objects if id(item) in longest.through]
    holder = _head(before, len(head), stretch, {*passed, id(before), id(entries)})
    if holder is None or not is_of_program(holder, entries, stretch):
        return None
    each = _bytes_a_turn(came, entries, stretch)
    if each is None:
        return None
    links = " or ".join(link for link, _ in Counter(longest.links).most_common(2))
    what = f"{type_name(cls)} behind each other by {links}, {len(longest.links) + 1} deep or more"
    finding = stated(course, holder, stretch, name=holder.holder, each=each, what=what)
    return finding, through


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
    if not count or count < _MOST_PART * len(held):
        return None
    explanation = next(each for each in in_containers if each.through == through)
    path = explanation.path[:-1]
    holder = replace(explanation, path=path, holder=way_text(path))
    entries = [(item,) for item in _spread(came.new, _SIZED)]
    each = _bytes_a_turn(came, entries, stretch)
    if each is None or not is_of_program(holder, entries, stretch):
        return None
    what = f"{came.course.lengths[-1]} of {type_name(came.cls)}"
    return stated(came.course, holder, stretch, name=holder.holder, each=each, what=what), explanation.through


def _bytes_a_turn(came: _Came, entries: Sequence[tuple[Any, ...]], stretch: Stretch) -> tuple[int, str] | None:
    """Return the bytes that come with each turn, and the device where most of them are; None if that is too little."""
    sized = {id(item) for (item,) in entries}
    kept = kept_by(entries, besides=[item for item in came.objects if id(item) not in sized])
    size, device = with_tensors(kept, tensors=stretch.tensors)
    each = round(size / len(entries) * came.course.items / came.course.span)
    return (each, device) if each >= LEAST_A_TURN or each * came.course.span >= LEAST_IN_ALL else None


def _among(ids: Ints, known: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each of some identities is among others, which are in their order."""
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return known[places] == ids if len(known) else np.zeros(len(ids), np.bool_)


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    return items[:: max(1, -(-len(items) // most))]


def _way_through(explanation: Explanation, item: object, kind: str) -> _Way | None:
    """Return how an object is reached through others of its type; None where it is not."""
    edges = [re.sub(r"\[\d+\]", "[*]", hop.edge) for hop in explanation.path]
    places = [place for place, hop in enumerate(explanation.path) if hop.type == kind and place]
    if len(places) < 2:
        return None
    links = ("".join(edges[here + 1 : there + 1]).strip() for here, there in itertools.pairwise(places))
    return _Way(tuple(edges[: places[0] + 1]), tuple(links), explanation.through | {id(item)})


def _head(members: Sequence[Any], hops: int, stretch: Stretch, passed: Collection[int]) -> Explanation | None:
    """Return who holds the first one of a chain's objects: the one to which the way has so many hops.

    Of many some are asked, and then those that are before the nearest of these.
    """
    while members:
        asked = _spread(members, _SIZED)
        explained = explain(asked, ignore={*passed, id(members), id(asked)}, roots=stretch.roots, living=True)
        # (The dict of a module's names is on a way, and no hop of it.)
        there = (each for each in explained if len(each.path) >= hops)
        nearest = min(there, key=lambda each: len(each.path), default=None)
        if nearest is None or len(nearest.path) <= hops:
            return nearest
        before = [item for item in members if id(item) in nearest.through]
        if len(before) >= len(members):
            return None
        members = before
    return None
