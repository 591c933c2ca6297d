"""Which objects are held from C or C++: those with more references than all objects together account for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CellType, FrameType

import msgspec

from lowtide.probes.objects.foreign import is_a
from lowtide.probes.objects.listed import frame_locals
from lowtide.probes.originals import sys
from lowtide.probes.references.edges import variables_of

_IMMORTAL = 1 << 28
"""A reference count that is none: from Python 3.12 on some objects never die."""


def _asked(item: object) -> int:
    return sys.getrefcount(item)


_ONLY = [object()]

_OWN = _asked(_ONLY[0])
"""References to an object while it is asked about: the heap's list, a variable and an argument; on Python 3.10 the
caller's stack as well."""


class Variables(msgspec.Struct, frozen=True):
    """How many variables of running functions refer to an object, by its identity.

    Attributes:
        plain: variables that hold it themselves.
        shared: variables of which a closure has the cell: such a function refers to a cell that holds the object.
    """

    plain: Counter[int] = msgspec.field(default_factory=Counter)
    shared: Counter[int] = msgspec.field(default_factory=Counter)


def held_from_c(
    nodes: Sequence[int],
    objects: Sequence[object],
    holders: Iterable[int],
    held_by: Callable[[object], Iterable[object]],
    variables: Variables,
    more: Sequence[object] = (),
) -> list[int]:
    """Return those of some nodes of a heap to which C or C++ refers, in their order.

    Classes are left out, since the interpreter's own caches refer to them, and the checker's own containers.

    Args:
        nodes: places of objects in the heap.
        objects: the heap, which has one reference to each.
        holders: places of all objects that refer to one of the nodes, each once.
        held_by: gives what an object refers to, each as often as it does.
        variables: of the running functions that the heap is without.
        more: objects that are not in the heap and refer to one of the nodes.
    """
    wanted = {id(objects[node]) for node in nodes}
    known = _references(wanted, objects, holders, held_by)
    known.update(_references(wanted, more, range(len(more)), held_by))
    known.update(variables.plain)
    # (No variable here may hold a node: it would be one more reference.)
    known.update(_references_to_cells(map(objects.__getitem__, nodes), variables))
    return [
        node
        for node in nodes
        if _count(objects, node) > known[id(objects[node])] and not _is_checkers(objects[node], variables)
    ]


def references_of(frames: list[FrameType]) -> Variables:
    """Return what the variables of some functions refer to.

    Args:
        frames: of the functions; empty afterwards, since this very function's and its caller's may be among them: they
            would hold each other, and all that is in their variables.
    """
    found = Variables()
    while frames:
        frame = frames.pop()
        shared = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        for name, value in variables_of(frame):
            (found.shared if name in shared else found.plain)[id(value)] += 1
        # A dict of them that an earlier reading made is in the heap, and so is held by its list.
        frame_locals(frame, is_checkers=True)  # undoes what reading them left behind
        del frame
    return found


def outermost(nodes: Collection[int], edges: Mapping[int, Collection[int]]) -> list[int]:
    """Return those of some nodes that no other one of them leads to; of several that lead to each other, the first.

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


def _references_to_cells(items: Iterable[object], variables: Variables) -> dict[int, int]:
    return {id(item): variables.shared[_content(item)] for item in items if type(item) is CellType}


def _is_checkers(item: object, variables: Variables) -> bool:
    """Return whether a running function has a container in a variable: its caller may have one reference more."""
    is_variables = bool(variables.plain[id(item)] or variables.shared[id(item)])
    return is_variables and any(type(item) is kind for kind in (list, dict, tuple, set))


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


def _count(objects: Sequence[object], node: int) -> int:
    """Count the references to an object, without those that it takes to ask."""
    # No variable here holds it: that would be one more reference.
    count = _asked(objects[node])
    return 0 if count >= _IMMORTAL or is_a(objects[node], type) else count - _OWN


def _content(cell: CellType) -> int:
    """Return the identity of what a cell holds; 0 if it is empty."""
    try:
        return id(cell.cell_contents)
    except ValueError:
        return 0
