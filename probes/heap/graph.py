"""The heap's references as arrays: one walk forward over all objects, frozen or not, which many questions share.

The walk fills numpy arrays (addresses, edges in compressed sparse rows). It takes everything in, what the collector
does not track, too, which most searches pass over.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy.typing as npt

from lowtide.probes.heap.roots import (
    CHECKER,
    FIRST,
    LATER,
    comes_later,
    is_checkers,
    roots,
)
from lowtide.probes.memory.capsules import CAPSULE, ExportedMemory
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.objects.c_modules import is_kind_of_module, without_state
from lowtide.probes.objects.foreign import dict_of_module, flags_of, is_a, module_of_class
from lowtide.probes.objects.identities import (
    Places,
    are_tracked,
    elements,
    identities,
    object_at,
    objects_at,
    places_of,
    referents,
    types_of,
)
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP, Census
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import gc
from lowtide.probes.references.edges import GENERATORS
from lowtide.probes.references.unseen_references import Reader, reader_of, untracked_kinds

# A graph's reader needs the kinds of its roots, too.


# More at once takes more memory for what is in flight, which then is fetched anew from the kernel each time.
_CHUNK = 8_000
_MAY_BE_TRACKED = 1 << 14
_PROBES = "lowtide.probes."


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
        turns: in which of a search's queues each node waits.
        namespaces: the nodes of the namespaces of libraries' modules.
        modules: the node of the module of each of these.
        scratch: room for a search, a number for each node.
    """

    def __init__(self, needed: Sequence[object] = ()) -> None:
        self.roots = list(roots())
        self.objects = [root.held for root in self.roots]
        self._table = places_of(identities(self.objects))
        _extend(self.objects, gc.get_objects(), self._table)
        self._table.add(identities(self.objects)[len(self.roots) :])
        self._begin_walk()
        self._list([item for item in needed if not gc.is_tracked(item) and not self.has(item)])
        self._own = {id(needed), id(self.objects)}
        self._listed = listed = len(self.objects)
        self._walk_on()
        # What is tracked, and was not listed but met by the walk, is frozen, if a program has frozen anything at all.
        # (To ask the collector how many are frozen takes it a walk over all of them.)
        met = np.count_nonzero(are_tracked(identities(self.objects[listed:])))
        self._unfrozen = listed if met > FROZEN_AT_STARTUP else sys.maxsize
        self.checkers = np.concatenate([self._checkers_generators(), self._checkers_probes()])
        self.turns = self._find_turns()

    def close(self) -> None:
        """Drops every object."""
        self.objects.clear()
        self.roots.clear()

    def has(self, item: object) -> bool:
        """Whether an object is a node."""
        return bool(self.find([item])[0] >= 0)

    def find(self, items: Sequence[object]) -> Indices:
        """The node of each object, shape [len(items)]; -1 for one that has none."""
        return self._table.find(identities(list(items)))

    def find_ids(self, ids: Collection[int]) -> Indices:
        """The nodes of those objects that have one, by their identities."""
        found = self._table.find(np.fromiter(ids, np.int64, len(ids)))
        return found[found >= 0]

    def census(self) -> Census:
        """The nodes by their types."""
        return Census.of_kinds(self.objects, self.kinds, self.types)

    def is_frozen(self, node: int) -> bool:
        """Whether the node's object is in the permanent generation."""
        return bool(node >= self._unfrozen) and gc.is_tracked(self.objects[node])

    def is_listed(self, node: int) -> bool:
        """Whether the node's object is one that the collector lists: tracked, and not frozen."""
        item = self.objects[node]
        return node < self._listed and id(item) not in self._own and gc.is_tracked(item)

    def comes_later(self, node: int) -> bool:
        """Whether a node that is no root waits until nothing else is left to search."""
        return comes_later(self.types[int(self.kinds[node])])

    def holders_of(self, nodes: Collection[int]) -> Mapping[int, list[int]]:
        """By node, the nodes that refer to it, each once."""
        wanted = np.zeros(len(self.objects), np.bool_)
        wanted[list(nodes)] = True
        places = np.flatnonzero(wanted[self.edges])
        holders = np.searchsorted(self.offsets, places, side="right") - 1
        found: dict[int, dict[int, None]] = {}
        for held, holder in zip(self.edges[places].tolist(), holders.tolist(), strict=True):
            found.setdefault(held, {})[holder] = None
        return {held: list(known) for held, known in found.items()}

    def referrers_since(self, nodes: Collection[int]) -> list[object]:
        """The objects that are no nodes, since they were made later, and refer to one of some nodes."""
        wanted = {id(self.objects[node]) for node in nodes}
        listed = gc.get_objects()
        ids = identities(listed)
        new = np.flatnonzero(self._table.find(ids) < 0)
        # The frames of the checker are among them, one of them this function's own.
        new = np.delete(new, _checkers_frames(ids[new]))
        found = [listed[place] for place in new.tolist()]
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
            reader = ExportedMemory(targets).held_by if cls is CAPSULE else reader_of(cls, thorough=True)
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
        """Makes nodes of objects that came to light later, which most searches pass over."""
        if not items:
            return
        first = len(self.objects)
        self._list(list({id(item): item for item in items}.values()))
        self._passed_over.append(np.arange(first, len(self.objects), dtype=np.int32))
        self._walk_on()
        new = len(self.objects) - len(self.turns)
        self.turns = np.concatenate([self.turns, np.full(new, FIRST, np.uint8)])

    def _list(self, items: Sequence[object]) -> None:
        self._table.add(identities(list(items)))
        self.objects.extend(items)

    def _begin_walk(self) -> None:
        self.types: dict[int, type] = {}
        self._untracked_kinds = [id(kind) for kind in untracked_kinds()]
        self._known_kinds = places_of(np.zeros(0, np.int64))
        # The place of each node's type among those known, by chunks; by that place, how instances of the type are read,
        # and whether they are modules.
        self._kind_places: list[Indices] = []
        self._readers: list[Reader | None] = []
        self._has_reader = np.zeros(0, np.bool_)
        self._is_module = np.zeros(0, np.bool_)
        self._passed_over: list[Indices] = []
        self._done = 0
        self.kinds = np.zeros(0, np.int64)
        self.offsets = np.zeros(1, np.int64)
        self.edges = np.zeros(0, np.int32)

    def _walk_on(self) -> None:
        """Reads the references of all objects that were not read yet, adding those that it meets."""
        counts: list[Ints] = []
        edges: list[Indices] = [self.edges]
        kinds: list[Ints] = [self.kinds]
        while self._done < len(self.objects):
            done = self._done
            chunk = self.objects[done : done + _CHUNK]
            kinds.append(types_of(identities(chunk)))
            places_of_kinds = self._places_of(kinds[-1])
            self._kind_places.append(places_of_kinds)
            asked = list(chunk)
            for place in np.flatnonzero(self._is_module[places_of_kinds]).tolist():
                asked[place] = without_state(chunk[place])
            sizes, ids, held = referents(asked)
            asked.clear()
            more = self._read_more(done, chunk, places_of_kinds, sizes)
            if more:
                sizes, ids = _with_more(sizes, ids, more)
            nodes = self._table.find(ids)
            unknown = np.flatnonzero(nodes < 0)
            met = ids[unknown]
            firsts = self._table.first_places(met)
            first = np.flatnonzero(firsts == np.arange(len(met)))
            worth, passed_over = self._are_worth(met[first])
            added = first[worth]
            if len(added):
                places = np.full(len(met), -1, np.int32)
                places[added] = np.arange(len(self.objects), len(self.objects) + len(added), dtype=np.int32)
                nodes[unknown] = places[firsts]
                self._passed_over.append(places[first[passed_over]])
                self._table.add(met[added])
                self.objects += objects_at(met[added])
            held.clear()
            more.clear()
            known = nodes >= 0
            counts.append(_sums(known, sizes))
            edges.append(nodes[known])
            self._done += len(chunk)
        self.kinds = np.concatenate(kinds)
        ends = len(self.edges) + np.cumsum(np.concatenate(counts)) if counts else np.zeros(0, np.int64)
        self.offsets = np.concatenate([self.offsets, ends])
        self.edges = np.concatenate(edges)
        self.passed_over = np.concatenate([np.zeros(0, np.int32), *self._passed_over])
        self.scratch = np.zeros(len(self.objects), np.int32)

    def _places_of(self, kinds: Ints) -> Indices:
        """The place of each type among those known, which those become that were not met before."""
        places = self._known_kinds.find(kinds)
        new = np.unique(kinds[places < 0])
        if not len(new):
            return places
        met = {kind: object_at(kind) for kind in new.tolist()}
        self._known_kinds.add(new)
        self.types.update(met)
        readers = [reader_of(cls) for cls in met.values()]
        self._readers += readers
        self._has_reader = np.append(self._has_reader, [reader is not None for reader in readers])
        self._is_module = np.append(self._is_module, list(map(is_kind_of_module, met.values())))
        return self._known_kinds.find(kinds)

    def _read_more(self, first: int, chunk: list[object], kinds: Indices, sizes: Ints) -> dict[int, list[object]]:
        """What objects refer to beyond what the collector shows, by their places in a chunk.

        Args:
            first: the node of the chunk's first object.
            chunk: the objects.
            kinds: the places of their types among those known.
            sizes: how many referents of each are known.
        """
        more: dict[int, list[object]] = {}
        for place in np.flatnonzero(self._has_reader[kinds]).tolist():
            reader = self._readers[kinds[place]]
            if reader is not None and (items := reader(chunk[place])):
                more[place] = [*items]
        if sys.version_info >= (3, 13):
            # A dict that shares an instance's values shows none of them, and takes them over when that dies.
            for place in np.flatnonzero(sizes == 0).tolist():
                if type(chunk[place]) is dict and (items := [*dict.values(chunk[place])]):
                    more.setdefault(place, []).extend(items)
        for place in range(first, min(first + len(chunk), len(self.roots))):
            if self.roots[place].also:
                more.setdefault(place - first, []).extend(self.roots[place].also)
        return more

    def _are_worth(self, ids: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which objects, met by the walk, can lead further, and which of these most searches pass over.

        What is not tracked refers to nothing that is. But dicts and tuples of nothing that is tracked are not tracked
        either, nor is, once it is made, what C calls a struct sequence (such as what `torch.max` returns).
        """
        worth = are_tracked(ids)
        passed_over = np.zeros(len(ids), np.bool_)
        rest = np.flatnonzero(~worth)
        kinds = types_of(ids[rest])
        for kind in self._untracked_kinds:
            worth[rest[kinds == kind]] = True
        asked = np.unique(kinds).tolist()
        containers = [kind for kind in asked if flags_of(object_at(kind)) & _MAY_BE_TRACKED or kind == id(CAPSULE)]
        passed_over[rest[np.isin(kinds, containers)]] = True
        passed_over &= ~worth
        worth |= passed_over
        own = _checkers_frames(ids)
        worth[own] = passed_over[own] = False
        return worth, passed_over

    def _checkers_generators(self) -> Indices:
        """The checker's own suspended generators: like its frames, they hold what it looks at."""
        files = _checkers_files()
        places = np.flatnonzero(np.isin(self.kinds, list(GENERATORS))).tolist()
        return np.array([place for place in places if _code_file(self.objects[place]) in files], np.int32)

    def _checkers_probes(self) -> Indices:
        """The objects with which the checker reads the program: they hold what they compare, and keep it for nobody.

        A way to them leads from any function that they stand in for.
        """
        own = [kind for kind, cls in self.types.items() if module_of_class(cls).startswith(_PROBES)]
        nodes = np.flatnonzero(np.isin(self.kinds, own)).astype(np.int32)
        return nodes[nodes >= len(self.roots)]

    def _find_turns(self) -> npt.NDArray[np.uint8]:
        """In which of the search's queues each node waits."""
        later = np.array([LATER if comes_later(cls) else FIRST for cls in self.types.values()], np.uint8)
        turns: npt.NDArray[np.uint8] = later.take(np.concatenate(self._kind_places))
        turns[: len(self.roots)] = [root.turn for root in self.roots]
        # A module's namespace too: every function of the module holds it, without passing the module.
        modules = [place for place, root in enumerate(self.roots) if root.turn == LATER and is_a(root.held, ModuleType)]
        namespaces = self.find([dict_of_module(self.objects[place]) for place in modules])
        self.namespaces = namespaces[namespaces >= 0]
        self.modules = np.array(modules, np.int32)[namespaces >= 0]
        turns[self.namespaces] = LATER
        return turns


def _checkers_files() -> set[object]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(CHECKER)]
    return {getattr(module, "__file__", None) for module in modules}


def _code_file(generator: Any) -> str:
    code: CodeType = getattr(generator, f"{GENERATORS[id(type(generator))]}_code")
    return code.co_filename


def _with_more(sizes: Ints, ids: Ints, more: Mapping[int, list[object]]) -> tuple[Ints, Ints]:
    """How many referents each object has, and the identities of all of them, with more for some of the objects."""
    places = sorted(more)
    counts, added = elements([more[place] for place in places])
    behind = np.cumsum(sizes)[places]
    sizes = sizes.copy()
    sizes[places] += counts
    return sizes, np.insert(ids, np.repeat(behind, counts), added)


def _checkers_frames(ids: Ints) -> list[int]:
    """The places of the objects that are frames of the checker's."""
    places = np.flatnonzero(types_of(ids) == id(FrameType)).tolist()
    return [place for place in places if is_checkers(object_at(int(ids[place])))]


def _extend(objects: list[object], more: list[object], known: Places) -> None:
    """Adds those of `more` whose identity is not known and that are no frames of the checker's; empties `more`."""
    ids = identities(more)
    unwanted = sorted({*np.flatnonzero(known.find(ids) >= 0).tolist(), *_checkers_frames(ids)})
    begin = 0
    # So few that whole parts of the list lie between them.
    for place in (*unwanted, len(more)):
        objects += more[begin:place]
        begin = place + 1
    # The frame of this very call may be among them, and would keep them.
    more.clear()


def _sums(is_counted: npt.NDArray[np.bool_], sizes: Ints) -> Ints:
    """How many are counted in each of some runs that lie one behind the other, by the runs' sizes."""
    before = np.zeros(len(is_counted) + 1, np.int32)
    np.cumsum(is_counted, out=before[1:])
    return np.diff(before[np.cumsum(sizes)], prepend=0).astype(np.int64)
