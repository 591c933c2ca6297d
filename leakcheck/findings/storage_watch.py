"""Tells which storages are gone, and which of them came back only because the checker collected.

Python's collector counts objects, not bytes: a few objects in cycles of references keep gigabytes until many others
were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.judging.storages import Key, live_keys, tensors_over
from lowtide.probes.heap.cycles import CycleEdge, cycles_behind
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.memory_parts import malloc_in_use
from lowtide.probes.memory.tensors import keys_of_each, plain_tensors, survey_storages, torch_member
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.objects.listed import Census
from lowtide.probes.originals import gc, loaded
from lowtide.reports.schema import Finding, Remedy, ResourceName
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import Note, Statement

_MOST_TRACED = 3
"""Storages, the largest ones, whose cycles are looked for."""

_MOST_BUFFERS = 16
"""Large objects of which it is asked whether they hang on a cycle, of those with at least so many bytes."""

_LEAST_TRACED = 64 << 10

_SHOWN_EDGES = 3


class StorageWatch:
    """Tells whether storages are gone, by weak references to the storages themselves (not to tensors).

    So a storage that only C++ still holds counts as held.  Of a kind without such a reference (sparse tensors, say) the
    tensors that Python knows of decide.

    Args:
        keys: the storages.
        over: the tensors and storage objects over these and maybe others; default: they are looked for.
        references: weak references to these storages and maybe others, where they have been made.
    """

    def __init__(
        self,
        keys: Collection[Key],
        over: Sequence[Any] | None = None,
        references: Mapping[Key, list[Any]] | None = None,
    ) -> None:
        if references is None:
            references = _references(tensors_over(keys) if over is None else over) if keys and loaded("torch") else {}
        self._references = {key: references[key] for key in keys if key in references}
        self._others = set(keys) - references.keys()
        self._gone: set[Key] = set()

    @classmethod
    def of_each(cls, keys: Sequence[Collection[Key]], walk: SharedWalk | None = None) -> list[StorageWatch]:
        """Return a watch for each of some groups of storages, which are looked for together."""
        wanted = {key for group in keys for key in group}
        found = _references(tensors_over(wanted, walk)) if wanted and loaded("torch") else {}
        return [cls(group, references=found) for group in keys]

    @property
    def all_gone(self) -> bool:
        """Return whether none is left; False of a kind without such references, of which that is not known."""
        waiting = next(iter(self._references.values()), ())
        if self._others or not all(ref.expired() for ref in waiting):
            return False
        return bool(self.gone()) and not self._references

    def gone(self) -> set[Key]:
        """Return those that are gone."""
        gone = [key for key, refs in self._references.items() if all(ref.expired() for ref in refs)]
        # What has gone does not come back, and is not asked about again.
        for key in gone:
            del self._references[key]
        self._gone.update(gone)
        return self._gone | (self._others - live_keys() if self._others else set())


def _references(items: Sequence[Any]) -> dict[Key, list[Any]]:
    """Return weak references to each storage, one for each of some tensors and storage objects over it."""
    torch: Any = loaded("torch")
    from torch.multiprocessing import reductions

    found: dict[Key, list[Any]] = {}
    reference: Any = reductions.StorageWeakRef
    # Not asked of the storages themselves: that of a compiler's stand-in answers with a warning.
    keys = keys_of_each(items)
    with plain_tensors(torch):
        for item, own in zip(items, keys, strict=True):
            if len(own) != 1:
                continue
            try:
                storage = torch_member(item, "untyped_storage")() if is_a(item, torch.Tensor) else item
                found.setdefault(next(iter(own)), []).append(reference(storage))
            except RuntimeError:  # an opaque layout: there is no storage to watch
                continue
    return found


class Collected(msgspec.Struct, frozen=True):
    """Storages as they were before a collection.

    Attributes:
        sizes: bytes of each.
        watch: reports which of them are freed.
        cycles: of the largest, the cycle that each hangs on.
        let_go: those that went in `released`.
    """

    sizes: Mapping[Key, int]
    watch: StorageWatch
    cycles: Mapping[Key, Sequence[CycleEdge]]
    let_go: set[Key] = msgspec.field(default_factory=set)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Take what goes in the block, where something is let go, for what was in no cycle."""
        before = self.watch.gone()
        yield
        self.let_go.update(self.watch.gone() - before)

    @classmethod
    def before(cls, tensors: Sequence[Any], least: int = COLLECTED) -> Collected | None:
        """Read some tensors that may be kept, or be garbage, before anything is collected.

        None where they have less than `least` bytes.
        """
        sizes = survey_storages(Census(list(tensors))).sizes if tensors else {}
        if sum(sizes.values()) < least:
            return None
        largest = set(sorted(sizes, key=lambda key: -sizes[key])[:_MOST_TRACED])
        traced = {
            key: tensor for tensor, keys in zip(tensors, keys_of_each(tensors), strict=True) for key in keys & largest
        }
        cycles = cycles_behind([*traced.values()], {id(tensors), id(traced)})
        return cls(sizes, StorageWatch(sizes, tensors), dict(zip(traced, cycles, strict=True)))

    def finding(self, stage: str, *, came: str = "") -> Finding | None:
        """Return what is said of those that are gone since, and that were there since a stage; None where none is.

        When they came back is `came`, beside that it was when the collector ran.
        """
        gone = self.watch.gone() - self.let_go
        size = sum(self.sizes[key] for key in gone)
        if not size:
            return None
        edges = [edge for key in self.cycles if key in gone for edge in self.cycles[key]]
        device = next(iter(gone))[0]
        return _collected("tensors", f"{format_bytes(size)} on {device}", size, len(gone), device, stage, came, edges)


class HostGarbage:
    """Looks for host memory that only the collector frees, while malloc gives out more and more.

    What a request and its data keep that refer to each other is no leak to a collector, which counts objects; a server
    grows by it until it has no memory (sglang-omni#1174).

    Args:
        turns: after what it is looked for, in the plural.
        least: bytes of it that are told.

    Attributes:
        found: what is said of it, once there was as much.
    """

    def __init__(self, turns: str, least: int = COLLECTED) -> None:
        self.found: Finding | None = None
        self._turns, self._least, self._rise = turns, least, least
        self._level: int | None = None

    def look(self, turn: int) -> None:
        """Collect after a turn, where there is so much more than at the last look that it may be garbage."""
        now = malloc_in_use()
        self._level = now if self._level is None else min(self._level, now)
        if self.found is not None or now - self._level < self._rise:
            return
        self.found = collected_host_memory(self._turns, self._least, came=f" after {turn} {self._turns}")
        # What stays is none: it is looked for again where as much has come as twice this time.
        self._level, self._rise = malloc_in_use(), 2 * self._rise


def collected_host_memory(stage: str, least: int = COLLECTED, *, came: str = "") -> Finding | None:
    """Collect, and return what is said of the host memory that this has freed; None where it is less than `least`.

    Counted is what malloc has given out, which is nothing to ask where it is not glibc's.

    Args:
        stage: since when it was there.
        least: bytes.
        came: when it was back, beside that the collector ran.
    """
    # numpy, which only who has arrays or a card needs.
    from lowtide.probes.memory.buffers import large_buffers

    largest = sorted(large_buffers(_LEAST_TRACED), key=lambda buffer: -buffer.bytes)[:_MOST_BUFFERS]
    items, ids = [buffer.item for buffer in largest], [id(buffer.item) for buffer in largest]
    cycles = cycles_behind(items, {id(items), *map(id, largest)})
    largest.clear()
    items.clear()
    # Only now: to look takes memory itself.
    before = malloc_in_use()
    gc.collect()
    size = before - malloc_in_use()
    if size < least:
        return None
    alive = {id(buffer.item) for buffer in large_buffers(_LEAST_TRACED)}
    gone = [cycle for mark, cycle in zip(ids, cycles, strict=True) if cycle and mark not in alive]
    edges = [edge for cycle in gone for edge in cycle]
    said = f"{format_bytes(size)} of host memory"
    return _collected("host-memory", said, size, max(1, len(gone)), "", stage, came, edges)


def _collected(
    resource: ResourceName, said: str, size: int, count: int, device: str, stage: str, came: str, edges: list[CycleEdge]
) -> Finding:
    """Return the finding on what came back when the collector ran, as it is `said`, with the edges of its cycles."""
    named = [edge.text for edge in edges if edge.is_attribute] or [edge.text for edge in edges]
    through = first_of(list(dict.fromkeys(named)), _SHOWN_EDGES)
    return finding_of(
        resource,
        cause="cycle",
        bytes=size,
        count=count,
        device=device,
        stage=stage,
        suspects=("only collected", *sorted(set(named))),
        statement=Statement(
            amount=f"{said} came back only when the collector ran{came}",
            came=None,
            notes=(Note(", in a cycle through ", through),) if through else (),
        ),
        holder=through or None,
        remedy=Remedy(action="gc.collect()", returns_bytes=size),
        advice=f"break the cycle in teardown: set {named[0]} to None" if named else None,
    )
