"""Which objects are held from C or C++: those with more references than all objects together account for."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FrameType

from lowtide.probes.edges import variables_of
from lowtide.probes.foreign import is_a
from lowtide.probes.objects import frame_locals

_IMMORTAL = 1 << 28
"""A reference count that is none: from Python 3.12 on some objects never die."""

_OWN = 3
"""References to an object while it is asked about: the heap's list, a variable, and an argument."""


def held_from_c(
    nodes: Sequence[int],
    objects: Sequence[object],
    holders: Iterable[int],
    held_by: Callable[[object], Iterable[object]],
    variables: Mapping[int, int],
) -> list[int]:
    """Those of some nodes of a heap to which C or C++ refers, in their order.

    Classes are left out, since the interpreter's own caches refer to them.

    Args:
        nodes: places of objects in the heap.
        objects: the heap, which has one reference to each.
        holders: places of all objects that refer to one of the nodes, each once.
        held_by: gives what an object refers to, each as often as it does.
        variables: how many variables of running functions refer to an object, by its identity.
    """
    wanted = {id(objects[node]) for node in nodes}
    known = _references(wanted, objects, holders, held_by)
    known.update(variables)
    return [node for node in nodes if _count(objects[node]) > known[id(objects[node])]]


def references_of(frames: list[FrameType]) -> Counter[int]:
    """How many plain variables of some functions refer to an object, by its identity.

    (What a closure shares lies in a cell, which is an object of its own.)

    Args:
        frames: of the functions; empty afterwards, since this very function's and its caller's may be among them: they
            would hold each other, and all that is in their variables.
    """
    found: Counter[int] = Counter()
    while frames:
        frame = frames.pop()
        shared = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        found.update(id(value) for name, value in variables_of(frame) if name not in shared)
        frame_locals(frame)  # undoes what reading them left behind
        del frame
    return found


def outermost(nodes: Collection[int], edges: Mapping[int, Collection[int]]) -> list[int]:
    """Those of some nodes that no other one of them leads to; of several that lead to each other, the first.

    Args:
        nodes: the nodes.
        edges: the nodes that each node leads to.
    """
    chosen: dict[int, None] = {}
    seen: set[int] = set()
    for node in nodes:
        if node in seen:
            continue
        chosen[node] = None
        behind = {node}
        waiting = deque([node])
        while waiting:
            for held in edges.get(waiting.popleft(), ()):
                if held in behind:
                    continue
                chosen.pop(held, None)
                # Behind what an earlier one leads to is nothing new.
                if held not in seen:
                    behind.add(held)
                    waiting.append(held)
        seen |= behind
    return list(chosen)


def _references(
    wanted: Collection[int],
    objects: Sequence[object],
    holders: Iterable[int],
    held_by: Callable[[object], Iterable[object]],
) -> Counter[int]:
    found: Counter[int] = Counter()
    for holder in holders:
        found.update(identity for identity in map(id, held_by(objects[holder])) if identity in wanted)
    return found


def _count(item: object) -> int:
    """References to an object, without those that it takes to ask."""
    count = sys.getrefcount(item)
    return 0 if count >= _IMMORTAL or is_a(item, type) else count - _OWN
