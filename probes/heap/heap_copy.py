"""A copy of a walked heap without its objects: types, sizes, references and what these are called, as arrays.

Sizes are those of the objects alone. The memory under tensors is a node of its own for each storage, to which each
tensor over it refers, so that it counts once however many these are. Contents are in no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from lowtide.probes.heap.edge_labels import EdgeLabels
from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.roots import FIRST, LATER
from lowtide.probes.memory.tensors import keys_of_each, survey_storages
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.objects.foreign import flags_of, module_of_class, mro_of, namespace_of, type_name
from lowtide.probes.objects.identities import Identities, are_tracked, identities
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import loaded

NEWBORN, LEFT, PASSED_OVER, BLOCKED, FROZEN = (1 << bit for bit in range(5))
"""What is known of a node: it was born in the test; it is what a finding is about; only a search that finds nothing
else goes through it; the checker itself holds by it what it looks at; `gc.freeze()` hides it."""

STORAGE = "storage on "
"""How the type of a storage's node begins; behind it comes the device."""

_HAVE_GC = 1 << 14
_OWN_SIZES = frozenset({"builtins", "collections", "numpy"})


class HeapCopy(msgspec.Struct, frozen=True):
    """The heap at one moment, as numbers and names; node `i` is what lay at its place in the walk.

    Attributes:
        types: the names of types.
        registries: the places of types that are `torch.nn.Module`s, whose parts lie in dicts of their own.
        roots: node, kind, name and thread of each root, in their order.
        texts: what labels from 0 on mean.
        kinds: the place of each node's type, shape [nodes].
        sizes: bytes of each node alone; of a storage's, those of the memory; shape [nodes].
        flags: what is known of each node, shape [nodes].
        turns: in which of a search's queues each node waits, shape [nodes].
        counts: how many edges each node has, shape [nodes].
        edges: the nodes referred to, node by node, shape [edges].
        labels: the label of each edge, shape [edges].
        namespaces: the nodes of the namespaces of libraries' modules, shape [n].
        modules: the node of the module of each of these, shape [n].
    """

    types: tuple[str, ...]
    registries: tuple[int, ...]
    roots: tuple[tuple[int, str, str, str], ...]
    texts: tuple[str, ...]
    kinds: Indices
    sizes: Ints
    flags: npt.NDArray[np.uint8]
    turns: npt.NDArray[np.uint8]
    counts: Indices
    edges: Indices
    labels: Indices
    namespaces: Indices
    modules: Indices


def copy_heap(
    graph: Graph,
    *,
    born: Collection[int] | None = None,
    left: Collection[int] = (),
    given: Sequence[tuple[str, object]] = (),
    ignore: Collection[int] = (),
) -> HeapCopy:
    """Copy what there is to know of a heap without its contents; runs no code of the program's.

    Takes some seconds and some hundred bytes for each object of a heap of a million; the collector must be paused.

    Args:
        graph: the heap.
        born: the identities of what was born in the test.
        left: the identities of what should be gone.
        given: further roots, by name.
        ignore: the identities of containers in which the caller keeps what it looks at.
    """
    labels = EdgeLabels(graph)
    ids = identities(graph.objects)
    count = len(ids)
    flags = np.zeros(count, np.uint8)
    for flag, known in ((NEWBORN, born or ()), (LEFT, left)):
        wanted = known if isinstance(known, Identities) else Identities(np.fromiter(known, np.int64, len(known)))
        # Of what the collector does not track nobody knows when it was made.
        flags[wanted.holds(ids) & (are_tracked(ids) if flag == NEWBORN else True)] |= flag
    flags[graph.passed_over] |= PASSED_OVER
    flags[graph.checkers] |= BLOCKED
    own = {id(part) for root in graph.roots for part in (root, root.also, root.variables)}
    flags[graph.find_ids({id(graph.objects), id(graph.roots), *own, *ignore})] |= BLOCKED
    flags[graph.frozen_nodes()] |= FROZEN
    names, kinds = _types(graph)
    storages = _Storages(graph, count, names)
    turns = graph.turns.copy()
    roots = [(node, root.kind, root.name, root.thread) for node, root in enumerate(graph.roots)]
    for (name, _), node in zip(given, graph.find([held for _, held in given]).tolist(), strict=True):
        if node >= 0:
            turns[node] = FIRST
            roots = [(node, "object", name, ""), *(root for root in roots if root[0] != node)]
    counts = np.diff(graph.offsets)
    sizes = np.concatenate([sizes_of(graph), storages.sizes])
    texts = (*labels.texts, "storage")
    # Those of tensors come behind their other edges.
    behind = graph.offsets[storages.holders + 1]
    extra = np.bincount(storages.holders, minlength=count)
    more = len(storages.sizes)
    return HeapCopy(
        types=tuple(names),
        registries=_modules_of_torch(graph),
        roots=tuple(roots),
        texts=texts,
        kinds=np.concatenate([kinds, storages.kinds]),
        sizes=sizes,
        flags=np.concatenate([flags, np.zeros(more, np.uint8)]),
        turns=np.concatenate([turns, np.full(more, LATER, np.uint8)]),
        counts=np.concatenate([counts + extra, np.zeros(more, np.int64)]).astype(np.int32),
        edges=np.insert(graph.edges, behind, storages.held),
        labels=np.insert(labels.labels, behind, np.full(len(behind), len(texts) - 1, np.int32)),
        namespaces=graph.namespaces,
        modules=graph.modules,
    )


def _types(graph: Graph) -> tuple[list[str], Indices]:
    """Return the names of the types, and the place of each node's."""
    ids = np.fromiter(graph.types, np.int64, len(graph.types))
    order = np.argsort(ids)
    places = order[np.searchsorted(ids[order], graph.kinds)]
    return [type_name(cls) for cls in graph.types.values()], places.astype(np.int32)


def _modules_of_torch(graph: Graph) -> tuple[int, ...]:
    torch: Any = loaded("torch")
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    classes = list(graph.types.values())
    return tuple(place for place, cls in enumerate(classes) if any(base is kind for base in mro_of(cls)))


class _Storages:
    """The storages under the tensors of a heap, as nodes behind all others.

    Args:
        graph: the heap.
        first: the first of their nodes.
        types: the names of types; those of the storages are appended.

    Attributes:
        sizes: the bytes of each.
        kinds: the place of the type of each.
        holders: the nodes of the tensors over them, in ascending order, each as often as it has some.
        held: the nodes of the storages.
    """

    def __init__(self, graph: Graph, first: int, types: list[str]) -> None:
        torch: Any = loaded("torch")
        found = () if torch is None else survey_storages(graph.census()).storages
        devices = {device: len(types) + place for place, device in enumerate(sorted({each.device for each in found}))}
        types += [f"{STORAGE}{device}" for device in devices]
        nodes = {each.key: first + place for place, each in enumerate(found)}
        self.sizes: Ints = np.array([each.bytes for each in found], np.int64)
        self.kinds: Indices = np.array([devices[each.device] for each in found], np.int32)
        tensors = graph.census().instances_of(torch.Tensor, torch.UntypedStorage) if found else []
        pairs = sorted(
            (node, nodes[key])
            for node, keys in zip(graph.find(tensors).tolist(), keys_of_each(tensors), strict=True)
            for key in keys
            if key in nodes
        )
        self.holders: Ints = np.array([holder for holder, _ in pairs], np.int64)
        self.held: Indices = np.array([held for _, held in pairs], np.int32)


def sizes_of(graph: Graph) -> Ints:
    """Return the bytes of each object, as Python's own types count them; another's code has no say in it."""
    sizes = np.zeros(len(graph.objects), np.int64)
    for cls, nodes in graph.by_type():
        sizes[nodes] = sizes_of_items(cls, [graph.objects[node] for node in nodes.tolist()])
    return sizes


def sizes_of_items(cls: type, items: Sequence[object]) -> Ints:
    """Return the bytes of some objects of one type."""
    head = 16 if flags_of(cls) & _HAVE_GC else 0
    return np.fromiter(map(_measure_of(cls), items), np.int64, len(items)) + head


def _measure_of(cls: type) -> Callable[[Any], int]:
    """Return how the last of Python's own, or numpy's, types that a type derives from counts its instances' bytes."""
    found: Iterator[Callable[[Any], int]] = (
        measure
        for base in mro_of(cls)
        if module_of_class(base) in _OWN_SIZES
        for measure in [namespace_of(base).get("__sizeof__")]
        if type(measure) is _METHOD
    )
    return next(found)


_METHOD = type(list.__sizeof__)
