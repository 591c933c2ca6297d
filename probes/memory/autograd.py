"""What the nodes of an autograd graph have saved: tensors that Python's own graph does not lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.probes.memory.tensors import torch_member

_MOST_NODES = 10_000


@dataclass(frozen=True)
class Saved:
    """A tensor that a node of an autograd graph has saved.

    Attributes:
        tensor: it.
        output: the tensor through which the graph is held.
        hops: from the output to what is saved: type and edge.
        node: the node's name.
        name: what the node calls it.
    """

    tensor: Any
    output: Any
    hops: tuple[tuple[str, str], ...]
    node: str
    name: str


def saved_behind(output: Any, seen: set[Any]) -> Iterator[Saved]:
    """What the nodes of a tensor's graph have saved, each node looked at once.

    No code of the program runs: what it would have to unpack is left out. Drop what comes soon: it holds the graph.

    Args:
        output: the tensor.
        seen: the nodes that were looked at before; grows by those looked at now.
    """
    for node, hops in nodes_behind(output, seen):
        name = hops[-1][0]
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                what = attribute.removeprefix("_raw_saved_")
                for tensor in _tensors_in(node, attribute):
                    yield Saved(tensor, output, (*hops, ("torch.Tensor", f"._saved_{what}")), name, what)
        leaf = getattr(node, "variable", None) if name.endswith("AccumulateGrad") else None
        if leaf is not None:
            yield Saved(leaf, output, (*hops, ("torch.Tensor", ".variable")), name, "variable")


def nodes_behind(output: Any, seen: set[Any]) -> Iterator[tuple[Any, tuple[tuple[str, str], ...]]]:
    """The nodes of a tensor's graph, each once, with the hops to it from the tensor: type and edge.

    Args:
        output: the tensor.
        seen: the nodes that were looked at before; grows by those looked at now.
    """
    start: tuple[Any, tuple[tuple[str, str], ...]] = (torch_member(output, "grad_fn"), (("", ".grad_fn"),))
    waiting = deque([start])
    while waiting and len(seen) < _MOST_NODES:
        node, hops = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        hops = (*hops[:-1], (node.name().rpartition("::")[2], hops[-1][1]))
        yield node, hops
        for place, (following, _) in enumerate(node.next_functions):
            waiting.append((following, (*hops, ("", f".next_functions[{place}][0]"))))


def _tensors_in(node: Any, attribute: str) -> Iterator[Any]:
    """What a node saved under a name; nothing where getting it would run the program's code, or it was freed."""
    try:
        saved = getattr(node, attribute)
    except RuntimeError:  # after backward it is gone
        return
    for item in saved if isinstance(saved, (tuple, list)) else (saved,):
        if getattr(item, "unpack_hook", node) is None and item.data is not None:
            yield item.data
