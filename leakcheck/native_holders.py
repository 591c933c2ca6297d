"""Tensors that Python's graph does not lead to: what torch itself tells of who holds them in C++."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lowtide.leakcheck.cuts import Names, cut_of
from lowtide.leakcheck.explain import Explanation
from lowtide.leakcheck.listing import first_of
from lowtide.probes.heap import Link
from lowtide.probes.objects import Census, all_objects
from lowtide.probes.tensors import plain_tensors, survey_storages
from lowtide.reports.schema import Hop

_SHOWN_HOLDERS = 4
_MOST_NODES = 10_000


def as_gradients(
    lost: Sequence[Any], older: Container[int], explained: Callable[[Sequence[Any]], Sequence[Explanation]]
) -> dict[int, Explanation]:
    """Of tensors that no path leads to, by identity: those that are gradients, explained by the tensor they belong to.

    Python's graph does not have this edge: a tensor holds its gradient in C++.

    Args:
        lost: the tensors.
        older: the identities of what was there before the leak.
        explained: explains other objects.
    """
    torch: Any = sys.modules["torch"]
    wanted = {id(tensor) for tensor in lost}
    owners = {}
    with plain_tensors(torch):
        for tensor in Census(all_objects()).instances_of(torch.Tensor):
            # Asking any other one for its gradient makes torch warn.
            if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad) and id(tensor.grad) in wanted:
                owners[id(tensor.grad)] = tensor
    holding = list(owners.values())
    return {
        gradient: _gradient_of(tensor, gradient, told, was_there=id(tensor) in older)
        for gradient, tensor, told in zip(owners, holding, explained(holding), strict=True)
    }


@dataclass(frozen=True)
class _Saved:
    """A tensor that a node of an autograd graph has saved.

    Attributes:
        output: the tensor through which the graph is held.
        hops: from the output to what is saved: type and edge.
        node: the node's name.
        name: what the node calls it.
    """

    output: Any
    hops: tuple[tuple[str, str], ...]
    node: str
    name: str


def saved_for_backward(
    lost: Sequence[Any], explained: Callable[[Sequence[Any]], Sequence[Explanation]]
) -> dict[int, Explanation]:
    """Of tensors that no path leads to, by identity: those that an autograd graph has saved, and who holds the graph.

    Args:
        lost: the tensors.
        explained: explains other objects.
    """
    torch: Any = sys.modules["torch"]
    wanted = {key: id(tensor) for tensor in lost for key in _addresses(tensor)}
    found: dict[int, _Saved] = {}
    with plain_tensors(torch):
        missing = {id(tensor) for tensor in lost}
        outputs = [
            tensor
            for tensor in Census(all_objects()).instances_of(torch.Tensor)
            if not tensor.is_leaf and id(tensor) not in missing
        ]
        seen: set[Any] = set()
        for output in outputs:
            for address, saved in _saved_behind(output, seen):
                if address in wanted:
                    found.setdefault(wanted[address], saved)
    holding = [saved.output for saved in found.values()]
    seen.clear()
    told = explained(holding) if holding else []
    return {
        identity: _saved_by(saved, holder)
        for (identity, saved), holder in zip(found.items(), told, strict=True)
        if holder.path
    }


def _saved_by(saved: _Saved, told: Explanation) -> Explanation:
    hops = tuple(Hop(type=kind, edge=edge) for kind, edge in saved.hops)
    return Explanation(
        verdict="native-held",
        cause="autograd",
        holder=f"{told.holder}.grad_fn, where {saved.node} saved {saved.name!r}",
        path=(*told.path, *hops),
        suspects=told.suspects,
        cut=told.cut,
        thread=told.thread,
        new=told.new,
    )


def _saved_behind(output: Any, seen: set[Any]) -> Iterator[tuple[tuple[str, int], _Saved]]:
    """What the nodes of a tensor's graph have saved, each node looked at once."""
    start: tuple[Any, tuple[tuple[str, str], ...]] = (output.grad_fn, (("", ".grad_fn"),))
    waiting = deque([start])
    while waiting and len(seen) < _MOST_NODES:
        node, hops = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().rpartition("::")[2]
        hops = (*hops[:-1], (name, hops[-1][1]))
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                what = attribute.removeprefix("_raw_saved_")
                for tensor in _tensors_in(node, attribute):
                    for address in _addresses(tensor):
                        yield address, _Saved(output, (*hops, ("torch.Tensor", f"._saved_{what}")), name, what)
        leaf = getattr(node, "variable", None) if name.endswith("AccumulateGrad") else None
        for address in [] if leaf is None else _addresses(leaf):
            yield address, _Saved(output, (*hops, ("torch.Tensor", ".variable")), name, "variable")
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


def _addresses(tensor: Any) -> list[tuple[str, int]]:
    return [(storage.device, storage.address) for storage in survey_storages([tensor]).storages]


def _gradient_of(tensor: Any, gradient: int, told: Explanation, *, was_there: bool) -> Explanation:
    hop = Hop(type="torch.Tensor", edge=".grad", suspect=True)
    link = Link(".grad", "instance-attribute", tensor, tensor, gradient)
    return Explanation(
        verdict=told.verdict,
        cause="instance-attribute" if was_there else told.cause,
        holder=f"{told.holder}.grad",
        path=(*(msgspec.structs.replace(step, suspect=step.suspect and not was_there) for step in told.path), hop),
        suspects=(".grad",) if was_there else told.suspects,
        cut=cut_of(link, told.holder, Names()) if was_there else told.cut,
        thread=told.thread,
        new=frozenset((gradient,)) if was_there else told.new,
    )


def together(explained: Mapping[Any, Explanation]) -> dict[Any, Explanation]:
    """One explanation for all that has no path and is not frozen: it is one knot that Python's collector cannot see."""
    loose = [key for key, found in explained.items() if not found.path and found.verdict != "frozen-garbage"]
    holders = sorted({explained[key].holder for key in loose} - {""})
    if len(holders) < 2:
        return dict(explained)
    nodes = [holder for holder in holders if holder.startswith("autograd")]
    told = [holder for holder in (nodes or holders) if holder != "native code"]
    shown = first_of(told, _SHOWN_HOLDERS)
    knot = Explanation(
        verdict="native-held",
        cause="autograd" if nodes else "native",
        holder=f"a cycle through C++ ({shown})",
        path=(),
        suspects=tuple(told),
    )
    return {**explained, **dict.fromkeys(loose, knot)}
