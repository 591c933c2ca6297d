"""What the nodes of an autograd graph have saved: tensors that Python's own graph does not lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from lowtide.probes.memory.tensors import torch_member
from lowtide.probes.objects.foreign import namespace_of

_MOST_NODES = 200_000


class GraphPath:
    """The way from a tensor, or a node that is held itself, to a node of its graph, without a copy of what ways share.

    Args:
        before: the way to the node before; None for the first.
        node: the node's name.
        edge: what leads to it; empty for the node that is held.
    """

    __slots__ = ("before", "edge", "length", "node")

    def __init__(self, before: GraphPath | None, node: str, edge: str) -> None:
        self.before = before
        self.node = node
        self.edge = edge
        self.length: int = 1 if before is None else before.length + 1

    def hops(self) -> tuple[tuple[str, str], ...]:
        """Return the names of the nodes and the edges to them, from what is held on, without that."""
        found = []
        way: GraphPath | None = self
        while way is not None and way.edge:
            found.append((way.node, way.edge))
            way = way.before
        return tuple(reversed(found))


class Saved(msgspec.Struct, frozen=True):
    """A tensor that a node of an autograd graph has saved.

    Attributes:
        tensor: it.
        output: the tensor, or the node, through which the graph is held.
        way: from the output to the node.
        name: what the node calls it.
        edge: what leads from the node to it.
    """

    tensor: Any
    output: Any
    way: GraphPath
    name: str
    edge: str

    def hops(self) -> tuple[tuple[str, str], ...]:
        """Return types and edges from the output to what is saved."""
        return (*self.way.hops(), ("torch.Tensor", self.edge))


def is_node(kind: type) -> bool:
    """Return whether a class is one of the nodes that torch's own operations make; these have no base in common."""
    return "next_functions" in namespace_of(kind)


def saved_behind(output: Any, seen: set[Any]) -> Iterator[Saved]:
    """Yield what the nodes of a tensor's graph have saved, each node looked at once.

    No code of the program runs: what it would have to unpack is left out. Drop what comes soon: it holds the graph.

    Args:
        output: the tensor, or a node.
        seen: the nodes that were looked at before; grows by those looked at now.
    """
    # By the type of a node, which attributes it has for what it saved.
    attributes: dict[type, list[str]] = {}
    for node, way in nodes_behind(output, seen):
        kind = type(node)
        if kind not in attributes:
            attributes[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for attribute in attributes[kind]:
            what = attribute.removeprefix("_raw_saved_")
            for tensor in _tensors_in(node, what):
                yield Saved(tensor, output, way, what, f"._saved_{what}")
        leaf = getattr(node, "variable", None) if way.node.endswith("AccumulateGrad") else None
        if leaf is not None:
            yield Saved(leaf, output, way, "variable", ".variable")


def nodes_behind(output: Any, seen: set[Any]) -> Iterator[tuple[Any, GraphPath]]:
    """Yield the nodes of a tensor's graph, each once, with the way to it from the tensor.

    Args:
        output: the tensor, or a node: a program may keep a `grad_fn` alone.
        seen: the nodes that were looked at before; grows by those looked at now.
    """
    start: tuple[Any, GraphPath | None, str] = (output, None, "")
    if not is_node(type(output)):
        start = (torch_member(output, "grad_fn"), None, ".grad_fn")
    waiting = deque([start])
    while waiting and len(seen) < _MOST_NODES:
        node, before, edge = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        way = GraphPath(before, node.name().rpartition("::")[2], edge)
        yield node, way
        for place, (following, _) in enumerate(node.next_functions):
            waiting.append((following, way, f".next_functions[{place}][0]"))


def _tensors_in(node: Any, what: str) -> Iterator[Any]:
    """Yield what a node saved under a name; nothing where getting it would run the program's code, or it was freed.

    As the node itself would take it: `SavedTensor.data` is a tensor that stays for as long as the graph does, and the
    next reading of this process would find it alive.
    """
    try:
        raw = getattr(node, f"_raw_saved_{what}")
    except RuntimeError:  # after backward it is gone
        return
    items = raw if isinstance(raw, (tuple, list)) else (raw,)
    own = [item for item in items if getattr(item, "unpack_hook", node) is None]
    # Of a function of the program's own only the raw ones can be asked without running its code.
    if len(own) == len(items) and what != "tensors":
        try:
            saved = getattr(node, f"_saved_{what}")
        except RuntimeError:  # it was changed in place since
            pass
        else:
            yield from (each for each in (saved if isinstance(saved, (tuple, list)) else (saved,)) if each is not None)
            return
    yield from (item.data for item in own if item.data is not None)
