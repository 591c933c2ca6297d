"""Tensors that Python's graph does not lead to: what torch itself reports about their holders in C++."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.cut import Names
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.explain import MOST_STEPS, Explanation
from lowtide.probes.heap.holders import SharedWalk, census_of
from lowtide.probes.heap.paths import Link
from lowtide.probes.memory.autograd import GraphPath, Saved, nodes_behind, saved_behind
from lowtide.probes.memory.tensors import plain_tensors, survey_storages, torch_member
from lowtide.probes.originals import loaded
from lowtide.reports.schema import Hop
from lowtide.reports.sizes import first_of

_SHOWN_HOLDERS = 4


def as_gradients(
    lost: Sequence[Any],
    older: Container[int],
    explained: Callable[[Sequence[Any]], Sequence[Explanation]],
    walk: SharedWalk | None = None,
) -> dict[int, Explanation]:
    """Explain tensors that no path leads to and that are gradients by the tensors that they belong to, by identity.

    Python's graph does not have this edge: a tensor holds its gradient in C++.

    Args:
        lost: the tensors.
        older: the identities of what was there before the leak.
        explained: explains other objects.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    torch: Any = loaded("torch")
    wanted = {id(tensor) for tensor in lost}
    owners = {}
    with plain_tensors(torch):
        for tensor in census_of(walk).instances_of(torch.Tensor):
            # Asking any other one for its gradient makes torch warn.
            if not torch_member(tensor, "requires_grad") or not (
                torch_member(tensor, "is_leaf") or torch_member(tensor, "retains_grad")
            ):
                continue
            if id(gradient := torch_member(tensor, "grad")) in wanted:
                owners[id(gradient)] = tensor
    holding = list(owners.values())
    return {
        gradient: _gradient_of(tensor, gradient, explanation, was_there=id(tensor) in older)
        for gradient, tensor, explanation in zip(owners, holding, explained(holding), strict=True)
    }


def saved_for_backward(
    lost: Sequence[Any],
    pathless: Container[int],
    explained: Callable[[Sequence[Any]], Sequence[Explanation]],
    walk: SharedWalk | None = None,
) -> dict[int, Explanation]:
    """Explain tensors that no path leads to and that autograd graphs have saved by who holds these, by identity.

    Args:
        lost: the tensors.
        pathless: the identities of those that have none even from what C++ holds, such as a hook of that very graph.
        explained: explains other objects.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    torch: Any = loaded("torch")
    wanted = {key: id(tensor) for tensor in lost for key in _addresses(tensor)}
    found: dict[int, Saved] = {}
    with plain_tensors(torch):
        everything = census_of(walk).instances_of(torch.Tensor)
        outputs = [
            tensor for tensor in everything if not torch_member(tensor, "is_leaf") and id(tensor) not in pathless
        ]
        del everything
        seen: set[Any] = set()
        for output in outputs:
            for saved in saved_behind(output, seen):
                for address in _addresses(saved.tensor):
                    if address in wanted:
                        found.setdefault(wanted[address], saved)
    holding = list({id(saved.output): saved.output for saved in found.values()}.values())
    seen.clear()
    explanations = dict(zip(map(id, holding), explained(holding) if holding else (), strict=True))
    saved_by = _SavedBy()
    return {
        identity: saved_by(saved, explanations[id(saved.output)])
        for identity, saved in found.items()
        if explanations[id(saved.output)].path and identity in pathless
    }


def held_by_nodes(
    explanations: Mapping[int, Explanation],
    pathless: Container[int],
    explained: Callable[[Sequence[Any]], Sequence[Explanation]],
    walk: SharedWalk | None = None,
) -> dict[int, Explanation]:
    """Explain tensors whose path begins at a node of a graph that C++ holds by who holds the graph, by identity.

    A `torch.autograd.Function`'s context is such a node, and what it keeps is held by who holds the graph.

    Args:
        explanations: those of the tensors, by their identities.
        pathless: the identities of tensors that no path leads to: they say nothing of who holds their graphs.
        explained: explains other objects.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    torch: Any = loaded("torch")
    wanted = {explanation.root for explanation in explanations.values()} - {0}
    found: dict[int, tuple[Any, GraphPath]] = {}
    with plain_tensors(torch):
        seen: set[Any] = set()
        for output in census_of(walk).instances_of(torch.Tensor) if wanted else ():
            # What one of them keeps itself does not show who holds it.
            on_node = id(output) in explanations and explanations[id(output)].is_of_node
            if on_node or id(output) in pathless or torch_member(output, "is_leaf"):
                continue
            for node, way in nodes_behind(output, seen):
                if id(node) in wanted:
                    found.setdefault(id(node), (output, way))
    holding = [output for output, _ in found.values()]
    seen.clear()
    ways = {node: way.hops() for node, (_, way) in found.items()}
    found.clear()
    holders = dict(zip(ways, explained(holding) if holding else [], strict=True))
    return {
        identity: _behind_node(ways[explanation.root], holders[explanation.root], explanation)
        for identity, explanation in explanations.items()
        if explanation.root in holders
        and holders[explanation.root].path
        and holders[explanation.root].root not in holders
    }


def _behind_node(hops: tuple[tuple[str, str], ...], explanation: Explanation, rest: Explanation) -> Explanation:
    """Return what holds a graph's output, the way from there to a node, and from the node to what it keeps."""
    what = f"{hops[-1][0]} has {''.join(hop.edge for hop in rest.path[1:])}"
    return _through_graph(explanation, (*(Hop(type=kind, edge=edge) for kind, edge in hops), *rest.path[1:]), what)


class _SavedBy:
    """Explains what graphs have saved: of a long graph some things stand for all others of their kind."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str, str], int] = {}
        self._parts: dict[tuple[int, str, str], Explanation] = {}

    def __call__(self, saved: Saved, explanation: Explanation) -> Explanation:
        """Return the explanation of one thing by that of the output of its graph."""
        kind = id(saved.output), saved.way.node, saved.name
        steps = self._steps.get(kind, 0)
        if steps >= MOST_STEPS:
            return self._parts[kind]
        self._steps[kind] = steps + saved.way.length
        hops = tuple(Hop(type=node, edge=edge) for node, edge in saved.hops())
        found = _through_graph(explanation, hops, f"{saved.way.node} saved {saved.name!r}")
        self._parts.setdefault(kind, replace(found, is_part=True))
        return found


def _through_graph(explanation: Explanation, hops: tuple[Hop, ...], what: str) -> Explanation:
    """Return what is behind the graph of something that is held.

    Args:
        explanation: that of the tensor.
        hops: the way from it through the graph.
        what: which node has what.
    """
    # Where C++ holds the output's own holder, that holder is what must let go, and no name for the graph leads there.
    in_c = bool(explanation.root)
    return Explanation(
        verdict="native-held",
        cause=explanation.cause if in_c else "autograd",
        holder=explanation.holder if in_c else f"{explanation.holder}.grad_fn, where {what}",
        path=(*explanation.path, *hops),
        suspects=explanation.suspects,
        cut=explanation.cut,
        thread=explanation.thread,
        new=explanation.new,
        advice=explanation.advice if in_c else "",
        root=explanation.root,
    )


def _addresses(tensor: Any) -> list[tuple[str, int]]:
    return [(storage.device, storage.address) for storage in survey_storages([tensor]).storages]


def _gradient_of(tensor: Any, gradient: int, holder: Explanation, *, was_there: bool) -> Explanation:
    hop = Hop(type="torch.Tensor", edge=".grad", suspect=True)
    link = Link(".grad", "instance-attribute", tensor, tensor, gradient)
    return Explanation(
        verdict=holder.verdict,
        cause="instance-attribute" if was_there else holder.cause,
        holder=f"{holder.holder}.grad",
        path=(
            *(msgspec.structs.replace(step, suspect=step.suspect and not was_there) for step in holder.path),
            hop,
        ),
        suspects=(".grad",) if was_there else holder.suspects,
        cut=cut_of(link, holder.holder, Names()) if was_there else holder.cut,
        thread=holder.thread,
        new=frozenset((gradient,)) if was_there else holder.new,
    )


def together(explained: Mapping[Any, Explanation]) -> dict[Any, Explanation]:
    """One explanation for all that has no path and is not frozen: it is one knot that Python's collector cannot see."""
    loose = [key for key, found in explained.items() if not found.path and found.verdict != "frozen-garbage"]
    holders = sorted({explained[key].holder for key in loose} - {""})
    if len(holders) < 2:
        return dict(explained)
    nodes = [holder for holder in holders if holder.startswith("autograd")]
    named = [holder for holder in (nodes or holders) if holder != "native code"]
    shown = first_of(named, _SHOWN_HOLDERS)
    knot = Explanation(
        verdict="native-held",
        cause="autograd" if nodes else "native",
        holder=f"a cycle through C++ ({shown})",
        path=(),
        suspects=tuple(named),
    )
    return {**explained, **dict.fromkeys(loose, knot)}
