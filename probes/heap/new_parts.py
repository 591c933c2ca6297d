"""What of a heap is new, by the objects through which the program comes to it: a tuple, a tree, the first of a chain.

Each new object is counted where the shortest path from the roots leads to it, so once, whoever else refers to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from types import CellType, FrameType, FunctionType, TracebackType
from typing import Any

import msgspec
import numpy.typing as npt

from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.heap_copy import sizes_of_items
from lowtide.probes.heap.search import Search
from lowtide.probes.objects.address_table import Indices, Ints, each_once, first_places
from lowtide.probes.objects.foreign import attribute, flags_of
from lowtide.probes.objects.identities import Identities, are_tracked, identities, objects_at, referents, types_of
from lowtide.probes.original_numpy import np

_AT_A_TIME = 1 << 16

_MOST = 0.9
"""The part of what an object leads to behind one reference from which that one is the better name for it."""

_MOST_PASSED = 8
"""Types that are passed on the way to a better name."""

_HEAP_TYPE = 1 << 9

_KEYS = 8
"""Entries of a dict that are asked whether they are attributes."""

_INSIDE = frozenset({CellType, FrameType, TracebackType})
"""What is part of something else, and says nothing by itself."""


class NewPart(msgspec.Struct, frozen=True, eq=False):
    """An object that leads to much of what is new.

    Attributes:
        item: the object.
        bytes: what it leads to takes, itself included.
        is_known: whether it is known to be new: of what the collector does not track nobody knows when it was made.
    """

    item: Any
    bytes: int
    is_known: bool


def largest_parts(
    graph: Graph, born: Collection[int], *, least: int, old: Collection[int] = (), ignore: Collection[int] = ()
) -> list[NewPart]:
    """Return the objects that lead to most of what is new, the largest first.

    What is not tracked counts as new, unless it is known to be old.

    It takes three seconds for a million new objects and runs no code of the program's.

    Args:
        graph: the heap; the collector must be paused.
        born: the identities of what is new.
        least: bytes that such an object must lead to.
        old: the identities of what was there before, though it is not tracked.
        ignore: the identities of objects that no path may pass.
    """
    ids = identities(graph.objects)
    known = born if isinstance(born, Identities) else Identities(np.fromiter(born, np.int64, len(born)))
    is_tracked = are_tracked(ids)
    is_known = known.holds(ids) & is_tracked
    is_new = is_known | ~(is_tracked | Identities(np.fromiter(old, np.int64, len(old))).holds(ids))
    is_new[: len(graph.roots)] = False
    parents = Search(graph, [graph.objects[node] for node in np.flatnonzero(is_new)], ignore, (), ()).search()
    is_new &= parents >= 0
    is_new[_attributes_of_older(graph, parents, is_new)] = False
    # The object through which the program comes to each, and by how many steps: twice as far each time.
    nodes = np.arange(len(ids))
    onward = np.where(is_new & is_new[parents], parents, nodes)
    depths = (onward != nodes).astype(np.int64)
    while not np.array_equal(further := onward[onward], onward):
        depths += depths[onward]
        onward = further
    total = _bytes_of(graph, is_new).tolist()
    above = parents.tolist()
    order = np.flatnonzero(depths)
    for node in order[np.argsort(-depths[order], kind="stable")].tolist():
        total[above[node]] += total[node]
    amounts = np.array(total, np.int64)
    firsts = np.flatnonzero(is_new & (depths == 0) & (amounts >= least))
    firsts = firsts[np.argsort(-amounts[firsts], kind="stable")]
    return [
        NewPart(graph.objects[_best_name(graph, node, parents, amounts)], total[node], bool(is_known[node]))
        for node in firsts.tolist()
    ]


def _attributes_of_older(graph: Graph, parents: Indices, is_new: npt.NDArray[np.bool_]) -> list[int]:
    """Return the dicts of attributes of what is older: they may be new themselves, or seem to be."""
    dicts = np.flatnonzero(is_new & (graph.kinds == id(dict)))
    dicts = dicts[~is_new[parents[dicts]]]
    return [node for node in dicts.tolist() if _has_attributes_in(graph.objects[parents[node]], graph.objects[node])]


def _has_attributes_in(holder: object, held: Any) -> bool:
    """Return whether an object has its attributes in a dict."""
    if not flags_of(type(holder)) & _HEAP_TYPE:
        return False
    first = itertools.islice(dict.items(held), _KEYS)
    return any(type(key) is str and attribute(holder, key) is value for key, value in first)


def _bytes_of(graph: Graph, is_new: npt.NDArray[np.bool_]) -> Ints:
    """Return the bytes of each new node, with what it is the first to refer to of text, numbers and the like."""
    sizes = np.zeros(len(is_new), np.int64)
    for cls, of_type in graph.by_type():
        wanted = of_type[is_new[of_type]]
        sizes[wanted] = sizes_of_items(cls, [graph.objects[node] for node in wanted.tolist()])
    nodes = np.flatnonzero(is_new)
    met = np.zeros(0, np.int64)
    for start in range(0, len(nodes), _AT_A_TIME):
        part = nodes[start : start + _AT_A_TIME]
        counts, held, alive = referents([graph.objects[node] for node in part.tolist()])
        owners = np.repeat(part, counts)
        is_leaf = graph.nodes_of(held) < 0
        held, owners = held[is_leaf], owners[is_leaf]
        is_first = first_places(held) == np.arange(len(held))
        held, owners = held[is_first], owners[is_first]
        is_first = ~np.isin(held, met)
        held, owners = held[is_first], owners[is_first]
        met = np.concatenate([met, held])
        kinds = types_of(held)
        for kind in each_once(kinds).tolist():
            of_kind = np.flatnonzero(kinds == kind)
            items = objects_at(held[of_kind])
            np.add.at(sizes, owners[of_kind], sizes_of_items(type(items[0]), items))
            items.clear()
        alive.clear()
    return sizes


def _best_name(graph: Graph, node: int, parents: Indices, amounts: Ints) -> int:
    """Return the object that leads to about as much as a node, and says more of it."""
    best, passed = node, {int(graph.kinds[node])}
    while len(behind := np.flatnonzero(parents == node)) and len(passed) < _MOST_PASSED:
        largest = int(behind[np.argmax(amounts[behind])])
        if amounts[largest] < amounts[node] * _MOST:
            break
        holder, node = graph.objects[node], largest
        item = graph.objects[node]
        if (
            type(item) in _INSIDE
            or type(holder) is FunctionType
            or (type(item) is dict and _has_attributes_in(holder, item))
        ):
            continue
        # One behind the other: the first one says where they begin.
        if int(graph.kinds[node]) in passed:
            break
        passed.add(int(graph.kinds[node]))
        best = node
    return best
