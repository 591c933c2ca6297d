"""Tries what gives a test's leaks back: with the verdict, or when nothing of the program runs any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Union

from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies, defer, try_deferred
from lowtide.leakcheck.findings.item_findings import HARMLESS, ItemLeak, confirmed_workspaces, is_harmless
from lowtide.leakcheck.findings.item_remedies import actions_for, try_actions
from lowtide.leakcheck.findings.remedies import StorageWatch, prove
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.judging.device_memory import IDLE_POOL, MEMORY_POOL, DeviceMemory
from lowtide.leakcheck.judging.judge import REMEDIES_SHARE, Budget
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.judging.storages import live_keys
from lowtide.leakcheck.resources.first_use import FirstUse
from lowtide.leakcheck.watching.deep_reading import Deep, devices_of
from lowtide.leakcheck.watching.verdict import Policy
from lowtide.probes.host.counters import Counters
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from lowtide.reports.schema import Finding

Draft = Union[Finding, TensorLeak, ItemLeak]  # noqa: UP007 - evaluated
"""A finding, or one for which remedies are still to be tried."""

_MOST_CLEARINGS = 5
"""How often a process's BLAS workspaces are cleared to find them: the next test allocates them again."""

_OF_BLOCKS = ("native ", "workspaces ", "in-flight ")
"""The beginnings of the keys of blocks of torch's allocator in which no tensor lies."""


class RemedyTrials:
    """Tries the remedies of one watch's findings.

    Args:
        policy: how strictly it watches.
        read: reads the counters.
        ownership: who owns what.
        device_memory: what is on the cards besides tensors.
        first_use: which libraries were used for the first time.
    """

    def __init__(
        self,
        policy: Policy,
        read: Callable[[], Counters],
        ownership: Ownership,
        device_memory: DeviceMemory,
        first_use: FirstUse,
    ) -> None:
        self._policy = policy
        self._read = read
        self._ownership = ownership
        self._device_memory = device_memory
        self._first_use = first_use
        self._workspaces_cleared = 0
        self._in_vain: set[str] = set()

    def prove(self, each: Sequence[DeferredRemedies]) -> list[dict[str, Finding]]:
        """The findings of some subjects, by their fingerprints before, with what gave each back.

        Nothing of the program may run afterwards.
        """
        budget = Budget(REMEDIES_SHARE * self._policy.budget)
        return try_deferred(each, self._left_now, self._driver_bytes, self._policy.settle, budget)

    def defer(
        self,
        drafts: list[list[Draft]],
        watches: Mapping[int, StorageWatch],
        context: Context,
        read: Callable[[], Deep],
    ) -> list[DeferredRemedies]:
        """Tries what changes nothing that the next test could need; the rest is for the end."""
        unproven = []
        for found in drafts:
            for place, draft in enumerate(found):
                if not isinstance(draft, ItemLeak):
                    continue
                found[place] = draft = self._confirmed(draft, read)
                if is_harmless(draft):
                    found[place] = self._tried_harmless(draft, context, read)
            tensors = [draft for draft in found if isinstance(draft, TensorLeak)]
            # By now the harmless ones are findings.
            items = [draft for draft in found if isinstance(draft, ItemLeak)]
            unproven.append(defer(tensors, [watches[id(draft.sizes)] for draft in tensors], items))
        return unproven

    def try_now(self, drafts: list[list[Draft]], context: Context, read: Callable[[], Deep]) -> None:
        """Replaces the drafts by findings with what gave each back: tensors first, which often hold all the rest."""
        may_unfreeze = self._may_unfreeze(drafts)
        leaks = [draft for found in drafts for draft in found if isinstance(draft, TensorLeak)]
        done = dict(zip(map(id, leaks), prove(leaks, context, may_unfreeze=may_unfreeze), strict=True))
        cuts = dict.fromkeys(
            finding.remedy.action for finding in done.values() if finding.remedy is not None and finding.tried
        )
        for found in drafts:
            for place, draft in enumerate(found):
                if isinstance(draft, TensorLeak):
                    found[place] = done[id(draft)]
        del leaks
        after = read() if cuts else None
        for found in drafts:
            for place, draft in enumerate(found):
                if not isinstance(draft, ItemLeak):
                    continue
                if after is not None:
                    left = draft.left(after.readings[draft.subject].items.get)
                    draft = draft.without(left, "; ".join(cuts))
                draft = self._confirmed(draft, read)
                actions = actions_for(draft, context.patience, may_unfreeze=may_unfreeze)
                found[place] = try_actions(draft, actions, self._left(draft, read), self._driver_bytes)

    def _left_now(self, key: str) -> Mapping[str, int] | None:
        now = self._read()
        device = key.partition(" ")[2]
        if device not in devices_of(now):
            return now.items.get(key)
        if key.startswith(MEMORY_POOL):
            return {IDLE_POOL: now.amounts.get(key) or 0}
        # Only blocks are distinguished by what Python's tensors hold.
        storages = dict.fromkeys(live_keys() if key.startswith(_OF_BLOCKS) else (), 0)
        return self._device_memory.all_items(now, device, storages).get(key)

    def _tried_harmless(self, draft: ItemLeak, context: Context, read: Callable[[], Deep]) -> Draft:
        """The finding, or the leak with what waiting has shown, where there is more to be tried at the end."""
        waiting = replace(draft, endings=())
        mark = draft.finding.fingerprint
        # What was waited for in vain once is only looked at again: it was waited for before it was judged, too.
        actions = actions_for(waiting, 0.0 if mark in self._in_vain else context.patience, may_unfreeze=False)
        # Which threads there are shows without a reading of all that there is.
        of_names = draft.finding.resource in HARMLESS
        left = (lambda: draft.left(self._left_now)) if of_names else self._left(draft, read)
        finding = try_actions(waiting, actions, left, self._driver_bytes)
        if of_names and (finding.remedy, finding.advice) == (None, draft.finding.advice):
            self._in_vain.add(mark)
        return replace(draft, finding=finding) if draft.endings and finding.remedy is None else finding

    def _may_unfreeze(self, drafts: Sequence[Sequence[Draft]]) -> bool:
        """Whether a freeze is a finding, and nobody else has done one: there is one permanent generation."""
        findings = [draft.finding for found in drafts for draft in found if isinstance(draft, ItemLeak)]
        frozen_before = self._ownership.baseline.amounts.get("gc-frozen") or 0
        is_own = frozen_before <= FROZEN_AT_STARTUP and not owners_froze(self._ownership)
        return any(finding.resource == "gc-frozen" for finding in findings) and is_own

    def _confirmed(self, draft: ItemLeak, read: Callable[[], Deep]) -> ItemLeak:
        if draft.finding.cause != "library-workspace" or draft.finding.resource != "tensors" or not draft.names:
            return draft
        is_first = self._first_use.of_blas or self._workspaces_cleared >= _MOST_CLEARINGS
        self._workspaces_cleared += not is_first
        return confirmed_workspaces(draft, self._left(draft, read), is_first=is_first)

    def _left(self, draft: ItemLeak, read: Callable[[], Deep]) -> Callable[[], Mapping[str, int]]:
        return lambda: draft.left(lambda key: read().readings[draft.subject].items.get(key, {}))

    def _driver_bytes(self) -> int:
        amounts = self._read().amounts
        return sum(amount or 0 for key, amount in amounts.items() if key.startswith("driver "))


def owners_froze(ownership: Ownership) -> bool:
    """Whether an owner that is alive has frozen the heap in its setup."""
    return any(owner.growth.get("gc-frozen", 0) > 0 for owner in ownership.live)
