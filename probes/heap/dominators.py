"""Which node holds which alone: the dominator tree of a heap, by the semi-NCA algorithm.

A node's dominator is the last one that every path from the roots to it passes: what would free it, were it gone. After
L. Georgiadis, R. Werneck, R. Tarjan, S. Triantafyllis, D. August: Finding dominators in practice (2004).
"""

from __future__ import annotations

from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.original_numpy import np

NONE = -1


def dominators(offsets: Ints, edges: Indices) -> tuple[Indices, Ints]:
    """Return the immediate dominator of each node, shape [nodes]; `NONE` for the root, and for what it does not reach.

    And what it reaches, each node behind its dominator. It takes two seconds for a million nodes.

    Args:
        offsets: where each node's edges begin, and where the last one's end, shape [nodes + 1].
        edges: the nodes that each node refers to. Node 0 is the root.
    """
    order, parents = _depth_first(offsets, edges)
    count = len(order)
    numbers = np.full(len(offsets) - 1, NONE, np.int64)
    numbers[order] = np.arange(count)
    # The edges among what is reached, by where they lead, both by their numbers in the order of the walk.
    sources = np.repeat(numbers, np.diff(offsets))
    held = numbers[edges]
    is_known = (sources >= 0) & (held > 0)
    sources, held = sources[is_known], held[is_known]
    by_held = np.argsort(held, kind="stable")
    sources = sources[by_held]
    starts = np.searchsorted(held[by_held], np.arange(count + 1))
    found = np.array(_semi_nca(parents, sources.tolist(), starts.tolist()), np.int64)
    immediate: Indices = np.full(len(offsets) - 1, NONE, np.int32)
    immediate[order[1:]] = order[found[1:]]
    return immediate, order


def _depth_first(offsets: Ints, edges: Indices) -> tuple[Ints, list[int]]:
    """Return the nodes in the order of a walk in depth from node 0, and the number of each one's parent in it."""
    starts, held = offsets.tolist(), edges.tolist()
    order: list[int] = []
    parents: list[int] = []
    seen = bytearray(len(starts))
    # By whom each node was met last, which is by whom it is gone to: numbers alone, since of pairs the collector would
    # have to know.
    met_by = [0] * len(starts)
    waiting = [0]
    while waiting:
        node = waiting.pop()
        if seen[node]:
            continue
        seen[node] = 1
        number = len(order)
        order.append(node)
        parents.append(met_by[node])
        for other in held[starts[node] : starts[node + 1]]:
            if not seen[other]:
                met_by[other] = number
                waiting.append(other)
    return np.array(order, np.int64), parents


def _semi_nca(parents: list[int], sources: list[int], starts: list[int]) -> list[int]:
    """Return the immediate dominator of each node, all by their numbers in the order of the walk.

    Args:
        parents: in the walk in depth.
        sources: the nodes that refer to each node, node by node.
        starts: where those of each node begin, and where the last one's end.
    """
    count = len(parents)
    semi, labels = list(range(count)), list(range(count))
    ancestors, found = parents.copy(), parents.copy()
    for node in range(count - 1, 0, -1):
        least = parents[node]
        for source in sources[starts[node] : starts[node + 1]]:
            # What comes behind the node was gone through already: it lies in trees, and the way up to the node is made
            # shorter each time that somebody goes it.
            if ancestors[source] > node:
                path = []
                at = source
                while ancestors[at] > node:
                    path.append(at)
                    at = ancestors[at]
                best, top = labels[at], ancestors[at]
                for at in reversed(path):
                    ancestors[at] = top
                    if semi[best] < semi[labels[at]]:
                        labels[at] = best
                    else:
                        best = labels[at]
            least = min(least, semi[labels[source]])
        semi[node] = least
    for node in range(1, count):
        at = found[node]
        while at > semi[node]:
            at = found[at]
        found[node] = at
    return found
