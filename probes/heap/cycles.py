"""Finds the cycle of references that keeps each object alive, and what its references are called: by backward sweeps.

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
"""Objects that may refer to those found for each object: what has more is held by what everything is held by."""


class CycleEdge(NamedTuple):
    """A reference of a cycle.

    Attributes:
        text: what it is called: `Req.data`, `list[0]`.
        is_attribute: whether that is an attribute of an instance.
    """

    text: str
    is_attribute: bool


def cycles_behind(targets: Sequence[object], ignore: Collection[int] = ()) -> list[list[CycleEdge]]:
    """Return the references of a cycle that holds or contains each object; none for what is held by a module.

    Args:
        targets: the objects; one sweep looks for the holders of all.
        ignore: the identities of what the caller holds them in.
    """
    known: dict[int, Any] = {id(target): target for target in targets}
    held: dict[int, list[int]] = {mark: [] for mark in known}
    # Those that are held by no module and by no cycle that is known.
    left = set(known)
    cycles: dict[int, list[CycleEdge]] = {}
    frontier: list[Any] = list(targets)
    found: list[Any] = []
    holders: list[Any] = []
    new: list[Any] = []
    with collector_paused():
        for _ in range(_MOST_SWEEPS):
            ours = {*ignore, *map(id, (targets, known, frontier, found, holders, new))}
            found = gc.get_referrers(*frontier)
            holders = [item for item in found if id(item) not in ours and not _is_of_checker(item)]
            if len(holders) > _MOST_HOLDERS * len(left):
                break
            wanted = set(map(id, frontier))
            new = []
            for holder in holders:
                edges = held.setdefault(id(holder), [])
                edges += [id(item) for item in gc.get_referents(holder) if id(item) in wanted]
                if id(holder) not in known:
                    known[id(holder)] = holder
                    new.append(holder)
            for holder in holders:
                if type(holder) is types.ModuleType:
                    left -= _behind(id(holder), held)
            for holder in holders:
                way = _way_back(id(holder), held)
                within = _behind(id(holder), held) & left if way else ()
                if within:
                    cycles |= dict.fromkeys(within, _named([known[mark] for mark in way]))
                    left.difference_update(within)
            frontier = [holder for holder in new if _behind(id(holder), held) & left]
            if not frontier:
                break
    return [cycles.get(id(target), []) for target in targets]


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


def _behind(start: int, held: dict[int, list[int]]) -> set[int]:
    """Return what an object leads to, and itself."""
    met, waiting = {start}, [start]
    for mark in waiting:
        others = set(held[mark]) - met
        met |= others
        waiting += others
    return met


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
