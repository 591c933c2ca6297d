"""Finds a cycle of references that keeps an object alive, and what its references are called: by backward sweeps.

A sweep takes a seventh of a full collection. What reference counting frees is in no cycle.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lowtide.probes.objects.foreign import type_name
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import gc
from lowtide.probes.references.edges import EdgeNamer

_MOST_SWEEPS = 8
"""How many references an object may be away from the cycle, and those of a cycle together."""

_MOST_HOLDERS = 1000
"""Objects that may refer to those found: what has more is held by what everything is held by."""


class CycleEdge(NamedTuple):
    """A reference of a cycle.

    Attributes:
        text: what it is called: `Req.data`, `list[0]`.
        is_attribute: whether that is an attribute of an instance.
    """

    text: str
    is_attribute: bool


def cycle_behind(target: object, ignore: Collection[int] = ()) -> list[CycleEdge]:
    """Return the references of a cycle that holds an object or contains it; none where it is held by a module.

    Args:
        target: the object.
        ignore: the identities of what the caller holds it in.
    """
    known: dict[int, Any] = {id(target): target}
    held: dict[int, list[int]] = {id(target): []}
    frontier: list[Any] = [target]
    found: list[Any] = []
    holders: list[Any] = []
    new: list[Any] = []
    with collector_paused():
        for _ in range(_MOST_SWEEPS):
            ours = {*ignore, id(known), *map(id, (frontier, found, holders, new))}
            found = gc.get_referrers(*frontier)
            holders = [item for item in found if id(item) not in ours and not _is_of_checker(item)]
            if not holders or len(holders) > _MOST_HOLDERS or any(type(item) is types.ModuleType for item in holders):
                return []
            wanted = set(map(id, frontier))
            new = []
            for holder in holders:
                edges = held.setdefault(id(holder), [])
                edges += [id(item) for item in gc.get_referents(holder) if id(item) in wanted]
                if id(holder) not in known:
                    known[id(holder)] = holder
                    new.append(holder)
            for holder in holders:
                way = _way_back(id(holder), held)
                if way:
                    return _named([known[mark] for mark in way])
            frontier = new
            if not frontier:
                return []
    return []


def _is_of_checker(item: object) -> bool:
    """Return whether a frame is one of this module's, which refers to all that is looked at."""
    return type(item) is types.FrameType and item.f_globals is globals()


def _way_back(start: int, held: dict[int, list[int]]) -> list[int]:
    """Return the objects of the shortest cycle from an object back to itself; none where there is none."""
    before: dict[int, int] = {}
    waiting = [start]
    for mark in waiting:
        for other in held[mark]:
            if other == start:
                way = [mark]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if other not in before:
                before[other] = mark
                waiting.append(other)
    return []


def _named(members: Sequence[Any]) -> list[CycleEdge]:
    # An instance's dict is named with the instance, which has to be before it.
    first = next((turn for turn, item in enumerate(members) if type(item) is not dict), 0)
    members = [*members[first:], *members[:first]]
    around, namer = [*members, *members[:2]], EdgeNamer({})
    edges, place = [], 0
    while place < len(members):
        edge = namer.edge(around, place)
        owner = type_name(type(around[place])).rpartition(".")[2]
        edges.append(CycleEdge(f"{owner}{edge.text}", edge.kind == "instance-attribute"))
        place += edge.references
    namer.undo()
    return edges
