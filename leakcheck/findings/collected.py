"""What came back only because the checker collected: tensors in cycles of references, and what these run through.

Python's collector counts objects, not bytes: a few objects in cycles keep gigabytes until many others were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.leakcheck.findings.remedies import StorageWatch
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.judging.storages import Key
from lowtide.probes.heap.cycles import CycleEdge, cycle_behind
from lowtide.probes.memory.tensors import keys_of_each, survey_storages
from lowtide.probes.objects.listed import Census
from lowtide.reports.schema import Finding, Remedy
from lowtide.reports.sizes import first_of, format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement

_MOST_TRACED = 3
"""Storages, the largest ones, whose cycles are looked for."""

_SHOWN_EDGES = 3


@dataclass(frozen=True)
class Collected:
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
    let_go: set[Key] = field(default_factory=set)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """In the block something is let go: what goes there was in no cycle."""
        before = self.watch.gone()
        yield
        self.let_go.update(self.watch.gone() - before)

    @classmethod
    def before(cls, tensors: Sequence[Any], least: int = COLLECTED, ignore: Collection[int] = ()) -> Collected | None:
        """Read some tensors that are there still, before anything is collected; None where they are less than `least`.

        Args:
            tensors: they may be kept, or be garbage.
            least: bytes.
            ignore: the identities of what the caller holds them in.
        """
        survey = survey_storages(Census(list(tensors))) if tensors else None
        sizes = {} if survey is None else {(each.device, each.address): each.bytes for each in survey.storages}
        if sum(sizes.values()) < least:
            return None
        largest = set(sorted(sizes, key=lambda key: -sizes[key])[:_MOST_TRACED])
        cycles: dict[Key, Sequence[CycleEdge]] = {}
        for turn, keys in enumerate(keys_of_each(tensors)):
            for key in keys & largest:
                largest.remove(key)
                cycles[key] = cycle_behind(tensors[turn], {*ignore, id(tensors)})
        return cls(sizes, StorageWatch(sizes, tensors), cycles)

    def finding(self, stage: str, *, came: str = "") -> Finding | None:
        """Return what is said of those that are gone since; None where none is.

        Args:
            stage: since when they were there.
            came: when they came back, beside that it was when the collector ran.
        """
        gone = self.watch.gone() - self.let_go
        size = sum(self.sizes[key] for key in gone)
        if not size:
            return None
        edges = [edge for key in self.cycles if key in gone for edge in self.cycles[key]]
        named = [edge.text for edge in edges if edge.is_attribute] or [edge.text for edge in edges]
        through = first_of(list(dict.fromkeys(named)), _SHOWN_EDGES)
        device = next(iter(gone))[0]
        return StatedFinding(
            resource="tensors",
            cause="cycle",
            bytes=size,
            count=len(gone),
            device=device,
            stage=stage,
            statement=Statement(
                amount=f"{format_bytes(size)} on {device} came back only when the collector ran{came}",
                came=None,
                notes=(Note(", in a cycle through ", through),) if through else (),
            ),
            fingerprint=fingerprint(
                resource="tensors", device=device, stage=stage, suspects=("only collected", *sorted(set(named)))
            ),
            holder=through or None,
            remedy=Remedy(action="gc.collect()", returns_bytes=size),
            advice=f"break the cycle where its owner ends: set {named[0]} to None" if named else None,
        )
