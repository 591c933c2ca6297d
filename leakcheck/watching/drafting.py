"""Drafts a subject's findings from the readings of a climb: what, since which stage, from where, held by whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lowtide.leakcheck.findings.empty_pools import with_pool_holders
from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import (
    UNFROZEN,
    ItemLeak,
    frozen_items,
    with_changes,
    with_fingerprint,
)
from lowtide.leakcheck.findings.owner_growth import merged
from lowtide.leakcheck.findings.remedies import StorageWatch
from lowtide.leakcheck.findings.storage_holders import Context, Explained
from lowtide.leakcheck.findings.tensor_findings import TensorLeak, frames, tensor_leaks, with_free_beside, with_stage
from lowtide.leakcheck.judging.filled_caches import FilledCaches
from lowtide.leakcheck.judging.judge import FROZEN, judge, listed
from lowtide.leakcheck.judging.ladder import LadderStep
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON, Metric, Reading, may_be_of_libraries
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.records import Ownership, Subject
from lowtide.leakcheck.resources.first_use import Sorted
from lowtide.leakcheck.resources.settings import EnvironmentSetters
from lowtide.leakcheck.watching.deep_reading import Deep, devices_of
from lowtide.leakcheck.watching.remedy_trials import Draft
from lowtide.leakcheck.watching.verdict import Thing
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.host.counters import Counters
from lowtide.reports.schema import Finding, Frame
from lowtide.reports.statement import noted


class Drafting:
    """Drafts the findings of one watch.

    Args:
        read: reads the counters.
        ownership: who owns what.
        caches: the filled caches.
        stacks: from where memory was allocated.
        environment: who set environment variables.
    """

    def __init__(
        self,
        read: Callable[[], Counters],
        ownership: Ownership,
        caches: FilledCaches,
        stacks: AllocationStacks,
        environment: EnvironmentSetters,
    ) -> None:
        self._read = read
        self._ownership = ownership
        self._caches = caches
        self._stacks = stacks
        self._environment = environment

    def findings(
        self,
        subject: Subject,
        turn: int,
        *,
        ended: Sequence[Owner],
        metrics: Sequence[Metric[Reading]],
        steps: Sequence[LadderStep[Deep]],
        stage: str,
        explained: Explained,
        context: Context,
        distinguished: Sorted | None,
        module: str,
    ) -> list[Draft]:
        """What one subject has left, as findings and as leaks for which remedies are still to be tried."""
        own = [LadderStep(step.rung, step.reading.readings[turn], step.seconds) for step in steps]
        context = replace(context, module=(subject.where if subject is not None else "") or module)
        found: list[Draft] = []
        judged = judge(metrics, Reading(), own, stage=stage, cycle=1)
        for finding, key in zip(judged.findings, judged.keys, strict=True):
            if finding.resource == "tensors" and finding.verdict not in NOT_OF_PYTHON and finding.bytes:
                held = [
                    [
                        storage
                        for storage in step.reading.heap.held
                        if storage.owner is subject and storage.key[0] == finding.device
                    ]
                    for step in steps
                ]
                found += tensor_leaks(held, [step.rung for step in steps], explained, context)
            else:
                names = frozen_items() if key == FROZEN else own[0].reading.items.get(key, {})
                if finding.resource == "reserved" and finding.remedy is None:
                    # Emptying the cache gave back the segments of pools that nobody holds any more.
                    names = own[-1].reading.items.get(key, names)
                filled = [self._caches.stage_of(name) for name in names]
                since = next(filter(None, filled), "") or self._ownership.since(_level_of(key, finding.device), names)
                dated = with_stage(finding, subject.stage if subject is not None else since or stage)
                stack = self._stack_of(finding.device, key, names)
                changed = (UNFROZEN,) if key == FROZEN and finding.remedy is not None else ()
                more = "" if distinguished is None else distinguished.addition(key, names)
                dated = noted(dated, more) if more else dated
                dated = msgspec.structs.replace(dated, holder=listed(key, names), allocated_at=stack, changed=changed)
                leak = ItemLeak(dated, key, names, turn, cached=self._caches.of(names))
                if key == "globals":
                    leak = with_changes(
                        leak, self._ownership.left(self._read(), subject, ended), self._environment.place_of
                    )
                named = [
                    with_array_holder(with_fingerprint(part, context.module), context)
                    for part in with_pool_holders(leak, context)
                ]
                found += [
                    part
                    for part in named
                    if part.explanation is not None
                    # By the devices of now: a card's first use is what takes most.
                    or not may_be_of_libraries(part.finding, devices_of(self._read()))
                ]
        return found

    def _stack_of(self, device: str, key: str, names: Mapping[str, int]) -> tuple[Frame, ...]:
        """Where the largest of some blocks was allocated."""
        if not names or not key.startswith(("native ", "workspaces ")):
            return ()
        largest = int(max(names, key=lambda name: names[name]).rpartition(" ")[2], 16)
        return frames(self._stacks.stacks_at(device, [largest]).get(largest, ()))


def things_of(draft: Draft) -> frozenset[Thing]:
    """What a draft is about."""
    if isinstance(draft, TensorLeak):
        return frozenset(("storage", device, address) for device, address in draft.keys)
    if isinstance(draft, ItemLeak):
        # A level is one thing, and has no names.
        names = () if draft.key == FROZEN else draft.names
        return frozenset(("item", draft.key, name) for name in names or ("",))
    return frozenset()


def watches_of(drafts: Sequence[Sequence[Draft]], walk: SharedWalk) -> dict[int, StorageWatch]:
    """For each leak of tensors, by the identity of its sizes, what reports which of its storages are freed."""
    leaks = [draft for drafted in drafts for draft in drafted if isinstance(draft, TensorLeak)]
    sizes = [leak.sizes for leak in leaks]
    return dict(zip(map(id, sizes), StorageWatch.of_each(sizes, walk), strict=True))


def with_free_memory_beside(drafts: Sequence[Draft]) -> list[Draft]:
    """Drafts with what is free in the segments beside leaked tensors."""
    leaks = [draft for draft in drafts if isinstance(draft, TensorLeak)]
    with_free = iter(with_free_beside(leaks))
    return [next(with_free) if isinstance(draft, TensorLeak) else draft for draft in drafts]


def with_growth(draft: Draft, grown: Sequence[Finding]) -> Draft:
    """A draft of an owner, with what has grown under it test after test."""
    if isinstance(draft, Finding):
        return merged(draft, grown)
    return replace(draft, finding=merged(draft.finding, grown))


def _level_of(key: str, device: str) -> str:
    """The key of the level that shows since when something on a card is there."""
    return f"driver {device}" if key == f"allocations {device}" or key == f"unlisted {device}" else key
