"""Finds who holds each of some storages, and keeps what is known around them.

Of tensors that Python's graph does not lead to, torch itself reports the holders in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.cut import Names
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.explain import MOST_STEPS, Explanation, Holder, explain, first_holders
from lowtide.leakcheck.explaining.path_reading import way_text
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.storages import Key, storage_keys, tensors_in
from lowtide.probes.heap.holders import Freed, SharedWalk, census_of, instances_in, sharing_walk
from lowtide.probes.heap.paths import Link
from lowtide.probes.host.makers import Maker
from lowtide.probes.memory.autograd import GraphPath, Saved, is_node, nodes_behind, saved_behind
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.memory.tensors import bytes_shown, plain_tensors, survey_storages, torch_member
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.identities import NamespaceSizes
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import loaded
from lowtide.reports.schema import Hop
from lowtide.reports.sizes import first_of

Stacks = Callable[[str, Collection[int]], Mapping[int, Sequence[StackFrame]]]
"""The stacks on which memory was allocated, by address, for a device and some addresses."""


UNEXPLAINED = Explanation(verdict="unexplained", cause="unknown", holder="", path=(), suspects=())
"""What is known of a storage whose holder was not looked for, or that no tensor lies over."""


class Explained(msgspec.Struct, frozen=True, dict=True):
    """Who holds each of some storages.

    Attributes:
        by_key: the best explanation of each: the shortest path among its tensors'.
        places: by storage, the places among the explained tensors of those over it that a root reaches.
        shown: by storage, the bytes that these show together; more than there are, where they overlap.
    """

    by_key: Mapping[Key, Explanation] = msgspec.field(default_factory=dict)
    places: Mapping[Key, frozenset[int]] = msgspec.field(default_factory=dict)
    shown: Mapping[Key, int] = msgspec.field(default_factory=dict)

    @functools.cached_property
    def _keys(self) -> Mapping[int, list[Key]]:
        """Return the storages over which each of the explained tensors lies, by its place."""
        found: dict[int, list[Key]] = {}
        for key, places in self.places.items():
            for place in places:
                found.setdefault(place, []).append(key)
        return found

    def is_retained(self, key: Key, freed: AbstractSet[int]) -> bool:
        """Return whether a storage is free when nothing holds some tensors any more."""
        places = self.places.get(key, ())
        return bool(places) and all(place in freed for place in places)

    def bytes_retained(self, freed: Sequence[AbstractSet[int] | None], sizes: Mapping[Key, int]) -> list[int | None]:
        """Return, for the tensors that each edge of a path frees, the bytes of the storages that are free then.

        Which these are is in `freed`, as `Explanation` has it; `sizes` are the bytes of the storages.
        """
        found: list[int | None] = []
        known: dict[int, tuple[Ints, Ints]] = {}
        for each in freed:
            if not isinstance(each, Freed):
                found.append(None if each is None else sum(sizes[key] for key in sizes if self.is_retained(key, each)))
            elif each.turn is None:
                found.append(0)
            else:
                # One list for all edges of a path, which may be long: the bytes that are free up to each of its cuts.
                if id(each.levels) not in known:
                    known[id(each.levels)] = self._by_level(each.levels, sizes)
                levels, amounts = known[id(each.levels)]
                found.append(int(amounts[np.searchsorted(levels, each.turn, side="right")]))
        return found

    def _by_level(self, levels: Ints, sizes: Mapping[Key, int]) -> tuple[Ints, Ints]:
        """Return the first cuts that do not free some storages, in order, and the bytes that all before these free."""
        amounts: dict[int, int] = {}
        # Most of many paths free few of all targets.
        freed_at_all = np.flatnonzero(levels > 0).tolist()
        for key in {key for place in freed_at_all for key in self._keys.get(place, ())} & sizes.keys():
            level = min(int(levels[place]) for place in self.places[key])
            amounts[level] = amounts.get(level, 0) + sizes[key]
        ordered = sorted(amounts)
        bytes_ = np.array([amounts[level] for level in ordered], np.int64)
        return np.array(ordered, np.int64), np.append(np.cumsum(bytes_[::-1])[::-1], 0)


class Older(Container[int]):
    """The identities of what was alive before the leak: all but those of what was born since; none if nobody knows."""

    def __init__(self, born: Collection[int] | None) -> None:
        self._born = born

    def __contains__(self, identity: object) -> bool:
        return self._born is not None and identity not in self._born


class Context(msgspec.Struct, frozen=True):
    """What is known around some leaks, besides the leaks themselves.

    Attributes:
        born: the identities of all objects born since the baseline: who was there before is not to blame; None if that
            is not known.
        hints: advice for what is reached from the object beside it, which the test runner keeps by design.
        roots: what is held, by name, where no path can see it, and is meant to be.
        living: whether an engine that runs is meant to live.
        is_over: whether nothing of the program will run again, so that any name may be set to None to prove a remedy.
        stacks: where memory was allocated.
        turns: how often each stage has run.
        midway: what there was in the middle of the turns that somebody counts, by resource; empty if nobody does.
        lives: how often every stage has, if all of them belong to one life that was repeated.
        namespaces: how many names each module had before the leak; None if that is not known.
        patience: seconds to wait for a thread to end, to prove that it is the holder.
        module: the test module, or the fixture's file, to which the leaks belong; empty if there is none.
        maker_of: who made a thing or started it, by its resource and name; None if that is not known.
        budget: how long may be spent on what can be left out.
        old_arrays: identity and bytes of large arrays that were there before the leak.
        old_lengths: how long some containers were before it, by identity.
        walk: the walk over the heap to ask who holds what, as long as nothing is changed; None: each asks its own.
    """

    born: Collection[int] | None = None
    hints: Sequence[tuple[str, object]] = ()
    roots: Sequence[tuple[str, object]] = ()
    living: bool = False
    is_over: bool = False
    stacks: Stacks = lambda device, addresses: {}
    turns: Mapping[str, int] = msgspec.field(default_factory=dict)
    midway: Mapping[str, Collection[str]] = msgspec.field(default_factory=dict)
    lives: int = 1
    namespaces: NamespaceSizes | None = None
    patience: float = 2.0
    module: str = ""
    maker_of: Callable[[str, str], Maker | None] = lambda key, name: None
    budget: Budget = msgspec.field(default_factory=Budget)
    old_arrays: Collection[tuple[int, int]] = frozenset()
    old_lengths: Mapping[int, int] = msgspec.field(default_factory=dict)
    walk: SharedWalk | None = None

    @property
    def older(self) -> Older:
        """Return what was alive before the leak."""
        return Older(self.born)

    def made_at(self, key: str, name: str) -> str:
        """Return the line that made a thing or started it, `function, file.py:12`; empty if that is not known."""
        maker = self.maker_of(key, name)
        return "" if maker is None else maker.place

    def names(self) -> Names:
        """Return what is known of the program's names, for cuts that do no harm; for one reading of the program."""
        older = None if self.born is None else self.older
        return Names(older, are_free=self.is_over, sizes=self.namespaces, by_source=older is None)

    def explain(
        self, items: Sequence[object], *, ignore: Collection[int] = (), names: Names | None = None
    ) -> list[Explanation]:
        """Explain some objects that should be gone.

        Besides `items`, identities to `ignore` are those of containers in which the caller keeps them; `names` is what
        is known of the program's names, if it was read before.
        """
        return explain(
            items,
            ignore={id(items), *ignore},
            innocent=self.older,
            roots=self.roots,
            living=self.living,
            names=names or self.names(),
            budget=self.budget,
            walk=self.walk,
        )

    def first_holders(
        self,
        items: Sequence[object],
        *,
        ignore: Collection[int] = (),
        not_roots: Collection[int] = (),
        names: Names | None = None,
    ) -> list[Holder | None]:
        """Return what of the program holds each of some objects; the arguments are those of `explain.first_holders`."""
        return first_holders(
            items,
            ignore={id(items), *ignore},
            innocent=self.older,
            roots=self.roots,
            living=self.living,
            not_roots=not_roots,
            names=names,
            walk=self.walk,
        )


def explain_storages(keys: Collection[Key], context: Context) -> Explained:
    """Find out, by one walk over the heap, who holds each of some storages."""
    if not keys:
        return Explained()
    with sharing_walk(context.walk) as walk:
        return _explain_storages(keys, replace(context, walk=walk))


def _explain_storages(keys: Collection[Key], context: Context) -> Explained:
    names = context.names()
    found_in = tensors_in(keys, context.walk)
    tensors = [tensor for tensor, _ in found_in]
    storages = [of_tensor for _, of_tensor in found_in]
    del found_in
    explanations = context.explain(tensors, names=names)
    rooted = {id(tensor): found for tensor, found in zip(tensors, explanations, strict=True) if found.root}
    lost = [tensor for tensor, found in zip(tensors, explanations, strict=True) if not found.path or found.root]
    native = _natively_held(lost, rooted, names, context) if lost else {}
    by_key: dict[Key, Explanation] = {}
    parts: dict[Key, list[Explanation]] = {}
    places: dict[Key, set[int]] = {}
    for place, (tensor, found) in enumerate(zip(tensors, explanations, strict=True)):
        explanation = native.get(id(tensor), found)
        for key in storages[place]:
            if found.path:
                places.setdefault(key, set()).add(place)
            known = by_key.get(key)
            if known is None or _rank(explanation) < _rank(known):
                by_key[key] = explanation
        parted = storages[place] - storage_keys([tensor])
        for key in parted if found.path else ():
            parts.setdefault(key, []).append(found)
    for key, others in parts.items():
        by_key[key] = by_key[key].with_parts(others, common_holder([by_key[key], *others]))
    sizes = bytes_shown(tensors)
    shown = {key: sum(sizes[place] for place in found) for key, found in places.items()}
    return Explained(together(by_key), {key: frozenset(found) for key, found in places.items()}, shown)


def behind_frozen_holders(keys: Collection[Key], context: Context) -> frozenset[Key]:
    """Return the storages whose path passes what `gc.freeze()` hides: to be asked before the heap is unfrozen."""
    explanations = explain_storages(keys, context).by_key
    return frozenset(key for key, explanation in explanations.items() if explanation.verdict == "frozen-holder")


def marked_as_frozen(explained: Explained, keys: Collection[Key]) -> Explained:
    """Return the same, found in the meantime unfrozen heap, for storages that were `behind_frozen_holders`."""
    by_key = {
        key: replace(found, verdict="frozen-holder") if key in keys and found.verdict == "reachable" else found
        for key, found in explained.by_key.items()
    }
    return replace(explained, by_key=by_key)


def common_holder(explanations: Sequence[Explanation]) -> str:
    """Return who holds all of them: the holder of one, or the part of the way to several that they have in common."""
    holders = list(dict.fromkeys(explanation.holder for explanation in explanations))
    paths = [explanation.path for explanation in explanations]
    if len(holders) == 1 or not all(path and _is_same(path[0], paths[0][0]) for path in paths):
        return holders[0]
    common = [hops[0] for hops in zip(*paths, strict=False) if all(_is_same(hop, hops[0]) for hop in hops)]
    way = way_text(common)
    # Where the holder is described in words and not as code, one description stands for all.
    return way if all(_begins_with(explanation.holder, way) for explanation in explanations) else holders[0]


def _is_same(hop: Hop, other: Hop) -> bool:
    return (hop.type, hop.edge) == (other.type, other.edge)


def _begins_with(holder: str, way: str) -> bool:
    """Return whether a holder, which may be shortened in the middle, begins with a way."""
    return holder.startswith(way) or ("…" in holder and way.startswith(holder.partition("…")[0]))


def _natively_held(
    lost: Sequence[Any], rooted: Mapping[int, Explanation], names: Names, context: Context
) -> dict[int, Explanation]:
    """Return what torch itself reports about tensors that Python's graph does not lead to, by identity.

    Of those whose path begins at what C++ holds, `rooted` has what is said of them.
    """
    explained = functools.partial(context.explain, names=names)
    pathless = {id(tensor) for tensor in lost} - rooted.keys()

    def past_nodes(items: Sequence[Any]) -> list[Explanation]:
        explanations = explained(items)
        of_nodes = {id(item): found for item, found in zip(items, explanations, strict=True) if found.is_of_node}
        better = held_by_nodes({**rooted, **of_nodes}, pathless, explained, context.walk) if of_nodes else {}
        return [better.get(id(item), found) for item, found in zip(items, explanations, strict=True)]

    return {
        **held_by_nodes(rooted, pathless, explained, context.walk),
        **saved_for_backward(lost, pathless, past_nodes, context.walk),
        **as_gradients(lost, context.older, explained, context.walk),
    }


def _rank(explanation: Explanation) -> tuple[bool, bool, int]:
    return not explanation.path, explanation.is_part, len(explanation.path)


_SHOWN_HOLDERS = 4


def as_gradients(
    lost: Sequence[Any],
    older: Container[int],
    explained: Callable[[Sequence[Any]], Sequence[Explanation]],
    walk: SharedWalk | None = None,
) -> dict[int, Explanation]:
    """Explain tensors that no path leads to and that are gradients by the tensors that they belong to, by identity.

    Python's graph does not have this edge: a tensor holds its gradient in C++. What was there before the leak is in
    `older`; `explained` explains other objects.
    """
    torch: Any = loaded("torch")
    wanted = {id(tensor) for tensor in lost}
    owners = {}
    with plain_tensors(torch):
        for tensor in instances_in(walk, torch.Tensor):
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

    In `pathless` are those that have no path even from what C++ holds, such as a hook of that very graph.
    """
    torch: Any = loaded("torch")
    wanted = {key: id(tensor) for tensor in lost for key in survey_storages([tensor]).sizes}
    found: dict[int, Saved] = {}
    with plain_tensors(torch):
        everything = instances_in(walk, torch.Tensor)
        outputs = [
            tensor for tensor in everything if not torch_member(tensor, "is_leaf") and id(tensor) not in pathless
        ]
        del everything
        # Behind the tensors: what these lead to is told by them.
        outputs += _nodes_held(walk)
        seen: set[Any] = set()
        for output in outputs:
            for saved in saved_behind(output, seen):
                for address in survey_storages([saved.tensor]).sizes:
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


def _nodes_held(walk: SharedWalk | None) -> list[Any]:
    """Return the nodes of graphs that Python code holds."""
    census = census_of(walk)
    kinds = [kind for kind in census.types() if is_node(kind)]
    return census.instances_of(*kinds) if kinds else []


def held_by_nodes(
    explanations: Mapping[int, Explanation],
    pathless: Container[int],
    explained: Callable[[Sequence[Any]], Sequence[Explanation]],
    walk: SharedWalk | None,
) -> dict[int, Explanation]:
    """Explain tensors whose path begins at a node of a graph that C++ holds by who holds the graph, by identity.

    A `torch.autograd.Function`'s context is such a node, and what it keeps is held by who holds the graph. What no path
    leads to (`pathless`) says nothing of that.
    """
    torch: Any = loaded("torch")
    wanted = {explanation.root for explanation in explanations.values()} - {0}
    found: dict[int, tuple[Any, GraphPath]] = {}
    with plain_tensors(torch):
        seen: set[Any] = set()
        outputs = [
            output
            for output in (instances_in(walk, torch.Tensor) if wanted else ())
            # What one of them keeps itself does not show who holds it.
            if not (id(output) in explanations and explanations[id(output)].is_of_node)
            and id(output) not in pathless
            and not torch_member(output, "is_leaf")
        ]
        for output in [*outputs, *(_nodes_held(walk) if wanted else ())]:
            for node, way in nodes_behind(output, seen):
                if id(node) in wanted:
                    found.setdefault(id(node), (output, way))
    holding = [output for output, _ in found.values()]
    seen.clear()
    del outputs
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
    """Return what is behind the graph of something that is held: `hops` lead there, `what` says which node has it."""
    # Where C++ holds the output's own holder, that holder is what must let go, and no name for the graph leads there.
    in_c = bool(explanation.root)
    # A node that is held alone is the graph itself.
    graph = ".grad_fn" if hops[0].edge == ".grad_fn" else ""
    return Explanation(
        verdict="native-held",
        cause=explanation.cause if in_c else "autograd",
        holder=explanation.holder if in_c else f"{explanation.holder}{graph}, where {what}",
        path=(*explanation.path, *hops),
        suspects=explanation.suspects,
        cut=explanation.cut,
        thread=explanation.thread,
        new=explanation.new,
        advice=explanation.advice if in_c else "",
        root=explanation.root,
    )


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
    """Return one explanation for all that has no path and is not frozen: one knot that the collector cannot see."""
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
