"""What a kept heap is asked: which way leads to an object, who holds a type, what holds how much alone."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy.typing as npt

from lowtide.probes.heap.dominators import NONE, dominators
from lowtide.probes.heap.edge_labels import ENTRIES, FIRST_ITEM, HIDDEN, THREADS, UNKNOWN
from lowtide.probes.heap.forward_search import BLOCKED, ROOT, UNSEEN, ForwardSearch
from lowtide.probes.heap.heap_copy import BLOCKED as CHECKERS
from lowtide.probes.heap.heap_copy import FROZEN, LEFT, NEWBORN, PASSED_OVER, STORAGE
from lowtide.probes.heap.roots import LATER
from lowtide.probes.objects.address_table import Indices, Ints
from lowtide.probes.original_numpy import np
from lowtide.reports.heap.kept_heap import KeptHeap
from lowtide.reports.reading.json_files import plain
from lowtide.reports.schema import Hop


class AskedError(ValueError):
    """A question that has no answer in this heap; the message says what can be asked."""


class TypeRow(msgspec.Struct, frozen=True):
    """The objects of one type.

    Attributes:
        type: its name.
        count: how many there are.
        bytes: of the objects alone; of storages, those of the memory.
        retained: what would be free without all of them, the memory of tensors included.
        newborn: how many were born in the test.
        left: how many of them a finding is about.
    """

    type: str
    count: int
    bytes: int
    retained: int
    newborn: int
    left: int


class HeldAlone(msgspec.Struct, frozen=True):
    """An object with what it alone holds.

    Attributes:
        id: its number in the file.
        type: its type.
        bytes: of the object alone.
        retained: what would be free without it, the memory of tensors included.
        objects: how many objects that are, itself included.
        path: how the program comes to it.
    """

    id: int
    type: str
    bytes: int
    retained: int
    objects: int
    path: str


class HolderRow(msgspec.Struct, frozen=True):
    """How often objects of one type hold an asked one by one edge, items by any place: `.model`, `[…]`."""

    holder: str
    edge: str
    count: int
    example: int


_CLOSE = (".", "[", "{")
"""How edges begin that stand right behind what has them."""


class FoundPath(msgspec.Struct, frozen=True):
    """A shortest path from a root, as a finding has it; none where no root leads there.

    Attributes:
        id: the object's number in the file.
        type: its type.
        hops: the root, then each edge.
        ids: the objects that the edges behind the root lead to.
    """

    id: int
    type: str
    hops: tuple[Hop, ...]
    ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """The path in one line, as a finding's holder: `helper.CACHE['a'][0]`."""
        root, *edges = self.hops or (Hop(type="", edge="nothing that Python knows"),)
        name = f"{root.type} {root.edge}" if root.type in ("frame", "thread", "context") else root.edge
        return "".join([name, *(hop.edge if hop.edge[:1] in _CLOSE else f" {hop.edge}" for hop in edges)])


class Overview(msgspec.Struct, frozen=True):
    """What there is in all.

    Attributes:
        subject: after which test, block or life it was kept.
        version: of the lowtide that has kept it.
        python: of the process.
        time: when that was, in seconds since 1970.
        objects: how many.
        references: how many.
        bytes: of the objects alone.
        devices: bytes of memory under tensors by device.
        unreached: objects to which no root leads: C or C++ holds them, or the checker does, or they are garbage.
        frozen: objects that `gc.freeze()` hides.
        types: those that retain most.
        more_types: how many there are beside them.
        dominators: the objects that retain most and that nothing else retains.
        left: what findings are about, the largest first.
        more_left: how many there are beside them.
    """

    subject: str
    version: str
    python: str
    time: float
    objects: int
    references: int
    bytes: int
    devices: dict[str, int]
    unreached: int
    frozen: int
    types: tuple[TypeRow, ...]
    more_types: int
    dominators: tuple[HeldAlone, ...]
    left: tuple[HeldAlone, ...]
    more_left: int


class AskedHeap:
    """Answers questions to one kept heap; what takes long is worked out once.

    Args:
        kept: the heap.
    """

    def __init__(self, kept: KeptHeap) -> None:
        self._meta, self._heap = kept.meta, kept.heap
        heap = kept.heap
        self._offsets: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(heap.counts, dtype=np.int64)])
        self._is_storage = np.array([name.startswith(STORAGE) for name in heap.types], np.bool_)[heap.kinds]
        self._having = {flag: (heap.flags & flag) != 0 for flag in (NEWBORN, LEFT, PASSED_OVER, CHECKERS, FROZEN)}
        self._is_checkers = self._having[CHECKERS]
        self._types = [plain(name) for name in heap.types]
        self._roots = {node: (kind, name, thread) for node, kind, name, thread in heap.roots}
        self._sources: Ints = np.repeat(np.arange(len(heap.counts)), heap.counts)

    def overview(self, top: int = 10) -> Overview:
        """Return what there is in all, with so many rows of each table."""
        heap = self._heap
        types = self._type_rows()
        devices = {
            name.removeprefix(STORAGE): int(heap.sizes[heap.kinds == place].sum())
            for place, name in enumerate(heap.types)
            if name.startswith(STORAGE)
        }
        # Of what retains something itself only what nothing but the roots retains.
        first = np.flatnonzero((self._immediate == 0) & ~self._is_storage)
        outer = self._largest(first, top)
        left = self._largest(np.flatnonzero(self._having[LEFT]), len(heap.kinds))
        return Overview(
            subject=self._meta.subject,
            version=self._meta.version,
            python=self._meta.python,
            time=self._meta.time,
            objects=int((~self._is_storage).sum()),
            references=len(heap.edges),
            bytes=int(heap.sizes[~self._is_storage].sum()),
            devices=devices,
            unreached=int(((self._immediate == NONE) & ~self._is_checkers).sum()),
            frozen=int(self._having[FROZEN].sum()),
            types=tuple(types[:top]),
            more_types=max(0, len(types) - top),
            dominators=self._held_alone(outer),
            left=self._held_alone(left[:top]),
            more_left=max(0, len(left) - top),
        )

    def find(self, asked: str) -> Ints:
        """Return the objects that are asked for, those first that findings are about, then newborn and large ones.

        Args:
            asked: a number as this heap has it, or a type by its name, with its module or without.

        Raises:
            AskedError: there is none.
        """
        heap = self._heap
        if asked.isdecimal():
            if len(asked) > 12 or int(asked) >= len(heap.kinds):
                raise AskedError(
                    f"there is no object {plain(asked)}: they are numbered from 0 to {len(heap.kinds) - 1}"
                )
            return np.array([int(asked)], np.int64)
        exact = [place for place, name in enumerate(heap.types) if name == asked]
        last = [place for place, name in enumerate(heap.types) if name.rpartition(".")[2] == asked]
        found = np.flatnonzero(np.isin(heap.kinds, exact or last))
        if not len(found):
            raise AskedError(
                f"there is no object of type {plain(asked)}: `lowtide heap FILE` lists types, and objects by number"
            )
        rank = self._having[LEFT][found] * 2 + self._having[NEWBORN][found]
        return found[np.lexsort((-heap.sizes[found], -rank))]

    def path(self, node: int) -> FoundPath:
        """Return a shortest path to an object, by the rules by which a finding's is chosen."""
        ways = self._ways([node])[0]
        kind = self._types[int(self._heap.kinds[node])]
        if not ways:
            return FoundPath(node, kind, (), ())
        root, name, thread = self._roots[ways[0]]
        hops = [Hop(type=root, edge=f"{name} (thread {thread})" if thread and root == "frame" else name)]
        ids = []
        newborn, is_new, is_marked = self._having[NEWBORN], False, False
        at = 0
        labels = [self._label(holder, held) for holder, held in itertools.pairwise(ways)]
        while at < len(labels):
            edge, count = self._folded(ways, labels, at)
            at += count
            to = ways[at]
            # The first edge to what was not there before is what may have to be cut. (A dict seems to be born when its
            # first entry comes.)
            is_new = bool(newborn[to]) and (is_new or self._heap.types[int(self._heap.kinds[to])] != "dict")
            is_first, is_marked = is_new and not is_marked, is_marked or is_new
            hops.append(Hop(type=self._types[int(self._heap.kinds[to])], edge=edge, suspect=is_first))
            ids.append(to)
        return FoundPath(node, kind, tuple(hops), tuple(ids))

    def holders(self, asked: str) -> list[HolderRow]:
        """Return who holds the objects that are asked for, those first who hold most.

        Raises:
            AskedError: there is none.
        """
        wanted = np.zeros(len(self._heap.kinds), np.bool_)
        wanted[self.find(asked)] = True
        places = np.flatnonzero(wanted[self._heap.edges] & ~self._is_checkers[self._sources])
        holders, labels = self._sources[places], self._heap.labels[places]
        # Who holds an object by an attribute is who has the attributes.
        owners, own = self._owners(holders)
        labels = np.where(labels <= FIRST_ITEM, UNKNOWN, labels)
        rows: dict[tuple[str, str], list[int]] = {}
        keys = np.stack([self._heap.kinds[owners], own, labels])
        unique, first, counts = np.unique(keys, axis=1, return_index=True, return_counts=True)
        for (kind, through, label), place, count in zip(
            unique.T.tolist(), first.tolist(), counts.tolist(), strict=True
        ):
            texts = [self._text(through), self._text(label)] if through >= 0 else [self._text(label)]
            edge, used = _fold(texts, is_module=kind in self._heap.registries)
            edge = edge if used == len(texts) else "".join(texts)
            row = rows.setdefault((self._types[kind], edge), [0, int(owners[place])])
            row[0] += count
        found = [HolderRow(holder, edge, count, example) for (holder, edge), (count, example) in rows.items()]
        return sorted(found, key=lambda row: (-row.count, row.holder, row.edge))

    def dominated(self, node: int | None, top: int = 10) -> tuple[HeldAlone, ...]:
        """Return what an object holds alone, the largest first; of None what the whole heap consists of.

        Args:
            node: the object.
            top: how many.
        """
        under = np.flatnonzero(self._immediate == (0 if node is None else node + 1))
        return self._held_alone(self._largest(under, top))

    def alone(self, node: int) -> HeldAlone:
        """Return what one object holds alone."""
        return self._held_alone(np.array([node], np.int64))[0]

    def _largest(self, nodes: Ints, top: int) -> Ints:
        order = np.lexsort((nodes, -self._retained[nodes]))
        return nodes[order[:top]]

    def _held_alone(self, nodes: Ints) -> tuple[HeldAlone, ...]:
        heap = self._heap
        return tuple(
            HeldAlone(
                node,
                self._types[int(heap.kinds[node])],
                int(heap.sizes[node]),
                int(self._retained[node]),
                int(self._objects[node]),
                self.path(node).text,
            )
            for node in nodes.tolist()
        )

    # The shortest paths.

    def _ways(self, nodes: Sequence[int]) -> list[list[int]]:
        """Return the nodes from a root to each of some; none where no root leads there."""
        ways = []
        for node in nodes:
            way = self._way(node, [CHECKERS | PASSED_OVER] if node not in self._passed_over else [CHECKERS])
            ways.append(way or self._way(node, [CHECKERS]))
        return ways

    @cached_property
    def _passed_over(self) -> frozenset[int]:
        return frozenset(np.flatnonzero(self._having[PASSED_OVER]).tolist())

    def _way(self, node: int, blocking: Sequence[int]) -> list[int]:
        parents = self._parents(node, blocking[0])
        if parents[node] in (UNSEEN, BLOCKED):
            return []
        way = [node]
        while parents[way[-1]] != ROOT:
            way.append(int(parents[way[-1]]))
        return way[::-1]

    def _parents(self, node: int, blocking: int) -> Indices:
        """Return the node before each on a shortest path, as far as the search has come for one of them."""
        known = self._searches.get(blocking)
        if known is not None and known[node] != UNSEEN:
            return known
        heap = self._heap
        parents = np.full(len(heap.kinds), UNSEEN, np.int32)
        roots = np.array([root[0] for root in heap.roots], np.int32)
        parents[roots] = ROOT
        parents[(heap.flags & blocking) != 0] = BLOCKED
        parents[heap.namespaces] = heap.modules
        scratch = np.zeros(len(heap.kinds), np.int32)
        search = ForwardSearch(self._offsets, heap.edges, np.minimum(heap.turns, LATER + 1), scratch)
        search.search(parents, np.concatenate([roots, heap.namespaces]), np.array([node], np.int32))
        self._searches[blocking] = parents
        return parents

    @cached_property
    def _searches(self) -> dict[int, Indices]:
        return {}

    def _label(self, holder: int, held: int) -> str:
        start, stop = int(self._offsets[holder]), int(self._offsets[holder + 1])
        place = start + int(np.flatnonzero(self._heap.edges[start:stop] == held)[0])
        label = int(self._heap.labels[place])
        return f"[{FIRST_ITEM - label}]" if label <= FIRST_ITEM else self._text(label)

    def _text(self, label: int) -> str:
        return plain(self._heap.texts[label]) if label >= 0 else "[…]"

    def _folded(self, way: Sequence[int], labels: Sequence[str], at: int) -> tuple[str, int]:
        """Return what the next edge of a path is called, and how many references it folds together."""
        is_module = int(self._heap.kinds[way[at]]) in self._heap.registries
        return _fold(labels[at : at + 3], is_module=is_module)

    def _owners(self, holders: Ints) -> tuple[Ints, Ints]:
        """Return whose attributes' dicts some are, and the label by which these have them; else themselves, and -2."""
        texts = self._heap.texts
        wanted = [place for place, text in enumerate(texts) if text == ".__dict__"]
        places = np.flatnonzero(np.isin(self._heap.labels, wanted))
        owner = np.full(len(self._heap.kinds), NONE, np.int64)
        owner[self._heap.edges[places[::-1]]] = self._sources[places[::-1]]
        found = owner[holders]
        has_owner = found != NONE
        return np.where(has_owner, found, holders), np.where(has_owner, wanted[0] if wanted else -2, -2)

    # What holds what alone.

    @cached_property
    def _tree(self) -> tuple[Indices, Ints]:
        """The immediate dominator of each node, all by numbers one higher than theirs: 0 is what all roots hang on."""
        heap = self._heap
        roots = np.array([root[0] for root in heap.roots], np.int64)
        allowed = ~self._is_checkers[self._sources] & ~self._is_checkers[heap.edges]
        counts = np.bincount(self._sources[allowed], minlength=len(heap.kinds))
        offsets = np.cumsum(np.concatenate([[0, len(roots)], counts]))
        return dominators(offsets, np.concatenate([roots + 1, heap.edges[allowed].astype(np.int64) + 1]))

    @cached_property
    def _immediate(self) -> Indices:
        return self._tree[0][1:]

    @cached_property
    def _retained(self) -> Ints:
        """Bytes that would be free without each node; the bytes of what no root leads to are its own."""
        return self._summed(self._heap.sizes)

    @cached_property
    def _objects(self) -> Ints:
        return self._summed(np.where(self._is_storage, 0, 1))

    def _summed(self, numbers: Ints) -> Ints:
        """Return for each node the sum over all that it dominates, itself included."""
        immediate, order = self._tree
        sums, above = [0, *numbers.tolist()], immediate.tolist()
        # What is dominated comes behind what dominates it.
        for node in order[:0:-1].tolist():
            sums[above[node]] += sums[node]
        return np.array(sums[1:], np.int64)

    def _type_rows(self) -> list[TypeRow]:
        """Return all types, those first that retain most."""
        heap = self._heap
        count = len(heap.types)

        def by_type(numbers: Ints) -> list[int]:
            return np.bincount(heap.kinds, numbers, minlength=count).astype(np.int64).tolist()  # type: ignore[no-any-return]

        retained = by_type(np.where(self._is_outermost, self._retained, 0))
        columns = (
            by_type(np.ones(len(heap.kinds), np.int64)),
            by_type(heap.sizes),
            retained,
            by_type(self._having[NEWBORN].astype(np.int64)),
            by_type(self._having[LEFT].astype(np.int64)),
        )
        rows = [TypeRow(name, *row) for name, *row in zip(self._types, *columns, strict=True) if row[0]]
        return sorted(rows, key=lambda row: (-row.retained, row.type))

    @cached_property
    def _is_outermost(self) -> npt.NDArray[np.bool_]:
        """Whether none of a node's dominators is of its type: what it retains, none of these does."""
        immediate, order = self._tree
        # Each node's place in a walk through the tree, and where those that it dominates end there.
        sizes = self._summed(np.ones(len(self._heap.kinds), np.int64)).tolist()
        above, begins, free = immediate.tolist(), [0] * len(immediate), [1] * len(immediate)
        for node in order[1:].tolist():
            begin = free[above[node]]
            free[above[node]] += sizes[node - 1]
            begins[node], free[node] = begin, begin + 1
        begun = np.array(begins[1:], np.int64)
        ends = begun + np.array(sizes, np.int64)
        # Type by type in that order: it lies in an earlier one of its type if that ends behind it.
        room = int(ends.max(initial=0)) + 1
        by_type = np.lexsort((begun, self._heap.kinds))
        shift = self._heap.kinds[by_type].astype(np.int64) * room
        latest = np.maximum.accumulate(np.concatenate([[0], ends[by_type] + shift]))[:-1]
        outermost = np.ones(len(begun), np.bool_)
        outermost[by_type] = begun[by_type] + shift >= latest
        # What no root leads to is in no tree.
        outermost |= self._immediate == NONE
        return outermost


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_ITEM = re.compile(r"\['(.*)'\]", re.DOTALL)


def _fold(labels: Sequence[str], *, is_module: bool) -> tuple[str, int]:
    """Return what the first of some edges is called, past the objects that only carry what lies behind them."""
    first, then = labels[0], labels[1] if len(labels) > 1 else ""
    name = _name_in(then)
    if is_module and first == ".__dict__" and name in _REGISTRIES and len(labels) > 2:
        return _registered(name, labels[2]), 3
    if is_module and first.removeprefix(".") in _REGISTRIES and then:
        return _registered(first.removeprefix("."), then), 2
    if first == ".__dict__" and then:
        return (f".{name}" if name else f".__dict__{then}"), 2
    if first in (".gi_frame", ".cr_frame", ".ag_frame") and then.startswith("f_locals["):
        return then, 2  # Python 3.10
    if first == HIDDEN and then:
        return f".__dict__{then}", 2
    if first == THREADS and len(labels) > 2:
        return f".{_name_in(labels[2]) or labels[2]}", 3
    if first == ".__closure__" and then:
        return then, min(3, len(labels))
    if first == ENTRIES and then:
        return then, 2
    if first in ("__globals__", "f_globals", ".__defaults__", ".__kwdefaults__") and then:
        return f"{first}{then}", 2
    return first, 1


def _name_in(label: str) -> str:
    """Return the name that an entry has which can stand behind a dot; empty for another one."""
    found = _ITEM.fullmatch(label)
    name = found[1] if found is not None else ""
    return name if name.isidentifier() and not keyword.iskeyword(name) else ""


def _registered(registry: str, entry: str) -> str:
    """Return what a `torch.nn.Module` has registered, as code."""
    found = _ITEM.fullmatch(entry)
    if found is not None and found[1].isdecimal():
        return f"[{found[1]}]"
    name = _name_in(entry)
    return f".{name}" if name else f".{registry}{entry}"
