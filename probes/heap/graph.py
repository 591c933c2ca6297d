"""The heap's references as arrays: one walk forward over all objects, frozen or not, which many questions share.

The references lie in numpy arrays (edges in compressed sparse rows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy.typing as npt

from lowtide.probes.heap.roots import (
    FIRST,
    LATER,
    comes_later,
    lists_of_threads,
    modules_among,
    roots,
    threads_among,
)
from lowtide.probes.heap.walk import NarrowWalk, walk_from
from lowtide.probes.memory.capsules import ExportedMemory, keeps_exported
from lowtide.probes.objects.address_table import Indices, Ints, each_once
from lowtide.probes.objects.foreign import dict_of_module, is_a, module_of_class, type_name
from lowtide.probes.objects.identities import Identities, are_tracked, identities
from lowtide.probes.objects.listed import CHECKER, FROZEN_AT_STARTUP, Census, any_frozen, is_checkers
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc, sys
from lowtide.probes.references.edges import GENERATORS
from lowtide.probes.references.unseen_references import reader_of

_PROBES = "lowtide.probes."

References = tuple[tuple[str, int], ...]
"""The types of some objects, each with the references to one of them."""


class Graph:
    """The process's heap at one moment: node `i` is `objects[i]`, its edges `edges[offsets[i]:offsets[i + 1]]`.

    It keeps every object alive until it is closed.

    Args:
        needed: objects that shall be nodes, though the collector may not track them; it is itself nobody's holder.

    Attributes:
        roots: the first nodes, in their order.
        objects: the object of each node.
        kinds: the identity of each node's type.
        types: the types by their identities.
        offsets: where each node's edges begin, and where the last one's end.
        edges: the nodes that each node refers to.
        passed_over: the nodes that only a search goes through which asks for what is not tracked.
        checkers: the nodes through which the checker itself holds what it looks at.
        own: the identities of the lists by which the walk knew where to begin, and has its objects.
        turns: in which of a search's queues each node waits.
        namespaces: the nodes of the namespaces of libraries' modules.
        modules: the node of the module of each of these.
        scratch: room for a search, a number for each node.
    """

    def __init__(self, needed: Sequence[object] = ()) -> None:
        self.roots = list(roots())
        self._walk = walk_from(self.roots)
        self.objects = self._walk.objects
        found = gc.get_objects()
        self._walk.add(found)
        # The frame of this very call may be among them, and would keep them.
        found.clear()
        self._walk.add([item for item in needed if not gc.is_tracked(item)])
        self.own = {id(needed), id(self.objects)}
        self._met = self._listed = listed = len(self.objects)
        self._read()
        # What is tracked, and was not listed but met by the walk, is frozen, if a program has frozen anything at all.
        # (To ask the collector how many are frozen takes it a walk over all of them.)
        met = np.count_nonzero(are_tracked(identities(self.objects[listed:])))
        self._unfrozen = listed if met > FROZEN_AT_STARTUP else sys.maxsize

    def _read(self) -> None:
        """Make the walk."""
        self._walk.read()
        self._take_over()
        self.checkers = np.concatenate([self._checkers_generators(), self._checkers_probes()])
        self.turns = self._find_turns()

    def close(self) -> None:
        """Drop every object."""
        self.objects.clear()
        self.roots.clear()

    def has(self, item: object) -> bool:
        """Return whether an object is a node."""
        return bool(self.find([item])[0] >= 0)

    def find(self, items: Sequence[object]) -> Indices:
        """Return the node of each object, shape [len(items)]; -1 for one that has none."""
        return self._walk.find(identities(list(items)))

    def find_ids(self, ids: Collection[int]) -> Indices:
        """Return the nodes of those objects that have one, by their identities."""
        found = self._walk.find(np.fromiter(ids, np.int64, len(ids)))
        return found[found >= 0]

    def nodes_of(self, ids: Ints) -> Indices:
        """Return the node of each object, by its identity, shape [len(ids)]; -1 for one that has none."""
        return self._walk.find(ids)

    def census(self) -> Census:
        """Return the nodes by their types."""
        return Census.of_kinds(self.objects, self.kinds, self.types)

    def by_type(self) -> list[tuple[type, Ints]]:
        """Return each type with its nodes, in their order."""
        order = np.argsort(self.kinds, kind="stable")
        kinds = self.kinds[order]
        starts = np.flatnonzero(np.diff(kinds, prepend=-1))
        return [
            (self.types[int(kinds[start])], order[start:stop])
            for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True)
        ]

    def is_frozen(self, node: int) -> bool:
        """Return whether the node's object is in the permanent generation."""
        return bool(node >= self._unfrozen) and gc.is_tracked(self.objects[node])

    def frozen_nodes(self) -> Ints:
        """Return the nodes whose objects are in the permanent generation."""
        first = min(self._unfrozen, len(self.objects))
        return first + np.flatnonzero(are_tracked(identities(self.objects[first:])))

    def is_listed(self, node: int) -> bool:
        """Return whether the node's object is one that the collector lists: tracked, and not frozen."""
        item = self.objects[node]
        return node < self._listed and id(item) not in self.own and gc.is_tracked(item)

    def comes_later(self, node: int) -> bool:
        """Return whether a node that is no root waits until nothing else is left to search."""
        return comes_later(self.types[int(self.kinds[node])])

    def holders_of(self, nodes: Collection[int]) -> Mapping[int, list[int]]:
        """Return by node the nodes that refer to it, each once."""
        wanted = np.zeros(len(self.objects), np.bool_)
        wanted[list(nodes)] = True
        places = np.flatnonzero(wanted[self.edges])
        holders = np.searchsorted(self.offsets, places, side="right") - 1
        found: dict[int, dict[int, None]] = {}
        for held, holder in zip(self.edges[places].tolist(), holders.tolist(), strict=True):
            found.setdefault(held, {})[holder] = None
        return {held: list(known) for held, known in found.items()}

    def leading_to(self, nodes: Indices | Sequence[int], new: Identities) -> tuple[Indices, Indices]:
        """Return the nodes of all that is new and leads to some nodes, and of what is older and refers to one of those.

        Args:
            nodes: which are among the first, however old they are.
            new: the identities of what is new.
        """
        ids = identities(self.objects)
        is_new = np.zeros(len(ids), np.bool_)
        is_new[self.find_ids(new)] = True
        # Of what is not tracked nobody knows how old it is; but a root is older.
        is_new[self._met :] |= ~are_tracked(ids[self._met :])
        frontier = np.asarray(nodes, np.int64)
        is_new[frontier] = True
        places = np.flatnonzero(is_new[self.edges])
        held, holders = self.edges[places], np.searchsorted(self.offsets, places, side="right") - 1
        by_others = ~np.isin(ids[holders], self._own_parts())
        held, holders = held[by_others], holders[by_others]
        leads = np.zeros(len(self.objects), np.bool_)
        while len(frontier):
            leads[frontier] = True
            before = holders[np.isin(held, frontier)]
            frontier = each_once(before[is_new[before] & ~leads[before]])
        behind = holders[leads[held]]
        older: Indices = each_once(behind[~leads[behind]]).astype(np.int32)
        return np.flatnonzero(leads).astype(np.int32), older

    def _own_parts(self) -> list[int]:
        """Return the identities of the objects by which this knows its roots and nodes."""
        of_roots = (id(part) for root in self.roots for part in (root, root.also, root.variables, *root.variables))
        return [*self.own, *of_roots]

    def referrers_since(self, nodes: Collection[int]) -> list[object]:
        """Return the objects that are no nodes, since they were made later, and refer to one of some nodes."""
        wanted = {id(self.objects[node]) for node in nodes}
        listed = gc.get_objects()
        ids = identities(listed)
        new = np.flatnonzero(self._walk.find(ids) < 0)
        # The frames of the checker are among them, one of them this function's own.
        found = [listed[place] for place in new.tolist() if not _is_checkers_frame(listed[place])]
        listed.clear()
        return [item for item in found if not wanted.isdisjoint(map(id, gc.get_referents(item)))]

    def with_hidden_edges(self, targets: Sequence[object]) -> tuple[Ints, Indices]:
        """Offsets and edges, with those that only a thorough search follows.

        Reading them may make Python objects of tensors that had none, which then stay.

        Args:
            targets: the suspects: of the memory that capsules export only theirs is looked for.
        """
        held: dict[int, list[object]] = {}
        for kind, cls in list(self.types.items()):
            reader = ExportedMemory(targets).held_by if keeps_exported(cls) else reader_of(cls, thorough=True)
            if reader is None or reader is reader_of(cls):
                continue
            for node in np.flatnonzero(self.kinds == kind).tolist():
                held[node] = reader(self.objects[node])
        self._add([item for items in held.values() for item in items if not self.has(item)])
        holders: list[int] = []
        added: list[int] = []
        for node, items in sorted(held.items(), key=lambda entry: entry[0]):
            known = set(self.edges[self.offsets[node] : self.offsets[node + 1]].tolist())
            new = [other for other in dict.fromkeys(self.find(items).tolist()) if other not in known]
            holders += [node] * len(new)
            added += new
        if not added:
            return self.offsets, self.edges
        behind = np.array(holders) + 1
        more = np.bincount(behind, minlength=len(self.offsets))
        edges: Indices = np.insert(self.edges, self.offsets[behind], np.array(added, np.int32))
        return self.offsets + np.cumsum(more), edges

    def _add(self, items: Sequence[object]) -> None:
        """Make nodes of objects that came to light later, which most searches pass over."""
        if not items:
            return
        first = len(self.objects)
        self._walk.add(list({id(item): item for item in items}.values()))
        listed = len(self.objects)
        self._walk.read()
        self._walk.pass_over(np.arange(first, listed, dtype=np.int32))
        self._take_over()
        self.turns = np.concatenate([self.turns, np.full(len(self.objects) - first, FIRST, np.uint8)])

    def _take_over(self) -> None:
        """Take what the walk has read."""
        walk = self._walk
        self.kinds, self.types, self.offsets, self.edges = walk.kinds, walk.types, walk.offsets, walk.edges
        self.passed_over = walk.passed_over
        self.scratch = np.zeros(len(self.objects), np.int32)

    def _checkers_generators(self) -> Indices:
        """Return the checker's own suspended generators: like its frames, they hold what it looks at."""
        files = _checkers_files()
        places = np.flatnonzero(np.isin(self.kinds, list(GENERATORS))).tolist()
        return np.array([place for place in places if _code_file(self.objects[place]) in files], np.int32)

    def _checkers_probes(self) -> Indices:
        """Return the objects with which the checker reads the program: they hold what they compare, for nobody.

        A way to them leads from any function that they stand in for.
        """
        own = [kind for kind, cls in self.types.items() if module_of_class(cls).startswith(_PROBES)]
        nodes = np.flatnonzero(np.isin(self.kinds, own)).astype(np.int32)
        return nodes[nodes >= len(self.roots)]

    def _find_turns(self) -> npt.NDArray[np.uint8]:
        """Return in which of the search's queues each node waits."""
        later = np.array([LATER if comes_later(cls) else FIRST for cls in self.types.values()], np.uint8)
        turns: npt.NDArray[np.uint8] = later.take(self._walk.kind_places)
        turns[: len(self.roots)] = [root.turn for root in self.roots]
        # A module's namespace too: every function of the module holds it, without passing the module.
        modules = [place for place, root in enumerate(self.roots) if root.turn == LATER and is_a(root.held, ModuleType)]
        namespaces = self.find([dict_of_module(self.objects[place]) for place in modules])
        self.namespaces = namespaces[namespaces >= 0]
        self.modules = np.array(modules, np.int32)[namespaces >= 0]
        turns[self.namespaces] = LATER
        return turns


class NewBehindKnown(Graph):
    """What is new behind objects that are known, as far as modules and new threads lead there through both alone.

    Args:
        known: the identities of the objects on the ways there; what is none of them now is not found.
        new: the identities of what is new.
    """

    def __init__(self, known: Collection[int], new: Identities) -> None:
        threads = threads_among(new)
        # It keeps each of them, too.
        known = {*known, *(map(id, lists_of_threads()) if threads else ())}
        self.roots = [*modules_among(known), *threads]
        self._walk = NarrowWalk(self.roots, new.and_also(known))
        self.objects = self._walk.objects
        self.own = {id(self.objects)}
        self._met = len(self.objects)
        self._new = new
        self._asked: Indices = np.zeros(0, np.int32)
        self._read()
        self._listed = self._unfrozen = len(self.objects)
        self._frozen: Ints = np.zeros(0, np.int64)
        if any_frozen():
            self._frozen = np.flatnonzero(~np.isin(identities(self.objects), identities(gc.get_objects())))

    def is_frozen(self, node: int) -> bool:
        """See `Graph`."""
        return bool(np.any(self._frozen == node)) and gc.is_tracked(self.objects[node])

    def is_listed(self, node: int) -> bool:
        """See `Graph`."""
        return super().is_listed(node) and not self.is_frozen(node)

    def census(self) -> Census:
        """See `Graph`; what was asked for last comes first, in the order in which it was."""
        others = np.setdiff1d(np.arange(len(self.objects), dtype=np.int32), self._asked)
        nodes = np.concatenate([self._asked, others])
        return Census.of_kinds([self.objects[node] for node in nodes.tolist()], self.kinds[nodes], self.types)

    def unseen_references(self, items: Collection[int]) -> References | None:
        """Return how often others than the nodes refer to some objects, or to what is new and leads to them.

        By their reference counts, so that C's references count too: nobody else may hold them meanwhile.

        Args:
            items: their identities, those of the oldest first, as the collector lists all objects.

        Returns:
            None where one of them is no node.
        """
        self._asked = self.find_ids(items)
        if len(self._asked) < len(items):
            return None
        nodes = self.leading_to(self._asked, self._new)[0].tolist()
        counted = np.bincount(self.edges, minlength=len(self.objects)).tolist()
        # To a root refers what names it, to a class the table of types; to all nodes this list and their own.
        own = Counter(self.types.keys())
        for root in self.roots:
            own.update(map(id, (root.held, *root.also, *dict(root.variables).values())))
        # What a call adds, it adds to each.
        bare, *counts = map(sys.getrefcount, [object(), *map(self.objects.__getitem__, nodes)])
        unseen = [
            (type_name(type(self.objects[node])), count - bare - 1 - counted[node] - own[id(self.objects[node])])
            for node, count in zip(nodes, counts, strict=True)
        ]
        return tuple(sorted((kind, number) for kind, number in unseen if number))


def _is_checkers_frame(item: object) -> bool:
    return type(item) is FrameType and is_checkers(item)


def _checkers_files() -> set[object]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(CHECKER)]
    return {getattr(module, "__file__", None) for module in modules}


def _code_file(generator: Any) -> str:
    code: CodeType = getattr(generator, f"{GENERATORS[id(type(generator))]}_code")
    return code.co_filename
